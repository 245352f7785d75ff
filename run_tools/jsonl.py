"""Reads JSON Lines, with errors that name the file and the line."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import UserError
from .rows import json_values

EXAMPLE = '{"title": "...", "text": "...", "keyphrases": ["..."]}'


def read_jsonl(
    paths: str | Path | Sequence[str | Path],
    required: Sequence[str] = (),
    example: str = EXAMPLE,
    hint: str = "",
    convert: Callable[[dict, str], dict] | None = None,
) -> list[dict]:
    """Reads the rows of one or more JSON Lines files; a `.json` file may also hold one array of rows.

    Args:
        paths: one path or several.
        required: columns that every row must have.
        example: a valid line, for error messages.
        hint: how to fix a missing column, for error messages.
        convert: is called with each row and its place (the file and the line), and returns the row to keep.

    Raises:
        FileNotFoundError: if a file does not exist.
        ValueError: if a file is empty, or a line is not a JSON object or lacks a required column; the message names the
            file and the line.
    """
    rows = []
    for path in [paths] if isinstance(paths, (str, Path)) else paths:
        for where, row in rows_of_file(path, example):
            if not isinstance(row, dict):
                raise ValueError(f"{where}: expected a JSON object, got a {type(row).__name__}.")
            row = row if convert is None else convert(row, where)
            check_columns(row, required, where, example, hint)
            rows.append(row)
    if not rows:
        raise ValueError(f"There are no documents in {paths}.")
    return rows


def check_columns(row: Mapping, required: Sequence[str], where: str, example: str = EXAMPLE, hint: str = "") -> None:
    """Raises a `ValueError` that names the place if a row lacks a required column."""
    if problem := missing_columns(row, required):
        raise ValueError(f"{where}: {problem}. {hint or f'A valid line: {example}'}")


def missing_columns(row: Mapping, required: Sequence[str]) -> str | None:
    """Which required columns a row lacks, and which it has; `None` if it lacks none."""
    missing = [name for name in required if name not in row]
    if not missing:
        return None
    return f"there is no {', '.join(map(repr, missing))}; the columns are {', '.join(map(repr, row))}"


def rows_of_file(path: str | Path, example: str = EXAMPLE) -> Iterator[tuple[str, Any]]:
    """Yields the place and the value of each line that is not blank, or of each element of the array of a `.json` file.
    Raises a `UserError` for a line that is not JSON in UTF-8.
    """
    with open(path, "rb") as file:
        for place, value in json_values(file, is_whole=Path(path).suffix.lower() == ".json"):
            if isinstance(value, ValueError):
                raise UserError(f"{path}, {place}: {value}. Each line must be one object, such as {example}.")
            yield f"{path}, {place}", value


def read_lines(path: Path) -> list[dict]:
    """The objects of a JSON Lines file of ours, whose lines end at "\\n" alone (a text may contain other line separators)."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def json_lines(rows: Iterable[Mapping]) -> str:
    """Objects as JSON Lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
