"""Scores of files of predictions, whose references are in the same rows or in another file."""

from collections import Counter
from collections.abc import Callable, Sequence

from keyphrase_tools.phrase_lists import read_phrases
from run_tools.errors import UserError, print_error, short_repr
from run_tools.rows import Source

from .compare import compare
from .scores import score_answers, score_definitions, score_keyphrases, score_summaries

# a row has the same value as its reference, if both have the column
SHARED = ("term", "context", "title", "text", "document", "question")


def evaluate_files(
    task: str,
    files: dict[str, list[str]],
    references: str | None = None,
    baseline: str | None = None,
    columns: tuple[str | None, str | None] = (None, None),
    **options,
) -> dict:
    """Scores the files of each system, its runs -> what `compare` returns, with the number of `rows` and of `empty` predictions.

    Args:
        references: a file; by default references are in the rows of predictions.
        columns: of predictions and of references, if not those of the task.
        options: of the task's function in `scores`.

    Raises:
        UserError: for rows of other sources, missing ids or rows, and values that cannot be read.
    """
    score, usual, readers, needed = TASKS[task]
    column, reference_column = (own or one for own, one in zip(columns, usual, strict=True))
    if references is None and column == reference_column:
        raise UserError(f"Predictions and references both have the column {column!r}. Pass --references FILE.")
    gold_place = references or next(iter(files.values()))[0]
    gold = read_rows(gold_place, reference_column)
    for name in needed:
        read_column(gold_place, gold, name, read_text)
    wanted = read_column(gold_place, gold, reference_column, readers[1])
    shared = SHARED if column == reference_column else (*SHARED, reference_column)
    systems: dict[str, list] = {name: [] for name in files}
    empty = dict.fromkeys(files, 0)
    for name, place in [(name, place) for name, places in files.items() for place in places]:
        rows = read_rows(place, column)
        found = read_column(place, rows, column, readers[0], may_fail=True)
        order = align(place, rows, gold_place, gold, shared)
        errors, count = sum(bool(row.get("error")) for row in rows), sum(not value for value in found)
        if errors == len(rows):
            raise UserError(f"{place}: all {errors:,} rows have an error, so there is nothing to score.")
        if count:
            print_error(f"{place}: {count:,} of {len(rows):,} predictions are empty, {errors:,} by an error.", "note")
        empty[name] += count
        systems[name].append(score([found[i] for i in order], wanted, gold, **options))
    return {"rows": len(gold), "empty": empty, **compare(systems, baseline)}


def read_rows(place: str, column: str) -> list[dict]:
    """The rows of a file. Raises a `UserError` if it has no such column, or a row cannot be read."""
    source, rows = Source(place), []
    source.check_columns([column])
    for row in source:
        if isinstance(row, ValueError):
            raise UserError(str(row))
        rows.append(row)
    return rows


def read_column(place: str, rows: list[dict], column: str, read: Callable, may_fail: bool = False) -> list:
    """The values of a column; with `may_fail` the empty one of a row with an error."""
    values = []
    for number, row in enumerate(rows, start=1):
        try:
            values.append(read("" if may_fail and row.get("error") else row.get(column)))
        except ValueError as error:
            raise UserError(f"{place}, row {number}, {column!r}: {error}") from error
    return values


def align(place: str, rows: list[dict], gold_place: str, gold: list[dict], shared: Sequence[str]) -> list[int]:
    """The index of each reference's prediction, by `id` if all rows have one. Raises a `UserError` for other rows."""
    order = list(range(len(rows)))
    if all("id" in row for row in [*rows, *gold]):
        ours, theirs = ([str(row["id"]) for row in own] for own in (rows, gold))
        index, wanted = {one: i for i, one in enumerate(ours)}, set(theirs)
        for name, ids in ((place, ours), (gold_place, theirs)):
            if twice := [one for one, count in Counter(ids).items() if count > 1]:
                raise UserError(f"{name} has two rows of each id of {short_repr(twice)}.")
        if other := sorted(index.keys() ^ wanted):
            raise UserError(f"{place} and {gold_place} have other rows: only one has the ids {short_repr(other)}.")
        order = [index[one] for one in theirs]
    elif len(rows) != len(gold):
        raise UserError(f"{place} has {len(rows):,} rows, {gold_place} has {len(gold):,}. Score the same rows.")
    for number, (i, reference) in enumerate(zip(order, gold, strict=True), start=1):
        for name in shared:
            if name in rows[i] and name in reference and rows[i][name] != reference[name]:
                raise UserError(
                    f"{place}, row {i + 1}: {name}={short_repr(rows[i][name])}, but in {gold_place}, row {number}, "
                    f"{short_repr(reference[name])}. Score the same rows."
                )
    return order


def read_text(value) -> str:
    """A text, or a list of sentences."""
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        value = " ".join(value)
    if not isinstance(value, str):
        raise ValueError(f"{short_repr(value)} is not a text.")
    return value.strip()


def read_reference(value) -> str:
    """A text that is not empty."""
    if not (text := read_text(value)):
        raise ValueError(f"{short_repr(value)} is empty.")
    return text


def read_answers(value) -> list[str]:
    """Gold answers: a text, a list of texts, or SQuAD's object."""
    value = value.get("text") if isinstance(value, dict) else value
    answers = [value] if isinstance(value, str) else value
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise ValueError(f"{short_repr(value)} is not a list of answers.")
    return answers


def read_keyphrases(value) -> list[str]:
    """Keyphrases in any form that our commands, other extractors and annotation tools write."""
    return [phrase for phrase in read_phrases(value) if phrase.strip()]


# the function, the columns of predictions and references, what reads them, texts that the references' rows need
TASKS: dict[str, tuple[Callable, tuple[str, str], tuple[Callable, Callable], tuple[str, ...]]] = {
    "keyphrases": (score_keyphrases, ("keyphrases", "keyphrases"), (read_keyphrases, read_keyphrases), ("text",)),
    "summaries": (score_summaries, ("summary_text", "summary"), (read_text, read_reference), ()),
    "definitions": (
        score_definitions, ("definition", "definition"), (read_text, read_reference), ("term", "context"),
    ),
    "answers": (score_answers, ("answer", "answers"), (read_text, read_answers), ()),
}  # fmt: skip
