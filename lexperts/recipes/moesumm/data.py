"""Documents with summaries from several places, each under the name of its dataset."""

import random
from pathlib import Path

from datasets import Dataset, concatenate_datasets, load_dataset

from run_tools.fingerprints import fingerprint
from run_tools.jsonl import read_jsonl
from run_tools.options import check_file_names, parse_name_place

from ..common.splits import SPLITS
from .arguments import DOCUMENTS, SUMMARIES, DataArguments

EXAMPLE = '{"document": "...", "summary": "..."}'


def load_sources(args: DataArguments) -> dict[str, dict[str, Dataset]]:
    """Rows with `document`, `summary` and `dataset`, by name and split; incomplete ones are dropped, and counted. Raises
    an error for names that occur twice, and missing files, columns or rows.
    """
    places = dict(parse_name_place(source, "--datasets") for source in args.datasets)
    if len(places) < len(args.datasets):
        raise ValueError(f"--datasets {' '.join(args.datasets)}: a name occurs twice. Use different names.")
    check_file_names(places, "--datasets")
    return {name: load_source(name, place, args) for name, place in places.items()}


def fingerprint_splits(args: DataArguments, splits: tuple[str, ...]) -> list[dict]:
    """Identifies the data of these splits: by the content of files, by the commit of a Hub data set."""
    fingerprints = []
    for name, place in (parse_name_place(source, "--datasets") for source in args.datasets):
        path = Path(place)
        if path.is_dir():
            files = [path / f"{split}.jsonl" for split in splits]
            fingerprints += [{"as": name, **fingerprint(file)} for file in files if file.exists()]
        else:
            repository = place if path.is_file() else place.partition(":")[0]
            fingerprints.append({"as": name, **fingerprint(repository), "place": place})
    return fingerprints


def load_source(name: str, place: str, args: DataArguments) -> dict[str, Dataset]:
    """The splits of one data set, with the columns `document`, `summary` and `dataset`."""
    splits, dropped = {}, 0
    for split, rows in load_splits(place).items():
        count = min(args.max_rows or len(rows), len(rows))
        rows = rows[:count] if isinstance(rows, list) else rows.select(range(count))
        document = find_column(rows[0], args.document_column, DOCUMENTS, "document", place)
        summary = find_column(rows[0], args.summary_column, SUMMARIES, "summary", place)
        if isinstance(rows, list):
            columns = {column: [row.get(column) for row in rows] for column in (document, summary)}
            splits[split] = Dataset.from_dict(complete_rows(columns, document, summary, name))
        else:  # stays on disk
            columns = {"document": document, "summary": summary, "name": name}
            splits[split] = rows.map(complete_rows, batched=True, fn_kwargs=columns, remove_columns=rows.column_names)
        dropped += count - len(splits[split])
        if not len(splits[split]):
            raise ValueError(f"{place} has no rows in {split} with both {document!r} and {summary!r}.")
    sizes = ", ".join(f"{len(rows):,} {split}" for split, rows in splits.items())
    print(f"{name}: {sizes}" + (f"; {dropped:,} rows without a text were dropped" if dropped else ""), flush=True)
    return splits


def complete_rows(columns: dict[str, list], document: str, summary: str, name: str) -> dict[str, list[str]]:
    """The columns of the rows that have both texts."""
    pairs = [(to_text(d), to_text(s)) for d, s in zip(columns[document], columns[summary], strict=True)]
    kept = [pair for pair in pairs if all(pair)]
    return {"document": [d for d, _ in kept], "summary": [s for _, s in kept], "dataset": [name] * len(kept)}


def load_splits(place: str) -> dict[str, list[dict] | Dataset]:
    """The rows of a folder, of a file (the same for every split), or of a Hub data set."""
    path = Path(place)
    if path.is_file():
        return dict.fromkeys(SPLITS, read_jsonl(path))
    if path.is_dir():
        files = {split: path / f"{split}.jsonl" for split in SPLITS if (path / f"{split}.jsonl").exists()}
        if not files:
            raise FileNotFoundError(f"{place} contains none of train.jsonl, validation.jsonl and test.jsonl.")
        return {split: read_jsonl(file) for split, file in files.items()}
    if path.suffix in (".jsonl", ".json"):
        raise FileNotFoundError(f"{place} does not exist.")
    name, _, configuration = place.partition(":")
    hub = load_dataset(name, configuration or None)
    return {split: hub[split] for split in SPLITS if split in hub}


def find_column(row: dict, requested: str | None, usual: tuple[str, ...], kind: str, place: str) -> str:
    """The requested column, or the first usual one that exists; `kind` is "document" or "summary"."""
    names = [requested] if requested else usual
    for name in names:
        if name in row:
            return name
    raise ValueError(
        f"{place} has no column {' or '.join(map(repr, names))}; its columns are {', '.join(map(repr, row))}. Use "
        f"--{kind}-column."
    )


def to_text(value) -> str:
    """A text; a list of sentences is joined."""
    return " ".join(value).strip() if isinstance(value, list) else str(value or "").strip()


def concatenate(sources: dict[str, dict[str, Dataset]], split: str) -> Dataset | None:
    """The rows of all data sets that have this split."""
    datasets = [splits[split] for splits in sources.values() if split in splits]
    return concatenate_datasets(datasets) if datasets else None


def sample_rows(rows: Dataset, number: int, seed: int) -> Dataset:
    """A random sample of `number` rows; raises a `ValueError` if there are fewer."""
    if number > len(rows):
        raise ValueError(f"--few-shot-rows {number} exceeds the {len(rows)} rows of the training split.")
    return rows.select(random.Random(seed).sample(range(len(rows)), number))


def require_split(sources: dict[str, dict[str, Dataset]], split: str, args: DataArguments) -> dict[str, Dataset]:
    """Each data set's rows of this split; raises a `ValueError` for a data set without it."""
    for name, splits in sources.items():
        if split not in splits:
            raise ValueError(
                f"{name} has no {split} split, only {', '.join(splits)} (--datasets {' '.join(args.datasets)})."
            )
    return {name: splits[split] for name, splits in sources.items()}
