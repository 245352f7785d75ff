"""`lexperts-lite extract FILE`: keyphrases of a text, or of the rows of a JSON Lines file. `lexperts-lite serve`: an HTTP server."""

import json
import sys
from argparse import Namespace
from pathlib import Path

from run_tools.errors import user_errors
from run_tools.options import OneLineParser
from run_tools.servers import SERVER_OPTIONS, bind, run_server

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


def extract(options: Namespace) -> None:
    """Prints the keyphrases of a file."""
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


def serve(options: Namespace) -> None:
    """Serves keyphrases over HTTP until SIGTERM or Ctrl-C."""
    try:
        from .serving import create_app
    except ImportError as error:
        raise ImportError(
            f"The server needs {error.name}. Install it with: pip install lexperts-lite[serve]"
        ) from error
    limits = {name: getattr(options, name, one.default) for name, one in SERVER_OPTIONS.items()}
    listener = bind(limits.pop("host"), limits.pop("port"))
    run_server(create_app(KeyphraseExtractor(options.model, num_threads=options.threads), **limits), listener)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command."""
    parser = OneLineParser("lexperts-lite", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    reading = commands.add_parser("extract", help="print the keyphrases of a file, best first")
    reading.add_argument("file", help="a text (.txt, - for standard input), or JSON Lines (.jsonl) with text and title")
    reading.add_argument("--top-k", type=int, default=10, help="keyphrases per document; default: 10")
    reading.add_argument("--style", help="style of annotation, such as tags")
    reading.add_argument("--min-score", type=float, help="leave out keyphrases with a lower score")
    serving = commands.add_parser("serve", help="answer over HTTP: POST /keyphrases, with /docs, /healthz and /metrics")
    for command, run in ((reading, extract), (serving, serve)):
        command.add_argument(
            "--model", default=MODEL, help="folder of an exported model; by default that of this package"
        )
        command.add_argument("--threads", type=int, default=1, help="of the model; default: 1")
        command.set_defaults(run=run)
    serving.add_options(SERVER_OPTIONS.values())
    with user_errors():
        options = parser.parse_args(arguments)
        options.run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
