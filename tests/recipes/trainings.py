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
    return [
        *STEPS,
        "--train-files",
        at.rows,
        "--backbone",
        at.bert,
        "--meta-embedding-size",
        4,
        "--hidden-size",
        8,
        *more,
    ]


# `at` has the file `rows`, the folder `mail` with three splits of them, and folders of the tiny models `bert`, `bart`, `llama`,
# `mixtral`
TRAININGS: dict[str, Callable[[SimpleNamespace], list]] = {
    "hypernet-keyphrases": lambda at: hypernet(at, "--max-length", 60, "--validation-share", 0.25, *EVALUATED),
    "hypernet-classes": lambda at: hypernet(at, "--max-length", 60, "--validation-share", 0.25, *EVALUATED),
    "hypernet-qa": lambda at: hypernet(at, "--max-seq-len", 60, "--doc-stride", 8),
}
