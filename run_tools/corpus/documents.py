"""The documents of text, JSON Lines, CSV or Parquet files, local or remote, read lazily and in blocks."""

import math
import os
import stat
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from ..errors import closest, one_line
from ..fingerprints import digest
from .csv_output import DELIMITERS
from .failures import CONTENT_ERRORS, describe_error, is_data_error
from .parquet_rows import RowGroup, import_parquet
from .source_files import COMPRESSED, count_lines, find_files, find_format, suffix
from .text_rows import csv_header, decode, parse_delimiter, parse_encoding, placed_csv_rows, placed_json_rows

VERSION_KEYS = ("ETag", "etag", "md5Hash", "blob_id", "mtime", "LastModified", "last_modified", "created")
FIRST = 20  # rows of a JSON Lines file that are checked for the columns
TEXT_FORMATS = ("txt", "jsonl", "csv")
UNREADABLE = "cannot be read, at least not to its end"
CHARACTERS = 2_000  # per document of a block, on average; blocks of longer documents contain fewer


class Row(NamedTuple):
    """One document. `values` are its columns, or `None` if it cannot be read; `error` says why.

    `id` is the value of the id column, the path of a .txt file, or in a source without ids the document's index. It is `None` if the
    source has ids and this document's is missing or cannot be read.
    """

    number: int
    id: object
    values: dict | None
    error: str | None = None


class Block(NamedTuple):
    """Consecutive documents, of which the first is document `start` of a run."""

    start: int
    rows: list[Row]

    @property
    def end(self) -> int:
        """The index after the last document."""
        return self.start + len(self.rows)


class UnreadableFileError(ValueError):
    """A file that cannot be read, or not to its end."""


class SourceError(ValueError):
    """A source that has no documents, or not the columns that are needed."""


