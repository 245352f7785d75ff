"""Documents with summaries from several places, each under the name that its selectors know it by."""

import random
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset, load_dataset

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


def read_sources(args: DataArguments) -> dict[str, dict[str, list[dict]]]:
    """name -> split -> rows with `document`, `summary`, `dataset`; rows without either text are dropped, and counted.

    Raises:
        ValueError: for a source that is not `name=PLACE`, a name given twice, and columns or rows that there are not.
        FileNotFoundError: for a folder without the files.
    """
    places = dict(named(source, "--datasets") for source in args.datasets)
    if len(places) < len(args.datasets):
        raise ValueError(f"--datasets {' '.join(args.datasets)}: two have one name. Give each its own.")
    return {name: read_source(name, place, args) for name, place in places.items()}


def named(given: str, option: str) -> tuple[str, str]:
    name, separator, place = given.partition("=")
    if not (separator and name.strip() and place.strip()):
        raise ValueError(f"{option} {given!r}: write name=PLACE, as in {option} news=data/news.")
    return name.strip(), place.strip()


def read_source(name: str, place: str, args: DataArguments) -> dict[str, list[dict]]:
    splits, dropped = {}, 0
    for split, rows in raw_splits(place).items():
        rows = rows[: args.max_rows] if args.max_rows else rows
        document = column_of(rows[0], args.document_column, DOCUMENTS, "document", place)
        summary = column_of(rows[0], args.summary_column, SUMMARIES, "summary", place)
        texts = [(as_text(row.get(document)), as_text(row.get(summary))) for row in rows]
        splits[split] = [{"document": d, "summary": s, "dataset": name} for d, s in texts if d and s]
        dropped += len(rows) - len(splits[split])
        if not splits[split]:
            raise ValueError(f"{place} has no row in {split} with both {document!r} and {summary!r}.")
    sizes = ", ".join(f"{len(rows):,} {split}" for split, rows in splits.items())
    print(f"{name}: {sizes}" + (f"; {dropped:,} rows without a text were dropped" if dropped else ""), flush=True)
    return splits


def raw_splits(place: str) -> dict[str, list[dict]]:
    """The rows of a folder, of a file (which is read as whatever split is asked for), or of a Hub data set."""
    path = Path(place)
    if path.is_file():
        rows = read_rows(path)
        return dict.fromkeys(SPLITS, rows)
    if path.is_dir():
        files = {split: path / f"{split}.jsonl" for split in SPLITS if (path / f"{split}.jsonl").exists()}
        if not files:
            raise FileNotFoundError(f"{place} has none of train.jsonl, validation.jsonl and test.jsonl.")
        return {split: read_rows(file) for split, file in files.items()}
    if path.suffix in (".jsonl", ".json"):
        raise FileNotFoundError(f"{place} is not there.")
    name, _, configuration = place.partition(":")
    hub = load_dataset(name, configuration or None)
    return {split: hub[split].to_list() for split in SPLITS if split in hub}


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


def mixed(sources: dict[str, dict[str, list[dict]]], split: str) -> Dataset | None:
    """The rows of all data sets that have this split, one after the other."""
    rows = [row for splits in sources.values() for row in splits.get(split, [])]
    return Dataset.from_list(rows) if rows else None


def drawn(rows: list[dict], number: int, seed: int) -> list[dict]:
    """`number` rows, the same for the same seed.

    Raises:
        ValueError: where there are fewer.
    """
    if number > len(rows):
        raise ValueError(f"{number} rows were asked for, and there are {len(rows)}. Ask for fewer.")
    return random.Random(seed).sample(rows, number)


def one_split(sources: dict[str, dict[str, list[dict]]], split: str, args: DataArguments) -> dict[str, list[dict]]:
    """name -> its rows of this split.

    Raises:
        ValueError: for a data set without it.
    """
    for name, splits in sources.items():
        if split not in splits:
            raise ValueError(f"{name} has no {split} split, only {', '.join(splits)}: {' '.join(args.datasets)}.")
    return {name: splits[split] for name, splits in sources.items()}
