"""Writes rows as a Parquet file."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path

import pyarrow
from pyarrow.parquet import ParquetWriter

ROWS = 8192  # per row group, at most
BYTES = 1 << 27  # per row group, about
EXACT = 2**53  # up to here integers are exact floats
SLICE = 512  # rows that are Python objects at a time
LONE_SURROGATE = re.compile(rb"(?<!\\)((?:\\\\)*)\\ud[89a-f][0-9a-f]{2}")


def write_parquet(rows: Callable[[], Iterable[dict]], output: Path, types: Mapping[str, pyarrow.DataType]) -> None:
    """Writes rows as a Parquet file with one schema.

    Args:
        rows: returns an iterator over all rows, of JSON's types. It is called twice, first for the schema.
        types: the types of columns that are known. Others are inferred from all rows; a column whose values have several types,
            such as ids that are numbers and texts, becomes a column of strings.
    """
    schema = find_schema(rows(), types)
    with ParquetWriter(output, schema, compression="zstd") as writer:
        tables: list[pyarrow.Table] = []
        for part in batched(rows()):
            values = [{field.name: convert(row.get(field.name), field.type) for field in schema} for row in part]
            tables.append(pyarrow.Table.from_pylist(values, schema))  # which takes a fraction of the memory
            if len(tables) * SLICE >= ROWS or sum(table.nbytes for table in tables) >= BYTES:
                writer.write_table(pyarrow.concat_tables(tables), row_group_size=ROWS)
                tables = []
        if tables:
            writer.write_table(pyarrow.concat_tables(tables), row_group_size=ROWS)


def batched(rows: Iterable[dict]) -> Iterator[list[dict]]:
    """Rows in slices."""
    rows = iter(rows)
    return iter(lambda: list(islice(rows, SLICE)), [])


def find_schema(rows: Iterable[dict], types: Mapping[str, pyarrow.DataType]) -> pyarrow.Schema:
    """The columns in the order in which they occur, the known ones last."""
    found: dict[str, pyarrow.DataType] = {}
    exact: set[str] = set()  # columns with integers that are ids, or no exact floats
    for part in batched(rows):
        columns: dict[str, list] = {}
        for row in part:
            for name, value in row.items():
                if name not in types:
                    columns.setdefault(name, []).append(value)
        for name, values in columns.items():
            found[name] = merge_types(found.get(name, pyarrow.null()), values)
            if any(type(value) is int and (name == "id" or abs(value) > EXACT) for value in values):
                exact.add(name)
    for name, kind in found.items():
        if has_empty_struct(kind) or (name in exact and pyarrow.types.is_floating(kind)):
            found[name] = pyarrow.string()
    return pyarrow.schema([*found.items(), *types.items()])


def has_empty_struct(type: pyarrow.DataType) -> bool:
    """Whether a type has objects without fields, which Parquet cannot hold."""
    fields = [type.field(i) for i in range(type.num_fields)]
    return pyarrow.types.is_struct(type) and not fields or any(has_empty_struct(field.type) for field in fields)


def merge_types(type: pyarrow.DataType, values: list) -> pyarrow.DataType:
    """The type of earlier and new values."""
    try:
        new = pyarrow.schema([("x", pyarrow.array(values).type)])  # infer_type takes [3, "x"] for integers
        return pyarrow.unify_schemas([pyarrow.schema([("x", type)]), new], promote_options="permissive").field("x").type
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, OverflowError):
        return pyarrow.string()


def convert(value, type: pyarrow.DataType):
    """A value for a column of this type: in a column of strings, other values as JSON."""
    if value is None or isinstance(value, str) or type != pyarrow.string():
        return value
    return json.dumps(value, ensure_ascii=False)


def parse_line(line: bytes) -> dict:
    """The row of a line of JSON. Lone surrogates, which Parquet cannot hold, become U+FFFD."""
    return json.loads(LONE_SURROGATE.sub(rb"\1\\ufffd", line) if rb"\ud" in line else line)
