"""Readers of published definition datasets: rows of term, context, definition, dataset and split, unfiltered.

| format | files |
| --- | --- |
| 3D-EX, `*.csv` (Almeman et al. 2023) | WORD, DEFINITION, EXAMPLE, DATASET_NAME, optionally SPLIT_TYPE; the unified file has lists of examples per dataset |
| WordNet, Oxford, Wikipedia, Urban of Ishiwatari et al. 2019 | `train.txt` with `train.eg`, also `valid` and `test`, tab-separated |
| Oxford of Gadetsky et al. 2018 | `train.json`, `valid.json`, `test.json`: lists of [[word], [definition's words], [example's words]] |
| source and target, as in SimpDefiner | `oxford.valid.src` (`term [SEP] context`) with `oxford.valid.tgt` |
| others | JSON Lines, a JSON list of objects, CSV or TSV with a header, or a Hub dataset |
"""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

from run_tools.jsonl import rows_of_file
from run_tools.rows import csv_rows

SPLITS = ("train", "validation", "test")
SPLIT_NAMES = dict.fromkeys(("valid", "validation", "val", "dev"), "validation")
SPLIT_NAMES |= {"train": "train", "training": "train", "test": "test"}
NAMES = {  # usual names of columns, in lower case
    "term": ("term", "word", "headword", "phrase"),
    "context": ("context", "example", "examples_list", "examples", "sentence"),
    "definition": ("definition", "gloss"),
    "source": ("source", "dataset_name", "datasets_list"),
    "split": ("split", "split_type"),
}
THREE_DEX = "dataset_name"
FILLER = "N/A"  # empty cells of 3D-EX
SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".txt", ".src")
EXAMPLE = '{"term": "...", "context": "...", "definition": "..."}'
COMPANIONS = (".eg", ".tgt")  # read with a .txt or .src


@dataclass
class RawRow:
    """An unchecked row: fields may be empty or not strings; `sources` are the datasets that share it."""

    term: object
    context: object
    definition: object
    sources: tuple[str, ...]
    split: str | None


def normalise_key(text: str) -> str:
    """A text without differences of case and white space, for comparisons."""
    return " ".join(text.casefold().split())


def split_named(name: object) -> str | None:
    """The split that a name means, or None."""
    return SPLIT_NAMES.get(name.strip().lower()) if isinstance(name, str) else None


def split_of(path: Path) -> str | None:
    """The split in the name of a file, such as `Urban_valid.csv` or `oxford.test.src`, or None."""
    splits = [split for part in re.split(r"[^a-z]+", path.stem.lower()) if (split := split_named(part))]
    return splits[-1] if splits else None


def read_source(name: str, place: str, columns: dict[str, str | None]) -> Iterator[RawRow]:
    """All rows of a file, a folder or a Hub dataset (`owner/name`, or `owner/name:configuration`). `name` is the dataset
    of rows without one, `columns` those without a usual name. Raises a `FileNotFoundError` for a missing file or folder,
    and a `ValueError` with the file for malformed content and missing columns.
    """
    path = Path(place)
    if path.is_dir():
        for file in split_files(path)[0]:
            yield from read_file(name, file, columns)
    elif path.is_file():
        yield from read_file(name, path, columns)
    elif path.suffix in (*SUFFIXES, *COMPANIONS) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", place):
        raise FileNotFoundError(f"{place} does not exist. Pass --sources {name}=PLACE with a file, folder or a Hub id.")
    else:
        yield from read_hub(name, place, columns)


def split_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files of a folder that are read, and the others. Raises a `FileNotFoundError` if there is none to read."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    read = [path for path in files if path.suffix in SUFFIXES]
    if not read:
        raise FileNotFoundError(f"{folder} has no file with one of the suffixes {' '.join(SUFFIXES)}.")
    return read, [path for path in files if path.suffix not in (*SUFFIXES, *COMPANIONS)]


