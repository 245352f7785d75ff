"""Runs over corpora: blocks of documents are processed by an engine, and one output is written, which resumes after an interruption.

Blocks depend on the documents only, not on the number of workers. `run_tools.resume` describes their files.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from ..claims import Claim
from ..errors import UserError
from ..files import hash_file
from ..option_paths import check_new_folder
from ..resume import OutputRecord, ResumableOutput, SettingsMismatchError
from ..settings import differences, find_changes
from .csv_output import DELIMITERS, flatten, write_csv
from .documents import UNREADABLE, Block, Corpus, Row
from .engines import Engine, LocalEngine
from .outputs import KnownRows, format_row, read_rows
from .parquet_rows import import_parquet

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json", "")
BLOCK_SIZE = 512
COMMAND = "run over a corpus"


class Process(Protocol):
    """What a run does with documents. Objects are pickled for Ray, so they load their models in `describe` or on first use."""

    @property
    def results(self) -> tuple[str, ...]:
        """The names of the values to add, as far as they do not depend on options; `error` is not among them."""

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
        SettingsMismatchError: if the output exists or is unfinished, and is not of a run with the same settings; the message names
            what differs.
        UserError: if the output has the suffix of another format, or if OUT.parts holds anything that is not of this run.
        RuntimeError: if a worker fails repeatedly, or the source changes while it is read.
        BlockingIOError: if another process writes the same output.
        OSError: if the disk is full, among others.
    """
    out, engine = check_output(output), engine or LocalEngine()
    check_kept(corpus, process, out.path)
    with engine:
        about = {**corpus.describe(), **engine.start(process), "block_size": block_size, **(settings or {})}
        about = json.loads(json.dumps(about, default=str))
        if Claim.read(out.parts) is None and (record := find_complete(out, about)):
            return RunSummary(**record.facts, new=0)
        with out.lock():
            if record := find_complete(out, about):  # of another process, or of a run that was killed at its end
                out.is_finished = True
                return RunSummary(**record.facts, new=0)
            earlier = out.find_record()
            known = None if earlier is None else find_known(out.path, corpus, earlier, about, append)
            out.open_claim(about, earlier, may_change=("source",))
            count = process_blocks(process, corpus, engine, out, block_size, known)
            if corpus.describe()["source"] != about["source"]:
                raise RuntimeError(
                    f"{corpus.source} has changed while it was read, so {out.path} is not written. Delete {out.parts}, and "
                    "repeat the command when nothing writes to the source."
                )
            record = out.join(lambda new: join_blocks(out, new, count, process, earlier))
            return RunSummary(**record.facts, new=count)


def process_blocks(
    process: Process, corpus: Corpus, engine: Engine, out: ResumableOutput, block_size: int, known: KnownRows | None
) -> int:
    """Writes the blocks that have no files yet, and returns the number of documents in all blocks."""
    count = 0
    bar = tqdm(total=corpus.documents, unit=" documents", unit_scale=True, smoothing=0.05)
    with bar, logging_redirect_tqdm():  # warnings stand above the bar

        def skip(documents: int) -> None:
            nonlocal count
            count += documents
            bar.update(documents)

        def is_new(row: Row) -> bool:
            return known is None or known.is_new(row.id, row.error)

        blocks = corpus.blocks(block_size, out.blocks(), skip, is_new if known else None)
        if corpus.keep is None:
            blocks = check_columns(blocks, result_names(process, out.path), corpus.source)
        for block, results in engine.run(blocks, bar.update):
            lines = "".join(format_row(kept, added) for kept, added in merge_rows(corpus, block, results))
            out.write_block(block.start, block.end, lines)
            count += len(block.rows)
            bar.n = count  # without rounding, and without what was read twice
            bar.refresh()
        bar.total = count
    return count


def result_names(process: Process, output: Path) -> set[str]:
    """The names of the values that a process adds, besides `error`."""
    names = set(process.results)
    return names | ({"scores"} if output.suffix in DELIMITERS and "keyphrases" in names else set())


def check_columns(blocks: Iterable[Block], results: set[str], source: str) -> Iterator[Block]:
    """The blocks. Raises a `ValueError` before one whose rows have a column that a result would replace."""
    for block in blocks:
        for row in block.rows:
            if taken := results & (row.values or {}).keys():
                raise ValueError(
                    f"{source}, row {row.number + 1}: it has a column {min(taken)!r}, which is the name of a result. Rename or "
                    "remove the column."
                )
        yield block


def check_kept(corpus: Corpus, process: Process, output: Path) -> None:
    """Raises a `ValueError` if a column of the source that is kept has the name of a result."""
    results = result_names(process, output) | {"error"}
    if corpus.id_column != "id":
        results.add("id")
    if taken := [name for name in corpus.keep or () if name in results]:
        raise ValueError(
            f"--keep {taken[0]} is the name of a result. Rename the column of the source, or leave it out of --keep."
        )


