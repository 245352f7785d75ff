"""JSON Lines as CSV files for spreadsheets, and as Parquet files."""

import csv
import json
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from .rows import DELIMITERS

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
FORMULA = ("=", "+", "-", "@", "\t", "\r")


def groups(lines: Path) -> Iterator[list[dict]]:
    """The rows of a JSON Lines file, in groups that are in memory together."""
    with lines.open("rb") as file:
        while group := list(map(json.loads, islice(file, 4096))):
            yield group


def flatten(row: Mapping) -> dict[str, str]:
    """The cells of a row. Texts of a list are joined by "; ", and so are the first fields of a list of objects;
    of `keyphrases` those with a score, which is in `scores`. Other values are JSON. Formulas have an apostrophe.
    """
    cells = {}
    for name, value in row.items():
        if isinstance(value, list) and value and all(isinstance(item, dict) and item for item in value):
            if name == "keyphrases":  # candidates that do not occur have no score
                value = [item for item in value if isinstance(item.get("score"), (int, float))]
                cells["scores"] = "; ".join(f"{item['score']:.4f}" for item in value)
            value = [str(next(iter(item.values()))) for item in value]
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            value = "; ".join(value)
        if not isinstance(value, str):
            value = "" if value is None else json.dumps(value, ensure_ascii=False)
        cells[name] = f"'{value}" if value.startswith(FORMULA) and not NUMBER.fullmatch(value) else value
    return cells


def write_table(lines: Path, output: Path, suffix: str, types: Mapping) -> None:
    """Writes JSON Lines as a .csv, .tsv or .parquet file. Other Arrow types are inferred, text for mixed ones."""
    if suffix in DELIMITERS:
        names = {name: None for group in groups(lines) for row in group for name in flatten(row) if name != "error"}
        with output.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, [*names, "error"], "", delimiter=DELIMITERS[suffix])
            writer.writerow(flatten({name: name for name in writer.fieldnames}))
            writer.writerows(flatten(row) for group in groups(lines) for row in group)
        return
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    text = pyarrow.string()
    found: dict = {}
    for group in groups(lines):
        for name in {name: None for row in group for name in row}:
            try:
                new = pyarrow.array([row.get(name) for row in group]).type
                both = [pyarrow.schema({name: one}) for one in (found.get(name, new), new)]
                found[name] = pyarrow.unify_schemas(both, promote_options="permissive").types[0]
            except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, OverflowError):
                found[name] = text
    found = {name: text if "struct<>" in str(one) else one for name, one in found.items()}  # which Parquet cannot hold
    schema = pyarrow.schema({**found, "error": text, **types})
    with ParquetWriter(output, schema, compression="zstd") as writer:
        for group in groups(lines):
            for row in group:
                for name, value in row.items():
                    is_other = schema.field(name).type == text and not isinstance(value, str | None)
                    row[name] = json.dumps(value, ensure_ascii=False) if is_other else value
            writer.write_table(pyarrow.Table.from_pylist(group, schema))
