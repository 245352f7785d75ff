"""Definitions, summaries and tags of the files in examples/smollm2, by the models over SmolLM2-135M that pipelines open by default.

python examples/demo_smollm2.py
"""

import textwrap
import time
from pathlib import Path

from transformers import logging, pipeline

import lexperts  # noqa: F401  (registers the pipelines)
from run_tools.rows import read_jsonl

FOLDER = Path(__file__).resolve().parent / "smollm2"


def show(answer: str, text: str) -> None:
    """Prints an answer, and below it the text, indented."""
    print(f"{answer}\n{textwrap.indent(textwrap.fill(textwrap.shorten(text, 400), 110), '    ')}")


def main():
    """The three tasks, one after the other."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    start = time.perf_counter()
    terms = read_jsonl(FOLDER / "terms.jsonl")
    for row, found in zip(terms, pipeline("definition-modeling")(terms), strict=True):
        show(f"{row['term']}: {found['definition']} ({found['score']:.2f})", row["context"])
    documents = [row["document"] for row in read_jsonl(FOLDER / "abstracts.jsonl")]
    for text, found in zip(documents, pipeline("moe-summarization")(documents, dataset="papers"), strict=True):
        show(found["summary_text"], text)
    questions = read_jsonl(FOLDER / "questions.jsonl")
    for row, phrases in zip(questions, pipeline("keyphrase-generation")(questions), strict=True):
        tags = [f"{p['keyphrase']}{'' if p['present'] else ' (not in the text)'}" for p in phrases]
        show("; ".join(tags), f"{row['title']} {row['text']}")
    print(f"\n{time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
