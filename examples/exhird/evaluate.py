"""Scores a keyphrase generator on test sets: present and absent keyphrases by ExHiRD's convention, and repeats.

    python examples/exhird/evaluate.py --model runs/bigru --test_files inspec=inspec/test.jsonl kp20k=kp20k/test.jsonl

Scores are those of the convention "exhird" of keyphrase_tools.metrics: F1@5 and F1@M of macro precision and recall, compared by
stems, phrases with <unk> left out. #C@M and #C@5 are right phrases, #Avg.Len phrases a document. Repeats are the generated
phrases whose stems were generated before, as a share of all. Results are printed and written to scores.json in the model's
folder, what was generated to NAME.jsonl.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import torch
from cli_args import parse_arguments, run_or_exit
from run_folder import replace_file
from tqdm import tqdm
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from keyphrase_tools.documents import read_jsonl
from keyphrase_tools.metrics import keyphrase_f1
from keyphrase_tools.opening import opening
from keyphrase_tools.stemming import stem_phrase
from modeling_exhird.keyphrases_exhird import KeyphraseWriter
from modeling_exhird.targets_exhird import clean_keyphrases


@dataclass
class Arguments:
    model: str = field(metadata={"help": "folder or Hub id of a keyphrase generator"})
    test_files: list[str] = field(metadata={"help": "NAME=JSON Lines with title, text, keyphrases"})
    output_dir: str | None = field(default=None, metadata={"help": "folder for scores and phrases; the model's"})
    batch_size: int = field(default=32, metadata={"help": "documents that are read at once"})
    exclusion_window: int | None = field(default=None, metadata={"help": "by default the model's; 0 off, -1 all"})
    num_beams: int = field(default=1, metadata={"help": "hypotheses of each phrase"})
    max_rows: int | None = field(default=None, metadata={"help": "documents of each set, the first ones"})
    traceback: bool = field(default=False, metadata={"help": "show the traceback of an error"})


def repeats(predictions: list[list[list[str]]]) -> float:
    """The share of generated phrases that repeat an earlier one of their document."""
    stems = [[stem_phrase(" ".join(words)) for words in phrases] for phrases in predictions]
    total = sum(map(len, stems))
    return 1 - sum(len(set(phrases)) for phrases in stems) / total if total else 0.0


def score(predictions: list[list[list[str]]], references: list[list[list[str]]], sources: list[list[str]]) -> dict:
    """Phrases as lists of words -> what the papers report, for present, absent and all."""
    said, gold = ([[" ".join(words) for words in phrases] for phrases in side] for side in (predictions, references))
    every = keyphrase_f1(said, gold, convention="exhird", sources=[" ".join(words) for words in sources], k=(5, "M"))
    names = {"f1@M": "F1@M", "f1@5": "F1@5", "correct@M": "#C@M", "correct@5": "#C@5", "avg_num_preds": "#Avg.Len"}
    found = {part: {to: scores[name] for name, to in names.items()} for part, scores in every.items()}
    return found | {"repeats": repeats(predictions), "documents": len(predictions)}


def test_sets(given: list[str]) -> dict[str, str]:
    """["inspec=test.jsonl"] -> {"inspec": "test.jsonl"}."""
    files = dict(entry.partition("=")[::2] for entry in given)
    if not all(files.values()):
        raise ValueError(f"--test_files {' '.join(given)}: pass NAME=FILE, such as inspec=inspec/test.jsonl.")
    return files


def evaluate(args: Arguments) -> dict[str, dict]:
    files = test_sets(args.test_files)
    with opening("--model", args.model):
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = AutoModelForSeq2SeqLM.from_pretrained(args.model)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    output = Path(args.output_dir or args.model)
    output.mkdir(parents=True, exist_ok=True)
    options = {"exclusion_window": args.exclusion_window, "num_beams": args.num_beams}
    writer, results = KeyphraseWriter(model, tokenizer, batch_size=args.batch_size, raw=True, **options), {}
    for name, path in files.items():
        rows = read_jsonl([path], ("text", "keyphrases"))[: args.max_rows]
        documents = [{"title": row.get("title"), "text": row["text"]} for row in rows]
        said = list(tqdm(writer.stream(documents), total=len(rows), unit="document", desc=name))
        sources = [tokenizer.read_source(row["text"], row.get("title")).words for row in rows]
        gold = [clean_keyphrases(row["keyphrases"], tokenizer, max_words=None) for row in rows]
        results[name] = score(said, gold, sources)
        lines = []
        for row, phrases in zip(rows, said, strict=True):
            entry = {"keyphrases": row["keyphrases"], "generated": [" ".join(words) for words in phrases]}
            lines.append(json.dumps({"title": row.get("title"), **entry}, ensure_ascii=False) + "\n")
        replace_file(output / f"{name}.jsonl", "".join(lines))
        parts = (
            f"{part} " + " ".join(f"{k} {v:.3f}" if "F1" in k else f"{k} {v:g}" for k, v in results[name][part].items())
            for part in ("present", "absent")
        )
        print(f"{name}: {'   '.join(parts)}   repeats {100 * results[name]['repeats']:.1f}%")
    replace_file(output / "scores.json", json.dumps(results, indent=1))
    return results


def main():
    (args,) = parse_arguments((Arguments,), __doc__)
    run_or_exit(evaluate, args, traceback=args.traceback)


if __name__ == "__main__":
    main()
