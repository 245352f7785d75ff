"""One way over a file: rows in, a model's results out, one JSON line per row, resumed after an interruption. Imports no torch."""

import json
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from .errors import UserError, one_line
from .files import locked, naming, write_file
from .fingerprints import differences
from .rows import DELIMITERS, Source, batched

TABLES = (*DELIMITERS, ".parquet")
LINES = (".jsonl", ".ndjson", ".json", "")


class Summary(NamedTuple):
    """The number of rows of an output, of those with an error, and of those that this call has added."""

    rows: int
    errors: int
    new: int


def run_over(
    open_process: Callable[[], Callable[[list], list[dict]]],
    source: str | Path | Source,
    out: str | Path,
    settings: Mapping,
    *,
    check: Callable[[dict], Any] = lambda row: row,
    batch_size: int = 256,
    keep: Sequence[str] | None = None,
    id_column: str = "id",
    results: Collection[str] = (),
    types: Callable[[], Mapping] = dict,
    workers: int = 0,
) -> Summary:
    """Writes a row for each row of a source: its columns, and the results of a model or `error`. Repeat the call after an
    interruption: rows that are there are kept, and the output is the same as without the interruption.

    Args:
        open_process: loads a model and returns a function from items to their results; called once per worker.
        source: a file, folder or pattern, see `Source`.
        out: a .jsonl, .csv, .tsv or .parquet file. OUT.settings.json is written beside it.
        settings: everything else on which results depend, as JSON.
        check: a row -> the item to process; a `ValueError` says why it has none.
        batch_size: rows that are processed, and written, together.
        keep: columns of the source to keep beside its id, by default all.
        id_column: if the source has no such column, rows are numbered.
        results: names of results, which no column that is kept may have.
        types: returns the Arrow types of results, for Parquet; others are inferred.
        workers: of Ray; by default this process.

    Raises:
        UserError: if `out` is of other settings, or not of a run, or the name of a column that of a result.
        BlockingIOError: if another process writes the same output.
    """
    source = source if isinstance(source, Source) else Source(source, output=out)
    names = set(source.columns) - {"error"} if keep is None else set(keep)
    own = set(results) if keep is None else {*results, "error", "id"} - {id_column}
    if taken := names & own:
        raise UserError(f"{source.name}: the column {min(taken)!r} has the name of a result. Rename or omit it.")
    state, ids = source.state(), id_column if id_column in source.columns else None
    output = Output(out, {**settings, "source": state}, types)
    if output.is_finished:
        return Summary(output.rows, output.errors, 0)
    from tqdm import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm

    from .ray_workers import process_by_ray

    process = None if workers else open_process()  # before anything is written: a model may be missing
    with output, tqdm(total=source.count(), unit=" documents") as bar, logging_redirect_tqdm():
        done = bar.initial = output.rows
        batches = unfinished(batched(source, batch_size), output)
        if process is None:
            processed = process_by_ray(open_process, check, batches, workers)
        else:
            processed = ((start, rows, process_each(process, rows, check)) for start, rows in batches)
        for start, rows, found in processed:
            numbered = enumerate(zip(rows, found, strict=True), start)
            output.write(columns(row, number, keep, ids) | result for number, (row, result) in numbered)
            bar.update(output.rows - bar.n)
            bar.set_postfix({"errors": output.errors} if output.errors else {})
        if source.state() != state:
            raise UserError(f"{source.name} has changed while it was read. Delete {out}, and repeat the command.")
        output.finish()
    return Summary(output.rows, output.errors, output.rows - done)


def unfinished(batches: Iterable[list], output: "Output") -> Iterator[tuple[int, list]]:
    """The batches that an output lacks, each after the index of its first row. One of which it has a part is begun again."""
    start, done = 0, output.rows
    for batch in batches:
        if start + len(batch) > done:
            if start < done:
                output.cut(start)
            yield start, batch
        start += len(batch)


def columns(row: Any, number: int, keep: Sequence[str] | None, id_column: str | None) -> dict:
    """The columns of a row that its output has."""
    row = row if isinstance(row, dict) else {}
    if keep is None:
        return {name: value for name, value in row.items() if name != "error"}
    return {"id": number if id_column is None else row.get(id_column)} | {name: row.get(name) for name in keep}


def process_each(process: Callable[[list], list[dict]], rows: Sequence, check: Callable) -> list[dict]:
    """The results of rows, or `{"error": reason}`: for a row that is an error, that `check` refuses, or that fails. If
    rows fail together, they are processed one by one.

    Raises:
        Exception: if all of several rows fail other than by their values, or if the device fails: so would all others.
    """
    results: dict[int, dict] = {}
    items: dict[int, Any] = {}
    for i, row in enumerate(rows):
        try:
            if isinstance(row, ValueError):
                raise row
            items[i] = check(row)
        except ValueError as error:
            results[i] = {"error": one_line(error)}
    together, errors = None, []
    try:
        found = process(list(items.values())) if items else []
    except Exception as error:
        found, together = [], error
    for item in items.values() if together else ():
        try:
            found += process([item])
        except Exception as error:
            if type(error).__name__ == "AcceleratorError":
                raise
            kind = "" if isinstance(error, (ValueError, TypeError)) else f"{type(error).__name__}: "
            found.append({"error": kind + one_line(error).removeprefix(kind)})
            errors.append(error)
    if 1 < len(errors) == len(items) and not isinstance(errors[0], (ValueError, TypeError)):
        raise errors[0]
    if together and not errors and len(items) > 1:
        warnings.warn(f"{len(items)} rows failed together ({one_line(together)}), and none alone.", stacklevel=2)
    results |= dict(zip(items, found, strict=True))
    return [results[i] for i in range(len(rows))]


