"""`lexperts-lite extract FILE`: keyphrases of a text, or of the rows of a JSON Lines file. `lexperts-lite serve`: an HTTP server."""

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from io import TextIOWrapper
from types import NoneType
from typing import NoReturn

from run_tools.errors import UserError, one_line, print_error, short_repr
from run_tools.rows import rows_of_file

from .runtime import KeyphraseExtractor
from .servers import OPTIONS, bind, run_server

EXAMPLE = '{"title": "...", "text": "..."}'
TABLES = (".parquet", ".csv", ".tsv", ".xlsx")


def read_rows(path: str) -> list[dict]:
    """The rows of a JSON Lines file with `text` and optionally `title`. Raises a `UserError` that names the line."""
    rows = []
    for where, row in rows_of_file(path):
        text, title = (row.get("text"), row.get("title")) if isinstance(row, dict) else (None, None)
        if not isinstance(text, str) or not isinstance(title, (str, NoneType)):
            problem = "it has no text" if not isinstance(text, str) else f"title={short_repr(title)} is not a text"
            raise UserError(f"{where}: {problem}. A valid line: {EXAMPLE}")
        rows.append(row)
    return rows


def read_text(path: str) -> str:
    """The text of a file in UTF-8, or for "-" of standard input. Raises a `UserError` for a table."""
    if path.lower().endswith(TABLES):
        raise UserError(
            f"{path}: lexperts-lite reads texts and JSON Lines. `lexperts keyphrases extract` reads tables."
        )
    with open(0 if path == "-" else path, "rb", closefd=path != "-") as file:
        content = file.read()
    try:
        return content.decode("utf-8-sig")
    except ValueError as error:
        raise UserError(f"{path}: {error}. Save the file as UTF-8.") from error


def extract(options: Namespace) -> None:
    """Prints the keyphrases of a file."""
    given = {name: getattr(options, name) for name in ("top_k", "min_phrases", "min_score", "style")}
    given = {name: value for name, value in given.items() if value is not None}
    model = KeyphraseExtractor(options.model, num_threads=options.threads)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # lone surrogates, which other programs refuse
    if options.file.lower().endswith((".jsonl", ".ndjson", ".json")):
        rows = read_rows(options.file)
        documents = ({"text": row["text"], "title": row.get("title")} for row in rows)
        for row, phrases in zip(rows, model(documents, **given), strict=True):
            print(json.dumps(row | {"keyphrases": phrases}, ensure_ascii=False))
    else:
        for phrase in model(read_text(options.file), **given):
            print(f"{phrase['score']:.2f}  {phrase['keyphrase']}")


def serve(options: Namespace) -> None:
    """Serves keyphrases over HTTP until SIGTERM or Ctrl-C."""
    try:
        from .serving import create_app
    except ImportError as error:
        raise ImportError(f"The server needs {error.name}. Install the extra lexperts-lite[serve].") from error
    limits = {name: getattr(options, name) for name in OPTIONS}
    listener = bind(limits.pop("host"), limits.pop("port"))
    run_server(create_app(KeyphraseExtractor(options.model, num_threads=options.threads), **limits), listener)


class OneLineParser(ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Raises a `UserError`."""
        raise UserError(f"{message}. See {self.prog} --help.")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command."""
    parser = OneLineParser("lexperts-lite", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    reading = commands.add_parser("extract", help="print the keyphrases of a file, best first")
    reading.add_argument("file", help="a text (.txt, - for standard input), or JSON Lines (.jsonl) with text and title")
    reading.add_argument("--top-k", type=int, default=10, help="keyphrases per document; default: 10")
    reading.add_argument("--style", help="style of annotation, such as phrases")
    reading.add_argument("--min-phrases", type=int, help="fewest of a document that has so many")
    reading.add_argument("--min-score", type=float, help="leave out keyphrases with a lower score")
    serving = commands.add_parser("serve", help="answer over HTTP: POST /keyphrases, with /docs, /healthz and /metrics")
    for command, run in ((reading, extract), (serving, serve)):
        command.add_argument(
            "--model", default="default", help="default, tiny, or the folder of an exported model; default: default"
        )
        command.add_argument("--threads", type=int, default=1, help="of the model; default: 1")
        command.set_defaults(run=run)
    for name, (default, text) in OPTIONS.items():
        flag, text = f"--{name.replace('_', '-')}", f"{text} Default: {default}"
        serving.add_argument(flag, type=type(default), default=default, help=text)
    try:
        options = parser.parse_args(arguments)
        options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print_error("Repeat the command.", "interrupted")
        return 130
    except BrokenPipeError:  # of `lexperts-lite ... | head`; what is still to be written is discarded
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        print_error(one_line(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
