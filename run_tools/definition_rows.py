"""Reads rows of terms, contexts and definitions from JSON Lines files."""

from collections.abc import Sequence
from pathlib import Path

from .jsonl import rows_of_file

FIELDS = ("term", "context", "definition")
EXAMPLE = '{"term": "...", "context": "...", "definition": "..."}'


def is_complete_row(row: dict) -> bool:
    """Whether term, context and definition are all non-empty strings."""
    return all(isinstance(row.get(name), str) and row[name].strip() for name in FIELDS)


def load_definition_rows(paths: str | Path | Sequence[str | Path]) -> tuple[list[dict], int]:
    """Reads rows of definitions. A row whose context is a list becomes one row per context.

    Returns:
        The complete rows, and the number of rows that were dropped for an empty or missing field.

    Raises:
        FileNotFoundError: for a missing file.
        ValueError: for a line that is not a JSON object (the message has file and line), or when no row is left.
    """
    rows, dropped = [], 0
    for path in [paths] if isinstance(paths, (str, Path)) else paths:
        for where, row in rows_of_file(path, EXAMPLE):
            if not isinstance(row, dict):
                raise ValueError(f"{where}: expected a JSON object, got a {type(row).__name__}.")
            contexts = row.get("context")
            read = [{**row, "context": context} for context in (contexts if isinstance(contexts, list) else [contexts])]
            complete = [candidate for candidate in read if is_complete_row(candidate)]
            rows += complete
            dropped += len(read) - len(complete)
    if not rows:
        raise ValueError(
            f"There are no complete rows in {paths}: {dropped:,} were dropped, because {', '.join(map(repr, FIELDS))} must "
            "all be non-empty strings. Rename the columns of your file to these."
        )
    return rows, dropped
