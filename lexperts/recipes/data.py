"""Rows of training, validation and test, from JSON Lines files or the Hub. Imports neither torch nor datasets before they are read."""

from collections.abc import Sequence
from dataclasses import dataclass

from run_tools.arguments import option
from run_tools.errors import UserError

SPLITS = ("train", "validation", "test")
Rows = dict[str, list[dict]]


@dataclass
class SplitArguments:
    """Where the rows come from."""

    dataset_name: str | None = option(None, "data set on the Hub, instead of files")
    train_files: list[str] | None = option(None, "training files, JSON Lines")
    validation_files: list[str] | None = option(None, "validation files, same format")
    test_files: list[str] | None = option(None, "test files, same format, scored after training")


@dataclass
class ColumnArguments:
    """The columns of documents with keyphrases."""

    text_column: str = option("text", "column of texts, or of lists of words")
    title_column: str = option("title", "column of titles, which may be empty")
    keyphrases_column: str = option("keyphrases", "column of lists of keyphrases, or of texts with ; between them")


def load_splits(args, required: Sequence[str]) -> Rows:
    """The rows of each split of `SplitArguments`. Raises a `UserError` without training rows or a required column."""
    if not args.dataset_name:
        from run_tools.rows import read_jsonl

        files = {split: getattr(args, f"{split}_files", None) for split in SPLITS}
        if not args.train_files:
            raise UserError("There are no training rows. Pass --train-files FILE or --dataset-name ID.")
        return {split: read_jsonl(paths, required) for split, paths in files.items() if paths}
    from datasets import load_dataset

    hub = load_dataset(args.dataset_name)
    for split in hub:
        if missing := [name for name in required if name not in hub[split].column_names]:
            raise UserError(
                f"{args.dataset_name} has no {missing[0]!r} in {split}; columns: {hub[split].column_names}."
            )
    return {split: hub[split].to_list() for split in SPLITS if split in hub}


def load_documents(args) -> Rows:
    """Rows with `title` (`None` if there is none), `text` and `keyphrases`, whatever the names and forms in the files are."""
    from keyphrase_tools.phrase_lists import labelled_row, read_labelled

    names = {"text_column": args.text_column, "keyphrases_column": args.keyphrases_column}
    if args.dataset_name or not args.train_files:
        rows = {
            split: [labelled_row(row, f"{args.dataset_name}, {split}, row {i}", **names) for i, row in enumerate(own)]
            for split, own in load_splits(args, ()).items()
        }
    else:
        files = {split: getattr(args, f"{split}_files") for split in SPLITS}
        rows = {split: read_labelled(paths, **names) for split, paths in files.items() if paths}

    def renamed(row: dict) -> dict:
        title, text = row.get(args.title_column), as_text(row[args.text_column])
        return row | {"title": title, "text": text, "keyphrases": row[args.keyphrases_column]}

    return {split: list(map(renamed, own)) for split, own in rows.items()}


def as_text(text: str | Sequence[str]) -> str:
    """A text, also of a list of words."""
    return text if isinstance(text, str) else " ".join(text)


def to_columns(rows: Sequence[dict], names: Sequence[str] = ("title", "text", "keyphrases")) -> dict[str, list]:
    """Columns of rows."""
    return {name: [row[name] for row in rows] for name in names}


def hold_out_validation(rows: Rows, share: float) -> None:
    """Moves a share of the training rows to the validation split, unless there is one."""
    if "validation" not in rows:
        from datasets import Dataset

        parts = Dataset.from_dict({"i": range(len(rows["train"]))}).train_test_split(share, seed=42)
        rows["train"], rows["validation"] = ([rows["train"][i] for i in parts[part]["i"]] for part in ("train", "test"))
