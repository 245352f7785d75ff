"""Rows of outputs: how they are written, read again, and known by their ids."""

import json
from collections import Counter
from collections.abc import Iterator
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from uuid import UUID

from .csv_output import DELIMITERS, unescape_formula
from .parquet_rows import import_parquet
from .text_rows import csv_rows, json_rows


def format_row(kept: dict, added: dict) -> str:
    """A row as a line of JSON. NaN and infinity, which JSON does not have, are null in a kept column and an error in a result."""
    try:
        return json.dumps(kept | added, ensure_ascii=False, default=to_json, allow_nan=False) + "\n"
    except ValueError:
        kept = json.loads(json.dumps(kept, default=to_json), parse_constant=lambda name: None)
    try:
        return json.dumps(kept | added, ensure_ascii=False, default=to_json, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(kept | {"error": "a result is not a number"}, ensure_ascii=False) + "\n"


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
        """Whether the output does not have a row. Raises a `ValueError` for a row that was read and has no id."""
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
