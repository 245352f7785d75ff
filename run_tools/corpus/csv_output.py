"""Rows as CSV for spreadsheets: nested values become texts, and no cell is a formula."""

import csv
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TextIO

DELIMITERS = {".csv": ",", ".tsv": "\t"}
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
FORMULA = ("=", "+", "-", "@", "\t", "\r")


def escape_formula(text: str) -> str:
    """The text with an apostrophe before it if a spreadsheet would run it as a formula; numbers are left as they are."""
    return f"'{text}" if text.startswith(FORMULA) and not NUMBER.fullmatch(text) else text


def unescape_formula(text: str) -> str:
    """The text of an escaped cell."""
    return text[1:] if text[:1] == "'" and text[1:].startswith(FORMULA) else text


def flatten(row: Mapping) -> dict[str, str]:
    """The cells of a row. A list of texts is joined by "; ", and so are the first fields of a list of objects; of `keyphrases` those with
    a score, and after them the column `scores`: candidates that do not occur have none. Other values are JSON.
    """
    cells: dict[str, str] = {}
    for name, value in row.items():
        if isinstance(value, list) and value and all(isinstance(item, dict) and item for item in value):
            if name == "keyphrases":
                value = [item for item in value if isinstance(item.get("score"), (int, float))]
                cells["scores"] = "; ".join(f"{item['score']:.4f}" for item in value)
            cells[name] = escape_formula("; ".join(str(next(iter(item.values()))) for item in value))
        elif isinstance(value, list) and all(isinstance(item, str) for item in value):
            cells[name] = escape_formula("; ".join(value))
        elif value is None or isinstance(value, str):
            cells[name] = escape_formula(value or "")
        else:
            cells[name] = json.dumps(value, ensure_ascii=False)
    return cells


class _Lines:
    """Ends the rows of a `csv.writer` by a line feed. It quotes a carriage return in a cell only if its own line ends have one."""

    def __init__(self, file: TextIO):
        self._file = file

    def write(self, row: str) -> None:
        """Writes one row."""
        self._file.write(row.removesuffix("\r\n") + "\n")


def write_csv(rows: Callable[[], Iterable[Mapping[str, str]]], output: Path, delimiter: str = ",") -> None:
    """Writes rows of cells.

    Args:
        rows: returns an iterator over all rows. It is called twice: first for the columns, which are those of all rows, "error" last.
    """
    columns = {name: None for row in rows() for name in row}
    names = [name for name in columns if name != "error"] + ["error"] * ("error" in columns)
    with output.open("w", encoding="utf-8", errors="replace", newline="") as file:
        writer = csv.DictWriter(_Lines(file), names, restval="", delimiter=delimiter, lineterminator="\r\n")
        writer.writeheader()
        writer.writerows(rows())
