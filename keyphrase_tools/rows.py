"""Rows of documents: the texts that a model reads, and how many of their keyphrases it can find."""

from collections.abc import Mapping

from lexperts_lite.clean import clean
from lexperts_lite.input_documents import is_missing
from lexperts_lite.words import join_title
from run_tools.errors import UserError, short_repr


def full_text(row: dict, text_column: str = "text", title_column: str | None = "title") -> str:
    """A row's title and text, joined and cleaned as the pipeline does it. The text may be a list of words."""
    text, title = row[text_column], row.get(title_column) if title_column else None
    if title is not None and not isinstance(title, str):
        raise UserError(f"{title_column}={short_repr(title)} is not a title. Use a string, or null for none.")
    text = text if isinstance(text, str) else " ".join(text)
    return clean(join_title(title, text) if title_column else text)


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
            "(--keyphrases-column), and that texts and keyphrases have the same language and order."
        )
    absent = total - num_present
    sentence = f"{num_present:,} of {total:,} keyphrases ({num_present / total:.1%}) occur in their texts"
    return f"{sentence}; {absent:,} do not and cannot be extracted." if absent else f"{sentence}."


def to_document(row: Mapping, text_column: str = "text", title_column: str | None = "title") -> dict:
    """A row as a document `{"title", "text"}` of the pipeline. Raises a `ValueError` if its text or title is not a text.

    Args:
        row: the text is a text or a list of words, which are joined by blanks; the title may be missing, `None` or NaN.
    """
    if text_column not in row:
        raise ValueError(f"there is no {text_column!r}; columns: {', '.join(map(repr, row))}")
    text, title = row[text_column], row.get(title_column) if title_column else None
    text = text.tolist() if hasattr(text, "tolist") else text
    if isinstance(text, (list, tuple)) and all(isinstance(word, str) for word in text):
        text = " ".join(text)
    title = None if is_missing(title) else title
    for column, value, is_valid in (
        (text_column, text, isinstance(text, str)),
        (title_column, title, isinstance(title, str | None)),
    ):
        if not is_valid:
            raise ValueError(f"{column!r} is {value!r:.60}, not a text")
    return {"title": title, "text": text}
