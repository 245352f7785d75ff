"""Rows of JSON Lines, JSON and CSV files in any encoding, read lazily: each row is a function that parses it."""

import codecs
import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, zip_longest
from typing import Any

from ..errors import UserError, short_repr

HEAD = 4096  # bytes that are read ahead to find the encoding
DEEPEST = 100  # levels of nested lists and objects in a row
BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    *((bom, "utf-32") for bom in (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)),  # before UTF-16: FF FE begins both
    *((bom, "utf-16") for bom in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)),
)
UTF_8 = ("utf-8", "utf-8-sig", "ascii")
DECODE = json.JSONDecoder().decode
BLANK = re.compile(r"[ \t\n\r]*")


class Peeked(io.RawIOBase):
    """A binary stream whose first bytes, `head`, have been looked at."""

    def __init__(self, file):
        # of a truncated archive, read1 returns what comes before the error
        self._read = getattr(file, "read1", file.read)
        self._rest = self.head = self._read(HEAD)

    def readable(self) -> bool:
        """As in `io.RawIOBase`."""
        return True

    def readinto(self, buffer) -> int:
        """As in `io.RawIOBase`."""
        content, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        content = content or self._read(len(buffer))
        buffer[: len(content)] = content
        return len(content)


def parse_encoding(name: str | None) -> str | None:
    """The normal name of an encoding of texts. Raises a `UserError` for an unknown one."""
    if name is None:
        return None
    try:
        codec = codecs.lookup(name)
        "".encode(codec.name)  # not of bytes, as base64
    except LookupError:
        raise UserError(
            f"The encoding {short_repr(name)} is not known. Use utf-8, utf-16, cp1252 or another name of Python's codecs."
        ) from None
    return codec.name


def parse_delimiter(delimiter: str | None) -> str | None:
    """The character between the fields of a CSV file; "tab" is also a name of it. Raises a `UserError` for anything else."""
    delimiter = {"tab": "\t", "\\t": "\t"}.get(delimiter or "", delimiter)
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n\0'):
        raise UserError(
            f"The delimiter {short_repr(delimiter)} is not one character. Use ';', '|' or tab, for example."
        )
    return delimiter


def find_encoding(head: bytes, encoding: str | None = None) -> str:
    """The encoding of a text that begins with these bytes: the given one, else that of its byte order mark, else UTF-8.
    Raises a `ValueError` if it looks like UTF-16 without a byte order mark.
    """
    if encoding is not None:
        return "utf-8-sig" if encoding in UTF_8 else encoding
    if (found := next((name for bom, name in BOMS if head.startswith(bom)), None)) is not None:
        return found
    start = head[:200]
    for name, zeros, others in (("utf-16-le", start[1::2], start[::2]), ("utf-16-be", start[::2], start[1::2])):
        if len(zeros) > 1 and 2 * zeros.count(0) > len(zeros) and not others.count(0):
            raise ValueError(f"it looks like {name.upper()} without a byte order mark; pass --encoding {name}")
    return "utf-8-sig"


def decode(content: bytes, encoding: str | None = None) -> str:
    """A text from the bytes of a file, without its byte order mark. Raises a `ValueError` if the bytes are not valid in
    their encoding; the message names it, and the position.
    """
    name = find_encoding(content[:HEAD], encoding)
    try:
        return content.decode(name).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        label = "UTF-8" if name in UTF_8 else name.upper()
        raise ValueError(f"it is not valid {label} (byte {error.start + 1}); pass --encoding") from error


def open_text(file, encoding: str | None = None) -> tuple[Any, str]:
    """A stream that can be read from its start, after the byte order mark of UTF-8, and its encoding."""
    peeked = Peeked(file)
    stream, name = io.BufferedReader(peeked, 1 << 17), find_encoding(peeked.head, encoding)
    if name in UTF_8 and peeked.head.startswith(codecs.BOM_UTF8):
        stream.read(len(codecs.BOM_UTF8))
    return stream, name


def text_lines(file, encoding: str | None = None) -> Iterator:
    """The lines without a byte order mark: bytes if the encoding is UTF-8, else texts, in which invalid bytes are surrogates."""
    stream, name = open_text(file, encoding)
    if name in UTF_8:
        return iter(stream)
    lines = io.TextIOWrapper(stream, name, errors="surrogateescape", newline="\n")
    return chain([next(lines, "").removeprefix("\ufeff")], lines)


def json_rows(file, encoding: str | None = None, may_be_array: bool = False) -> Iterator[Callable[[], Any]]:
    """The rows of JSON Lines; with `may_be_array` also the items of an array. Raises as `placed_json_rows`."""
    return (row for _, row in placed_json_rows(file, encoding, may_be_array))


def placed_json_rows(
    file, encoding: str | None = None, may_be_array: bool = False
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The rows of JSON Lines, or the items of an array, each after its place, such as "line 3".

    Raises:
        ValueError: if the file is not in its encoding, is a damaged array, or holds one object over several lines.
    """
    lines = enumerate(text_lines(file, encoding), start=1)
    rows: Iterator[tuple[int, bytes | str]] = ((number, line) for number, line in lines if line.strip())
    if may_be_array and (found := next(rows, None)) is not None:
        first: Any = found[1]
        if _text(first).lstrip("\ufeff \t").startswith("["):
            content = first[:0].join([first, *(line for _, line in lines)])
            text = decode(content) if isinstance(content, bytes) else _check_decoded(content)
            yield from ((f"element {number}", item) for number, item in enumerate(array_items(text), start=1))
            return
        if _text(first).strip("\ufeff \t\r\n") == "{":
            raise ValueError("it holds one object over several lines; write one per line, or an array of objects")
        rows = chain([found], rows)
    yield from ((f"line {number}", partial(parse_json, line)) for number, line in rows)


def _text(line: bytes | str) -> str:
    return line if isinstance(line, str) else line.decode("utf-8", "replace")


def _check_decoded(text: str) -> str:
    """A text that was decoded with surrogates for its invalid bytes, if it has none."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("it is not valid in the file's encoding; pass another --encoding")
    return text


def parse_json(line: bytes | str) -> Any:
    """The value of a line of JSON. Raises a `ValueError` if it is not valid, or nested deeper than DEEPEST levels."""
    try:
        text = (_check_decoded(line) if isinstance(line, str) else line.decode()).rstrip()
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not valid UTF-8 (byte {error.start + 1}); pass --encoding") from error
    try:
        value = DECODE(text)
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        raise ValueError(f"this is not valid JSON ({error.msg.removesuffix(' at')}, column {error.colno})") from error
    return check_depth(value) if text.count("[") + text.count("{") > DEEPEST else value


def check_depth(value: Any) -> Any:
    """The value, unless it is nested deeper than DEEPEST levels: then a `ValueError` is raised."""
    level = [value]
    for _ in range(DEEPEST + 1):
        containers = [item for item in level if isinstance(item, (list, dict))]
        if not containers:
            return value
        level = [item for one in containers for item in (one.values() if isinstance(one, dict) else one)]
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"it is nested deeper than {DEEPEST} levels")


def array_items(text: str) -> Iterator[Callable[[], Any]]:
    """The items of a JSON array. Raises a `ValueError` at one that is not valid, since the next cannot be found."""
    decoder, number = json.JSONDecoder(), 0
    position = _skip_blank(text, _skip_blank(text, 0) + 1)
    while position < len(text) and (number or text[position] != "]"):
        try:
            value, position = decoder.raw_decode(text, position)
        except RecursionError:
            raise ValueError(f"item {number} of its array is nested too deeply") from None
        except json.JSONDecodeError as error:
            raise ValueError(
                f"item {number} of its array is not valid JSON: {error}. Correct it, or write one object per line"
            ) from error
        yield partial(check_depth, value)
        number, position = number + 1, _skip_blank(text, position)
        if text[position : position + 1] == "]":
            break
        if text[position : position + 1] != ",":
            raise ValueError(f"its array ends after {number} items without a ']'")
        position = _skip_blank(text, position + 1)
    if text[position : position + 1] != "]":
        raise ValueError(f"its array ends after {number} items without a ']'")
    if _skip_blank(text, position + 1) != len(text):
        raise ValueError("something follows its array")


def _skip_blank(text: str, position: int) -> int:
    return BLANK.match(text, position).end()  # type: ignore[union-attr]


def csv_header(file, delimiter: str, encoding: str | None = None) -> list[str]:
    """The names of the columns. Raises a `ValueError` for quotes that are not closed, or followed by other text."""
    return _header(_csv_reader(file, delimiter, encoding))


def csv_rows(
    file, delimiter: str, encoding: str | None = None, fill_missing: bool = False
) -> Iterator[Callable[[], dict[str, Any]]]:
    """The rows after the header. A row with fewer fields is an error, or with `fill_missing` ends with `None`s."""
    return (row for _, row in placed_csv_rows(file, delimiter, encoding, fill_missing))


def placed_csv_rows(
    file, delimiter: str, encoding: str | None = None, fill_missing: bool = False
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """As `csv_rows`, each row after its place, such as "row 3" after the header."""
    rows = _csv_reader(file, delimiter, encoding)
    names = _header(rows)
    for number, row in enumerate(rows, start=1):
        if row:  # blank lines count, and are left out
            yield f"row {number}", partial(_csv_row, names, row, encoding, fill_missing)


def _header(rows: Iterator[list[str] | ValueError]) -> list[str]:
    header = next(rows, [])
    if isinstance(header, ValueError):
        raise header
    return [name.removeprefix("\ufeff") for name in header]


def _csv_reader(file, delimiter: str, encoding: str | None) -> Iterator[list[str] | ValueError]:
    """The fields of each row, the header first, or an error for a quote that is followed by other text: Python's reader would change
    the text, and read all rows up to the next quote as one field. Raises a `ValueError` for a quote that is never closed.
    """
    csv.field_size_limit(sys.maxsize)
    stream, name = open_text(file, encoding)
    text = io.TextIOWrapper(stream, name, errors="surrogateescape", newline="")
    reader, line = csv.reader(text, delimiter=delimiter, strict=True), 0
    while True:
        try:
            yield next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            lines = f"line {line + 1}" if reader.line_num == line + 1 else f"lines {line + 1:,} to {reader.line_num:,}"
            fix = "Put fields with quotes in quotes, and write the inner ones twice"
            if str(error) == "unexpected end of data":
                raise ValueError(f"{lines}: a quote is never closed. {fix}") from error
            yield ValueError(f"{lines}: a quote ends in the middle of a field ({error}). {fix}")
        line = reader.line_num


def _csv_row(names: list[str], row: list[str] | ValueError, encoding: str | None, fill_missing: bool) -> dict[str, Any]:
    if isinstance(row, ValueError):
        raise row
    if len(row) > len(names) or (len(row) < len(names) and not fill_missing):
        raise ValueError(f"the row has {len(row)} fields, the header has {len(names)}")
    try:
        "".join(row).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"it is not valid {(encoding or 'UTF-8').upper()}; pass --encoding") from error
    return dict(zip_longest(names, row))
