"""Files of texts: .txt with one text per line, or rows with texts, such as JSON Lines."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from run_tools.errors import UserError, short_repr
from run_tools.rows import read_jsonl, rows_of_file


def read_texts(path: str | Path, text_of_row: Callable[[dict[str, Any]], Any]) -> list[str]:
    """The different texts of a file in their order; blank lines of a .txt file are left out.

    Args:
        text_of_row: gives the text of a row, or raises a `KeyError`.

    Raises:
        FileNotFoundError, UserError: if the file does not exist, cannot be read, or has no texts, or rows without one.
    """
    texts: dict[str, int] = {}
    path = Path(path).expanduser()
    for where, row in rows_of_file(path):
        if path.suffix == ".txt" and not row["text"].strip():
            continue
        try:
            text = text_of_row(row)
        except (KeyError, AttributeError, TypeError):
            text = None
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"{where} has no text: {short_repr(row)}")
        texts[text] = texts.get(text, 0) + 1
    if not texts:
        raise UserError(f"{path} has no texts.")
    if repeated := sum(texts.values()) - len(texts):
        warnings.warn(f"{path}: {repeated} texts occur more than once, and count once.", stacklevel=3)
    return list(texts)


def read_samples(path: str | Path) -> list[str]:
    """The different texts of an expert's samples: `text`, `prompt`, or the prompt for `term` and `context`."""
    return read_texts(path, lambda row: row.get("text") or row.get("prompt") or prompt_of(row))


def read_domain(path: str | Path) -> list[str]:
    """The different texts of a domain: `text`, or a prompt with its `definition`."""
    return read_texts(path, lambda row: row["text"] if "text" in row else prompt_of(row) + row["definition"])


def prompt_of(row: dict[str, Any]) -> str:
    """The prompt for a definition of the row's `term` in its `context`."""
    from modeling_lexicon.data_lexicon import format_prompt

    return format_prompt(row["term"], row["context"])


def read_definitions(paths: Sequence[str | Path]) -> tuple[list[dict[str, Any]], int]:
    """Rows of `term`, `context` and `definition`, one for each context of a list.

    Returns:
        The complete rows, and the number of rows without a text for each of the three. Raises a `UserError` if none is complete.
    """
    rows = []
    for row in read_jsonl(paths):
        contexts = row.get("context")
        rows += [{**row, "context": context} for context in (contexts if isinstance(contexts, list) else [contexts])]
    names = ("term", "context", "definition")
    complete = [row for row in rows if all(isinstance(row.get(name), str) and row[name].strip() for name in names)]
    if not complete:
        raise UserError(f"{paths[0]}: none of the {len(rows):,} rows has a text as {', '.join(map(repr, names))}.")
    return complete, len(rows) - len(complete)
