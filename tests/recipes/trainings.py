"""A short run of each training: what follows `lexperts train NAME`, without the output folder."""

from collections.abc import Callable
from types import SimpleNamespace

STEPS = ["--num-train-epochs", 1, "--save-strategy", "steps", "--save-steps", 1, "--learning-rate", 0.01, "--use-cpu"]
STEPS += ["--per-device-train-batch-size", 4, "--report-to", "none", "--disable-tqdm", "true"]
EVALUATED = ["--eval-strategy", "steps", "--eval-steps", 1]
THINGS = ("bird", "boat", "bell", "barn", "book")


def some_rows(count: int = 12) -> list[dict]:
    """Rows with the columns of all trainings."""
    rows = []
    for i in range(count):
        one, other = THINGS[i % 5], THINGS[(i + 1) % 5]
        text = f"the graph cut of {one} {i} is learning in graph networks, and the {other} went away"
        rows.append(
            {
                "title": ["graph cut", "learning", ""][i % 3], "text": text, "keyphrases": ["graph cut", "networks"],
                "label": ["sport", "arts"][i % 2], "id": f"q{i}", "question": "the network", "context": text,
                "answers": {"text": ["learning"], "answer_start": [text.index("learning")]},
                "term": f"{one} {i}", "definition": f"a thing of kind {i % 4}", "document": f"{text}. It was {i}.",
                "summary": f"A {one} met a {other}.",
            }
        )  # fmt: skip
    return rows


def hypernet(at: SimpleNamespace, *more) -> list:
    model = ["--backbone", at.bert, "--meta-embedding-size", 4, "--hidden-size", 8]
    return [*STEPS, "--train-files", at.rows, *model, *more]


def moesumm(at: SimpleNamespace) -> list:
    model = ["--model-name-or-path", at.bart, "--deputy-intermediate-size", 8]
    return [*STEPS, *EVALUATED, "--datasets", f"mail={at.mail}", *model]


# `at` has the file `rows`, the folder `mail` with three splits of them, and folders of the tiny models `bert`, `bart`, `llama`,
# `mixtral`
TRAININGS: dict[str, Callable[[SimpleNamespace], list]] = {
    "exhird": lambda at: [
        *(*STEPS, *EVALUATED, "--train-files", at.rows, "--validation-files", at.rows, "--encoder-type", "bigru"),
        *("--hidden-size", 16, "--num-hidden-layers", 1, "--lr-scheduler-type", "reduce_lr_on_plateau"),
    ],
    "hypernet-keyphrases": lambda at: hypernet(at, "--max-length", 60, "--cache-states", "true", *EVALUATED),
    "hypernet-classes": lambda at: hypernet(at, "--max-length", 60, "--freeze-backbone", "false", *EVALUATED),
    "language": lambda at: [
        *(*STEPS, "--train-files", at.texts, "--model-name-or-path", at.llama, "--max-length", 32, "--bf16", "false")
    ],
    "hypernet-qa": lambda at: hypernet(at, "--max-seq-len", 60, "--doc-stride", 8),
    "seke": lambda at: [*STEPS, *EVALUATED, "--train-files", at.rows, "--backbone", at.bert, "--max-length", 64],
    "moesumm": moesumm,
}
