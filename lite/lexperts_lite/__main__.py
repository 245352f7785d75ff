"""`lexperts-lite extract FILE`: keyphrases of a text, or of the rows of a JSON Lines file."""

import argparse
import json
import sys
from pathlib import Path

from .runtime import MODEL, KeyphraseExtractor


def read_rows(path: Path) -> list[dict]:
    """The rows of a JSON Lines file with `text` and optionally `title`. Raises a `ValueError` that names the line."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}.") from error
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise ValueError(f'{path}, line {number}: it has no text. A valid line: {{"text": "..."}}')
        rows.append(row)
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser("lexperts-lite", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    extract = commands.add_parser("extract", help="print the keyphrases of a file, best first")
    extract.add_argument("file", help="a text (.txt, - for standard input), or JSON Lines (.jsonl) with text and title")
    extract.add_argument(
        "--model", default=MODEL, help="folder of an exported model; by default the one of this package"
    )
    extract.add_argument("--top-k", type=int, default=10, help="keyphrases per document; default: 10")
    extract.add_argument("--style", help="style of annotation, such as tags")
    extract.add_argument("--min-score", type=float, help="leave out keyphrases with a lower score")
    extract.add_argument("--threads", type=int, default=1, help="of the model; default: 1")
    options = parser.parse_args(arguments)
    try:
        given = {"top_k": options.top_k, "style": options.style, "min_score": options.min_score}
        given = {name: value for name, value in given.items() if value is not None}
        model = KeyphraseExtractor(options.model, num_threads=options.threads)
        if options.file.endswith(".jsonl"):
            rows = read_rows(Path(options.file))
            documents = [{"text": row["text"]} | ({"title": row["title"]} if row.get("title") else {}) for row in rows]
            for row, phrases in zip(rows, model(iter(documents), **given), strict=True):
                print(json.dumps(row | {"keyphrases": phrases}, ensure_ascii=False))
        else:
            text = sys.stdin.read() if options.file == "-" else Path(options.file).read_text(encoding="utf-8")
            for phrase in model(text, **given):
                print(f"{phrase['score']:.2f}  {phrase['keyphrase']}")
    except (OSError, ValueError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