def read_file(name: str, path: Path, columns: dict[str, str | None]) -> Iterator[RawRow]:
    """All rows of a file, by its suffix."""
    first = path.open("rb").readline(400).decode("utf-8", "replace").strip()
    if re.fullmatch(r"https?://\S+", first):
        raise ValueError(f"{path} contains a link, not rows. Download {first} and pass that file.")
    split = split_of(path)
    if path.suffix in (".txt", ".src"):
        read = read_examples if path.suffix == ".txt" else read_source_and_target
        yield from read(name, path, split)
        return
    rows = read_json(path) if path.suffix in (".json", ".jsonl") else read_table(path)
    if isinstance(rows, list) and isinstance(rows[0], list):
        yield from read_triples(name, rows, path, split)
    else:
        yield from rows_with_columns(name, rows, columns, str(path), split)


def read_table(path: Path) -> Iterator[dict]:
    """Rows of a CSV or TSV file with a header; missing cells are None. Raises a `ValueError` for extra cells."""
    with path.open("rb") as file:
        try:
            for place, row in csv_rows(file, "\t" if path.suffix == ".tsv" else ",", fill=True):
                if isinstance(row, Exception):
                    raise ValueError(f"{place}: {row}. Quote cells that contain the separator")
                yield row
        except ValueError as error:
            raise ValueError(f"{path}, {error}. Files are UTF-8.") from error


def read_json(path: Path) -> list:
    """The rows of a JSON list or of JSON Lines: objects, or lists. Raises a `ValueError` for others, and without rows."""
    rows: list = []
    for where, row in rows_of_file(path):
        if not isinstance(row, type(rows[0]) if rows else (dict, list)):
            raise ValueError(
                f"{where}: {row!r:.40} is not a row. Rows are objects such as {EXAMPLE}, or all are lists."
            )
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} has no rows. A valid line: {EXAMPLE}")
    return rows


def read_hub(name: str, place: str, columns: dict[str, str | None]) -> Iterator[RawRow]:
    """All rows of a Hub dataset."""
    from datasets import load_dataset

    hub_id, _, configuration = place.partition(":")
    for split, rows in load_dataset(hub_id, configuration or None).items():
        yield from rows_with_columns(name, rows, columns, place, split_named(split))


def column_names(row: dict, given: dict[str, str | None], place: str) -> dict[str, str | None]:
    """The names of a row's columns, None for missing optional ones. Raises a `ValueError` for a missing required one."""
    lowered = {column.lower(): column for column in row if isinstance(column, str)}
    columns: dict[str, str | None] = {}
    for what, usual in NAMES.items():
        requested = given.get(what)
        columns[what] = requested or next((lowered[name] for name in usual if name in lowered), None)
        is_optional = what in ("source", "split") or (what == "context" and THREE_DEX in lowered)
        if (requested and requested not in row) or (columns[what] is None and not is_optional):
            raise ValueError(
                f"{place} has no column {requested or ' or '.join(usual)!r}; its columns are {', '.join(map(repr, row))}. "
                f"Pass the name of the {what} column as --{what}-column."
            )
    return columns


def rows_with_columns(
    name: str, rows: Iterable[dict], given: dict[str, str | None], place: str, split: str | None
) -> Iterator[RawRow]:
    """Rows of a table; a split column overrides the split of the file."""
    rows = iter(rows)
    first = next(rows, None)
    if first is None:
        return
    columns = column_names(first, given, place)
    three_dex = columns["source"] is not None and columns["source"].lower() in NAMES["source"][1:]
    for row in chain([first], rows):
        term, context, definition, source, row_split = (
            row.get(column) if column else None for column in (columns[what] for what in NAMES)
        )
        row_split = split_named(row_split) or split
        if three_dex:
            for one, sources in three_dex_contexts(context, source):
                yield RawRow(term, one, definition, sources, row_split)
        else:
            sources = (source,) if isinstance(source, str) and source.strip() else (name,)
            for one in context if isinstance(context, list) else [context]:
                yield RawRow(term, one, definition, sources, row_split)


