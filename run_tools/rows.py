"""The rows of text, JSON Lines, CSV and Parquet files, local or remote, compressed or not. Imports no torch."""

import csv
import io
import json
import lzma
import os
import sys
import zlib
from collections.abc import Iterable, Iterator
from gzip import BadGzipFile
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from .errors import UserError, one_line
from .fingerprints import digest

SUFFIXES = (".txt", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
VERSIONS = ("ETag", "etag", "md5Hash", "blob_id", "mtime", "LastModified", "last_modified", "created")
DAMAGED = (ValueError, EOFError, BadGzipFile, zlib.error, lzma.LZMAError, csv.Error)  # files, not disks or connections
FIRST = 100  # rows whose columns are those of the source

Row = dict[str, Any] | ValueError  # a row that cannot be read is an error that names its place


class Source:
    """The rows of a file, or of the files of a folder or pattern in the order of their names: whatever fsspec opens.

    A .txt file has one text per line; in a folder or pattern, each .txt file is one text, and its path is its `id`.

    Args:
        text_column: the name of the column of texts of .txt files.
        delimiter: of CSV files; by default a comma, of .tsv files a tab.
        encoding: of text files; by default UTF-8.
        output: the files whose names begin with this one are not read.

    Raises:
        FileNotFoundError: if there are no such files.
        UserError: for files of several formats, and without rows.
    """

    def __init__(self, source, *, text_column="text", delimiter=None, encoding=None, output: str | Path | None = None):
        from fsspec.core import url_to_fs  # comes with torch

        self.name, self.text_column, self.encoding = str(source), text_column, encoding
        self.delimiter = {"tab": "\t"}.get(delimiter, delimiter)
        self.fs, path = url_to_fs(self.name)
        self.is_file, place = self.fs.isfile(path), PurePosixPath(path)
        if self.is_file:
            self.root, found = place.parent, [path]
        elif self.fs.isdir(path):
            self.root, found = place, self.fs.find(path)
        else:
            self.root, found = next(one for one in place.parents if not set(str(one)) & set("*?[")), self.fs.glob(path)
        own = None if output is None else os.path.abspath(output)

        def is_read(one: str) -> bool:
            is_hidden = any(part.startswith((".", "_")) for part in PurePosixPath(self.place(one)).parts)
            return suffix(one) in SUFFIXES and not is_hidden and (own is None or own not in one)

        self.paths = sorted(one for one in found if self.is_file or is_read(one))
        if not self.paths:
            raise FileNotFoundError(f"{source} is not a file, and no folder or pattern of {', '.join(SUFFIXES)} files.")
        kinds = sorted({suffix(one) for one in self.paths})
        if len(kinds) > 1 or kinds[0] not in SUFFIXES:
            raise UserError(f"{source} has {', '.join(kinds)} files. Pass files of one of {', '.join(SUFFIXES)}.")
        self.kind = kinds[0]
        self.first = list(islice(self, FIRST))
        if not self.first:
            raise UserError(f"There are no documents in {source}.")
        self.columns = list(dict.fromkeys(name for row in self.first if isinstance(row, dict) for name in row))

    def place(self, path: str) -> str:
        """The name of a file below the folder or pattern."""
        return str(PurePosixPath(path).relative_to(self.root))

    def __iter__(self) -> Iterator[Row]:
        """All rows. A damaged file ends with a row that is an error."""
        for path in self.paths:
            try:
                with self.fs.open(path, "rb", compression=None if self.kind == ".parquet" else "infer") as file:
                    if self.kind == ".txt" and not self.is_file:
                        text = file.read().decode(self.encoding or "utf-8-sig")
                        yield {"id": self.place(path), self.text_column: text}
                        continue
                    for place, row in read_rows(file, self.kind, self.delimiter, self.encoding, self.text_column):
                        is_row = isinstance(row, dict)
                        reason = row if isinstance(row, Exception) else f"{row!r:.60} is not a JSON object"
                        yield row if is_row else ValueError(f"{self.place(path)}, {place}: {reason}")
            except UserError as error:
                raise UserError(f"{path}: {error}") from error
            except UnicodeDecodeError as error:
                yield ValueError(f"{path} cannot be read: {error}. Pass its --encoding, such as cp1252.")
            except DAMAGED as error:
                yield ValueError(f"{path} cannot be read, at least not to its end: {one_line(error)}")

    def check_columns(self, names: Iterable[str]) -> None:
        """Raises a `UserError` for a column that the first rows do not have."""
        if not self.columns:
            raise UserError(str(self.first[0]))
        if problem := missing_columns(self.columns, names):
            other = next((c for c in ";\t|" if len(self.columns) == 1 and c in self.columns[0]), None)
            hint = f" Use --delimiter {'tab' if other == chr(9) else repr(other)}." if other else ""
            raise UserError(f"{self.paths[0]}: {problem}.{hint}")

    def count(self) -> int | None:
        """The number of rows; `None` for remote files, which are not read twice."""
        if "file" not in self.fs.protocol:
            return None
        if self.kind == ".parquet":
            from pyarrow import parquet

            return sum(parquet.read_metadata(path).num_rows for path in self.paths)
        return sum(1 for _ in self)

    def state(self) -> str:
        """What changes with the files: their number, their size, and a hash of their names, sizes and times or versions."""
        self.fs.invalidate_cache()
        infos = [self.fs.info(path) for path in self.paths]
        versions = [str(next((info[key] for key in VERSIONS if info.get(key)), "")) for info in infos]
        sizes = [info.get("size") or 0 for info in infos]
        about = digest([list(map(self.place, self.paths)), sizes, versions])
        return f"{len(infos):,} file{'s' * (len(infos) > 1)}, {sum(sizes):,} bytes, {about[:12]}"


def suffix(path: str) -> str:
    """The suffix that names the format, without that of a compression."""
    name = PurePosixPath(path.lower())
    return PurePosixPath(name.stem).suffix if name.suffix in COMPRESSED else name.suffix


def missing_columns(columns: Iterable[str], required: Iterable[str]) -> str | None:
    """Which required columns are missing, and which there are; `None` if none is."""
    missing = [name for name in required if name not in columns]
    if not missing:
        return None
    return f"there is no {', '.join(map(repr, missing))}; the columns are {', '.join(map(repr, columns))}"


def read_rows(
    file, kind: str, delimiter: str | None = None, encoding: str | None = None, text_column: str = "text"
) -> Iterator[tuple[str, Any]]:
    """The place and the value of each row of a file that is open in binary; a `ValueError` for a row that cannot be read.

    Args:
        kind: a suffix. A file of another kind than those of SUFFIXES has JSON Lines.
    """
    if kind == ".parquet":
        from pyarrow import parquet

        for batch in parquet.ParquetFile(file).iter_batches(64):  # texts may be long
            yield from (("", row) for row in batch.to_pylist())
    elif kind in DELIMITERS:
        yield from csv_rows(file, delimiter or DELIMITERS[kind], encoding)
    elif kind == ".txt":
        for number, line in enumerate(io.TextIOWrapper(file, encoding or "utf-8-sig"), 1):
            yield f"line {number}", {text_column: line.rstrip("\n")}
    else:
        yield from json_rows(file, encoding, is_whole=kind == ".json")


def json_rows(file, encoding: str | None = None, is_whole: bool = False) -> Iterator[tuple[str, Any]]:
    """The place and the value of each line that is not blank; with `is_whole`, also of an array of rows, or of one row."""
    if is_whole:
        content = file.read()
        value = parse_json(content, encoding)
        if not isinstance(value, ValueError):
            rows = value if isinstance(value, list) else [value]
            yield from ((f"element {number}", row) for number, row in enumerate(rows, 1))
            return
        file = content.split(b"\n")
    for number, line in enumerate(file, 1):
        if line.strip():
            yield f"line {number}", parse_json(line, encoding)


def parse_json(content: bytes, encoding: str | None = None) -> Any:
    """The value of a text, or a `ValueError` that says why it has none."""
    try:
        return json.loads((content.decode(encoding) if encoding else content).rstrip())
    except json.JSONDecodeError as error:
        return ValueError(f"it is not valid JSON ({error.msg}, column {error.colno})")
    except (ValueError, RecursionError) as error:
        return ValueError(f"it cannot be read ({error})")


def csv_rows(file, delimiter: str, encoding: str | None = None) -> Iterator[tuple[str, Any]]:
    """The rows after the header, each after the line on which it ends; a `ValueError` for one with other fields than the
    header, or with text after a closing quote. Raises a `UserError` for two columns of the
    same name.
    """
    csv.field_size_limit(sys.maxsize)
    text = io.TextIOWrapper(file, encoding or "utf-8-sig", newline="")
    reader = csv.DictReader(text, delimiter=delimiter, strict=True)
    names = list(reader.fieldnames or ())
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"it has two columns {twice[0]!r}. Rename one of them.")
    while True:
        row: Any = None
        try:
            if (row := next(reader, None)) is None:
                return
            if None in row or None in row.values():
                row = ValueError(f"it has {'more' if None in row else 'fewer'} fields than the header")
        except csv.Error as error:
            row = error
        yield f"line {reader.line_num}", row


def batched(rows: Iterable[Row], size: int, characters: int = 2000) -> Iterator[list[Row]]:
    """Rows in batches that depend on the rows alone: of `size`, or fewer if they have more characters each, on average."""
    batch: list[Row] = []
    length = 0
    for row in rows:
        batch.append(row)
        length += sum(len(text) for text in row.values() if isinstance(text, str)) if isinstance(row, dict) else 0
        if len(batch) == size or length >= size * characters:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch
