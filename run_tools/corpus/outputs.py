"""The record of a finished output file, beside it: the run that wrote it and the size and hash of what it wrote.

It is a hidden file, which readers of a whole folder leave out. Without it, or after a change, a file is the user's.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

from ..files import write_file
from .csv_output import DELIMITERS, unescape_formula
from .parquet_rows import import_parquet
from .text_rows import csv_rows, json_rows


class OutputRecord(NamedTuple):
    """What is known of an output.

    Attributes:
        settings: those of the run, as JSON.
        size, sha256: of the output's content.
        documents, errors: the number of its rows, and of those with an error.
        files: messages of files of the source that could not be read.
    """

    settings: dict
    size: int
    sha256: str
    documents: int
    errors: int
    files: list[str]


def record_path(output: Path) -> Path:
    """The path of the record of an output."""
    return output.with_name(f".{output.name}.run.json")


def hash_file(path: Path) -> str:
    """The SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def parse_record(content: object) -> OutputRecord | None:
    """A record from JSON, or `None` if it is not one."""
    names = OutputRecord._fields
    if not isinstance(content, dict) or set(content) != set(names):
        return None
    kinds = zip(names, (dict, int, str, int, int, list), strict=True)
    return OutputRecord(**content) if all(isinstance(content[name], kind) for name, kind in kinds) else None


def read_record(output: Path) -> OutputRecord | None:
    """The record of an output, or `None` if there is none or it is damaged."""
    try:
        return parse_record(json.loads(record_path(output).read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return None


def check_record(output: Path) -> None:
    """Raises a `FileExistsError` if another file has the name of the output's record."""
    path = record_path(output)
    if os.path.lexists(path) and (path.is_symlink() or read_record(output) is None):
        raise FileExistsError(
            f"{path} is in the way: it is not the record of a run. Move it away, and repeat the command."
        )


def write_record(output: Path, record: OutputRecord) -> None:
    """Writes the record of an output, which may not have its name yet.

    Raises:
        FileExistsError: if another file has the record's name.
    """
    check_record(output)
    write_file(
        record_path(output),
        json.dumps(record._asdict(), ensure_ascii=False, indent=1).encode("utf-8", "backslashreplace"),
    )


def read_rows(output: Path) -> Iterator[dict]:
    """The rows of a JSON Lines, Parquet or CSV file, by its suffix."""
    with output.open("rb") as file:
        if output.suffix == ".parquet":
            for batch in import_parquet()(file).iter_batches(512):
                yield from batch.to_pylist()
        elif output.suffix in DELIMITERS:
            for row in csv_rows(file, DELIMITERS[output.suffix]):
                yield {name: unescape_formula(cell) or None for name, cell in row().items()}
        else:
            yield from (row() for row in json_rows(file))


def to_json(value: object) -> str:
    """A value of a type that JSON does not have, as a text, for `json.dumps(default=to_json)`."""
    if isinstance(value, (date, time)):  # also datetime
        return value.isoformat()
    if isinstance(value, (Decimal, UUID, timedelta)):
        return str(value)
    raise TypeError(
        f"A value of the type {type(value).__name__} cannot be kept ({value!r:.60}). Leave out its column, and join it by id."
    )


class KnownRows:
    """The rows that an output has: by their ids, and rows that could not be read, which have none, by their errors.

    Args:
        output: the file.
        id_column: its column of ids.
    """

    def __init__(self, output: Path, id_column: str):
        self._ids: set[str] = set()
        self._errors: Counter[str] = Counter()
        for row in read_rows(output):
            if row.get(id_column) is None:
                self._errors[row.get("error") or ""] += 1
            else:
                self._ids.add(_key(row[id_column]))

    def is_new(self, id: object, error: str | None) -> bool:
        """Whether the output does not have a row.

        Raises:
            ValueError: for a row that was read and has no id.
        """
        if id is not None:
            return _key(id) not in self._ids
        if error is None:
            raise ValueError(
                "A document has no id, so it is not known whether it is new. Give each an id, or leave out --append."
            )
        self._errors[error] -= 1
        return self._errors[error] < 0


def _key(id: object) -> str:
    """An id as a text, equal for a value and for what CSV or a column of several types makes of it."""
    text = json.dumps(id, ensure_ascii=False, default=to_json)
    return json.loads(text) if text.startswith('"') else text
