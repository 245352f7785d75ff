"""Reads JSON Lines, with errors that name the file and the line."""

import json
from collections.abc import Sequence
from pathlib import Path

from .clean_text import clean
from .words import join_title

NAME_COLUMNS = "Set the names with --text_column, --title_column and --keyphrases_column."
EXAMPLE = '{"title": "...", "text": "...", "keyphrases": ["..."]}'


def read_jsonl(
    paths: str | Path | Sequence[str | Path], required: Sequence[str] = (), example: str = EXAMPLE, hint: str = ""
) -> list[dict]:
    """Reads the rows of one or more JSON Lines files.

    Args:
        paths: one path or several.
        required: columns that every row must have.
        example: a valid line, for error messages.
        hint: how to fix a missing column, for error messages.

    Raises:
        FileNotFoundError: if a file does not exist.
        ValueError: if a file is empty, or a line is not a JSON object or lacks a required column; the message names the
            file and the line.
    """
    rows = []
    for path in [paths] if isinstance(paths, (str, Path)) else paths:
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line.decode("utf-8").rstrip())
                except UnicodeDecodeError as error:
                    raise ValueError(
                        f"{path}, line {number}: this is not valid UTF-8 ({error.reason} at byte {error.start + 1}). "
                        "Save the file as UTF-8."
                    ) from error
                except json.JSONDecodeError as error:
                    raise ValueError(
                        f"{path}, line {number}: this is not valid JSON ({error.msg.removesuffix(' at')}, column {error.colno}). Each line must be "
                        f"one object, such as {example}."
                    ) from error
                if not isinstance(row, dict):
                    raise ValueError(f"{path}, line {number}: expected a JSON object, got a {type(row).__name__}.")
                missing = [name for name in required if name not in row]
                if missing:
                    raise ValueError(
                        f"{path}, line {number}: there is no {', '.join(map(repr, missing))}; the columns are "
                        f"{', '.join(map(repr, row))}. {hint or f'A valid line: {example}'}"
                    )
                rows.append(row)
    if not rows:
        raise ValueError(f"There are no documents in {paths}.")
    return rows


def full_text(row: dict, text_column: str = "text", title_column: str | None = "title") -> str:
    """A row's title and text, joined and cleaned as the pipeline does it. The text may be a list of words."""
    text = row[text_column]
    text = text if isinstance(text, str) else " ".join(text)
    return clean(join_title(row.get(title_column), text) if title_column else text)


def describe_coverage(rows) -> str:
    """A sentence on how many keyphrases occur in their texts.

    Args:
        rows: the rows of `labels.tokenize_documents`, as a data set or a dict.

    Raises:
        ValueError: if no keyphrase occurs in its text.
    """
    total, num_present = sum(rows["num_keyphrases"]), sum(rows["num_present"])
    if not num_present:
        raise ValueError(
            f"None of the {total:,} keyphrases occurs in its text, so a model cannot learn to extract them. Check the column "
            "(--keyphrases_column), and that texts and keyphrases have the same language and order."
        )
    absent = total - num_present
    sentence = f"{num_present:,} of {total:,} keyphrases ({num_present / total:.1%}) occur in their texts"
    return f"{sentence}; {absent:,} do not and cannot be extracted." if absent else f"{sentence}."
