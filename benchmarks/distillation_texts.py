"""Writes the texts without labels that the small model was trained on, a file for each source, and prints their numbers.

    python benchmarks/distillation_texts.py --data PATH --output FOLDER     # PATH/classification/..., PATH/qa/..., PATH/summarization/...

Then `lexperts train seke distill --unlabelled-files FOLDER/*.jsonl ...`, see models/seke-tiny/README.md. Only training splits are read.
"""

import argparse
import json
from pathlib import Path

from run_tools.jsonl import read_jsonl

SHORTEST, LONGEST = 80, 12_000  # characters of a text
SOURCES = {  # file -> files of the data, and their columns of titles and texts
    "ag_news": (["classification/ag_news"], "title", "text"),
    "bbc_topics": (["classification/bbc_news"], "title", "text"),
    "wikipedia": (["qa/squad_v1", "qa/squad_v2"], "title", "context"),
    **{
        name: ([f"summarization/{name}"], None, "document")
        for name in ("aeslc", "bbc_news", "cnn_dailymail", "inshorts_news", "scitldr", "sumpubmed", "mts_dialog")
    },
}


def main():
    """Writes the files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    total = 0
    for name, (folders, title, text) in SOURCES.items():
        rows = [row for folder in folders for row in read_jsonl(options.data / folder / "train.jsonl", (text,))]
        texts = {row[text][:LONGEST]: row[title] if title else "" for row in reversed(rows)}  # the first of equals
        kept = [{"title": texts[one], "text": one} for one in reversed(texts) if len(one) >= SHORTEST]
        lines = "".join(json.dumps(row) + "\n" for row in kept)
        (options.output / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        print(f"{name}: {len(kept):,} texts")
        total += len(kept)
    print(f"{total:,} texts")


if __name__ == "__main__":
    main()
