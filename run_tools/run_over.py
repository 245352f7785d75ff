"""One way over a file: rows in, a model's results out, one JSON line per row, resumed after an interruption."""

import json
import os
import time
import warnings
from collections import namedtuple
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from .errors import UserError, one_line
from .files import differences, locked, write_file
from .rows import DELIMITERS, Source
from .tables import write_table

SAVED = 30  # seconds after which rows are on the disk, and not only in the memory of the system
LINES = (".jsonl", ".ndjson", ".json", "")
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
    """Writes a row for each row of a source: its columns, and the results of a model or `error`. Repeat the call after
    an interruption: rows that are there are kept, and the output is the same as without the interruption.

    Args:
        open_process: loads a model and returns a function from items to their results; called once per worker of Ray.
        source, out: see `Source`; a .jsonl, .csv, .tsv or .parquet file, with OUT.settings.json beside it.
        settings: everything else on which results depend, as JSON.
        check: a row -> the item to process; a `ValueError` says why it has none.
        keep, id_column: columns of the source to keep, by default all. If there is no column of ids, rows are numbered.
        results, types: the names of results, and their Arrow types for Parquet; others are inferred.

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
    if output.finished:
        if output.is_table:
            output.lines.unlink(missing_ok=True)  # of a run that was killed before its last step
        return Summary(output.finished["rows"], output.finished["errors"], 0)
    process = None if workers else open_process()  # before anything is written: a model may be missing
    total = sum(1 for _ in source) if "file" in source.fs.protocol else None  # remote files are not read twice
    output.path.parent.mkdir(parents=True, exist_ok=True)
    with locked(output.lines) as output.file, tqdm(total=total, unit=" documents") as bar:
        output.compare()  # another process may have begun
        output.write_record()
        done = output.cut()
        # a batch of which there is a part is begun again
        start = bar.n = bar.initial = output.cut(done - done % batch_size)
        saved = time.monotonic()
        unfinished = islice(source, start, None)
        batches = iter(lambda: list(islice(unfinished, batch_size)), [])
        if process is None:
            processed = process_by_ray(open_process, check, batches, workers)
        else:
            processed = ((rows, process_each(process, rows, check)) for rows in batches)
        for rows, found in processed:
            numbered = enumerate(zip(rows, found, strict=True), start)
            lines = [format_row(columns(row, number, keep, ids) | result) for number, (row, result) in numbered]
            output.file.writelines(lines)
            output.file.flush()
            if time.monotonic() - saved > SAVED:
                os.fsync(output.file.fileno())
                saved = time.monotonic()
            start += len(lines)
            bar.update(len(lines))
        if source.state() != state:
            raise UserError(f"{source.name} has changed while it was read. Delete {out}, and repeat the command.")
        total, errors = output.finish(types())
    return Summary(total, errors, total - done)


def columns(row: Any, number: int, keep: Sequence[str] | None, id_column: str | None) -> dict:
    """The columns of a row that its output has."""
    row = row if isinstance(row, dict) else {}
    if keep is None:
        return {name: value for name, value in row.items() if name != "error"}
    return {"id": number if id_column is None else row.get(id_column)} | {name: row.get(name) for name in keep}


def process_each(process: Callable[[list], list[dict]], rows: Sequence, check: Callable) -> list[dict]:
    """The results of rows, or `{"error": reason}` for one that is an error, that `check` refuses, or that fails alone.
    Raises the error if several rows all fail other than by their values, or if the device fails: so would all others.
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
    except Exception as together:
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
        if not errors and len(items) > 1:
            warnings.warn(f"{len(items)} rows failed together ({one_line(together)}), and none alone.", stacklevel=2)
    results |= dict(zip(items, found, strict=True))
    return [results[i] for i in range(len(rows))]


