"""Documents with summaries from several places, each under the name that its selectors know it by."""

import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

from datasets import Dataset, concatenate_datasets, load_dataset
from run_folder import fingerprint

from keyphrase_tools.documents import read_jsonl

SPLITS = ("train", "validation", "test")
# what the data sets on the Hub call them
DOCUMENTS = ("document", "article", "dialogue", "text", "source", "body", "email_body", "report", "findings", "ctext")
SUMMARIES = ("summary", "highlights", "abstract", "headline", "target", "subject_line", "tldr", "impression", "title")


@dataclass
class DataArguments:
    datasets: list[str] = field(
        metadata={
            "help": "name=PLACE: a folder with train.jsonl, validation.jsonl and test.jsonl, one JSONL file, or a Hub id, "
            "as in news=abisee/cnn_dailymail:3.0.0"
        }
    )
    document_column: str | None = field(default=None, metadata={"help": "otherwise found among the usual names"})
    summary_column: str | None = field(default=None, metadata={"help": "likewise"})
    max_source_length: int | None = field(default=None, metadata={"help": "tokens; what the encoder reads at most"})
    max_target_length: int | None = field(default=None, metadata={"help": "tokens; what the decoder writes at most"})
    max_rows: int | None = field(default=None, metadata={"help": "rows of each split of each data set, the first ones"})


def read_sources(args: DataArguments) -> dict[str, dict[str, Dataset]]:
    """name -> split -> rows with `document`, `summary`, `dataset`; rows without either text are dropped, and counted.

    Raises:
        ValueError: for a source that is not `name=PLACE`, a name given twice, and columns or rows that there are not.
        FileNotFoundError: for a folder without the files.
    """
    places = dict(named(source, "--datasets") for source in args.datasets)
    if len(places) < len(args.datasets):
        raise ValueError(f"--datasets {' '.join(args.datasets)}: two have one name. Give each its own.")
    return {name: read_source(name, place, args) for name, place in places.items()}


def fingerprints(args: DataArguments, splits: tuple[str, ...]) -> list[dict]:
    """What tells the data of these splits from others: the content of files, the commit of a Hub data set."""
    found = []
    for name, place in (named(source, "--datasets") for source in args.datasets):
        path = Path(place)
        if path.is_dir():
            files = [path / f"{split}.jsonl" for split in splits]
            found += [{"as": name, **fingerprint(file)} for file in files if file.exists()]
        else:
            found.append(
                {"as": name, **fingerprint(place if path.is_file() else place.partition(":")[0]), "place": place}
            )
    return found


def named(given: str, option: str) -> tuple[str, str]:
    name, separator, place = given.partition("=")
    if not (separator and name.strip() and place.strip()):
        raise ValueError(f"{option} {given!r}: write name=PLACE, as in {option} news=data/news.")
    return name.strip(), place.strip()


def read_source(name: str, place: str, args: DataArguments) -> dict[str, Dataset]:
    splits, dropped = {}, 0
    for split, rows in raw_splits(place).items():
        count = min(args.max_rows or len(rows), len(rows))
        rows = rows[:count] if isinstance(rows, list) else rows.select(range(count))
        document = column_of(rows[0], args.document_column, DOCUMENTS, "document", place)
        summary = column_of(rows[0], args.summary_column, SUMMARIES, "summary", place)
        if isinstance(rows, list):
            splits[split] = Dataset.from_dict(
                whole_texts(columns_of(rows, (document, summary)), document, summary, name)
            )
        else:  # stays on disk
            columns = {"document": document, "summary": summary, "name": name}
            splits[split] = rows.map(whole_texts, batched=True, fn_kwargs=columns, remove_columns=rows.column_names)
        dropped += count - len(splits[split])
        if not len(splits[split]):
            raise ValueError(f"{place} has no row in {split} with both {document!r} and {summary!r}.")
    sizes = ", ".join(f"{len(rows):,} {split}" for split, rows in splits.items())
    print(f"{name}: {sizes}" + (f"; {dropped:,} rows without a text were dropped" if dropped else ""), flush=True)
    return splits


def columns_of(rows: list[dict], names: tuple[str, ...]) -> dict[str, list]:
    return {name: [row.get(name) for row in rows] for name in names}


def whole_texts(columns: dict[str, list], document: str, summary: str, name: str) -> dict[str, list[str]]:
    """Columns of the rows that have both texts."""
    pairs = [(as_text(d), as_text(s)) for d, s in zip(columns[document], columns[summary], strict=True)]
    kept = [pair for pair in pairs if all(pair)]
    return {"document": [d for d, _ in kept], "summary": [s for _, s in kept], "dataset": [name] * len(kept)}


def raw_splits(place: str) -> dict[str, list[dict] | Dataset]:
    """The rows of a folder, of a file (which is read as whatever split is asked for), or of a Hub data set."""
    path = Path(place)
    if path.is_file():
        return dict.fromkeys(SPLITS, read_rows(path))
    if path.is_dir():
        files = {split: path / f"{split}.jsonl" for split in SPLITS if (path / f"{split}.jsonl").exists()}
        if not files:
            raise FileNotFoundError(f"{place} has none of train.jsonl, validation.jsonl and test.jsonl.")
        return {split: read_rows(file) for split, file in files.items()}
    if path.suffix in (".jsonl", ".json"):
        raise FileNotFoundError(f"{place} is not there.")
    name, _, configuration = place.partition(":")
    hub = load_dataset(name, configuration or None)
    return {split: hub[split] for split in SPLITS if split in hub}


def read_rows(path: Path) -> list[dict]:
    return read_jsonl(path, example='{"document": "...", "summary": "..."}')


def column_of(row: dict, given: str | None, usual: tuple[str, ...], what: str, place: str) -> str:
    names = [given] if given else usual
    for name in names:
        if name in row:
            return name
    raise ValueError(
        f"{place} has no {' or '.join(map(repr, names))}; its columns are {', '.join(map(repr, row))}. Name the one that "
        f"holds the {what} with --{what}_column."
    )


def as_text(value) -> str:
    """A text, or sentences as one."""
    return " ".join(value).strip() if isinstance(value, list) else str(value or "").strip()


def mixed(sources: dict[str, dict[str, Dataset]], split: str) -> Dataset | None:
    """The rows of all data sets that have this split, one after the other."""
    there = [splits[split] for splits in sources.values() if split in splits]
    return concatenate_datasets(there) if there else None


def drawn(rows: Dataset, number: int, seed: int) -> Dataset:
    """`number` rows, the same for the same seed.

    Raises:
        ValueError: where there are fewer.
    """
    if number > len(rows):
        raise ValueError(f"{number} rows were asked for, and there are {len(rows)}. Ask for fewer.")
    return rows.select(random.Random(seed).sample(range(len(rows)), number))


def one_split(sources: dict[str, dict[str, Dataset]], split: str, args: DataArguments) -> dict[str, Dataset]:
    """name -> its rows of this split.

    Raises:
        ValueError: for a data set without it.
    """
    for name, splits in sources.items():
        if split not in splits:
            raise ValueError(f"{name} has no {split} split, only {', '.join(splits)}: {' '.join(args.datasets)}.")
    return {name: splits[split] for name, splits in sources.items()}
