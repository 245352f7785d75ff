"""The rows that the training commands of LM-Lexicon read."""

from datasets import Dataset

from modeling_lexicon.data_lexicon import tokenize_definitions
from run_tools.definition_rows import FIELDS, load_definition_rows

from ..common.causal_training import print_rank0
from .arguments import DataArguments


def load_split(name: str, paths: list[str]) -> list[dict]:
    """The complete rows of a split; prints their number and the number of dropped rows."""
    rows, dropped = load_definition_rows(paths)
    print_rank0(f"{name}: {len(rows):,} rows; {dropped:,} dropped for an empty or missing field")
    return rows


def load_rows(args: DataArguments) -> dict[str, list[dict]]:
    """The rows of training and, if there are any, of validation."""
    files = {"train": args.train_files, "validation": args.validation_files}
    return {split: load_split(split, paths) for split, paths in files.items() if paths}


def tokenize_rows(rows: list[dict], tokenizer, max_length: int) -> tuple[dict[str, list], int]:
    """Columns of `tokenize_definitions`, and the number of rows too long. Raises a `ValueError` if all are."""
    names = [*FIELDS, "domain"] if all("domain" in row for row in rows) else FIELDS
    columns = tokenize_definitions({name: [row[name] for row in rows] for name in names}, tokenizer, max_length)
    if not columns["row"]:
        raise ValueError(f"All {len(rows):,} rows exceed max_length={max_length} tokens. Use a larger value.")
    return columns, len(rows) - len(columns["row"])


def make_dataset(name: str, rows: list[dict], tokenizer, max_length: int) -> Dataset:
    """The tokenised rows of a split; prints their numbers."""
    columns, too_long = tokenize_rows(rows, tokenizer, max_length)
    tokens = sum(map(len, columns["input_ids"]))
    labels = sum(label >= 0 for row in columns["labels"] for label in row)
    print_rank0(
        f"{name}: {len(columns['row']):,} rows of {tokens:,} tokens, {labels:,} of them in definitions; "
        f"{too_long:,} rows longer than {max_length} tokens dropped"
    )
    return Dataset.from_dict({key: value for key, value in columns.items() if key != "row"})
