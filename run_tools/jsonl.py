"""Rows of files as a list, with errors that name the file and the line."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import UserError
from .rows import missing_columns, read_rows


def rows_of_file(path: str | Path) -> Iterator[tuple[str, Any]]:
    """The place and the value of each row, see `rows.read_rows`. Raises a `UserError` for a row that cannot be read."""
    try:
        with open(path, "rb") as file:
            for place, row in read_rows(file, Path(path).suffix.lower()):
                if isinstance(row, Exception):
                    raise UserError(f"{path}, {place}: {row}.")
                yield f"{path}, {place}", row
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: {error}.") from error


def read_jsonl(
    paths: str | Path | Sequence[str | Path],
    required: Sequence[str] = (),
    convert: Callable[[dict, str], dict] | None = None,
) -> list[dict]:
    """Reads the rows of one or more JSON Lines files; a `.json` file may also hold one array of rows.

    Args:
        paths: one path or several.
        required: columns that every row must have.
        convert: is called with each row and its place (the file and the line), and returns the row to keep.

    Raises:
        FileNotFoundError: if a file does not exist.
        UserError: if a file is empty, or a line is not a JSON object or lacks a required column.
    """
    rows = []
    for path in [paths] if isinstance(paths, (str, Path)) else paths:
        for where, row in rows_of_file(path):
            if not isinstance(row, dict):
                raise UserError(f"{where}: expected a JSON object, got a {type(row).__name__}.")
            row = row if convert is None else convert(row, where)
            if problem := missing_columns(row, required):
                raise UserError(f"{where}: {problem}.")
            rows.append(row)
    if not rows:
        raise UserError(f"There are no documents in {paths}.")
    return rows


def read_lines(path: Path) -> list[dict]:
    """The objects of a JSON Lines file of ours, whose lines end at "\\n" alone (a text may contain other line separators)."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def json_lines(rows: Iterable[Mapping]) -> str:
    """Objects as JSON Lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
