"""Reads lists of keyphrases in the forms in which people, annotation tools, other extractors and our own commands write them.

Gold keyphrases and predictions are read in the same way, in training, scoring and calibration.
"""

import re
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path

from run_tools.errors import UserError, short_repr
from run_tools.rows import missing_columns, rows_of_file

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
        elif not (isinstance(element, Mapping) and "keyphrase" in element and element.get("score", 0) is None):
            phrases.append(_read_element(element, text, f"{where}[{i}]"))
    return phrases


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
        if len(element) == 2 and isinstance(element[0], str) and _is_number(element[1], Real):
            return element[0]
        if len(element) == 3 and isinstance(element[2], str):
            return _span(element[0], element[1], text, f"{where}={short_repr(element)}")
    raise UserError(f"{where}={short_repr(element)} is not a phrase. Use {FORMS}.")


def _span(start, end, text: str | None, where: str) -> str:
    """The part of the text between two offsets."""
    if text is None:
        raise UserError(f"{where} has offsets, but there is no text that they refer to.")
    if not (_is_number(start, Integral) and _is_number(end, Integral) and 0 <= start < end <= len(text)):
        raise UserError(f"{where} is not a span of the text, which has {len(text):,} characters.")
    return text[start:end]


def _is_number(value, kind) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def row_phrases(row: Mapping, where: str, text_column: str = "text", column: str = "keyphrases") -> list[str] | None:
    """The keyphrases of a row of a file: those of the column, or where it is missing, the spans of an annotation tool.

    Args:
        row: of JSON; also a row of doccano, Prodigy or spaCy (`Doc.to_json`), or one that an extraction wrote.
        where: the file and the line.
        text_column, column: of the text to which offsets refer, and of the keyphrases.

    Returns:
        The phrases; none for a row with an `error`. `None` if the row has no keyphrases.

    Raises:
        UserError: for keyphrases in another form.
    """
    text = row.get(text_column)
    text = text if isinstance(text, str) else None
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


def labelled_row(row: Mapping, where: str, text_column: str = "text", keyphrases_column: str = "keyphrases") -> dict:
    """A row with a text and its keyphrases as a list of strings, from any form that `row_phrases` reads.

    Raises:
        UserError: if the text or the keyphrases are missing, or have another form.
    """
    phrases, text = row_phrases(row, where, text_column, keyphrases_column), row.get(text_column)
    row = dict(row) if phrases is None else dict(row) | {keyphrases_column: phrases}
    if problem := missing_columns(row, (text_column, keyphrases_column)):
        raise UserError(f"{where}: {problem}.")
    if not isinstance(text, str) and not (isinstance(text, (list, tuple)) and all(isinstance(w, str) for w in text)):
        raise UserError(f"{where}: {text_column}={short_repr(text)} is not a text, or a list of words.")
    return row


def read_labelled(
    paths: str | Path | Sequence[str | Path], text_column: str = "text", keyphrases_column: str = "keyphrases"
) -> list[dict]:
    """Reads the rows of JSON Lines files, each with a text and a list of keyphrases; see `labelled_row`.

    Raises:
        UserError: for a row without them, and if strings of phrases have commas, but none has the separator `;`, so that each would
            be one phrase.
    """
    rows = [(where, row, row.get(keyphrases_column)) for where, row in rows_of_file(paths)]
    strings = [(where, value) for where, _, value in rows if isinstance(value, str)]
    if not any(";" in value for _, value in strings):
        for where, value in strings:
            if re.search(r",(?![0-9])", value):
                raise UserError(
                    f"{where}: {keyphrases_column}={short_repr(value)} is one phrase, without ';'. Use {FORMS}."
                )
    return [labelled_row(row, where, text_column, keyphrases_column) for where, row, _ in rows]


def read_predicted(path: str | Path) -> list[dict]:
    """Reads the rows of a JSON Lines file of predicted keyphrases, best first; a row with `error` has none."""
    rows = [(where, row, row_phrases(row, where)) for where, row in rows_of_file(path)]
    for where, row, phrases in rows:
        if phrases is None:
            raise UserError(f"{where}: {missing_columns(row, ['keyphrases'])}.")
    return [row | {"keyphrases": phrases} for _, row, phrases in rows]
