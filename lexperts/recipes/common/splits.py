"""Rows of the training, validation and test split, from JSON Lines files or from the Hub."""

from collections.abc import Callable
from functools import partial

from datasets import Dataset, load_dataset

from keyphrase_tools.phrase_lists import labelled_row
from keyphrase_tools.rows import NAME_COLUMNS
from run_tools.jsonl import read_jsonl

EXAMPLE = '{"title": "...", "text": "...", "keyphrases": ["..."]}'
SPLITS = ("train", "validation", "test")


def load_splits(
    args,
    required: tuple[str, ...],
    hub_example: str,
    example: str = EXAMPLE,
    hint: str = "",
    convert: Callable[[dict, str], dict] | None = None,
) -> dict[str, list[dict]]:
    """Rows of each split, from `dataset_name` or `train_files`, `validation_files` and `test_files`. Raises a `ValueError` without
    training data and the `required` columns; `convert` is called with each row and its place, see `jsonl.read_jsonl`; the other
    arguments are for messages.
    """
    if args.dataset_name:
        hub = load_dataset(args.dataset_name)
        splits = {split: hub[split] for split in SPLITS if split in hub}
        for split, rows in splits.items():
            if missing := [name for name in required if name not in rows.column_names]:
                raise ValueError(
                    f"{args.dataset_name} has no {', '.join(map(repr, missing))} in {split}; the columns are "
                    f"{', '.join(map(repr, rows.column_names))}. {hint}"
                )
        keep = convert or (lambda row, place: row)
        return {
            split: [keep(row, f"{args.dataset_name}, {split}, row {i}") for i, row in enumerate(rows.to_list())]
            for split, rows in splits.items()
        }
    if not args.train_files:
        raise ValueError(f"No training data. Pass --train-files train.jsonl or --dataset-name {hub_example}.")
    files = {split: getattr(args, f"{split}_files", None) for split in SPLITS}
    return {split: read_jsonl(paths, required, convert) for split, paths in files.items() if paths}


def load_keyphrase_rows(args) -> dict[str, list[dict]]:
    """Rows of documents with keyphrases, with the columns of `ColumnArguments`; see `load_splits`."""
    columns = {"text_column": args.text_column, "keyphrases_column": args.keyphrases_column}
    convert = partial(labelled_row, **columns)
    return load_splits(args, tuple(columns.values()), "midas/inspec", hint=NAME_COLUMNS, convert=convert)


def to_columns(rows: list[dict], args) -> dict[str, list]:
    """The columns `title` (`None` if a row has none), `text` and `keyphrases` of such rows."""
    names = {"title": args.title_column, "text": args.text_column, "keyphrases": args.keyphrases_column}
    return {column: [row.get(name) for row in rows] for column, name in names.items()}


def hold_out_validation(rows: dict[str, list[dict]], share: float):
    """Moves a share of the training rows to the validation split, unless there is one."""
    if "validation" not in rows:
        parts = Dataset.from_dict({"i": range(len(rows["train"]))}).train_test_split(share, seed=42)
        rows["train"], rows["validation"] = ([rows["train"][i] for i in parts[part]["i"]] for part in ("train", "test"))
