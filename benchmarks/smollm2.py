"""The installed models over SmolLM2 beside simple baselines: definitions of four sets, summaries of two domains, tags of questions.

    pip install ./models/smollm2 ./models/lexicon-smollm2 ./models/moesumm-smollm2 ./models/exhird-smollm2 sacrebleu rouge-score
    python benchmarks/smollm2.py --data PATH --tasks definitions --rows 500
    python benchmarks/smollm2.py --data PATH --tasks tags --model runs/mine          # another model of the task

Definitions have BLEU (sacrebleu, sentences) and ROUGE-L, against the definition of the same context and the best of any sense of the
term. Summaries have ROUGE-1, -2 and -L (F1 of stemmed words), tags F1 of present and absent ones by ExHiRD's convention. `prompted` is
SmolLM2-135M-Instruct without training, asked in a conversation, `lead` the first words of a text, as many as a training summary has on
average, `extracted` what the default model of extraction finds. Greedy; 95% intervals are bootstrapped over rows.
"""

import random
import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from by_document import f1_of_means
from common import make_parser, write
from tqdm import tqdm
from transformers import pipeline

import lexperts  # noqa: F401  (registers the pipelines)
from keyphrase_tools.metrics import keyphrase_f1_by_document
from lexperts.evaluate.bootstrap import bootstrap_means, confidence_interval
from run_tools.packaged import find_packaged
from run_tools.rows import read_jsonl

DOMAINS = {"papers": "scitldr", "clinic": "mts_dialog"}
REQUESTS = {
    "papers": "Summarize this abstract in one sentence.",
    "clinic": "Write the note of the doctor for this conversation.",
}
LEFT_OUT = ("psychology", "chemistry-bundle")  # books of which the default model of definitions has read nothing
CUTS = (5, "M")
Rows = list[dict]
Systems = dict[str, Callable[[Rows], list]]


def prompted(requests: list[str], max_new_tokens: int) -> list[str]:
    """Answers of SmolLM2-135M-Instruct."""
    generate = pipeline("text-generation", model=find_packaged("smollm2"), dtype="bfloat16")
    answers = []
    for request in tqdm(requests, desc="prompted"):
        turns = [[{"role": "user", "content": " ".join(request.split()[:1000])}]]
        (output,) = generate(turns, max_new_tokens=max_new_tokens, do_sample=False, return_full_text=False)
        answers.append(output[0]["generated_text"].strip())
    return answers


def interval(values: np.ndarray) -> list[float]:
    """The mean of values with its interval."""
    return [float(values.mean()), *confidence_interval(bootstrap_means(values))]


# Definitions


def clean(text: str) -> str:
    """A definition without its full stop, with single spaces."""
    return " ".join(text.split()).removesuffix(".")


def score_definitions(rows: Rows, answers: list[str]) -> dict[str, list[float]]:
    """BLEU and ROUGE-L in per cent; the references of a row are those of its term and context, or of its term."""
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics import BLEU

    bleu, rouge = BLEU(effective_order=True), RougeScorer(["rougeL"], use_stemmer=False)
    metrics = {
        "BLEU": lambda answer, gold: bleu.sentence_score(answer, [gold]).score,
        "ROUGE-L": lambda answer, gold: 100 * rouge.score(gold, answer)["rougeL"].fmeasure,
    }
    scores = {}
    for protocol, fields in (("same context", ("term", "context")), ("any sense", ("term",))):
        golds: dict[tuple, set[str]] = {}
        for row in rows:
            golds.setdefault(tuple(row[field].casefold() for field in fields), set()).add(clean(row["definition"]))
        for name, metric in metrics.items():
            best = [
                max(metric(clean(answer), gold) for gold in golds[tuple(row[field].casefold() for field in fields)])
                for row, answer in zip(rows, answers, strict=True)
            ]
            scores[f"{name}, {protocol}"] = interval(np.array(best))
    return scores


