"""Keyphrases by the default model: of a paragraph, of a long document and of a folder, and a page that shows them.

python examples/demo.py                  # writes runs/demo.html
python examples/demo.py article.txt      # the same for your own text files
"""

import argparse
import time
from pathlib import Path

from transformers import logging, pipeline

import lexperts  # noqa: F401  (registers the pipeline)
from keyphrase_tools.html_page import render_page

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = {
    "A paragraph (examples/corpus/paragraph.txt)": [ROOT / "examples" / "corpus" / "paragraph.txt"],
    "A long document (docs/summarization.md)": [ROOT / "docs" / "summarization.md"],
}
FOLDER = ROOT / "docs"


def print_phrases(name: str, phrases: list[dict], limit: int) -> None:
    """Prints a document's keyphrases in a line."""
    print(f"{name}\n    " + "; ".join(f"{phrase['keyphrase']} ({phrase['score']:.2f})" for phrase in phrases[:limit]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="text files, in place of the examples")
    parser.add_argument("--model", help="folder or Hub id; by default the model of the package lexperts-seke-minilm")
    parser.add_argument("--output", type=Path, default=Path("runs/demo.html"), help="the page to write")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    start = time.perf_counter()
    extract = pipeline("keyphrase-extraction", model=options.model)
    print(f"model opened in {time.perf_counter() - start:.1f} s\n")

    groups = {file.name: [file] for file in options.files} or EXAMPLES
    texts = {name: "\n\n".join(file.read_text(encoding="utf-8") for file in files) for name, files in groups.items()}
    start = time.perf_counter()
    results = {name: extract(text) for name, text in texts.items()}
    for name, phrases in results.items():
        print_phrases(f"{name}, {len(texts[name].split()):,} words", phrases, 8)
    if not options.files:
        pages = {file.name: file.read_text(encoding="utf-8") for file in sorted(FOLDER.glob("*.md"))}
        print("\nA folder (docs/, the beginning of each page)")
        for name, phrases in zip(pages, extract(list(pages.values()), on_long="truncate"), strict=True):
            print_phrases(f"  {name}", phrases, 4)
    print(f"\nextracted in {time.perf_counter() - start:.1f} s")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    page = render_page(list(texts.values()), list(results.values()), list(texts))
    options.output.write_text(page, encoding="utf-8")
    print(f"open {options.output.resolve().as_uri()} to see them in the texts")


if __name__ == "__main__":
    main()