class Corpus:
    """The documents of one or more files of the same format.

    Args:
        source: a file, a folder, or a pattern such as "texts/*.parquet", also with a protocol that fsspec knows, such as
            s3://, gs:// and hf://. Files end in .txt (one document each, whose path is its id), .jsonl, .json (lines, or an
            array), .csv, .tsv or .parquet; text formats may be compressed (.gz, .bz2, .xz, .zst).
        text_column: the column of texts, which may be lists of words.
        title_column, id_column: columns, which must exist unless they have their default names. Without ids, documents are
            numbered.
        keep: other columns to read, or `None` for all columns. Then rows without a text are passed on.
        required: other columns that must exist.
        delimiter: between the fields of CSV files; by default a comma, in .tsv files a tab.
        encoding: of text files; by default that of their byte order mark, else UTF-8.
        output: a file of results, which is left out of the files that a folder or pattern names.
        fixed_columns: whether a user cannot choose the columns, so that messages name no options for them.

    Raises:
        FileNotFoundError: if there are no such files.
        ImportError: if a package for the protocol or format is not installed.
        ValueError: if files have different formats, a column is missing or is not text, or no file can be read.
    """

    def __init__(
        self,
        source: str | Path,
        text_column: str = "text",
        title_column: str | None = "title",
        id_column: str = "id",
        keep: Sequence[str] | None = (),
        required: Sequence[str] = (),
        *,
        delimiter: str | None = None,
        encoding: str | None = None,
        output: str | Path | None = None,
        fixed_columns: bool = False,
    ):
        self.delimiter, self.encoding = parse_delimiter(delimiter), parse_encoding(encoding)
        self.source, self.text_column, self.title_column = str(source), text_column, title_column
        self.id_column, self.keep = id_column, None if keep is None else list(keep)
        self._required = [text_column, *required, *([id_column] if id_column != "id" else [])]
        self._fixed_columns = fixed_columns
        self._warned: set[str] = set()  # columns
        self.has_ids = False
        self._fs, self._paths, self._root = find_files(self.source, output)
        self._format = find_format(self.source, self._paths)
        self._check_options()
        check, self._read_file = {
            "txt": (self._check_texts, self._read_text),
            "jsonl": (self._check_lines, self._read_lines),
            "csv": (self._check_csv, self._read_csv),
            "parquet": (self._check_parquet, self._read_parquet),
        }[self._format]
        if next(self._records(), None) is None:
            raise SourceError(f"There are no documents in {self.source}.")
        self.documents = check()
        """The number of documents, or `None` if it is known only after reading."""

    def describe(self) -> dict:
        """The settings and the files' names, sizes and versions (modification times, ETags), without the documents."""
        files, changed = [], 0.0
        self._fs.invalidate_cache()
        for path in self._paths:
            try:
                info = self._fs.info(path)
            except OSError:  # it cannot be read either
                info = {}
            name = self._name(path) if len(self._paths) > 1 else ""
            changed = max(changed, info["mtime"] if isinstance(info.get("mtime"), float) else 0.0)
            files.append((name, info.get("size"), str(next((info[k] for k in VERSION_KEYS if info.get(k)), ""))))
        options = ("text_column", "title_column", "id_column", "keep", "delimiter", "encoding")
        columns = {name: getattr(self, name) for name in options}
        number = f"{len(files)} {'file' if len(files) == 1 else 'files'}"
        state = f"{number}, {sum(size or 0 for _, size, _ in files):,} bytes"
        state += f", changed {datetime.fromtimestamp(changed):%Y-%m-%d %H:%M:%S}" if changed else ""
        return {"source": {"name": self.source, "sha256": digest(files), "state": state}, **columns}

    def read(self) -> Iterator[Row]:
        """All documents, in order."""
        for number, record in enumerate(self._records()):
            yield self._row(number, record)

    def blocks(
        self,
        max_documents: int,
        finished: Mapping[int, int] | None = None,
        on_skip: Callable[[int], None] = lambda documents: None,
        is_new: Callable[[Row], bool] | None = None,
    ) -> Iterator[Block]:
        """Cuts the documents into blocks, which depend on the documents only.

        Args:
            max_documents: per block; blocks of documents longer than 2,000 characters on average have fewer.
            finished: start -> end of blocks that are skipped without being parsed.
            on_skip: is called with the number of documents of each.
            is_new: leaves out the documents for which it is false. Blocks are counted without them, and all documents are parsed.
        """
        items: Iterator[Any] = self._records() if is_new is None else filter(is_new, self.read())
        parse: Callable[[int, Any], Row] = self._row if is_new is None else lambda number, row: row
        number, finished, characters = 0, finished or {}, 0
        rows: list[Row] = []
        while True:
            if not rows and number in finished:
                skipped = sum(1 for _ in islice(items, finished[number] - number))
                number += skipped
                on_skip(skipped)
                continue
            item = next(items, None)
            if item is not None:
                rows.append(parse(number, item))
                number += 1
                text = (rows[-1].values or {}).get(self.text_column)
                characters += len(text) if isinstance(text, str) else sum(map(len, text or ())) if is_words(text) else 0
            if rows and (item is None or len(rows) == max_documents or characters >= CHARACTERS * max_documents):
                yield Block(number - len(rows), rows)
                rows, characters = [], 0
            if item is None:
                return

    def _row(self, number: int, record: Callable[[], dict]) -> Row:
        try:
            values = record()
        except UnreadableFileError as error:
            return Row(number, None, None, str(error))
        except CONTENT_ERRORS as error:
            if not is_data_error(error):
                raise
            document = self._name(self._paths[number]) if self._format == "txt" else self._id({}, number)
            return Row(number, document, None, describe_error(error))
        name = values.get(self.id_column)
        if not self.has_ids or name != name:
            name = self._id(values, number)
        if self.keep is not None and self.text_column not in values:
            columns = ", ".join(map(repr, values))
            return Row(number, name, None, f"there is no {self.text_column!r}; columns: {columns}")
        if self.keep is not None:
            wanted = (self.text_column, self.title_column, *self.keep)
            values = {name: values.get(name) for name in wanted if name is not None}
        return Row(number, name, dict(values))

    def _id(self, values: Mapping, number: int) -> object:
        """The id of a row: never its number in a source with ids, which may be the id of another row."""
        name = values.get(self.id_column)
        if self.has_ids:
            return None if isinstance(name, float) and math.isnan(name) else name
        if name is not None and "id of a row" not in self._warned:
            self._warned.add("id of a row")
            warnings.warn(
                f"Document {number:,} of {self.source} has an {self.id_column!r}, the first ones have none: all are numbered.",
                stacklevel=2,
            )
        return number

    def _records(self) -> Iterator[Callable[[], dict]]:
        """For each document a function that parses it."""
        for path in self._paths:
            try:
                yield from self._read_file(path)
            except CONTENT_ERRORS as error:
                if not is_data_error(error):
                    raise
                yield partial(_fail, f"{self._name(path)} {UNREADABLE}: {one_line(error)}")

    def _name(self, path: str) -> str:
        return str(PurePosixPath(path).relative_to(self._root))

    def _open(self, path: str, compression: str | None = "infer"):
        """A file as a binary stream. Raises an `OSError` if it is none, such as a pipe, which would wait for its writer."""
        if "file" in self._fs.protocol and not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError("it is not a regular file")
        return self._fs.open(path, "rb", compression=compression)

    def _check_options(self) -> None:
        """Raises a `SourceError` for an option that has no effect on the format."""
        for name, formats in (("delimiter", ("csv",)), ("encoding", TEXT_FORMATS)):
            value = getattr(self, name)
            if value is not None and self._format not in formats:
                kinds = ", ".join(f".{kind}" for kind in formats)
                raise SourceError(
                    f"--{name} {value!r} has no effect on .{self._format} files, only on {kinds}. Leave it out."
                )

    def _check_texts(self) -> int:
        self.has_ids = True
        self.text_column, self.title_column, self.id_column = "text", None, "id"
        return len(self._paths)

    def _read_text(self, path: str) -> Iterator[Callable[[], dict]]:
        def read() -> dict:
            with self._open(path) as file:
                return {"id": self._name(path), "text": decode(file.read(), self.encoding)}

        yield read

    def _check_lines(self) -> int | None:
        self._check_each(self._check_first_lines)
        files = [
            path for path in self._paths if not path.lower().endswith((*COMPRESSED, ".json")) and os.path.isfile(path)
        ]
        if "file" in self._fs.protocol and len(files) == len(self._paths):
            with suppress(OSError):  # of a file that may not be read, which is reported when it is read
                return sum(map(count_lines, files))
        return None

    def _check_first_lines(self, path: str) -> None:
        records = list(islice(self._read_lines(path), FIRST))
        rows = []
        for record in records:
            with suppress(ValueError):
                rows += [row] if isinstance(row := record(), dict) else []
        names = list(dict.fromkeys(name for row in rows for name in row))
        self.has_ids |= self.id_column in names
        for name in self._required:
            if rows and name not in names:
                self._raise_missing(path, name, names)
        for name in (*(self.keep or ()), self.title_column):
            if rows and name not in (*names, "title", None) and name not in self._warned:
                self._warned.add(name)  # once, not for each of many files
                columns = ", ".join(map(repr, names))
                warnings.warn(f"The first rows of {path} have no column {name!r}, only {columns}.", stacklevel=2)

    def _check_each(self, check: Callable[[str], int | None]) -> int:
        """Checks each file -> the number of documents, if the check says it; a damaged file is one, that is reported when it
        is read. Raises a `ValueError` if no file can be read.
        """
        documents, damaged = 0, []
        for path in self._paths:
            try:
                documents += check(path) or 0
            except SourceError:
                raise
            except CONTENT_ERRORS as error:
                if not is_data_error(error):
                    raise
                damaged.append(f"{self._name(path)}: {one_line(error)}")
        if len(damaged) == len(self._paths):
            raise ValueError(f"No file of {self.source} can be read. {damaged[0]}")
        return documents + len(damaged)

    def _read_lines(self, path: str) -> Iterator[Callable[[], dict]]:
        with self._open(path) as file:
            rows, name = placed_json_rows(file, self.encoding, may_be_array=suffix(path) == ".json"), self._name(path)
            yield from (partial(_read_at, name, place, read) for place, read in rows)

    def _check_csv(self) -> None:
        self._check_each(self._check_header)

    def _check_header(self, path: str) -> None:
        with self._open(path) as file:
            self._check_columns(path, csv_header(file, self._delimiter(path), self.encoding))

    def _delimiter(self, path: str) -> str:
        return self.delimiter or DELIMITERS[suffix(path)]

    def _read_csv(self, path: str) -> Iterator[Callable[[], dict]]:
        with self._open(path) as file:
            rows, name = placed_csv_rows(file, self._delimiter(path), self.encoding), self._name(path)
            yield from (partial(_read_at, name, place, read) for place, read in rows)

    def _check_parquet(self) -> int:
        import_parquet()
        return self._check_each(self._check_schema)

    def _check_schema(self, path: str) -> int:
        with self._open(path, None) as file:
            parquet = import_parquet()(file)
            types = {field.name: field.type for field in parquet.schema_arrow}
            documents, names = parquet.metadata.num_rows, parquet.schema_arrow.names
        self._check_columns(path, names)
        kind = str(types[self.text_column])
        if not any(word in kind for word in ("string", "null")):
            raise SourceError(
                f"The column {self.text_column!r} of {path} has the type {kind}, not string. Choose another with "
                "--text-column, or leave the file out."
            )
        return documents

    def _read_parquet(self, path: str) -> Iterator[Callable[[], dict]]:
        with self._open(path, None) as file:
            parquet = import_parquet()(file)
            columns = None
            if self.keep is not None:
                wanted = {self.text_column, self.title_column, self.id_column, *self.keep}
                columns = [name for name in parquet.schema_arrow.names if name in wanted]
            first, name = 1, self._name(path)
            for group in range(parquet.num_row_groups):
                rows, count = RowGroup(parquet, group, columns), parquet.metadata.row_group(group).num_rows
                for i in range(count):
                    yield partial(_read_at, name, f"row {first + i}", partial(rows.read, i))
                first += count

    def _check_columns(self, path: str, names: list[str]) -> None:
        self.has_ids |= self.id_column in names
        if twice := [name for name in names if names.count(name) > 1]:
            what = f"two columns {twice[0]!r}" if twice[0] else "two columns without a name"
            raise SourceError(f"{path} has {what}. Rename one of them, or remove it.")
        for name in (*self._required, *(self.keep or ())):
            if name not in names:
                self._raise_missing(path, name, names)
        if self.title_column is not None and self.title_column not in ("title", *names):
            self._raise_missing(path, self.title_column, names)

    def _raise_missing(self, path: str, name: str, names: list[str]) -> None:
        columns, similar = ", ".join(map(repr, names)) or "none", closest(name, names)
        hint = f" Did you mean {similar!r}?" if similar else ""
        columns_by_option = {"text": self.text_column, "title": self.title_column, "id": self.id_column}
        option = next((f" Use --{kind}-column." for kind, column in columns_by_option.items() if name == column), "")
        if self._fixed_columns:
            option = f" Rename the column with the {name}s." if not similar else ""
        if len(names) == 1 and (other := next((c for c in ";\t|," if c in names[0]), None)):
            hint, option = "", f" Use --delimiter {'tab' if other == chr(9) else repr(other)}."
        others = " All files need the same columns." if len(self._paths) > 1 else ""
        raise SourceError(f"{path} has no column {name!r}. Its columns are {columns}.{hint}{option}{others}")


