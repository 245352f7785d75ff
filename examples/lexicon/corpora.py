"""Definitions in the forms that they are published in: rows of term, context, definition, data set and split, unfiltered.

| form | read as |
| --- | --- |
| 3D-EX, `*.csv` (Almeman et al. 2023) | WORD, DEFINITION, EXAMPLE, DATASET_NAME, perhaps SPLIT_TYPE; or, unified, lists of examples a data set |
| WordNet, Oxford, Wikipedia, Urban of Ishiwatari et al. 2019 | `train.txt` with `train.eg` beside it, `valid` and `test`, tab-separated |
| Oxford of Gadetsky et al. 2018 | `train.json`, `valid.json`, `test.json`: lists of [[word], [definition's words], [example's words]] |
| source and target, as of SimpDefiner | `oxford.valid.src` (`term [SEP] context`) with `oxford.valid.tgt` |
| any other | JSON Lines, a JSON list of objects, CSV or TSV with a header, or a data set of the Hub |
"""

import ast
import csv
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

from keyphrase_tools.documents import read_jsonl

SPLITS = ("train", "validation", "test")
SPLIT_NAMES = dict.fromkeys(("valid", "validation", "val", "dev"), "validation")
SPLIT_NAMES |= {"train": "train", "training": "train", "test": "test"}
NAMES = {  # what columns are called, in lower case
    "term": ("term", "word", "headword", "phrase"),
    "context": ("context", "example", "examples_list", "examples", "sentence"),
    "definition": ("definition", "gloss"),
    "source": ("source", "dataset_name", "datasets_list"),
    "split": ("split", "split_type"),
}
THREE_DEX = "dataset_name"
FILLER = "N/A"  # what 3D-EX's scripts write into an empty cell
SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".txt", ".src")
BESIDE = (".eg", ".tgt")  # read with a .txt or .src


@dataclass
class Raw:
    """A row as it was found: fields may be empty or no strings; `sources` are the data sets that share it."""

    term: object
    context: object
    definition: object
    sources: tuple[str, ...]
    split: str | None


def key(text: str) -> str:
    """What is the same for spellings of one text that differ in case and spaces only."""
    return " ".join(text.casefold().split())


def split_named(name: object) -> str | None:
    return SPLIT_NAMES.get(name.strip().lower()) if isinstance(name, str) else None


def split_of(path: Path) -> str | None:
    """The split that a file's name says, as of `Urban_valid.csv` or `oxford.test.src`."""
    found = [split for part in re.split(r"[^a-z]+", path.stem.lower()) if (split := split_named(part))]
    return found[-1] if found else None


def read_source(name: str, place: str, columns: dict[str, str | None]) -> Iterator[Raw]:
    """All rows of a file, a folder or a Hub data set (`owner/name`, or `owner/name:configuration`).

    `columns` names columns where they are not among the usual ones; `name` is the data set of rows that name none.

    Raises:
        FileNotFoundError: for a file or a folder that is not there, or a folder without a file of a known form.
        ValueError: for a file that is not of its form, and for a column that there is not; the file is named.
    """
    path = Path(place)
    if path.is_dir():
        for file in files_of(path)[0]:
            yield from read_file(name, file, columns)
    elif path.is_file():
        yield from read_file(name, path, columns)
    elif path.suffix in (*SUFFIXES, *BESIDE) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", place):
        raise FileNotFoundError(f"{place} is not there. Pass --sources {name}=PLACE with a file, a folder or a Hub id.")
    else:
        yield from read_hub(name, place, columns)


