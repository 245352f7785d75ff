"""Rows of files as a list, with errors that name the file and the line."""

from collections.abc import Callable, Iterator, Sequence
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