def definition_sets(data: Path, count: int) -> tuple[dict[str, Rows], Rows]:
    """Rows of four sets, drawn once and for all; and six examples for a prompt, of WordNet and of textbooks in turn.

    The default model was trained on no row of `left_out`, two books, nor on `oxford`; with textbooks it read other modules.
    """
    wordnet, oxford, books = (
        data / "definitions" / name for name in ("wordnet", "oxford", "../open/definitions/openstax")
    )
    rows = [row for part in ("train", "validation", "test") for row in read_jsonl(books / f"{part}.jsonl")]
    left_out = [[row for row in rows if row["domain"] == book] for book in LEFT_OUT]
    textbooks = [row for row in read_jsonl(books / "test.jsonl") if row["domain"] not in LEFT_OUT]
    draw = random.Random(42).sample
    sets = {
        "wordnet": draw(read_jsonl(wordnet / "test.jsonl"), count),
        "oxford": draw(read_jsonl(oxford / "test.jsonl"), count),
        "textbooks": draw(textbooks, count),
        "left_out": [row for rows in left_out for row in draw(rows, count // 2)],
    }
    scored = {row["term"].casefold() for rows in (*left_out, *sets.values()) for row in rows}
    examples = []
    for folder, contexts, answers in ((wordnet, (6, 12), (4, 10)), (books, (10, 22), (6, 16))):
        rows = read_jsonl(folder / "train.jsonl")
        random.Random(3).shuffle(rows)
        examples.append(
            [
                row
                for row in rows
                if contexts[0] <= len(row["context"].split()) <= contexts[1]
                and answers[0] <= len(row["definition"].split()) <= answers[1]
                and row["term"].casefold() in row["context"].casefold()
                and row["term"].casefold() not in scored
            ][:3]
        )
    return sets, [row for pair in zip(*examples, strict=True) for row in pair]


def as_text(row: dict, definition: str = "") -> str:
    """A row as an example of a prompt, or its question."""
    return f"Text: {row['context']}\nTerm: {row['term']}\nDefinition: {definition}".rstrip()


def continued(rows: Rows, examples: Rows) -> list[str]:
    """What SmolLM2-135M-Instruct writes after examples, up to the end of the line."""
    generate = pipeline("text-generation", model=find_packaged("smollm2"), dtype="float32")
    shown = [as_text(row, row["definition"].rstrip(".")) for row in examples]
    head = "\n\n".join(["Each term is defined as it is used in the text.", *shown])
    prompts = [f"{head}\n\n{as_text(row)}" for row in rows]
    options = {"max_new_tokens": 32, "do_sample": False, "return_full_text": False}
    outputs = (generate(prompt, **options) for prompt in tqdm(prompts, desc="continued"))
    return [output[0]["generated_text"].strip().split("\n")[0] for output in outputs]


def after_copula(row: dict) -> str:
    """The clause after "TERM is", "are", "means" or "refers to" in a context, or an empty text."""
    verb = r"(?:(?:is|are|was|were)(?: defined as)?|refers? to|means?)"
    term = rf"\b{re.escape(row['term'])}(?:e?s)?(?:\s*\([^)]*\))?"
    found = re.search(rf"{term},?\s+{verb}\s+(?:(?:a|an|the)\s+)?(.+?)[.;:]?\s*$", row["context"], re.I)
    return found[1] if found else ""


def definitions(options: Namespace) -> Iterator[tuple[str, Rows, Systems, Callable]]:
    """The default model of definitions, SmolLM2 asked for one, after six examples, and what a context says after "is"."""

    def define(rows: Rows) -> list[str]:
        model = pipeline("definition-modeling", **options.model)
        inputs = [{"term": row["term"], "context": row["context"]} for row in rows]
        return [answer["definition"] for answer in model(inputs, batch_size=32, max_new_tokens=32)]

    def ask(rows: Rows) -> list[str]:
        return prompted([f'What does "{row["term"]}" mean in this text? {row["context"]}' for row in rows], 32)

    sets, examples = definition_sets(options.data, options.rows or 200)
    for name, rows in sets.items():
        systems = {
            "default": define,
            "prompted": ask,
            "six examples": lambda rows: continued(rows, examples),
            "copula": lambda rows: [after_copula(row) for row in rows],
        }
        yield name, rows, systems, score_definitions


# Summaries


def score_summaries(rows: Rows, answers: list[str]) -> dict[str, list[float]]:
    """ROUGE in per cent."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    found = [scorer.score(row["summary"], answer) for row, answer in zip(rows, answers, strict=True)]
    return {name: interval(100 * np.array([one[name].fmeasure for one in found])) for name in found[0]}


def summaries(options: Namespace) -> Iterator[tuple[str, Rows, Systems, Callable]]:
    """The default model of summaries, SmolLM2 asked for one, and the first words."""
    for domain, name in DOMAINS.items():
        folder = options.data / "summarization" / name
        gold = [row["summary"] for row in read_jsonl(folder / "train.jsonl", ("document", "summary"))]
        length = round(sum(len(summary.split()) for summary in gold) / len(gold))

        def summarize(rows: Rows, domain=domain) -> list[str]:
            model = pipeline("moe-summarization", **options.model)
            texts = [row["document"] for row in rows]
            return [answer["summary_text"] for answer in model(texts, dataset=domain, batch_size=8, max_new_tokens=96)]

        def ask(rows: Rows, domain=domain) -> list[str]:
            return prompted([f"{REQUESTS[domain]}\n\n{row['document']}" for row in rows], 96)

        def lead(rows: Rows, length=length) -> list[str]:
            return [" ".join(row["document"].split()[:length]) for row in rows]

        rows = read_jsonl(folder / "test.jsonl", ("document", "summary"))[: options.rows]
        yield domain, rows, {"default": summarize, "prompted": ask, "lead": lead}, score_summaries


# Tags


def score_tags(rows: Rows, answers: list[list[str]]) -> dict[str, list[float]]:
    """F1 of mean precision and mean recall, in per cent."""
    sources = [f"{row.get('title') or ''} {row['text']}" for row in rows]
    golds = [row["keyphrases"] for row in rows]
    by_part = keyphrase_f1_by_document(answers, golds, convention="exhird", sources=sources, k=CUTS)
    scores = {}
    for part in ("present", "absent"):
        for cut in CUTS:
            values = np.array([[row[f"precision@{cut}"], row[f"recall@{cut}"]] for row in by_part[part]], dtype=float)
            low, high = confidence_interval(100 * f1_of_means(bootstrap_means(values)))
            scores[f"{part} F1@{cut}"] = [float(100 * f1_of_means(values.mean(0))), low, high]
    return scores


def tags(options: Namespace) -> Iterator[tuple[str, Rows, Systems, Callable]]:
    """The default model of tags, the same for at least eight, and extraction."""

    def documents(rows: Rows) -> Rows:
        return [{"title": row.get("title"), "text": row["text"]} for row in rows]

    def generate(rows: Rows, **more) -> list[list[str]]:
        model = pipeline("keyphrase-generation", **options.model)
        found = model(tqdm(documents(rows), desc="tags"), **more)
        return [[phrase["keyphrase"] for phrase in phrases] for phrases in found]

    def extract(rows: Rows) -> list[list[str]]:
        found = pipeline("keyphrase-extraction")(documents(rows), batch_size=32)
        return [[phrase["keyphrase"] for phrase in phrases] for phrases in found]

    rows = read_jsonl(options.data / "keyphrases" / "stackexchange" / "test.jsonl")[: options.rows]
    longer = {"min_phrases": 8, "exclusion_window": -1}
    systems = {"default": generate, "default, 8 phrases": lambda rows: generate(rows, **longer), "extracted": extract}
    yield "stackexchange", rows, systems, score_tags


TASKS = {"definitions": definitions, "summaries": summaries, "tags": tags}


def main(argv: list[str] | None = None) -> None:
    """Scores the systems of each task; each row is written at once and replaces the earlier one."""
    parser = make_parser(__doc__, "smollm2", "definitions/, summarization/ and keyphrases/")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--systems", nargs="+", help="default, prompted, lead, extracted, ...; by default all")
    parser.add_argument("--rows", type=int, help="first test rows; all by default")
    parser.add_argument("--model", type=Path, help="a checkpoint instead of the installed model of a task")
    options = parser.parse_args(argv)
    name = str(options.model or "installed")
    options.model = {"model": str(options.model)} if options.model else {}
    for task in options.tasks:
        for dataset, rows, systems, score in TASKS[task](options):
            for system, answer in systems.items():
                if options.systems is None or system in options.systems:
                    scores = score(rows, answer(rows))
                    shown = ", ".join(
                        f"{metric} {one[0]:.1f} [{one[1]:.1f}, {one[2]:.1f}]" for metric, one in scores.items()
                    )
                    print(f"{task}, {dataset}, {system}: {shown}", flush=True)
                    row = {"task": task, "set": dataset, "system": system, "model": name, "rows": len(rows)}
                    write(options.name, [row | {"scores": scores}], key=("task", "set", "system", "model"))


if __name__ == "__main__":
    main()