class Output:
    """A file to which rows are appended; a context manager that locks it. Beside it is a record, OUT.settings.json. Until all
    are there, the rows of a CSV or Parquet file are in OUT.rows.jsonl.

    Attributes:
        rows, errors: the number of rows that are there, and of those with an error.
        is_finished: whether an earlier run has written all rows.
    """

    def __init__(self, out: str | Path, settings: Mapping, types: Callable[[], Mapping] = dict):
        self.path, self.types, self.record = Path(out), types, Path(f"{out}.settings.json")
        self.is_table = self.path.suffix in TABLES
        if not self.is_table and self.path.suffix not in LINES or self.path.is_dir():
            raise UserError(f"OUT {out} is not the name of a .jsonl, .csv, .tsv or .parquet file.")
        self.lines = Path(f"{out}.rows.jsonl") if self.is_table else self.path
        self.settings = json.loads(json.dumps(settings, default=str))
        self.rows = self.errors = 0
        self.is_finished, self._stack = False, ExitStack()
        self.compare()

    def __enter__(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self._stack.enter_context(locked(self.lines))
        self.compare()  # another process may have begun
        self.cut()
        self.write_record()
        return self

    def __exit__(self, *_):
        with suppress(OSError):  # of a full disk, which was raised before
            self._stack.close()

    def compare(self) -> None:
        """Reads the record. Raises a `UserError` if the file is of other settings, or not of a run."""
        has_rows = any(path.exists() and path.stat().st_size for path in (self.path, self.lines))
        if not self.record.exists():
            if has_rows:
                raise UserError(f"{self.path} already exists, and is not of a run. Choose another name, or delete it.")
            return
        try:
            record = json.loads(self.record.read_text(encoding="utf-8"))
            changes = differences(record["settings"], self.settings)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{self.record} is damaged, or not of a run. Move it and {self.path} away.") from error
        if changes and has_rows:
            raise UserError(f"{self.path} is of other settings: {changes}. Repeat those, or choose another name.")
        finished = None if changes or not self.path.exists() else record.get("finished")
        if finished and self.path.stat().st_size == finished["bytes"]:
            self.is_finished, self.rows, self.errors = True, finished["rows"], finished["errors"]
        elif finished and self.is_table:
            raise UserError(f"{self.path} has changed since it was written. Delete it, or choose another name.")

    def write_record(self, **finished) -> None:
        """Writes OUT.settings.json."""
        record = {"settings": self.settings, **finished}
        write_file(self.record, json.dumps(record, ensure_ascii=False, indent=1) + "\n")

    def write(self, rows: Iterable[dict]) -> None:
        """Appends rows. Raises an `OSError` that names the file if the disk is full."""
        rows = list(rows)
        with naming(self.path):
            self.file.writelines(map(format_row, rows))
            self.file.flush()
        self.rows += len(rows)
        self.errors += sum("error" in row for row in rows)

    def cut(self, limit: int | None = None) -> None:
        """Removes the rows after the first ones, and an incomplete line of a process that was killed."""
        self.rows = self.errors = end = 0
        with self.lines.open("rb") as file:
            for line in file:
                if self.rows == limit or not line.endswith(b"}\n"):
                    break
                self.rows, end = self.rows + 1, end + len(line)
                self.errors += b'"error": "' in line and "error" in json.loads(line)  # not within a column
        self.file.truncate(end)

    def finish(self) -> None:
        """Converts the rows of a CSV or Parquet file, and records that all are there."""
        os.fsync(self.file.fileno())
        if self.is_table:
            from .tables import write_table

            new = self.path.with_name(f".{self.path.name}.tmp")
            with naming(self.path):
                write_table(self.lines, new, self.path.suffix, self.types())
            new.replace(self.path)
        self.write_record(finished={"rows": self.rows, "errors": self.errors, "bytes": self.path.stat().st_size})
        if self.is_table:
            self.lines.unlink()


def format_row(row: dict) -> bytes:
    """A row as a line of JSON: NaN and infinity are null, dates and decimals texts, lone surrogates question marks."""

    def to_json(value):
        return value.isoformat() if hasattr(value, "isoformat") else str(value)

    try:
        text = json.dumps(row, ensure_ascii=False, default=to_json, allow_nan=False)
    except ValueError:
        row = json.loads(json.dumps(row, default=to_json), parse_constant=lambda _: None)
        text = json.dumps(row, ensure_ascii=False)
    return f"{text}\n".encode("utf-8", "replace")
