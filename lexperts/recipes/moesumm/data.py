"""Documents with summaries from several places, each under the name of its data set."""

import random
from pathlib import Path

from datasets import Dataset, concatenate_datasets, load_dataset

from run_tools.errors import UserError
from run_tools.rows import read_jsonl

from ..data import as_text
from .arguments import DOCUMENTS, SUMMARIES, DataArguments


def load_rows(args: DataArguments, seed: int) -> dict[str, Dataset]:
    """Rows of "train" and perhaps "validation", with `document`, `summary` and `dataset`; prints how many."""
    splits: dict[str, list[Dataset]] = {"train": [], "validation": []}
    pairs = [given.partition("=")[::2] for given in args.datasets]
    for name, place in pairs:
        if not name or not place or [own for own, _ in pairs].count(name) > 1:
            raise UserError(f"--datasets {name}={place}: write NAME=PLACE, with a name of its own for each data set.")
        sizes = []
        for split, rows in read_splits(place).items():
            kept = keep_complete(rows, name, place, args)
            dropped = f" ({len(rows) - len(kept):,} without a text were dropped)" if len(kept) < len(rows) else ""
            if split == "train" and (number := args.few_shot_rows):
                if number > len(kept):
                    raise UserError(f"--few-shot-rows {number}: {place} has {len(kept)} training rows.")
                kept = kept.select(random.Random(seed).sample(range(len(kept)), number))
            if not len(kept):
                raise UserError(f"--datasets {name}={place} has no {split} rows with both texts.")
            splits[split].append(kept)
            sizes.append(f"{len(kept):,} {split} rows{dropped}")
        print(f"{name}: {', '.join(sizes)}", flush=True)
    return {split: concatenate_datasets(parts) for split, parts in splits.items() if parts}


def read_splits(place: str) -> dict[str, list[dict] | Dataset]:
    """The training and validation rows of a folder, of a file, which are for training, or of a Hub data set."""
    path, names = Path(place), ("train", "validation")
    if path.is_dir():
        files = {split: path / f"{split}.jsonl" for split in names}
        splits = {split: read_jsonl(file) for split, file in files.items() if file.exists()}
    elif path.is_file() or path.suffix in (".jsonl", ".json"):
        splits = {"train": read_jsonl(path)}
    else:
        name, _, configuration = place.partition(":")
        hub = load_dataset(name, configuration or None)
        splits = {split: hub[split] for split in names if split in hub}
    if "train" not in splits:
        raise UserError(f"--datasets: {place} has no train split.")
    return splits


def keep_complete(rows: list[dict] | Dataset, name: str, place: str, args: DataArguments) -> Dataset:
    """The rows that have both texts, as `document`, `summary` and `dataset`. Lists of sentences are joined."""
    document = find_column(rows[0], args.document_column, DOCUMENTS, "document", place)
    summary = find_column(rows[0], args.summary_column, SUMMARIES, "summary", place)

    def convert(row) -> dict[str, str]:
        texts = (as_text(row.get(column) or "").strip() for column in (document, summary))
        return dict(zip(("document", "summary"), texts, strict=True), dataset=name)

    def is_complete(row) -> bool:
        return bool(row["document"] and row["summary"])

    if isinstance(rows, list):
        return Dataset.from_list(list(filter(is_complete, map(convert, rows))))
    return rows.map(convert, remove_columns=rows.column_names).filter(is_complete)  # stays on disk


def find_column(row: dict, requested: str | None, usual: tuple[str, ...], kind: str, place: str) -> str:
    """The requested column, or the first usual one that exists; `kind` is "document" or "summary"."""
    found = [name for name in ([requested] if requested else usual) if name in row]
    if not found:
        raise UserError(f"{place} has the columns {list(row)}, and no {requested or usual}. Pass --{kind}-column.")
    return found[0]
