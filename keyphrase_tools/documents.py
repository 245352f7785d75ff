"""Documents with keyphrases from JSON Lines or a Hub data set, with errors that name the file and the line."""

import json
from collections.abc import Sequence
from pathlib import Path

from .clean_text import clean
from .words import join_title

NAME_COLUMNS = "Name yours with --text_column, --title_column and --keyphrases_column."  # of scripts with these
EXAMPLE = '{"title": "...", "text": "...", "keyphrases": ["..."]}'


def read_jsonl(
    paths: str | Path | Sequence[str | Path], required: Sequence[str] = (), example: str = EXAMPLE, hint: str = ""
) -> list[dict]:
    """Rows of one or more JSON Lines files; for messages, `example` is what a line should be like, `hint` how columns are named.

    Raises:
        FileNotFoundError: for a file that is not there.
        ValueError: for a line that is no JSON object or lacks a required column; the file and the line are named.
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
                        f"{path}, line {number}: this is not UTF-8 text ({error.reason} at byte {error.start + 1}). "
                        "Save the file as UTF-8."
                    ) from error
                except json.JSONDecodeError as error:
                    raise ValueError(
                        f"{path}, line {number}: this is not valid JSON ({error.msg.removesuffix(' at')}, column {error.colno}). Each line holds "
                        f"one object, such as {example}."
                    ) from error
                if not isinstance(row, dict):
                    raise ValueError(f"{path}, line {number}: a JSON object is wanted, not a {type(row).__name__}.")
                missing = [name for name in required if name not in row]
                if missing:
                    raise ValueError(
                        f"{path}, line {number}: there is no {', '.join(map(repr, missing))}; the columns are "
                        f"{', '.join(map(repr, row))}. {hint or f'A line is such as {example}.'}"
                    )
                rows.append(row)
    if not rows:
        raise ValueError(f"There are no documents in {paths}.")
    return rows


def full_text(row: dict, text_column: str = "text", title_column: str | None = "title") -> str:
    """A row's title and text as one, cleaned (see `clean_text`), as the pipeline reads them; a text may be a list of words."""
    text = row[text_column]
    text = text if isinstance(text, str) else " ".join(text)
    return clean(join_title(row.get(title_column), text) if title_column else text)


def coverage(rows) -> str:
    """How many keyphrases can be learnt, in words; `rows` are those of `labels.encode`, as a data set or a dict.

    Raises:
        ValueError: when not one keyphrase stands in its text.
    """
    total, found = sum(rows["num_keyphrases"]), sum(rows["num_present"])
    if not found:
        raise ValueError(
            f"None of the {total:,} keyphrases stands in its text, so there is nothing to learn by extraction. Is the right "
            "column read (--keyphrases_column)? Are texts and keyphrases of the same language and rows?"
        )
    absent = total - found
    share = f"{found:,} of {total:,} keyphrases ({found / total:.1%}) stand in their texts"
    return f"{share}; {absent:,} do not and cannot be extracted." if absent else f"{share}."
