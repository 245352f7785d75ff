"""Runs over a corpus that can be killed and resumed: blocks of documents, one file per finished block, joined at the end.

OUT.parts/about.json                            the settings on which the results depend
OUT.parts/000000000512-000000001024.jsonl       the results of documents 512 to 1,023

A block's file is written under another name, flushed to disk and renamed, so it is complete or does not exist. Blocks depend on the
documents only, not on the number of workers. Repeating a run skips the blocks that have files.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from tqdm import tqdm

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from .corpus import UNREADABLE, Block, Corpus
from .engines import Engine, LocalEngine
from .fingerprints import describe_differences

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json", "")
BLOCK_SIZE = 512
FULL = {
    errno.ENOSPC: ("The disk has no space left", "Free some"),
    errno.EDQUOT: ("The user's quota has no space left", "Free some"),
    errno.EFBIG: ("The limit of file sizes is reached", "Raise it, see `ulimit -f`"),
}


class Process(Protocol):
    """What a run does with documents. Objects are pickled for Ray, so they load their models in `describe` or on first use."""

    def describe(self) -> dict:
        """Everything on which results depend, as JSON. Loads the model and raises errors of its options."""

    def process_rows(self, rows: list[dict], progress=...) -> list[dict]:
        """For each row the values to add, or `{"error": reason}`; calls `progress` with the number of rows read."""

    def types(self) -> dict:
        """The Arrow types of the values to add, for Parquet."""


class RunSummary(NamedTuple):
    """Result of `run_blocks`: the number of rows written, of those with an error, and messages of unreadable files."""

    documents: int
    errors: int
    files: list[str]


def run_blocks(
    process: Process,
    corpus: Corpus,
    output: str | Path,
    *,
    engine: Engine | None = None,
    block_size: int = BLOCK_SIZE,
    settings: Mapping | None = None,
) -> RunSummary:
    """Processes a corpus into a JSON Lines or Parquet file, one row per document in the corpus's order.

    A row has the `id` and the columns `keep` of the corpus, or only all of its columns for `keep=None`, and the values that
    `process` returns, or `error`. Repeat the call after an interruption: finished blocks are not computed again, and the output
    is the same, byte for byte, as without the interruption.

    Args:
        process: for example a `KeyphraseExtractor`.
        corpus: the documents.
        output: a .jsonl or .parquet file, which must not exist yet.
        engine: where blocks are processed, by default in this process.
        block_size: maximum number of documents per block.
        settings: further settings to compare when a run is resumed.

    Raises:
        FileExistsError: if the output exists.
        ValueError: if the output has the suffix of another format, or if an unfinished run had other settings; the message
            names what differs.
        RuntimeError: if a worker fails repeatedly.
        BlockingIOError: if another process writes the same output.
        OSError: if the disk is full, among others.
    """
    output, parts, engine = Path(output), Path(f"{output}.parts"), engine or LocalEngine()
    check_output(output)
    check_kept(corpus, process)
    with ExitStack() as lock:
        with engine, tqdm(total=corpus.documents, unit=" documents", unit_scale=True, smoothing=0.05) as bar:
            about = {**corpus.describe(), **engine.start(process), "block_size": block_size, **(settings or {})}
            lock.enter_context(lock_parts(parts))
            check_output(output)  # another process may have written it meanwhile
            open_parts(parts, json.loads(json.dumps(about, default=str)))
            count = 0

            def skip(documents: int) -> None:
                nonlocal count
                count += documents
                bar.update(documents)

            for block, results in engine.run(corpus.blocks(block_size, find_finished(parts), skip), bar.update):
                write_block(parts, block, merge_rows(corpus, block, results))
                count += len(block.rows)
                bar.n = count  # without rounding, and without what was read twice
                bar.refresh()
            bar.total = count
        summary = join_blocks(parts, output, count, process)
        lock.close()  # NFS and Windows do not delete an open file
        shutil.rmtree(parts)
        return summary


def check_kept(corpus: Corpus, process: Process) -> None:
    """Raises a `ValueError` if a column of the source that is kept has the name of a result."""
    try:
        results = process.types()
    except ImportError:  # without pyarrow
        return
    if taken := [name for name in corpus.keep or () if name in results]:
        raise ValueError(
            f"--keep {taken[0]} is the name of a result. Rename the column of the source, or leave it out of --keep."
        )


def check_output(output: str | Path) -> None:
    """Checks the path of an output before the model is loaded.

    Raises:
        FileExistsError: if the output exists.
        ValueError: if its suffix is not that of JSON Lines or Parquet.
        ImportError: for Parquet without pyarrow.
    """
    output = Path(output)
    if output.exists():
        killed = f" {output}.parts is of a run that was killed at its end, and can be deleted."
        left = killed if Path(f"{output}.parts").is_dir() else ""
        raise FileExistsError(f"{output} already exists and is complete. Choose another name, or delete it.{left}")
    if output.suffix == ".parquet":
        from .corpus import import_parquet

        import_parquet()
    elif output.suffix not in JSON_SUFFIXES:
        raise ValueError(
            f"{output} ends in {output.suffix!r}. Name it {output.with_suffix('.jsonl').name!r} for JSON Lines, or "
            f"{output.with_suffix('.parquet').name!r} for Parquet."
        )


def merge_rows(corpus: Corpus, block: Block, results: Iterable[dict]) -> Iterator[dict]:
    """The output's rows of a block; `results` are those of its readable rows."""
    results = iter(results)
    for row in block.rows:
        if corpus.keep is None:
            kept = {name: value for name, value in (row.values or {}).items() if name != "error"}
        else:
            kept = {"id": row.id} | {name: (row.values or {}).get(name) for name in corpus.keep}
        yield kept | ({"error": row.error} if row.values is None else next(results))


