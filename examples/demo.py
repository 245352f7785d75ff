"""Keyphrases by the default model: of a paragraph, of a long document and of many texts, and a page that shows them.

python examples/demo.py                  # writes runs/demo.html
python examples/demo.py article.txt      # the same for your own text files
"""

import argparse
import time
from pathlib import Path

from transformers import logging

import lexperts  # noqa: F401  (registers the models)
from keyphrase_tools.html_page import render_page
from keyphrase_tools.loading import open_extractor
from run_tools.rows import read_jsonl

CORPUS = Path(__file__).resolve().parent / "corpus"
SUBJECT = "astronomy"  # of the long document
EACH = 7  # of the many texts one in so many is shown


def read_examples() -> dict[str, str]:
    """A paragraph, and the texts of one subject as one document."""
    texts = [row["text"] for row in read_jsonl(CORPUS / "train.jsonl") if row["subject"] == SUBJECT]
    return {
        "A paragraph (examples/corpus/paragraph.txt)": (CORPUS / "paragraph.txt").read_text(encoding="utf-8"),
        f"A long document ({len(texts)} texts on {SUBJECT}, joined)": "\n\n".join(texts),
    }


def print_phrases(name: str, phrases: list[dict], limit: int) -> None:
    """Prints a document's keyphrases in a line."""
    print(f"{name}\n    " + "; ".join(f"{phrase['keyphrase']} ({phrase['score']:.2f})" for phrase in phrases[:limit]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="text files, in place of the examples")
    parser.add_argument("--model", help="folder or Hub id; by default the default model")
    parser.add_argument("--output", type=Path, default=Path("runs/demo.html"), help="the page to write")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    start = time.perf_counter()
    extract = open_extractor(options.model)
    print(f"model opened in {time.perf_counter() - start:.1f} s\n")

    texts = {file.name: file.read_text(encoding="utf-8") for file in options.files} or read_examples()
    start = time.perf_counter()
    results = {name: extract(text) for name, text in texts.items()}
    for name, phrases in results.items():
        print_phrases(f"{name}, {len(texts[name].split()):,} words", phrases, 8)
    if not options.files:
        rows = read_jsonl(CORPUS / "test.jsonl")
        found = extract([row["text"] for row in rows])
        print(f"\n{len(rows)} texts (examples/corpus/test.jsonl), of which some:")
        for row, phrases in list(zip(rows, found, strict=True))[::EACH]:
            print_phrases(f"  {row['title']}", phrases, 4)
    print(f"\nextracted in {time.perf_counter() - start:.1f} s")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    headline = "Keyphrases that lexperts has found"
    page = render_page(list(texts.values()), list(results.values()), list(texts), headline)
    options.output.write_text(page, encoding="utf-8")
    print(f"open {options.output.resolve().as_uri()} to see them in the texts")


if __name__ == "__main__":
    main()
