"""One way over a file: rows in, a model's results out, one JSON line per row, resumed after an interruption. Imports no torch."""

import errno
import json
import os
from collections import namedtuple
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .errors import UserError, one_line
from .files import differences, locked, write_file
from .rows import DELIMITERS, Source
from .tables import write_table

TABLES = (*DELIMITERS, ".parquet")
LINES = (".jsonl", ".ndjson", ".json", "")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a disk, a quota, the limit of file sizes

Summary = namedtuple("Summary", "rows errors new")  # of an output; `new` are those that a call has added


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
        source, out: see `Source`, and a .jsonl, .csv, .tsv or .parquet file. OUT.settings.json is written beside it.
        settings: everything else on which results depend, as JSON.
        check: a row -> the item to process; a `ValueError` says why it has none.
        batch_size: rows that are processed, and written, together.
        keep, id_column: columns of the source to keep, by default all. If there is no column of ids, rows are numbered.
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
    output = Output(out, {**settings, "source": state})
    if output.is_finished:
        return Summary(output.rows, output.errors, 0)
    process = None if workers else open_process()  # before anything is written: a model may be missing
    with output, tqdm(total=source.count(), initial=output.rows, unit=" documents") as bar:
        done = output.rows
        output.write_record()
        output.cut(done - done % batch_size)  # a batch of which there is a part is begun again
        batches = numbered_batches(source, output.rows, batch_size)
        if process is None:
            processed = process_by_ray(open_process, check, batches, workers)
        else:
            processed = ((start, rows, process_each(process, rows, check)) for start, rows in batches)
        for start, rows, found in processed:
            numbered = enumerate(zip(rows, found, strict=True), start)
            output.write([columns(row, number, keep, ids) | result for number, (row, result) in numbered])
            bar.update(output.rows - bar.n)
            bar.set_postfix(errors=output.errors)
        if source.state() != state:
            raise UserError(f"{source.name} has changed while it was read. Delete {out}, and repeat the command.")
        output.finish(types())
    return Summary(output.rows, output.errors, output.rows - done)


def numbered_batches(rows: Iterable, start: int, size: int) -> Iterator[tuple[int, list]]:
    """The rows from an index on in batches, each after the index of its first row."""
    rows = islice(rows, start, None)
    while batch := list(islice(rows, size)):
        yield start, batch
        start += size


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
    try:
        found = process(list(items.values())) if items else []
    except Exception:
        found, errors = [], []
        for item in items.values():
            try:
                found += process([item])
            except Exception as error:
                if type(error).__name__ == "AcceleratorError":
                    raise
                errors.append(error)
                found.append({"error": one_line(error)})
        if 1 < len(errors) == len(items) and not isinstance(errors[0], (ValueError, TypeError)):
            raise errors[0] from None
    results |= dict(zip(items, found, strict=True))
    return [results[i] for i in range(len(rows))]


def process_by_ray(open_process: Callable, check: Callable, batches: Iterable[tuple], workers: int) -> Iterator[tuple]:
    """The batches in order, each with the results of its rows. That of a lost worker is processed again.

    The cluster is that of RAY_ADDRESS; by default Ray is started on this machine. Workers share its GPUs, if there are some.
    Raises a `RuntimeError` if the model does not load in a worker, or a worker is lost too often.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError("--workers needs Ray. Install it with: pip install 'lexperts[ray]'") from error
    ray.init(log_to_driver=False, logging_level="error", ignore_reinit_error=True)  # ends with this process
    gpus = min(1, ray.cluster_resources().get("GPU", 0) / workers)

    @ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=3, max_task_retries=3)
    class Worker:
        def __init__(self):
            self.process = open_process()

        def results(self, start, rows):
            return start, rows, process_each(self.process, rows, check)

    pool = ray.util.ActorPool([Worker.remote() for _ in range(workers)])  # type: ignore[attr-defined]
    try:
        for batch in batches:
            if not pool.has_free():
                yield pool.get_next()
            pool.submit(lambda worker, batch: worker.results.remote(*batch), batch)
        while pool.has_next():
            yield pool.get_next()
    except ray.exceptions.RayError as error:
        raise RuntimeError(f"A worker failed: {getattr(error, 'cause', None) or error}") from error


class Output:
    """A file to which rows are appended; a context manager that locks it. Beside it is a record, OUT.settings.json. Until all
    are there, the rows of a CSV or Parquet file are in OUT.rows.jsonl.

    Attributes:
        rows, errors: the number of rows that are there, and of those with an error.
        is_finished: whether an earlier run has written all rows.
    """

    def __init__(self, out: str | Path, settings: Mapping):
        self.path, self.record = Path(out), Path(f"{out}.settings.json")
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
        return self

    def __exit__(self, kind, error, traceback):
        if isinstance(error, OSError) and error.errno in FULL:
            error.filename = error.filename or str(self.path)
        with suppress(OSError):  # of a full disk again
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
            changes, finished = differences(record["settings"], self.settings), record.get("finished")
        except (ValueError, LookupError, TypeError) as error:
            raise UserError(f"{self.record} is damaged, or not of a run. Move it and {self.path} away.") from error
        if changes and has_rows:
            raise UserError(f"{self.path} is of other settings: {changes}. Repeat those, or choose another name.")
        if finished and self.path.exists() and not changes:
            self.is_finished = self.path.stat().st_size == finished["bytes"]
            if self.is_table and not self.is_finished:
                raise UserError(f"{self.path} has changed since it was written. Delete it, or choose another name.")
            self.rows, self.errors = finished["rows"], finished["errors"]

    def write_record(self, **finished) -> None:
        """Writes OUT.settings.json."""
        write_file(
            self.record, json.dumps({"settings": self.settings, **finished}, ensure_ascii=False, indent=1) + "\n"
        )

    def write(self, rows: list[dict]) -> None:
        """Appends rows."""
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
                self.errors += b'"error": ' in line and "error" in json.loads(line)  # not within a column
        self.file.truncate(end)

    def finish(self, types: Mapping) -> None:
        """Converts the rows of a CSV or Parquet file, and records that all are there."""
        os.fsync(self.file.fileno())
        if self.is_table:
            new = self.path.with_name(f".{self.path.name}.tmp")
            write_table(self.lines, new, self.path.suffix, types)
            new.replace(self.path)
        self.write_record(finished={"rows": self.rows, "errors": self.errors, "bytes": self.path.stat().st_size})
        if self.is_table:
            self.lines.unlink()


def format_row(row: dict) -> bytes:
    """A row as a line of JSON: NaN and infinity are null, dates and decimals texts, lone surrogates question marks."""
    try:
        text = json.dumps(row, ensure_ascii=False, default=str, allow_nan=False)
    except ValueError:
        row = json.loads(json.dumps(row, default=str), parse_constant=lambda _: None)
        text = json.dumps(row, ensure_ascii=False)
    return f"{text}\n".encode("utf-8", "replace")
