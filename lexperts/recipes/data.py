"""Rows of training, validation and test, from files or the Hub. Imports torch and datasets only to read them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from run_tools.arguments import option
from run_tools.errors import UserError

SPLITS = ("train", "validation", "test")
Rows = dict[str, list[dict]]


@dataclass
class SplitArguments:
    """Where the rows come from. `COLUMNS`: those that they have whatever the options."""

    COLUMNS: ClassVar[tuple[str, ...]] = ()
    dataset_name: str | None = option(None, "data set on the Hub, instead of files")
    train_files: list[str] | None = option(None, "training files, JSON Lines")
    validation_files: list[str] | None = option(None, "validation files, same format")
    test_files: list[str] | None = option(None, "test files, same format, scored after training")

    def check_columns(self) -> None:
        """Raises a `UserError` for a column that the training files do not have. `title` need not exist."""
        from run_tools.rows import Source

        columns = {name: getattr(self, name, None) for name in ("text_column", "title_column", "label_column")}
        names = [column for name, column in columns.items() if column and (name, column) != ("title_column", "title")]
        for place in self.train_files or ():
            Source(place.rpartition("=")[2]).check_columns([*names, *self.COLUMNS])


@dataclass
class ColumnArguments:
    """The columns of documents with keyphrases."""

    text_column: str = option("text", "column of texts, or of lists of words")
    title_column: str = option("title", "column of titles, which may be empty")
    keyphrases_column: str = option("keyphrases", "column of lists of keyphrases, or of texts with ; between them")


def load_splits(args, required: Sequence[str] = (), read: Callable[..., list[dict]] | None = None) -> Rows:
    """The rows of each split, of files by `read` or `read_jsonl`. Raises a `UserError` without them or a column."""
    from run_tools.rows import missing_columns, read_jsonl

    if not args.dataset_name:
        if not args.train_files:
            raise UserError("There are no training rows. Pass --train-files FILE or --dataset-name ID.")
        read = read or partial(read_jsonl, required=required)
        return {split: read(paths) for split in SPLITS if (paths := getattr(args, f"{split}_files", None))}
    from datasets import load_dataset

    hub = load_dataset(args.dataset_name)
    for split in hub:
        if problem := missing_columns(hub[split].column_names, required):
            raise UserError(f"{args.dataset_name}, {split}: {problem}.")
    return {split: hub[split].to_list() for split in SPLITS if split in hub}


def load_documents(args) -> Rows:
    """Rows with `title` (`None` if there is none), `text` and `keyphrases`, whatever they are called."""
    from keyphrase_tools.phrase_lists import labelled_row, read_labelled

    names = {"text_column": args.text_column, "keyphrases_column": args.keyphrases_column}
    rows = load_splits(args, read=partial(read_labelled, **names))
    for split, own in rows.items():
        for i, row in enumerate(own):
            row = labelled_row(row, f"{args.dataset_name}, {split}, row {i}", **names) if args.dataset_name else row
            title, text = row.get(args.title_column), as_text(row[args.text_column])
            own[i] = row | {"title": title, "text": text, "keyphrases": row[args.keyphrases_column]}
    return rows


def as_text(text: str | Sequence[str]) -> str:
    """A text, also of a list of words."""
    return text if isinstance(text, str) else " ".join(text)


def to_columns(rows: Sequence[dict], names: Sequence[str] = ("title", "text", "keyphrases")) -> dict[str, list]:
    """Columns of rows."""
    return {name: [row[name] for row in rows] for name in names}


def hold_out_validation(rows: Rows, share: float = 0.2) -> None:
    """Moves a share of the training rows to the validation split, unless there is one."""
    if "validation" not in rows:
        from datasets import Dataset

        parts = Dataset.from_dict({"i": range(len(rows["train"]))}).train_test_split(share, seed=42)
        rows["train"], rows["validation"] = ([rows["train"][i] for i in parts[part]["i"]] for part in ("train", "test"))
