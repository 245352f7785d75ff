"""The rows of text, JSON Lines, CSV and Parquet files, local or remote, compressed or not. Imports no torch."""

import csv
import io
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from .errors import UserError, one_line
from .files import digest

FORMATS = ".txt, .jsonl, .ndjson, .json, .csv, .tsv or .parquet"
SUFFIX = re.compile(r"(\.txt|\.jsonl|\.ndjson|\.json|\.csv|\.tsv|\.parquet)(\.gz|\.bz2|\.xz|\.zst)?$")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
VERSIONS = ("size", "mtime", "ETag", "etag", "md5Hash", "blob_id", "LastModified", "last_modified")  # of fsspec

Row = dict[str, Any] | ValueError  # a row that cannot be read is an error that names its place


class Source:
    """The rows of a file, or of the files of a folder or pattern in the order of their names: whatever fsspec opens.

    A .txt file has one text per line, in the column `text_column`; in a folder or pattern, each is one text, and its
    path is its `id`. Files whose names begin with that of `output` are not read. A `delimiter` may be "tab".
    Raises a `FileNotFoundError` if there are no such files, a `UserError` for files of several formats or without rows.
    """

    def __init__(self, source, *, text_column="text", delimiter=None, encoding=None, output: str | Path | None = None):
        from fsspec.core import url_to_fs  # comes with torch, and with tokenizers

        self.name, self.text_column, self.encoding = str(source), text_column, encoding
        self.delimiter = {"tab": "\t"}.get(delimiter, delimiter)
        self.fs, path = url_to_fs(self.name)
        self.is_file, is_folder = self.fs.isfile(path), self.fs.isdir(path)
        self.root = path if is_folder else re.split(r"[*?\[]", path)[0].rpartition("/")[0]
        found = [path] if self.is_file else self.fs.find(path) if is_folder else self.fs.glob(path)
        if not self.is_file:
            own = os.path.abspath(output or "\0")
            found = [one for one in found if own not in one and not re.search(r"(^|/)[._]", self.place(one))]
        kinds = {one: match[1] for one in sorted(found) if (match := SUFFIX.search(one.lower()))}
        if not kinds:
            exists = self.is_file or is_folder or re.search(r"[*?\[]", path)
            kind = f"is not a {FORMATS} file, and no folder or pattern of these" if exists else "does not exist"
            raise FileNotFoundError(f"{source} {kind}.")
        self.paths, self.kind = list(kinds), next(iter(kinds.values()))
        if len(set(kinds.values())) > 1:
            raise UserError(f"{source} has {', '.join(sorted(set(kinds.values())))} files. Pass files of one format.")
        first = list(islice(self, 100))
        self.columns = list(dict.fromkeys(name for row in first if isinstance(row, dict) for name in row))
        if not self.columns:
            raise UserError(f"{self.root}/{first[0]}." if first else f"There are no documents in {source}.")

    def place(self, path: str) -> str:
        """The name of a file below the folder or pattern."""
        return path[len(self.root) :].lstrip("/")

    def __iter__(self) -> Iterator[Row]:
        """All rows."""
        return (row for _, row in self.items())

    def items(self) -> Iterator[tuple[str, Row]]:
        """Each row after its place, such as "a.jsonl, line 3". A damaged file ends with a row that is an error."""
        for path in self.paths:
            name = self.place(path)
            try:
                with self.fs.open(path, "rb", compression=None if self.kind == ".parquet" else "infer") as file:
                    for number, row in self.rows_of(file, name):
                        if not isinstance(row, dict):
                            reason = row if isinstance(row, Exception) else f"{row!r:.60} is not a JSON object"
                            row = ValueError(f"{name}, {number}: {reason}")
                        yield f"{name}, {number}", row
            except OSError:  # of a disk or a connection
                raise
            except Exception as error:
                hint = ". Pass its encoding, such as cp1252" if isinstance(error, UnicodeDecodeError) else ""
                yield name, ValueError(f"{name} cannot be read, at least not to its end: {one_line(error)}{hint}")

    def rows_of(self, file, name: str) -> Iterator[tuple[str, Any]]:
        """The number and the value of each row of a file that is open in binary; an error if it cannot be read."""
        encoding = self.encoding or "utf-8-sig"
        if self.kind == ".parquet":
            from pyarrow import parquet

            for batch in parquet.ParquetFile(file).iter_batches(64):  # texts may be long
                yield from (("", row) for row in batch.to_pylist())
        elif self.kind in DELIMITERS:
            yield from csv_rows(io.TextIOWrapper(file, encoding, newline=""), self.delimiter or DELIMITERS[self.kind])
        elif self.kind != ".txt":
            lines = io.TextIOWrapper(file, self.encoding) if self.encoding else file
            yield from json_rows(lines, self.kind == ".json")
        elif self.is_file:
            lines = enumerate(io.TextIOWrapper(file, encoding), 1)
            yield from ((f"line {number}", {self.text_column: line.rstrip("\n")}) for number, line in lines)
        else:
            yield "", {"id": name, self.text_column: file.read().decode(encoding)}

    def check_columns(self, names: Iterable[str]) -> None:
        """Raises a `UserError` for a column that the first rows do not have."""
        if problem := missing_columns(self.columns, names):
            raise UserError(f"{self.paths[0]}: {problem}.")

    def state(self) -> str:
        """What changes with the files: their number, their size, and a hash of their names and times or versions."""
        self.fs.invalidate_cache()
        infos = {self.place(path): self.fs.info(path) for path in self.paths}
        about = digest([[place, *(str(info.get(key)) for key in VERSIONS)] for place, info in infos.items()])
        size = sum(info.get("size") or 0 for info in infos.values())
        return f"{len(infos):,} file{'s' * (len(infos) > 1)}, {size:,} bytes, {about[:12]}"


