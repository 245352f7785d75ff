"""Rows of documents: the texts that a model reads, and how many of their keyphrases it can find."""

from itertools import islice

from run_tools.corpus.documents import Corpus, check_document
from run_tools.errors import UserError, short_repr

from .clean_text import clean
from .words import join_title

NAME_COLUMNS = "Set the names with --text-column, --title-column and --keyphrases-column."


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


def read_texts(corpus: Corpus, max_documents: int | None = None) -> tuple[dict[int, str], dict[int, str]]:
    """Reads the first documents, each with its title and text joined.

    Returns:
        The texts by document index, and the error messages of the documents that cannot be read or are empty.
    """
    texts, errors = {}, {}
    for row in islice(corpus.read(), max_documents):
        document, error = None, row.error
        if row.values is not None:
            document = {"text": row.values[corpus.text_column], "title": row.values.get(corpus.title_column)}
            document, error = check_document(document, corpus.text_column, corpus.title_column)
        text = clean(join_title(document["title"], document["text"])) if document else ""
        if text.strip():
            texts[row.number] = text
        else:
            errors[row.number] = error or "it is empty"
    return texts, errors
