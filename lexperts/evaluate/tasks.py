"""Scores of files of predictions, whose references are in the same rows or in another file."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from keyphrase_tools.phrase_lists import read_phrases
from run_tools.errors import UserError, print_error, short_repr
from run_tools.rows import Source

from .compare import compare
from .scores import score_answers, score_definitions, score_keyphrases, score_summaries

Files = Mapping[str, Sequence[str]]
# a row has the same value as its reference, if both have the column
SHARED = ("term", "context", "title", "text", "document", "question")


def evaluate_files(
    task: str, files: Files, references: str | None, baseline: str | None, reference_column: str | None, **options
) -> dict:
    """Scores the files of each system, its runs -> what `compare` returns, with the number of `rows`; says how many predictions are empty.

    References are the task's column, or `reference_column`, of the file `references`, by default of the first predictions. The options
    are those of the task's function in `scores`. Raises a `UserError` for rows of other sources, and values that cannot be read.
    """
    score, column, usual, read, read_gold, needed = TASKS[task]
    reference_column = reference_column or usual
    if references is None and column == reference_column:
        raise UserError(f"Predictions and references both have the column {column!r}. Pass --references FILE.")
    gold_place = references or next(iter(files.values()))[0]
    gold, wanted = read_rows(gold_place, reference_column, read_gold, needed)
    if "" in wanted:
        raise UserError(f"{gold_place}, row {wanted.index('') + 1}: {reference_column!r} is empty.")
    shared = [name for name in (*SHARED, reference_column) if name != column]
    systems: dict[str, list] = {name: [] for name in files}
    for name, place in [(name, place) for name, places in files.items() for place in places]:
        rows, found = read_rows(place, column, read)
        order = align(place, rows, gold_place, gold, shared)
        if count := sum(not value for value in found):
            print_error(f"{place}: {count:,} of {len(rows):,} predictions are empty.", "note")
        systems[name].append(score([found[i] for i in order], wanted, gold, **options))
    return {"rows": len(gold), **compare(systems, baseline)}


def read_rows(place: str, column: str, read: Callable, needed: Sequence[str] = ()) -> tuple[list[dict], list]:
    """The rows of a file, and the values of a column. Raises a `UserError` without the columns, or for a row that cannot be read."""
    source, rows, values = Source(place), [], []
    source.check_columns([column, *needed])
    for number, row in enumerate(source, start=1):
        if isinstance(row, ValueError):
            raise UserError(str(row))
        if empty := [name for name in needed if row.get(name) is None]:
            raise UserError(f"{place}, row {number}: {empty[0]!r} is empty.")
        value = row.get(column)
        try:
            values.append(read("" if value is None and row.get("error") else value))
        except ValueError as error:
            raise UserError(f"{place}, row {number}, {column!r}: {error}") from error
        rows.append(row)
    return rows, values


def align(place: str, rows: list[dict], gold_place: str, gold: list[dict], shared: Sequence[str]) -> list[int]:
    """The index of each reference's prediction, by `id` if all rows have one. Raises a `UserError` for other rows."""
    has_ids = all("id" in row for row in [*rows, *gold])
    ours, theirs = ([str(row["id"]) if has_ids else f"row {i}" for i, row in enumerate(own, 1)] for own in (rows, gold))
    counts, others = Counter(ours), Counter(theirs)
    if wrong := [one for one in {**counts, **others} if not counts[one] == others[one] == 1]:
        raise UserError(f"{place} and {gold_place} do not both have one row of each of {short_repr(wrong)}.")
    index = {one: i for i, one in enumerate(ours)}
    for one, reference in zip(theirs, gold, strict=True):
        row = rows[index[one]]
        for name in shared:
            if name in row and name in reference and row[name] != reference[name]:
                raise UserError(f"{place}, {one}: {name} is {short_repr(row[name])}, but another in {gold_place}.")
    return [index[one] for one in theirs]


def read_text(value) -> str:
    """A text."""
    if not isinstance(value, str):
        raise ValueError(f"{short_repr(value)} is not a text.")
    return value.strip()


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


# the function, the columns of predictions and references, what reads them, columns that the references' rows need
TASKS: dict[str, tuple[Callable, str, str, Callable, Callable, tuple[str, ...]]] = {
    "keyphrases": (score_keyphrases, "keyphrases", "keyphrases", read_keyphrases, read_keyphrases, ("text",)),
    "summaries": (score_summaries, "summary_text", "summary", read_text, read_text, ()),
    "definitions": (score_definitions, "definition", "definition", read_text, read_text, ("term", "context")),
    "answers": (score_answers, "answer", "answers", read_text, read_answers, ()),
}