def missing_columns(columns: Iterable[str], required: Iterable[str]) -> str | None:
    """Which required columns are missing, and which there are; `None` if none is."""
    missing = ", ".join(repr(name) for name in required if name not in columns)
    return f"there is no {missing}; the columns are {', '.join(map(repr, islice(columns, 50)))}" if missing else None


def json_rows(file, is_whole: bool) -> Iterator[tuple[str, Any]]:
    """The number and the value of each line that is not blank; with `is_whole`, also of an array of rows, or of one."""
    if is_whole:
        content = file.read()
        value = parse_json(content)
        if not isinstance(value, ValueError):
            rows = enumerate(value if isinstance(value, list) else [value], 1)
            yield from ((f"element {number}", row) for number, row in rows)
            return
        file = content.split("\n" if isinstance(content, str) else b"\n")
    lines = enumerate(file, 1)
    yield from ((f"line {number}", parse_json(line)) for number, line in lines if line.strip())


def parse_json(content: bytes | str) -> Any:
    """The value of a text, or a `ValueError` that says why it has none."""
    try:
        return json.loads(content.rstrip())
    except (ValueError, RecursionError) as error:
        return ValueError(f"it is not valid JSON ({error})")


def csv_rows(file: Iterable[str], delimiter: str) -> Iterator[tuple[str, Any]]:
    """The rows, each after the line on which it ends. Raises a `ValueError` for two columns of the same name."""
    csv.field_size_limit(sys.maxsize)
    reader = csv.DictReader(file, delimiter=delimiter, strict=True)
    if twice := [name for name, count in Counter(reader.fieldnames or ()).items() if count > 1]:
        raise ValueError(f"it has two columns {twice[0]!r}")
    while True:
        try:
            row: Any = next(reader)
            if None in row or None in row.values():
                row = ValueError(f"it has {'more' if None in row else 'fewer'} fields than the header")
        except StopIteration:
            return
        except csv.Error as error:
            row = error
        yield f"line {reader.line_num}", row


def rows_of_file(paths: str | Path | Sequence[str | Path]) -> Iterator[tuple[str, dict]]:
    """The place and the value of each row of files, see `Source`. Raises a `UserError` for one that cannot be read."""
    for path in [paths] if isinstance(paths, (str, Path)) else paths:
        source = Source(path)
        for where, row in source.items():
            if isinstance(row, ValueError):
                raise UserError(f"{source.root}/{row}.")
            yield f"{source.root}/{where}", row


def read_jsonl(paths: str | Path | Sequence[str | Path], required: Sequence[str] = ()) -> list[dict]:
    """As `rows_of_file`; raises a `UserError` for a row without one of the `required` columns, too."""
    rows = []
    for where, row in rows_of_file(paths):
        if problem := missing_columns(row, required):
            raise UserError(f"{where}: {problem}.")
        rows.append(row)
    return rows
