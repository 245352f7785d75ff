"""Reads lists of keyphrases in the forms in which people, annotation tools, other extractors and our own commands write them.

Gold keyphrases and predictions are read in the same way, in training, scoring, calibration and export.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Integral, Real
from pathlib import Path

from run_tools.errors import UserError, short_repr
from run_tools.rows import missing_columns, rows_of_file

from .rows import NAME_COLUMNS

FORMS = (
    '["graph cut", "energy"], "graph cut; energy", [["graph cut", 0.9]], [{"keyphrase": "graph cut"}] (also "phrase" or "text"), '
    'or with offsets in the text [[0, 9, "KEY"]] or [{"start": 0, "end": 9}]'
)
NAMES = ("keyphrase", "phrase", "text")  # of the phrase in an object
OFFSETS = (("start", "end"), ("start_offset", "end_offset"))
LABELS = ("label", "labels", "entities", "spans", "ents")  # columns of doccano, Prodigy and spaCy


def read_phrases(value, text: str | None = None, where: str = "keyphrases") -> list[str]:
    """The keyphrases of one document.

    Args:
        value: a string in which `;` separates phrases; or a list of strings, of pairs of a phrase and its score, of objects with
            `keyphrase`, `phrase` or `text`, or of spans: `[start, end, label]`, or objects with `start` and `end`. A candidate
            of our own output that does not occur, with `"score": null`, is left out.
        text: the text to which offsets of spans refer.
        where: what error messages call the value.

    >>> read_phrases([[0, 9, "KEY"], ["energy", 0.1]], "graph cut of an energy")
    ['graph cut', 'energy']

    Raises:
        UserError: for any other value; the message names it and lists the accepted forms.
    """
    if isinstance(value, str):
        return value.split(";")
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, (list, tuple)):
        raise UserError(f"{where}={short_repr(value)} is not a list of phrases. Use {FORMS}.")
    phrases: list[str] = []
    for i, element in enumerate(value):
        if isinstance(element, str):
            phrases += element.split(";") if ";" in element else [element]
        elif not _is_absent(element):
            phrases.append(_read_element(element, text, f"{where}[{i}]"))
    return phrases


def row_phrases(row: Mapping, where: str, text: str | None = None, column: str = "keyphrases") -> list[str] | None:
    """The keyphrases of a row of a file: those of the column, or where it is missing, the spans of an annotation tool.

    Args:
        row: of JSON; also a row of doccano, Prodigy or spaCy (`Doc.to_json`), or one that an extraction wrote.
        where: the file and the line.
        text: as in `read_phrases`.
        column: of the keyphrases.

    Returns:
        The phrases; none for a row with an `error`. `None` if the row has no keyphrases.

    Raises:
        UserError: for keyphrases in another form.
    """
    if row.get(column) is None and row.get("error") is not None:
        return []
    if column in row:
        return read_phrases(row[column], text, f"{where}: {column}")
    for name in LABELS:
        spans = row.get(name)
        if isinstance(spans, Mapping):  # the span groups of a spaCy Doc
            spans = [span for group in spans.values() for span in group]
        if isinstance(spans, list):
            return read_phrases(spans, text, f"{where}: {name}")
    return None


def labelled_row(
    row: Mapping, where: str, text_column: str = "text", keyphrases_column: str = "keyphrases", hint: str = NAME_COLUMNS
) -> dict:
    """A row with a text and its keyphrases as a list of strings, from any form that `row_phrases` reads.

    Raises:
        UserError: if the text or the keyphrases are missing, or have another form.
    """
    text = row.get(text_column)
    phrases = row_phrases(row, where, text if isinstance(text, str) else None, keyphrases_column)
    if phrases is not None:
        row = dict(row) | {keyphrases_column: phrases}
    if problem := missing_columns(row, (text_column, keyphrases_column)):
        raise UserError(f"{where}: {problem}. {hint}")
    is_words = isinstance(text, (list, tuple)) and all(isinstance(word, str) for word in text)
    if not isinstance(text, str) and not is_words:
        raise UserError(f"{where}: {text_column}={short_repr(text)} is not a text. Use a string, or a list of words.")
    return dict(row)


def read_labelled(
    paths: str | Path | Sequence[str | Path],
    text_column: str = "text",
    keyphrases_column: str = "keyphrases",
    hint: str = NAME_COLUMNS,
) -> list[dict]:
    """Reads the rows of JSON Lines files, each with a text and a list of keyphrases; see `labelled_row`."""
    convert = partial(labelled_row, text_column=text_column, keyphrases_column=keyphrases_column, hint=hint)
    return _read_separated(paths, convert, keyphrases_column)


def read_predictions(path: str | Path) -> list[dict]:
    """Reads the rows of a JSON Lines file of predicted keyphrases, best first; a row with `error` has none.

    Raises:
        ValueError: if a row has neither keyphrases nor an error, or keyphrases of another form, the message names the line; and if
            every row has an error.
    """

    def convert(row: dict, where: str) -> dict:
        text = row.get("text")
        phrases = row_phrases(row, where, text if isinstance(text, str) else None)
        if phrases is None and (problem := missing_columns(row, ("keyphrases",))):
            raise UserError(f"{where}: {problem}.")
        return row | {"keyphrases": phrases}

    rows = _read_separated(path, convert, "keyphrases")
    if all(row.get("error") is not None and not row["keyphrases"] for row in rows):
        raise UserError(
            f"{path}: all of the {len(rows):,} rows have an error, so there is nothing to score. Extract them again."
        )
    return rows


def _read_separated(paths, convert: Callable[[dict, str], dict], column: str) -> list[dict]:
    """The rows of JSON Lines files, converted.

    Raises:
        UserError: if strings of phrases have commas, but none has the separator `;`, so that each would be one phrase.
    """
    unseparated, separated = "", False

    def check(row: dict, where: str) -> dict:
        nonlocal unseparated, separated
        if isinstance(value := row.get(column), str):
            separated = separated or ";" in value
            if not unseparated and re.search(r",(?![0-9])", value):
                unseparated = f"{where}: {column}={short_repr(value)}"
        return convert(row, where)

    rows = [check(row, where) for where, row in rows_of_file(paths)]
    if unseparated and not separated:
        raise UserError(f"{unseparated} is one phrase, since no row has a ';' between phrases. Use {FORMS}.")
    return rows


def _read_element(element, text: str | None, where: str) -> str:
    """The phrase of one element of a list that is not a string."""
    if isinstance(element, Mapping):
        name = next((name for name in NAMES if name in element), None)
        if name is not None and isinstance(element[name], str):
            return element[name]
        for start, end in OFFSETS:
            if name is None and start in element and end in element:
                return _span(element[start], element[end], text, f"{where}={short_repr(element)}")
    elif isinstance(element, (list, tuple)):
        if len(element) == 2 and isinstance(element[0], str) and _is_number(element[1]):
            return element[0]
        if len(element) == 3 and isinstance(element[2], str):
            return _span(element[0], element[1], text, f"{where}={short_repr(element)}")
    raise UserError(f"{where}={short_repr(element)} is not a phrase. Use {FORMS}.")


def _span(start, end, text: str | None, where: str) -> str:
    """The part of the text between two offsets."""
    if not all(isinstance(offset, Integral) and not isinstance(offset, bool) for offset in (start, end)):
        raise UserError(f"{where}: its offsets are not whole numbers. Use {FORMS}.")
    if text is None:
        raise UserError(
            f"{where} has offsets, but there is no text that they refer to. Add the text to the row, or pass phrases."
        )
    if not 0 <= start < end <= len(text):
        raise UserError(
            f"{where} is not in the text, which has {len(text):,} characters. Use offsets of characters, start before end."
        )
    return text[start:end]


def _is_absent(element) -> bool:
    """Whether it is a candidate of our own output that does not occur in its text."""
    return isinstance(element, Mapping) and "keyphrase" in element and element.get("score", 0) is None


def _is_number(value) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
