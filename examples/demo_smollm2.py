"""Definitions of words in texts, by the model over SmolLM2-135M that `pipeline("definition-modeling")` opens.

python examples/demo_smollm2.py
"""

import time

from transformers import logging, pipeline

import lexperts  # noqa: F401  (registers the pipeline)

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


def main():
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    start = time.perf_counter()
    define = pipeline("definition-modeling")
    print(f"model opened in {time.perf_counter() - start:.1f} s\n")
    start = time.perf_counter()
    found = define([{"term": term, "context": context} for term, context in TERMS])
    for (term, context), row in zip(TERMS, found, strict=True):
        print(f"{term}: {row['definition']} ({row['score']:.2f})\n    {context}")
    print(f"\n{len(found)} definitions in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
