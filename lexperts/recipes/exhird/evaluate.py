"""Generates keyphrases for test sets and scores them: present and absent keyphrases, and repeats.

    lexperts evaluate exhird --model runs/bigru --test-files inspec=inspec/test.jsonl kp20k=kp20k/test.jsonl

Scores follow the convention "exhird" of keyphrase_tools.metrics: F1@5 and F1@M from macro precision and recall, phrases compared
by stems, phrases with <unk> dropped. #C@M and #C@5 are the numbers of correct phrases per document, #Avg.Len is the number of
phrases per document. Repeats are the share of generated phrases whose stems occur in an earlier phrase of the same document.

Scores are printed and written to scores.json in the model's folder, generated phrases to NAME.jsonl. A file of that name that no
evaluation has written is not replaced.
"""

import json
from pathlib import Path

from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from keyphrase_tools.metrics import check_gold, keyphrase_f1
from keyphrase_tools.phrase_lists import read_labelled
from keyphrase_tools.words import stem_phrase
from modeling_exhird import ExhirdCausalConfig
from modeling_exhird.causal_data_exhird import generator_class
from modeling_exhird.data_exhird import clean_keyphrases, join_words
from modeling_exhird.tokenization_exhird import split_document
from run_tools.errors import UserError, short_repr
from run_tools.files import write_file
from run_tools.jsonl import json_lines
from run_tools.loading import describe_load_errors, open_config, open_with_tokenizer, parse_device
from run_tools.options import check_file_names, parse_name_place

from ..common.arguments import command
from ..common.scores_file import check_scores, write_scores
from .arguments import EvaluateArguments

METRICS = {"f1@M": "F1@M", "f1@5": "F1@5", "correct@M": "#C@M", "correct@5": "#C@5", "avg_num_preds": "#Avg.Len"}
COLUMNS = ["title", "keyphrases", "generated"]  # of NAME.jsonl


def score(predictions: list[list[list[str]]], references: list[list[list[str]]], sources: list[list[str]]) -> dict:
    """Phrases as lists of words -> the metrics of the papers, for present, absent and all phrases."""
    phrases, gold = ([[" ".join(words) for words in row] for row in rows] for rows in (predictions, references))
    texts = [" ".join(words) for words in sources]
    by_part = keyphrase_f1(phrases, gold, convention="exhird", sources=texts, k=(5, "M"))
    scores = {part: {label: values[name] for name, label in METRICS.items()} for part, values in by_part.items()}
    stems = [[stem_phrase(phrase) for phrase in row] for row in phrases]
    total = sum(map(len, stems))
    repeats = 1 - sum(len(set(row)) for row in stems) / total if total else 0.0
    return scores | {"repeats": repeats, "documents": len(predictions)}


def parse_test_files(entries: list[str]) -> dict[str, str]:
    """["inspec=test.jsonl"] -> {"inspec": "test.jsonl"}. Raises a `UserError` for an entry without a name or a file, and a name that
    occurs twice or cannot become the name of a file.
    """
    files: dict[str, str] = {}
    for entry in entries:
        name, path = parse_name_place(entry, "--test-files", "inspec=inspec/test.jsonl", "NAME=FILE")
        if name in files:
            raise UserError(f"--test-files: {files[name]} and {path} have the same name {name!r}. Use different names.")
        files[name] = path
    check_file_names(files, "--test-files")
    return files


def check_generated(files: dict[str, str], folder: str | Path) -> None:
    """Raises a `UserError` if phrases would replace a file that no evaluation has written, such as a test set."""
    for name, path in files.items():
        place = Path(folder) / f"{name}.jsonl"
        if place.exists() and not is_generated(place):
            raise UserError(
                f"--test-files {name}={path}: the generated phrases would replace {place}, which no evaluation has written. Use "
                "another name, or another --output-dir."
            )


def is_generated(path: Path) -> bool:
    """Whether a file is a NAME.jsonl of an evaluation, by its first row. It cannot be a test set: it has no texts."""
    try:
        with path.open(encoding="utf-8") as file:
            return list(json.loads(file.readline())) == COLUMNS
    except (OSError, ValueError, TypeError):
        return False


def read_test_set(path: str) -> list[dict]:
    """The rows of a file; titles and texts that are lists of words are joined. Raises a `UserError` for any other title."""
    rows = []
    for number, row in enumerate(read_labelled(path, hint=""), start=1):
        title = row.get("title")
        is_words = isinstance(title, list) and all(isinstance(word, str) for word in title)
        if not (title is None or isinstance(title, str) or is_words):
            raise UserError(
                f"{path}, row {number}: title={short_repr(title)} is not a title. Use a string, a list of words, or null for none."
            )
        rows.append(row | {"title": None if title is None else join_words(title), "text": join_words(row["text"])})
    return rows


def format_scores(name: str, scores: dict) -> str:
    """One line: present and absent scores, and repeats in per cent."""
    parts = (
        f"{part} " + " ".join(f"{k} {v:.3f}" if "F1" in k else f"{k} {v:g}" for k, v in scores[part].items())
        for part in ("present", "absent")
    )
    return f"{name}: {'   '.join(parts)}   repeats {100 * scores['repeats']:.1f}%"


def score_keys(content: dict[str, dict]) -> list[str]:
    """Each test set of scores.json, with the model if the folder is not the model's own."""
    return [f"{name} by {scores['model']}" if "model" in scores else name for name, scores in content.items()]


def evaluate(args: EvaluateArguments) -> dict[str, dict]:
    """Generates and scores all test sets, and writes the files. Returns the scores of each set."""
    files = parse_test_files(args.test_files)
    output = Path(args.output_dir or args.model)
    owner = (
        {"model": str(Path(args.model).resolve())} if args.output_dir else {}
    )  # the model's own folder may be renamed
    check_scores(output, score_keys(dict.fromkeys(files, owner)), score_keys)
    check_generated(files, output)
    with describe_load_errors("--model", args.model):
        causal = open_config(args.model).model_type == ExhirdCausalConfig.model_type
    auto_class = AutoModelForCausalLM if causal else AutoModelForSeq2SeqLM
    model, tokenizer = open_with_tokenizer("--model", auto_class, args.model)
    model.to(parse_device(None))
    output.mkdir(parents=True, exist_ok=True)
    options = {"exclusion_window": args.exclusion_window, "num_beams": args.num_beams}
    options |= {} if args.min_phrases is None else {"min_phrases": args.min_phrases}
    generator = generator_class(model.config)(model, tokenizer, batch_size=args.batch_size, raw=True, **options)
    results = {}
    for name, path in files.items():
        rows = read_test_set(path)[: args.max_rows]
        gold = [clean_keyphrases(row["keyphrases"], max_words=None) for row in rows]
        check_gold([[" ".join(words) for words in phrases] for phrases in gold], str(path))
        documents = [{"title": row["title"], "text": row["text"]} for row in rows]
        with tqdm(total=len(rows), unit="document", desc=name) as bar:
            predictions = list(generator.stream(documents, bar.update))
        sources = [[word for word, _ in split_document(row["text"], row["title"])] for row in rows]
        results[name] = owner | score(predictions, gold, sources)
        generated = [[" ".join(words) for words in phrases] for phrases in predictions]
        lines = (
            dict(zip(COLUMNS, (row["title"], row["keyphrases"], phrases), strict=True))
            for row, phrases in zip(rows, generated, strict=True)
        )
        write_file(output / f"{name}.jsonl", json_lines(lines))
        print(format_scores(name, results[name]))
    write_scores(output, results)
    return results


main = command("exhird", "evaluate", evaluate)