def is_words(text) -> bool:
    """Whether a text is a list or tuple of strings."""
    return isinstance(text, (list, tuple)) and all(isinstance(word, str) for word in text)


def _read_at(file: str, place: str, read: Callable[[], Any]) -> Any:
    """The row that `read` returns. Raises a `ValueError` that names the place if it cannot be read, or is not an object."""
    try:
        row = read()
    except ValueError as error:
        raise ValueError(f"{file}, {place}: {error}") from error
    if not isinstance(row, Mapping):
        raise ValueError(f"{file}, {place}: expected a JSON object, got {row!r:.60}")
    return row


def _fail(message: str):
    raise UnreadableFileError(message)


def check_document(document: Mapping, text_column: str, title_column: str | None) -> tuple[dict | None, str | None]:
    """A document `{"text", "title"}` as the pipeline reads it, or why it cannot be read.

    Args:
        document: "text" is a text or a list of words, which are joined by blanks; "title" is a text, `None` or NaN.
        text_column, title_column: their names, for the error.
    """
    text, title = document["text"], document["title"]
    text = text.tolist() if hasattr(text, "tolist") else text
    text = " ".join(text) if is_words(text) else text
    # pandas marks missing values by NaN, NA or NaT
    if (isinstance(title, float) and title != title) or type(title).__name__ in ("NAType", "NaTType"):
        title = None
    for column, value, is_valid in (
        (text_column, text, isinstance(text, str)),
        (title_column, title, isinstance(title, str | None)),
    ):
        if not is_valid:
            return None, f"{column!r} is {value!r:.60}, not a text"
    return {"title": title, "text": text}, None
