"""Runs over corpora that can be killed and resumed: blocks of documents, one file per finished block, joined at the end.

OUT.parts/run.record                            the claim: the settings on which the results depend, and the files of the folder
OUT.parts/000000000512-000000001024.jsonl       the results of documents 512 to 1,023
.OUT.run.json                                   the record of the finished output: its settings, size and hash

A block is named in the claim, then written under another name, flushed to disk and renamed: it is complete or does not exist. Blocks
depend on the documents only, not on the number of workers. Repeating a run skips the blocks that have files.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Protocol

from tqdm import tqdm

from ..claims import Claim, locked, remove_empty
from ..files import describe_space, sync
from ..fingerprints import describe_differences, different_settings
from ..option_paths import check_new_folder
from .csv_output import DELIMITERS, flatten, write_csv
from .documents import UNREADABLE, Block, Corpus, Row
from .engines import Engine, LocalEngine
from .outputs import (
    KnownRows,
    OutputRecord,
    check_record,
    hash_file,
    parse_record,
    read_record,
    read_rows,
    record_path,
    to_json,
    write_record,
)
from .parquet_rows import import_parquet

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json", "")
BLOCK_SIZE = 512
APPENDED = "appended_to"  # the setting of a claim that holds the record of the output to which rows are appended


class Process(Protocol):
    """What a run does with documents. Objects are pickled for Ray, so they load their models in `describe` or on first use."""

    def describe(self) -> dict:
        """Everything on which results depend, as JSON. Loads the model and raises errors of its options."""

    def process_rows(self, rows: list[dict], progress=...) -> list[dict]:
        """For each row the values to add, or `{"error": reason}`; calls `progress` with the number of rows read."""

    def types(self) -> dict:
        """The Arrow types of the values to add, for Parquet."""


class RunSummary(NamedTuple):
    """Result of `run_blocks`.

    Attributes:
        documents, errors: the number of rows of the output, and of those with an error.
        files: messages of unreadable files.
        new: the number of rows that this call has added; 0 if the output was complete.
    """

    documents: int
    errors: int
    files: list[str]
    new: int


def run_blocks(
    process: Process,
    corpus: Corpus,
    output: str | Path,
    *,
    engine: Engine | None = None,
    block_size: int = BLOCK_SIZE,
    settings: Mapping | None = None,
    append: bool = False,
) -> RunSummary:
    """Processes a corpus into a JSON Lines, Parquet or CSV file, one row per document in the corpus's order.

    A row has the `id` and the columns `keep` of the corpus, or only all of its columns for `keep=None`, and the values that
    `process` returns, or `error`. Repeat the call after an interruption: finished blocks are not computed again, and the output
    is the same, byte for byte, as without the interruption. Repeated after its end, it does nothing.

    Args:
        process: for example a `KeyphraseExtractor`.
        corpus: the documents.
        output: a .jsonl, .parquet, .csv or .tsv file.
        engine: where blocks are processed, by default in this process.
        block_size: maximum number of documents per block.
        settings: further settings to compare when a run is resumed.
        append: if the output exists and the source has changed, add rows for the documents whose ids the output does not have.

    Raises:
        FileExistsError: if the output exists, and is not of a run with the same settings.
        ValueError: if the output has the suffix of another format, if OUT.parts holds anything that is not of this run, or if an
            unfinished run had other settings; the message names what differs.
        RuntimeError: if a worker fails repeatedly, or the source changes while it is read.
        BlockingIOError: if another process writes the same output.
        OSError: if the disk is full, among others.
    """
    output, parts, engine = Path(output), Path(f"{output}.parts"), engine or LocalEngine()
    check_output(output)
    check_kept(corpus, process, output)
    with ExitStack() as stack:
        stack.enter_context(engine)
        about = {**corpus.describe(), **engine.start(process), "block_size": block_size, **(settings or {})}
        about = json.loads(json.dumps(about, default=str))
        claim = Claim.read(parts)
        if claim is None and (record := find_complete(output, claim, about)):
            return summarize(record, 0)
        lock = stack.enter_context(ExitStack())
        lock.enter_context(locked(parts))
        claim = Claim.read(parts)  # another process may have written meanwhile
        if record := find_complete(output, claim, about):
            lock.close()  # NFS and Windows do not delete an open file
            remove_parts(parts, claim)
            return summarize(record, 0)
        earlier = find_earlier(output, claim)
        try:
            known = None if earlier is None else find_known(output, corpus, earlier, about, append)
        except (OSError, ValueError):
            lock.close()
            remove_empty(parts)
            raise
        if earlier is not None:
            about[APPENDED] = earlier._asdict()
        claim = open_claim(parts, claim, about)
        count = process_blocks(process, corpus, engine, claim, block_size, known)
        if corpus.describe()["content"] != about["content"]:
            raise RuntimeError(
                f"{corpus.source} has changed while it was read, so {output} is not written. Delete {parts}, and repeat the "
                "command when nothing writes to the source."
            )
        summary = join_blocks(claim, output, count, process, earlier)
        lock.close()
        claim.remove()
        return summary


def process_blocks(
    process: Process, corpus: Corpus, engine: Engine, claim: Claim, block_size: int, known: KnownRows | None
) -> int:
    """Writes the blocks that have no files yet, and returns the number of documents in all blocks."""
    count = 0
    with tqdm(total=corpus.documents, unit=" documents", unit_scale=True, smoothing=0.05) as bar:

        def skip(documents: int) -> None:
            nonlocal count
            count += documents
            bar.update(documents)

        def is_new(row: Row) -> bool:
            return known is None or known.is_new(row.id, row.error)

        blocks = corpus.blocks(block_size, finished_blocks(claim), skip, is_new if known else None)
        for block, results in engine.run(blocks, bar.update):
            write_block(claim, block, merge_rows(corpus, block, results))
            count += len(block.rows)
            bar.n = count  # without rounding, and without what was read twice
            bar.refresh()
        bar.total = count
    return count


def check_kept(corpus: Corpus, process: Process, output: Path) -> None:
    """Raises a `ValueError` if a column of the source that is kept has the name of a result."""
    try:
        results = set(process.types())
    except ImportError:  # without pyarrow
        return
    if output.suffix in DELIMITERS and "keyphrases" in results:
        results.add("scores")
    if taken := [name for name in corpus.keep or () if name in results]:
        raise ValueError(
            f"--keep {taken[0]} is the name of a result. Rename the column of the source, or leave it out of --keep."
        )


def check_output(output: str | Path) -> None:
    """Checks the path of an output before the model is loaded.

    Raises:
        FileExistsError: if the output exists, and no run of ours has written it, or it has changed since.
        ValueError: if its suffix is not that of JSON Lines, Parquet or CSV.
            Also if OUT.parts holds anything that is not of a run.
        ImportError: for Parquet without pyarrow.
    """
    output = Path(output)
    check_new_folder("OUT", output.parent)
    if output.suffix == ".parquet":
        import_parquet()
    elif output.suffix not in (*JSON_SUFFIXES, *DELIMITERS):
        raise ValueError(
            f"{output} ends in {output.suffix!r}. Name it {output.with_suffix('.jsonl').name!r} for JSON Lines, "
            f"{output.with_suffix('.parquet').name!r} for Parquet, or {output.with_suffix('.csv').name!r} for CSV."
        )
    find_earlier(output, Claim.read(f"{output}.parts"))


def find_complete(output: Path, claim: Claim | None, about: dict) -> OutputRecord | None:
    """The record of an output that a run with these settings has finished. Raises a `FileExistsError` as `find_earlier`."""
    earlier = find_earlier(output, claim)
    return None if earlier is None or describe_differences(earlier.settings, about) else earlier


def find_earlier(output: Path, claim: Claim | None) -> OutputRecord | None:
    """The record of an output that exists, or `None` if it does not.

    Raises:
        FileExistsError: if there is no record, or the output has changed since.
    """
    if not output.exists():
        if output.is_symlink():
            raise FileExistsError(
                f"{output} is a link to {os.readlink(output)!r}, which does not exist. Remove the link."
            )
        check_record(output)
        return None
    record, size = read_record(output), output.stat().st_size
    appended = (
        parse_record(claim.settings.get(APPENDED)) if claim else None
    )  # a run was killed before it replaced the output
    for found in (record, appended):
        if found is not None and found.size == size:
            return found
    reason = (
        "has changed since the run that wrote it"
        if record
        else f"is not of a run ({record_path(output).name} is missing)"
    )
    raise FileExistsError(f"{output} already exists, and {reason}. Choose another name, or delete it.")


def find_known(output: Path, corpus: Corpus, earlier: OutputRecord, about: dict, append: bool) -> KnownRows:
    """The rows of an output to which a run may append.

    Raises:
        FileExistsError: without `append`, if other settings than the source differ, or if the output has changed.
        ValueError: if the source has no ids.
    """
    others = [name for name in different_settings(earlier.settings, about) if name not in ("content", "source")]
    if others or not append:
        differences = "; ".join(describe_differences(earlier.settings, about))
        fix = "" if others else "add --append to add the documents with new ids, "
        raise FileExistsError(
            f"{output} already exists, and is of a run with other settings: {differences}. Repeat that run's settings, {fix}choose "
            "another name, or delete it."
        )
    if not corpus.has_ids:
        raise ValueError(f"--append finds new documents by their ids, and {corpus.source} has none. Use --id-column.")
    if hash_file(output) != earlier.sha256:
        raise FileExistsError(f"{output} has changed since the run that wrote it. Choose another name, or delete it.")
    return KnownRows(output, "id" if corpus.keep is not None else corpus.id_column)


def open_claim(parts: Path, claim: Claim | None, about: dict) -> Claim:
    """The claim of an unfinished run with the same settings, or a new one.

    Raises:
        ValueError: if the settings of an unfinished run differ; the message names them.
    """
    if claim is not None and (names := different_settings(claim.settings, about)):
        is_append = claim.settings.get(APPENDED) == about.get(APPENDED) is not None
        if not (is_append and set(names) <= {"content", "source"}):
            differences = "; ".join(describe_differences(claim.settings, about))
            raise ValueError(
                f"{parts} holds an unfinished run with other settings: {differences}. Repeat that run's settings, or "
                "delete the folder to start over."
            )
        claim.clear()  # of a source that has grown again meanwhile
        claim = None
    return claim or Claim.create(parts, "run over a corpus", about)


def remove_parts(parts: Path, claim: Claim | None) -> None:
    """Removes what a run that was killed at its end has left, or the lock of this process."""
    if claim is None:
        remove_empty(parts)
    else:
        claim.remove()


def merge_rows(corpus: Corpus, block: Block, results: Iterable[dict]) -> Iterator[tuple[dict, dict]]:
    """The columns of the source and the results, or the error, of each row; `results` are those of its readable rows."""
    results = iter(results)
    for row in block.rows:
        if corpus.keep is None:
            kept = {name: value for name, value in (row.values or {}).items() if name != "error"}
        else:
            kept = {"id": row.id} | {name: (row.values or {}).get(name) for name in corpus.keep}
        yield kept, {"error": row.error} if row.values is None else next(results)


def find_finished(parts: str | Path) -> dict[int, int]:
    """start -> end of each block that has a file, in a folder that is of a run."""
    claim = Claim.read(parts)
    return {} if claim is None else finished_blocks(claim)


def finished_blocks(claim: Claim) -> dict[int, int]:
    """start -> end of each block that has a file."""
    names = (re.fullmatch(r"(\d+)-(\d+)\.jsonl", name) for name in claim.complete())
    return dict(sorted((int(match[1]), int(match[2])) for match in names if match))


def block_name(start: int, end: int) -> str:
    """The file of a block."""
    return f"{start:012d}-{end:012d}.jsonl"


def write_block(claim: Claim, block: Block, rows: Iterable[tuple[dict, dict]]) -> None:
    """Writes the file of a block."""
    lines = "".join(format_row(kept, added) for kept, added in rows)
    # a lone surrogate is written as its JSON escape
    claim.write(block_name(block.start, block.end), lines.encode("utf-8", "backslashreplace"))


def format_row(kept: dict, added: dict) -> str:
    """A row as a line of JSON. NaN and infinity, which JSON does not have, are null in a kept column and an error in a result."""
    try:
        return json.dumps(kept | added, ensure_ascii=False, default=to_json, allow_nan=False) + "\n"
    except ValueError:
        kept = json.loads(json.dumps(kept, default=to_json), parse_constant=lambda name: None)
    try:
        return json.dumps(kept | added, ensure_ascii=False, default=to_json, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(kept | {"error": "a result is not a number"}, ensure_ascii=False) + "\n"


def read_blocks(claim: Claim, documents: int) -> tuple[list[Path], int, list[str]]:
    """The files of all blocks in the documents' order, the number of rows with an error, and messages of unreadable files.

    Raises:
        RuntimeError: if the blocks do not contain each document exactly once.
        UserError: if a file is not as it was written.
    """
    finished, end = finished_blocks(claim), 0
    for start, next_end in finished.items():
        if start != end:
            break
        end = next_end
    if end != documents or len(finished) != sum(1 for start in finished if start < end):
        raise RuntimeError(
            f"{claim.folder} has no results for document {end:,} of {documents:,}. Repeat the same command."
        )
    paths, errors, files = [], 0, []
    for block in finished.items():
        name = block_name(*block)
        content = (claim.folder / name).read_bytes()
        claim.check_hash(name, hashlib.sha256(content).hexdigest())
        for line in content.splitlines() if b'"error": ' in content else ():
            if b'"error": ' in line and isinstance(error := json.loads(line).get("error"), str):
                errors += 1
                files += [error] if UNREADABLE in error else []
        paths.append(claim.folder / name)
    return paths, errors, files


def join_blocks(
    claim: Claim, output: Path, documents: int, process: Process, earlier: OutputRecord | None = None
) -> RunSummary:
    """Joins the files of all blocks in the documents' order, after the rows of an `earlier` output.

    Raises:
        RuntimeError: if the blocks do not contain each document exactly once.
        UserError: if a file is not as it was written.
        OSError: if the disk is full.
    """
    paths, errors, files = read_blocks(claim, documents)
    new = claim.name_file(f"joined{output.suffix}")
    new.unlink(missing_ok=True)
    try:
        if output.suffix == ".parquet":
            from .parquet_output import write_parquet

            before = [] if earlier is None else [copy_rows(output, claim.name_file("earlier.jsonl"))]
            write_parquet([*before, *paths], new, process.types())
        elif output.suffix in DELIMITERS:
            write_csv(lambda: csv_cells(output if earlier else None, paths), new, DELIMITERS[output.suffix])
        else:
            with new.open("wb") as out:
                for path in [*([] if earlier is None else [output]), *paths]:
                    with path.open("rb") as block:
                        shutil.copyfileobj(block, out, 1 << 20)
        sync(new)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise describe_space(error, output) from error
    settings = {name: value for name, value in claim.settings.items() if name != APPENDED}
    if earlier is not None:
        errors, files = errors + earlier.errors, earlier.files + files
    total = documents + (earlier.documents if earlier else 0)
    record = OutputRecord(settings, new.stat().st_size, hash_file(new), total, errors, files)
    write_record(output, record)
    new.replace(output)
    sync(output.parent)  # before the blocks are deleted
    return summarize(record, documents)


def summarize(record: OutputRecord, new: int) -> RunSummary:
    """The summary of an output to which a call has added `new` rows."""
    return RunSummary(record.documents, record.errors, record.files, new)


def copy_rows(output: Path, path: Path) -> Path:
    """Writes the rows of a Parquet file, without nulls, as JSON Lines."""
    with path.open("w", encoding="utf-8") as file:
        for row in read_rows(output):
            values = {name: value for name, value in row.items() if value is not None or name != "error"}
            file.write(json.dumps(values, default=to_json) + "\n")
    return path


def csv_cells(earlier: Path | None, paths: Iterable[Path]) -> Iterator[dict[str, str]]:
    """The cells of an earlier CSV file, and of the rows of JSON Lines files."""
    if earlier is not None:
        for row in read_rows(earlier):
            yield flatten(row)
    for path in paths:
        for row in read_rows(path):
            yield flatten(row)