def process_by_ray(open_process: Callable, check: Callable, batches: Iterable[list], workers: int) -> Iterator[tuple]:
    """The batches in order, each with the results of its rows, by workers that share the GPUs of the cluster, by
    RAY_ADDRESS or this machine. Raises a `RuntimeError` if the model does not load, or a worker is lost four times.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError("--workers needs Ray. Install the extra lexperts[ray].") from error
    ray.init(log_to_driver=False, logging_level="error", ignore_reinit_error=True)  # ends with this process
    gpus = min(1, ray.cluster_resources().get("GPU", 0) / workers)

    @ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=3, max_task_retries=3)
    class Worker:
        def __init__(self):
            self.process = open_process()

        def results(self, rows):
            return rows, process_each(self.process, rows, check)

    pool = ray.util.ActorPool([Worker.remote() for _ in range(workers)])  # type: ignore[attr-defined]
    try:
        for batch in batches:
            if not pool.has_free():
                yield pool.get_next()
            pool.submit(lambda worker, rows: worker.results.remote(rows), batch)
        while pool.has_next():
            yield pool.get_next()
    except ray.exceptions.RayError as error:
        raise RuntimeError(f"A worker failed: {getattr(error, 'cause', None) or error}") from error


class Output:
    """A file with its record OUT.settings.json. Until a table is `finished`, its rows are in OUT.rows.jsonl."""

    file: IO[bytes]  # of the rows, while it is locked

    def __init__(self, out: str | Path, settings: Mapping):
        self.path, self.record = Path(out), Path(f"{out}.settings.json")
        self.is_table = self.path.suffix in (*DELIMITERS, ".parquet")
        if not self.is_table and self.path.suffix not in LINES:
            raise UserError(f"OUT {out} is not the name of a .jsonl, .csv, .tsv or .parquet file.")
        self.lines = Path(f"{out}.rows.jsonl") if self.is_table else self.path
        self.settings = json.loads(json.dumps(settings, default=str))
        self.finished = self.compare()

    def compare(self) -> dict | None:
        """What a run has finished. Raises a `UserError` if the file is of other settings, or not of a run."""
        has_rows = any(path.exists() and path.stat().st_size for path in (self.path, self.lines))
        try:
            record = json.loads(self.record.read_text(encoding="utf-8"))
            changes, finished = differences(record["settings"], self.settings), record.get("finished")
        except (OSError, ValueError, LookupError, TypeError) as error:
            if has_rows or self.record.exists():
                raise UserError(f"{self.path} or {self.record.name} is not of a run. Choose another name.") from error
            return None
        if changes and has_rows:
            raise UserError(f"{self.path} is of other settings: {changes}. Repeat those, or choose another name.")
        if changes or not finished or not self.path.exists():
            return None
        is_same = self.path.stat().st_size == finished["bytes"]
        if self.is_table and not is_same:
            raise UserError(f"{self.path} has changed since it was written. Delete it, or choose another name.")
        return finished if is_same else None

    def write_record(self, **finished) -> None:
        """Writes OUT.settings.json."""
        text = json.dumps({"settings": self.settings, **finished}, ensure_ascii=False, indent=1)
        write_file(self.record, text + "\n")

    def cut(self, limit: int | None = None) -> int:
        """Removes rows after the first ones, and an incomplete line of a process that was killed -> their number."""
        rows = end = 0
        with self.lines.open("rb") as file:
            for line in file:
                if rows == limit or not line.endswith(b"}\n"):
                    break
                rows, end = rows + 1, end + len(line)
        self.file.truncate(end)
        return rows

    def finish(self, types: Mapping) -> tuple[int, int]:
        """Converts the rows of a table, and records that all are there -> their number, and that of errors."""
        os.fsync(self.file.fileno())
        rows = errors = 0
        with self.lines.open("rb") as file:
            for line in file:  # a column of the source may hold an error within
                rows, errors = rows + 1, errors + (b'"error": "' in line and "error" in json.loads(line))
        if self.is_table:
            new = self.path.with_name(f".{self.path.name}.tmp")
            write_table(self.lines, new, self.path.suffix, types)
            new.replace(self.path)
        finished = {"rows": rows, "errors": errors, "bytes": self.path.stat().st_size}
        self.write_record(finished=finished)
        if self.is_table:
            self.lines.unlink()
        return rows, errors


def format_row(row: dict) -> bytes:
    """A row as a line of JSON: NaN and infinity are null, dates and decimals texts, lone surrogates question marks."""
    try:
        text = json.dumps(row, ensure_ascii=False, default=str, allow_nan=False)
    except ValueError:
        row = json.loads(json.dumps(row, default=str), parse_constant=lambda _: None)
        text = json.dumps(row, ensure_ascii=False)
    return f"{text}\n".encode("utf-8", "replace")