def files_of(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files of a folder that are read, and those that are not.

    Raises:
        FileNotFoundError: where there is none to read.
    """
    found = sorted(path for path in folder.iterdir() if path.is_file())
    read = [path for path in found if path.suffix in SUFFIXES]
    if not read:
        raise FileNotFoundError(f"{folder} has no file of a form that is read here: {' '.join(SUFFIXES)}.")
    return read, [path for path in found if path.suffix not in (*SUFFIXES, *BESIDE)]


def read_file(name: str, path: Path, columns: dict[str, str | None]) -> Iterator[Raw]:
    first = path.open("rb").readline(400).decode("utf-8", "replace").strip()
    if re.fullmatch(r"https?://\S+", first):
        raise ValueError(f"{path} holds a link and no rows. Download {first} and pass that file.")
    split = split_of(path)
    if path.suffix == ".txt":
        yield from read_examples(name, path, split)
    elif path.suffix == ".src":
        yield from read_source_and_target(name, path, split)
    elif path.suffix == ".jsonl":
        rows = read_jsonl(path, example='{"term": "...", "context": "...", "definition": "..."}')
        yield from by_columns(name, rows, columns, str(path), split)
    elif path.suffix == ".json":
        rows = read_json(path)
        if isinstance(rows[0], list):
            yield from read_triples(name, rows, path, split)
        else:
            yield from by_columns(name, rows, columns, str(path), split)
    else:
        yield from by_columns(name, read_table(path), columns, str(path), split)


def read_table(path: Path) -> Iterator[dict]:
    """Rows of a CSV or TSV file with a header, in UTF-8; a cell that a line lacks is None.

    Raises:
        ValueError: for a line with more cells than the header, and text that is not UTF-8.
    """
    csv.field_size_limit(sys.maxsize)  # 3D-EX's lists of examples are long
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",")
            for row in reader:
                if None in row:
                    raise ValueError(
                        f"{path}, line {reader.line_num}: {len(row) - 1 + len(row[None])} cells, and the header has "
                        f"{len(row) - 1}. Quote cells that hold the separator; tabs separate in files named .tsv."
                    )
                yield row
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason}). Save it as UTF-8.") from error


def read_json(path: Path) -> list:
    """Raises a ValueError for what is no list of objects or of lists."""
    try:
        rows = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}). Name files of JSON Lines .jsonl.") from error
    if not isinstance(rows, list) or not rows or not isinstance(rows[0], (dict, list)):
        raise ValueError(f"{path} holds no list of rows. Pass a list of objects with term, context and definition.")
    return rows


def read_hub(name: str, place: str, columns: dict[str, str | None]) -> Iterator[Raw]:
    from datasets import load_dataset

    hub_id, _, configuration = place.partition(":")
    for split, rows in load_dataset(hub_id, configuration or None).items():
        yield from by_columns(name, rows, columns, place, split_named(split))


def column_names(row: dict, given: dict[str, str | None], place: str) -> dict[str, str | None]:
    """What the columns of a row are called, or None for one that is not needed and not there.

    Raises:
        ValueError: for one that is needed; it says what there is.
    """
    lowered = {column.lower(): column for column in row if isinstance(column, str)}
    found: dict[str, str | None] = {}
    for what, usual in NAMES.items():
        asked = given.get(what)
        found[what] = asked if asked else next((lowered[name] for name in usual if name in lowered), None)
        may_lack = what in ("source", "split") or (what == "context" and THREE_DEX in lowered)
        if (asked and asked not in row) or (found[what] is None and not may_lack):
            raise ValueError(
                f"{place} has no column {asked or ' or '.join(usual)!r}; its columns are {', '.join(map(repr, row))}. "
                f"Name the one that holds the {what} with --{what}_column."
            )
    return found


def by_columns(
    name: str, rows: Iterable[dict], given: dict[str, str | None], place: str, split: str | None
) -> Iterator[Raw]:
    """Rows with columns; a split that a row names itself goes before the file's."""
    rows = iter(rows)
    first = next(rows, None)
    if first is None:
        return
    columns = column_names(first, given, place)
    three_dex = columns["source"] is not None and columns["source"].lower() in NAMES["source"][1:]
    for row in chain([first], rows):
        term, context, definition, source, own = (
            row.get(column) if column else None for column in (columns[what] for what in NAMES)
        )
        own = split_named(own) or split
        if three_dex:
            for one, sources in three_dex_contexts(context, source):
                yield Raw(term, one, definition, sources, own)
        else:
            sources = (source,) if isinstance(source, str) and source.strip() else (name,)
            for one in context if isinstance(context, list) else [context]:
                yield Raw(term, one, definition, sources, own)


def as_list(cell: object) -> list:
    """A cell that holds the text of a Python list -> the list; any other -> a list of it."""
    if isinstance(cell, str) and cell.startswith("[") and cell.endswith("]"):
        try:
            found = ast.literal_eval(cell)
        except (ValueError, SyntaxError):
            return [cell]
        return found if isinstance(found, list) else [cell]
    return cell if isinstance(cell, list) else [cell]


def three_dex_contexts(examples: object, datasets: object) -> Iterator[tuple[object, tuple[str, ...]]]:
    """3D-EX's cells of a row -> each context with the data sets that have it.

    A file of one data set has an example and its name. The unified file has a list of lists of examples, and beside it a
    list of which each item, a list written as text, names the data sets of that list of examples.
    """
    groups = [as_list(group) for group in as_list(examples)] or [[None]]
    named = [tuple(as_list(group)) for group in as_list(datasets)]
    if len(named) != len(groups):  # data sets without examples are one flat list
        named = [tuple(chain.from_iterable(named))] * len(groups)
    for group, names in zip(groups, named, strict=True):
        sources = tuple(name.strip() for name in names if isinstance(name, str) and name.strip() not in ("", FILLER))
        for context in group or [None]:
            yield (None if context == FILLER else context), sources


def read_lines(path: Path, beside: str) -> Iterator[tuple[int, str, str]]:
    """Lines of a file and of the one beside it with another suffix -> number, line, line.

    Raises:
        FileNotFoundError: where that is not there.
        ValueError: where one of them ends before the other.
    """
    other = path.with_suffix(beside)
    if not other.is_file():
        raise FileNotFoundError(f"{path} needs {other.name} beside it, which is not there.")
    with path.open(encoding="utf-8") as left, other.open(encoding="utf-8") as right:
        for number, (one, two) in enumerate(zip_longest(left, right), start=1):
            if one is None or two is None:
                shorter = path if one is None else other
                raise ValueError(f"{shorter} ends before line {number} of its other half: their lines must correspond.")
            yield number, one.rstrip("\r\n"), two.rstrip("\r\n")


def read_examples(name: str, path: Path, split: str | None) -> Iterator[Raw]:
    """`.txt`: term%sense, part of speech, data set, definition; `.eg`: term%sense, context with <TRG> for the term."""
    for number, entry, example in read_lines(path, ".eg"):
        cells, (sense, _, context) = entry.split("\t"), example.partition("\t")
        if len(cells) < 4 or cells[0] != sense:
            raise ValueError(
                f"{path}, line {number}: {entry[:60]!r} is no line of term%sense, part of speech, data set and definition, "
                f"or not of the term of its context, {sense[:40]!r}."
            )
        term = cells[0].rpartition("%")[0] or cells[0]
        term = term.replace("_", " ")
        yield Raw(term, context.replace("<TRG>", term), cells[3], (name,), split)


def read_source_and_target(name: str, path: Path, split: str | None) -> Iterator[Raw]:
    """`.src`: term [SEP] context; `.tgt`: definition."""
    for number, question, definition in read_lines(path, ".tgt"):
        term, separator, context = question.partition("[SEP]")
        if not separator:
            raise ValueError(f"{path}, line {number}: {question[:60]!r} has no [SEP] between term and context.")
        yield Raw(term, context, definition, (name,), split)


def read_triples(name: str, rows: list, path: Path, split: str | None) -> Iterator[Raw]:
    """[[word], [definition's words], [example's words]]."""
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, list) or len(row) != 3:
            raise ValueError(f"{path}, row {number}: [[word], [definition's words], [example's words]] is wanted.")
        term, definition, context = (" ".join(map(str, part)) if isinstance(part, list) else part for part in row)
        yield Raw(term, context, definition, (name,), split)