def check_output(output: str | Path, source: str | None = None) -> ResumableOutput:
    """Checks the path of an output, before the model is loaded; `source` is what a command reads.

    Raises:
        SettingsMismatchError: if the output exists, and no run of ours has written it unchanged.
        UserError: if it is a folder or the source, or OUT.parts holds anything that is not of a run.
        ValueError: if its suffix is not that of JSON Lines, Parquet or CSV.
        ImportError: for Parquet without pyarrow.
    """
    output = Path(output)
    check_new_folder("OUT", output.parent)
    if os.path.isdir(output):
        raise UserError(f"OUT {output} is a folder. Name a file in it, such as {output / 'out.jsonl'}.")
    if source is not None and os.path.exists(output) and os.path.exists(source) and os.path.samefile(output, source):
        raise UserError(f"OUT {output} is the source, which is not replaced. Name another file.")
    if output.suffix == ".parquet":
        import_parquet()
    elif output.suffix not in (*JSON_SUFFIXES, *DELIMITERS):
        raise ValueError(
            f"{output} ends in {output.suffix!r}. Name it {output.with_suffix('.jsonl').name!r} for JSON Lines, "
            f"{output.with_suffix('.parquet').name!r} for Parquet, or {output.with_suffix('.csv').name!r} for CSV."
        )
    out = ResumableOutput(output, COMMAND)
    out.find_record()
    return out


def find_complete(out: ResumableOutput, about: dict) -> OutputRecord | None:
    """The record of an output that a run with these settings has finished."""
    record = out.find_record()
    return None if record is None or find_changes(record.settings, about) else record


def find_known(output: Path, corpus: Corpus, earlier: OutputRecord, about: dict, append: bool) -> KnownRows:
    """The rows of an output to which a run may append.

    Raises:
        SettingsMismatchError: without `append`, if other settings than the source differ, or if the output has changed.
        ValueError: if the source has no ids.
    """
    only_source = set(find_changes(earlier.settings, about)) <= {"source"}
    if not (only_source and append):
        fix = "add --append to add the documents with new ids, " if only_source else ""
        raise SettingsMismatchError(
            f"{output} already exists, and is of a run with other settings: {differences(earlier.settings, about)}. Repeat that "
            f"run's settings, {fix}choose another name, or delete it."
        )
    if not corpus.has_ids:
        raise ValueError(f"--append finds new documents by their ids, and {corpus.source} has none. Use --id-column.")
    if hash_file(output) != earlier.sha256:
        raise SettingsMismatchError(
            f"{output} has changed since the run that wrote it. Choose another name, or delete it."
        )
    return KnownRows(output, "id" if corpus.keep is not None else corpus.id_column)


def merge_rows(corpus: Corpus, block: Block, results: Iterable[dict]) -> Iterator[tuple[dict, dict]]:
    """The columns of the source and the results, or the error, of each row; `results` are those of its readable rows."""
    results = iter(results)
    for row in block.rows:
        if corpus.keep is None:
            kept = {name: value for name, value in (row.values or {}).items() if name != "error"}
        else:
            kept = {name: (row.values or {}).get(name) for name in corpus.keep}
            kept = {"id": row.id} | kept | {"id": row.id}  # first, and the document's, also if `id` is kept
        yield kept, {"error": row.error} if row.values is None else next(results)


def join_blocks(
    out: ResumableOutput, new: Path, documents: int, process: Process, earlier: OutputRecord | None
) -> dict[str, Any]:
    """Writes the rows of all blocks in the documents' order, after those of an `earlier` output -> the facts of a `RunSummary`.

    Raises:
        RuntimeError: if the blocks do not contain each document exactly once.
        UserError: if a file is not as it was written.
    """
    errors: list[str] = []

    def contents() -> Iterator[bytes]:
        errors.clear()  # of the pass before
        for content in out.read_blocks(documents):
            errors.extend(find_errors(content))
            yield content

    def rows(parse: Callable[[bytes], dict] = json.loads) -> Iterator[dict]:
        yield from () if earlier is None else read_rows(out.path)
        for content in contents():
            yield from map(parse, content.splitlines())

    if new.suffix == ".parquet":
        from .parquet_output import parse_line, write_parquet

        write_parquet(lambda: rows(parse_line), new, process.types())
    elif new.suffix in DELIMITERS:
        write_csv(lambda: map(flatten, rows()), new, DELIMITERS[new.suffix])
    else:
        with new.open("wb") as file:
            if earlier is not None:
                with out.path.open("rb") as before:
                    shutil.copyfileobj(before, file, 1 << 20)
            file.writelines(contents())
    facts: dict[str, Any] = earlier.facts if earlier else {"documents": 0, "errors": 0, "files": []}
    return {
        "documents": facts["documents"] + documents,
        "errors": facts["errors"] + len(errors),
        "files": facts["files"] + [error for error in errors if UNREADABLE in error],
    }


def find_errors(content: bytes) -> Iterator[str]:
    """The errors of a block's rows."""
    for line in content.splitlines() if b'"error": ' in content else ():
        if b'"error": ' in line and isinstance(error := json.loads(line).get("error"), str):
            yield error