@contextmanager
def lock_parts(parts: Path) -> Iterator[None]:
    """Creates the folder, and locks it until the end of the context or of the process.

    Raises:
        BlockingIOError: if another process has locked it.
    """
    parts.mkdir(parents=True, exist_ok=True)
    with (parts / "lock").open("w", encoding="utf-8") as file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                f"Another process writes {parts}. Wait for it, or stop it and repeat the command to resume."
            ) from None
        except OSError:  # a file system without locks
            pass
        yield


def open_parts(parts: Path, about: dict) -> None:
    """Writes the settings into a new folder, or checks those of an existing one and removes incomplete files.

    Raises:
        ValueError: if the settings of an existing folder differ; the message names them.
    """
    for path in parts.glob("*.tmp"):
        path.unlink(missing_ok=True)
    path = parts / "about.json"
    if not path.exists():
        write_file(path, json.dumps(about, ensure_ascii=False, indent=1).encode("utf-8", "backslashreplace"))
    elif differences := describe_differences(json.loads(path.read_text(encoding="utf-8")), about):
        raise ValueError(
            f"{parts} holds an unfinished run with other settings: {'; '.join(differences)}. Repeat that run's settings, or "
            "delete the folder to start over."
        )


def find_finished(parts: Path) -> dict[int, int]:
    """start -> end of each block that has a file."""
    names = (re.fullmatch(r"(\d+)-(\d+)\.jsonl", path.name) for path in parts.iterdir())
    return dict(sorted((int(match[1]), int(match[2])) for match in names if match))


def block_path(parts: Path, start: int, end: int) -> Path:
    """The file of a block."""
    return parts / f"{start:012d}-{end:012d}.jsonl"


def write_block(parts: Path, block: Block, rows: Iterable[dict]) -> None:
    """Writes the file of a block."""
    lines = "".join(json.dumps(row, ensure_ascii=False, default=_not_json) + "\n" for row in rows)
    # a lone surrogate is written as its JSON escape
    write_file(block_path(parts, block.start, block.end), lines.encode("utf-8", "backslashreplace"))


def _not_json(value):
    raise TypeError(
        f"A value of the type {type(value).__name__} cannot be kept ({value!r:.60}). Leave out its column, and join it by id."
    )


def write_file(path: Path, content: bytes) -> None:
    """Writes a file that is complete or does not exist, also if the machine stops.

    Raises:
        OSError: if the disk is full.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise _describe_space(error, path) from error


def flush(path: Path) -> None:
    """Writes a file, or the names in a folder, from memory to the disk."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some file systems flush no folders
            raise
    finally:
        os.close(descriptor)


def _describe_space(error: OSError, path: Path) -> OSError:
    if error.errno not in FULL:
        return error
    problem, fix = FULL[error.errno]
    return OSError(f"{problem} for {path}. {fix}, and repeat the command to resume.")


def join_blocks(parts: Path, output: Path, documents: int, process: Process) -> RunSummary:
    """Joins the files of all blocks in the documents' order.

    Raises:
        RuntimeError: if the blocks do not contain each document exactly once.
        OSError: if the disk is full.
    """
    finished, end = find_finished(parts), 0
    for start, next_end in finished.items():
        if start != end:
            break
        end = next_end
    if end != documents or len(finished) != sum(1 for start in finished if start < end):
        raise RuntimeError(f"{parts} has no results for document {end:,} of {documents:,}. Repeat the same command.")
    paths = [block_path(parts, *block) for block in finished.items()]
    new, errors, files = Path(f"{output}.new"), 0, []
    for path in paths:
        with path.open("rb") as lines:
            for line in lines:
                if b'"error": ' in line and isinstance(error := json.loads(line).get("error"), str):
                    errors += 1
                    files += [error] if UNREADABLE in error else []
    try:
        if output.suffix == ".parquet":
            from .parquet_output import write_parquet

            write_parquet(paths, new, process.types())
        else:
            with new.open("wb") as out:
                for path in paths:
                    with path.open("rb") as block:
                        shutil.copyfileobj(block, out, 1 << 20)
        flush(new)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise _describe_space(error, output) from error
    new.replace(output)
    flush(output.parent)  # before the blocks are deleted
    return RunSummary(documents, errors, files)