def as_list(cell: object) -> list:
    """A cell with the text of a Python list -> the list; any other -> a list with the cell."""
    if isinstance(cell, str) and cell.startswith("[") and cell.endswith("]"):
        try:
            value = ast.literal_eval(cell)
        except (ValueError, SyntaxError):
            return [cell]
        return value if isinstance(value, list) else [cell]
    return cell if isinstance(cell, list) else [cell]


def three_dex_contexts(examples: object, datasets: object) -> Iterator[tuple[object, tuple[str, ...]]]:
    """The cells of a 3D-EX row -> each context with its datasets.

    The file of one dataset has an example and the dataset's name. The unified file has a list of lists of examples, and a list
    with the datasets of each of these lists, written as text.
    """
    groups = [as_list(group) for group in as_list(examples)] or [[None]]
    named = [tuple(as_list(group)) for group in as_list(datasets)]
    if len(named) != len(groups):  # datasets without examples are one flat list
        named = [tuple(chain.from_iterable(named))] * len(groups)
    for group, names in zip(groups, named, strict=True):
        sources = tuple(name.strip() for name in names if isinstance(name, str) and name.strip() not in ("", FILLER))
        for context in group or [None]:
            yield (None if context == FILLER else context), sources


def read_parallel_lines(path: Path, suffix: str) -> Iterator[tuple[int, str, str]]:
    """Lines of a file and of its companion, with their number. Raises an error if that is missing, or of another length."""
    other = path.with_suffix(suffix)
    if not other.is_file():
        raise FileNotFoundError(f"{path} needs {other.name} in the same folder, which does not exist.")
    with path.open(encoding="utf-8") as left, other.open(encoding="utf-8") as right:
        for number, (one, two) in enumerate(zip_longest(left, right), start=1):
            if one is None or two is None:
                shorter = path if one is None else other
                raise ValueError(f"{shorter} ends before line {number} of its companion. Their lines must correspond.")
            yield number, one.rstrip("\r\n"), two.rstrip("\r\n")


def read_examples(name: str, path: Path, split: str | None) -> Iterator[RawRow]:
    """`.txt`: term%sense, part of speech, data set, definition; `.eg`: term%sense, context with <TRG> for the term."""
    for number, entry, example in read_parallel_lines(path, ".eg"):
        cells, (sense, _, context) = entry.split("\t"), example.partition("\t")
        if len(cells) < 4 or cells[0] != sense:
            raise ValueError(
                f"{path}, line {number}: {entry[:60]!r} does not have term%sense, part of speech, dataset and definition, "
                f"or another term than its context, {sense[:40]!r}."
            )
        term = cells[0].rpartition("%")[0] or cells[0]
        term = term.replace("_", " ")
        yield RawRow(term, context.replace("<TRG>", term), cells[3], (name,), split)


def read_source_and_target(name: str, path: Path, split: str | None) -> Iterator[RawRow]:
    """`.src`: term [SEP] context; `.tgt`: definition."""
    for number, question, definition in read_parallel_lines(path, ".tgt"):
        term, separator, context = question.partition("[SEP]")
        if not separator:
            raise ValueError(f"{path}, line {number}: {question[:60]!r} has no [SEP] between term and context.")
        yield RawRow(term, context, definition, (name,), split)


def read_triples(name: str, rows: list, path: Path, split: str | None) -> Iterator[RawRow]:
    """[[word], [definition's words], [example's words]]."""
    for number, row in enumerate(rows, start=1):
        if len(row) != 3:
            raise ValueError(f"{path}, row {number}: expected [[word], [definition's words], [example's words]].")
        term, definition, context = (" ".join(map(str, part)) if isinstance(part, list) else part for part in row)
        yield RawRow(term, context, definition, (name,), split)
