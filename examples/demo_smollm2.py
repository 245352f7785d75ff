"""Definitions, summaries and tags by the models over SmolLM2-135M that pipelines open without a model argument.

python examples/demo_smollm2.py
"""

import textwrap
import time

from transformers import logging, pipeline

import lexperts  # noqa: F401  (registers the pipelines)

TERMS = [
    ("bank", "They sat on the bank of the river and watched the barges."),
    ("bank", "The bank refused to lend the company any more money."),
    ("current", "The current in the wire is measured in amperes."),
    ("current", "The current government took office in May."),
    ("sourdough", "She bakes a sourdough every Saturday morning."),
    ("bicornuate", "a bicornuate uterus"),
    ("to table", "The committee decided to table the motion until June."),
    ("reluctantly", "He reluctantly agreed to come."),
]
TEXTS = [
    (
        "papers",
        "Large language models are trained on one domain after another, and forget the earlier ones. We add a small expert for each domain beside "
        "the feed-forward layers and leave all other weights as they are. A router that is fitted in closed form chooses among the experts. On six "
        "domains the mixture keeps 95% of what each expert has learned, and needs a tenth of the memory of the experts together.",
    ),
    (
        "clinic",
        "Doctor: What brings you in today? Patient: I have had a cough for two weeks, and since Sunday a fever. Doctor: Do you cough anything up? "
        "Patient: Yes, it is yellow. Doctor: Any chest pain? Patient: Only when I breathe in deeply. Doctor: Do you smoke? Patient: I stopped five "
        "years ago.",
    ),
]
QUESTIONS = [
    {
        "title": "How can I rotate a log file every night?",
        "text": "A service writes to one file, which has grown to 4 GB. It must not be restarted, and the old files should be compressed.",
    },
    {
        "title": "Why is the sum of these floats not exact?",
        "text": "0.1 + 0.2 prints 0.30000000000000004. I expected 0.3. Is it a bug of the interpreter?",
    },
    {
        "title": "How do I fit a line to noisy points without being misled by a few outliers?",
        "text": "Least squares is pulled towards three wrong measurements. I would rather not remove them by hand.",
    },
]


def print_indented(text: str) -> None:
    """Prints a paragraph, indented."""
    print(textwrap.fill(text, 110, initial_indent="    ", subsequent_indent="    "))


def timed(task: str, ask) -> None:
    """Opens the default model of a task, and prints what `ask(pipeline)` prints, with times."""
    start = time.perf_counter()
    opened = pipeline(task)
    print(f"\n{task}: opened in {time.perf_counter() - start:.1f} s\n")
    start = time.perf_counter()
    number = ask(opened)
    print(f"\n{number} in {time.perf_counter() - start:.1f} s")


def definitions(define) -> int:
    """Defines the terms."""
    found = define([{"term": term, "context": context} for term, context in TERMS])
    for (term, context), row in zip(TERMS, found, strict=True):
        print(f"{term}: {row['definition']} ({row['score']:.2f})")
        print_indented(context)
    return len(found)


def summaries(summarize) -> int:
    """Summarises the texts."""
    found = summarize([text for _, text in TEXTS], dataset=[name for name, _ in TEXTS])
    for (name, text), row in zip(TEXTS, found, strict=True):
        print(f"{name}: {row['summary_text']}")
        print_indented(text)
    return len(found)


def tags(generate) -> int:
    """Writes the tags of the questions."""
    for question, phrases in zip(QUESTIONS, generate(QUESTIONS), strict=True):
        print("; ".join(f"{p['keyphrase']}{'' if p['present'] else ' (not in the text)'}" for p in phrases))
        print_indented(f"{question['title']} {question['text']}")
    return len(QUESTIONS)


def main():
    """The three, one after the other."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    timed("definition-modeling", definitions)
    timed("moe-summarization", summaries)
    timed("keyphrase-generation", tags)


if __name__ == "__main__":
    main()
