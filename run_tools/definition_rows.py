"""Rows of terms, contexts and definitions."""

from collections.abc import Sequence
from pathlib import Path

from .errors import UserError
from .jsonl import read_jsonl

FIELDS = ("term", "context", "definition")


def is_complete_row(row: dict) -> bool:
    """Whether term, context and definition are all non-empty strings."""
    return all(isinstance(row.get(name), str) and row[name].strip() for name in FIELDS)


def load_definition_rows(paths: str | Path | Sequence[str | Path]) -> tuple[list[dict], int]:
    """Reads JSON Lines files, see `read_jsonl`. A row whose context is a list becomes one row per context.

    Returns:
        The complete rows, and the number of rows that were dropped for an empty or missing field.

    Raises:
        UserError: also if no row is complete.
    """
    rows = []
    for row in read_jsonl(paths):
        contexts = row.get("context")
        rows += [{**row, "context": context} for context in (contexts if isinstance(contexts, list) else [contexts])]
    complete = [row for row in rows if is_complete_row(row)]
    if not complete:
        raise UserError(f"{paths}: none of the {len(rows):,} rows has a text as {', '.join(map(repr, FIELDS))}.")
    return complete, len(rows) - len(complete)
