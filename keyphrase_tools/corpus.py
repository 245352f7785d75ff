"""Extracts the keyphrases of a corpus of any size into a JSON Lines file, resumably and in one or more processes.

During the run, results are appended to the folder OUT.parts after every batch. The same call resumes from there, also with
another number of processes. At the end all documents are written to OUT in their order, and the folder is deleted.
"""

import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from tqdm import tqdm

from .candidates import parse_candidates
from .clean_text import clean
from .corpus_parts import PartWriter, Windows, merge_parts, open_parts, read_done, read_windows
from .fingerprints import hash_config, hash_files, hash_lines, hash_tokenizer, hash_weights
from .input_documents import split_into_blocks
from .words import join_title

SUFFIXES = (".jsonl", ".ndjson", ".json", "")  # accepted for the output, which is JSON Lines
BATCHES = 16  # batches of documents that are sorted by length together, approximately


class CorpusRow(NamedTuple):
    """One document of a corpus. `content` is the input of the pipeline, or `None` if it cannot be read; `error` says why."""

    number: int
    id: str | int
    content: dict | None
    error: str | None = None


@dataclass
class Corpus:
    """The documents of a folder of .txt files, a JSON Lines file or a data set, read lazily.

    Args:
        source: a folder of .txt files, whose relative paths are the ids; a .jsonl file; or the Hub id or folder of a data set.
        split: the split of a data set.
        text_column, title_column, id_column: column names. A text may be a list of words. Without an id, the document's
            index is used.

    Raises:
        FileNotFoundError: if the source is neither a folder, a file nor a data set.
        ValueError: if the source is empty.
    """

    source: str | Path
    split: str = "test"
    text_column: str = "text"
    title_column: str | None = "title"
    id_column: str = "id"

    def __post_init__(self):
        path = Path(self.source)
        self._files = sorted(path.rglob("*.txt")) if path.is_dir() else []
        if self._files:
            self._rows, self._length = self._of_files, len(self._files)
        elif path.is_file():
            self._rows = self._of_lines
            self._digest, self._length = hash_lines(path)
        else:
            self._dataset = open_dataset(str(self.source), self.split)
            self._rows, self._length = self._of_dataset, len(self._dataset)
        if not self._length:
            raise ValueError(f"There are no documents in {self.source}.")

    def __len__(self) -> int:
        return self._length

    def fingerprint(self) -> str:
        """Hash of a file's content, of a folder's names, sizes and modification times, or the data set's own fingerprint."""
        if self._files:
            return hash_files(Path(self.source), self._files)
        return self._digest if self._rows == self._of_lines else self._dataset._fingerprint

    def sizes(self) -> array:
        """The approximate size of each document, for the progress bar: bytes, or characters for a data set."""
        if self._files:
            return array("Q", (path.stat().st_size for path in self._files))
        if self._rows == self._of_lines:
            with open(self.source, "rb") as lines:
                return array("Q", (len(line) for line in lines if line.strip()))
        texts = (
            self._dataset[self.text_column] if self.text_column in self._dataset.column_names else [None] * len(self)
        )
        return array("Q", (len(text) if isinstance(text, str) else sum(map(len, text or [])) for text in texts))

    def read(self, selected: Callable[[int], bool] = lambda number: True) -> Iterator[CorpusRow]:
        """The documents for whose index `selected` is true, in order."""
        return self._rows(selected)

    def _of_files(self, selected) -> Iterator[CorpusRow]:
        for number, path in enumerate(self._files):
            if selected(number):
                name = path.relative_to(self.source).as_posix()
                try:
                    yield CorpusRow(number, name, {"text": path.read_text(encoding="utf-8")})
                except (OSError, UnicodeDecodeError) as error:
                    yield CorpusRow(number, name, None, f"{type(error).__name__}: {error}")

    def _of_lines(self, selected) -> Iterator[CorpusRow]:
        with open(self.source, "rb") as lines:
            for number, line in enumerate(line for line in lines if line.strip()):
                if not selected(number):
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:  # not JSON, or not UTF-8
                    yield CorpusRow(number, number, None, f"{type(error).__name__}: {error}")
                else:
                    yield self._of_row(number, row)

    def _of_dataset(self, selected) -> Iterator[CorpusRow]:
        numbers = [number for number in range(self._length) if selected(number)]
        for number, row in zip(numbers, self._dataset.select(numbers), strict=True):
            yield self._of_row(number, row)

    def _of_row(self, number: int, row) -> CorpusRow:
        if not isinstance(row, Mapping):
            return CorpusRow(number, number, None, f"expected a JSON object, got a {type(row).__name__}")
        name, text = row.get(self.id_column), row.get(self.text_column)
        name = number if name is None else name
        if isinstance(text, list) and all(isinstance(word, str) for word in text):
            text = " ".join(text)
        title = row.get(self.title_column) if self.title_column else None
        if not isinstance(text, str) or not isinstance(title, str | None):
            column = self.title_column if isinstance(text, str) else self.text_column
            columns = ", ".join(map(repr, row))
            return CorpusRow(
                number, name, None, f"{column!r} is {row.get(column)!r:.60}, not a text; columns: {columns}"
            )
        return CorpusRow(number, name, {"title": title, "text": text})


def read_texts(corpus: Corpus, max_documents: int | None = None) -> tuple[dict[int, str], dict[int, str]]:
    """Reads the first documents, each with its title and text joined.

    Returns:
        The texts by document index, and the error messages of the documents that cannot be read or are empty.
    """
    texts, errors = {}, {}
    for document in corpus.read(lambda number: max_documents is None or number < max_documents):
        content = document.content
        text = clean(join_title(content.get("title"), content["text"])) if content else ""
        if text.strip():
            texts[document.number] = text
        else:
            errors[document.number] = document.error or "it is empty"
    return texts, errors


def open_dataset(name: str, split: str):
    """Opens a split of a data set on the Hub or in a local folder.

    Raises:
        FileNotFoundError: if it does not exist.
    """
    if name.endswith((".jsonl", ".json", ".txt")):
        raise FileNotFoundError(f"The file {name} does not exist.")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            "Data sets on the Hub need the package datasets. Install it with: pip install lexperts[train]"
        ) from error
    try:
        return load_dataset(name, split=split)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{name!r} is neither a folder of .txt files nor a .jsonl file, and cannot be opened as a data set with split={split!r}: "
            f"{error}"
        ) from error


class ExtractionSummary(NamedTuple):
    """Result of `extract_corpus`: the number of documents in the output, and of those that could not be read."""

    documents: int
    errors: int


def check_output(output: str | Path) -> None:
    """Checks the path of an output before the model is loaded.

    Raises:
        FileExistsError: if the output exists.
        ValueError: if its suffix is that of another format than JSON Lines.
    """
    output = Path(output)
    if output.exists():
        raise FileExistsError(f"{output} already exists and is complete. Choose another name, or delete it.")
    if output.suffix not in SUFFIXES:
        name = output.with_suffix(".jsonl").name
        raise ValueError(f"{output} ends in {output.suffix!r}, but the output is JSON Lines. Name it {name!r}.")


def extract_corpus(
    extract,
    corpus: Corpus,
    output: str | Path,
    *,
    batch_size: int = 8,
    rank: int = 0,
    processes: int = 1,
    wait: Callable[[], None] = lambda: None,
    mentions: bool = False,
    **options,
) -> ExtractionSummary:
    """Extracts the keyphrases of a corpus into a JSON Lines file, `{"id", "keyphrases": [{"keyphrase", "score", ...}]}`.

    A document that cannot be read is written as `{"id", "error"}` and does not stop the run. Offsets are those of the
    pipeline: they refer to the text, or if the document has a title, to the column named by `field`; for a list of words, to
    the words joined by blanks. Repeat the same call after an interruption: no batch is computed twice, and with the same
    number of processes the output is the same, byte for byte, as without the interruption.

    Args:
        extract: a keyphrase-extraction pipeline.
        corpus: the documents.
        output: the file to write, which must not exist yet.
        batch_size: windows per batch.
        rank, processes, wait: the index of this process, the number of processes, and a function that waits for all of
            them: `process_index`, `num_processes` and `wait_for_everyone` of `accelerate.PartialState()`.
        mentions: write all mentions of a keyphrase.
        options: arguments of the pipeline, such as `top_k` and `threshold`. With `diversity`, the windows of a document
            that was unfinished when the run was interrupted are read again.

    Returns:
        The numbers of documents and of errors.

    Raises:
        FileExistsError: if the output exists.
        ValueError: if the output has the suffix of another format, or if an unfinished run used another model, other
            documents or other options; the message names what differs. For `candidates` with one list per document.
    """
    output, parts = Path(output), Path(f"{output}.parts")
    if "candidates" in options:
        options["candidates"] = parse_candidates(options["candidates"])  # once, not for each block
    if rank == 0:
        check_output(output)
        open_parts(parts, describe_run(extract, corpus, options | {"mentions": mentions}))
    wait()
    done = read_done(parts, len(corpus))
    cached = read_windows(parts, done)
    wait()  # before any process appends to a part
    shard = ProcessShard(len(corpus), batch_size, rank, processes)
    with PartWriter(parts, rank) as writer, Progress(corpus, shard, done) as progress:
        for documents in shard.read(corpus, done):
            unreadable = [d for d in documents if d.content is None and not done[d.number]]
            writer.write((d.number, {"id": d.id, "error": d.error}) for d in unreadable)
            progress.update(finished=[d.number for d in unreadable])
            for block in cut_blocks([d for d in documents if d.content is not None], shard.block):
                if all(done[d.number] for d in block):
                    continue
                for rows, windows, shares in read_block(extract, block, done, cached, mentions, batch_size, options):
                    writer.write(rows, windows)
                    progress.update(shares, [number for number, _ in rows])
                writer.clear_windows()
    wait()
    errors = merge_parts(parts, output, len(corpus)) if rank == 0 else 0
    wait()
    return ExtractionSummary(len(corpus), errors)


class ProcessShard:
    """The documents of one process: every n-th block of `block` consecutive documents, for n processes.

    Blocks do not depend on which documents are done, and so neither do the batches.
    """

    def __init__(self, documents: int, batch_size: int, rank: int, processes: int):
        largest = BATCHES * batch_size
        fair = -(-documents // (4 * processes))  # at least four blocks per process
        self.block = largest if processes == 1 else min(largest, fair)
        self.rank, self.processes = rank, processes

    def __contains__(self, number: int) -> bool:
        return number // self.block % self.processes == self.rank

    def read(self, corpus: Corpus, done: bytearray) -> Iterator[list[CorpusRow]]:
        """The blocks of this process, except those whose documents are all done."""

        def selected(number: int) -> bool:
            start = number - number % self.block
            return number in self and not all(done[start : start + self.block])

        for _, documents in groupby(corpus.read(selected), key=lambda document: document.number // self.block):
            yield list(documents)


def cut_blocks(documents: list[CorpusRow], max_documents: int) -> Iterator[list[CorpusRow]]:
    """Splits documents into the same blocks as the pipeline; see `input_documents.split_into_blocks`."""
    start = 0
    for contents in split_into_blocks((document.content for document in documents), max_documents):
        yield documents[start : start + len(contents)]
        start += len(contents)


def read_block(extract, block: list[CorpusRow], done: bytearray, cached: Windows, mentions: bool, batch_size, options):
    """Yields, for each batch, the rows of finished documents, the windows of unfinished ones, and the shares that were read."""
    numbers = [document.number for document in block]
    index_of = {number: index for index, number in enumerate(numbers)}
    reads = extract.read_block(
        [document.content for document in block],
        batch_size=batch_size,
        first=numbers[0],
        done={index for index, number in enumerate(numbers) if done[number]},
        cached={(index_of[n], window): values for (n, window), values in cached.items() if n in index_of},
        **options,
    )
    for read in reads:
        rows = []
        for index, phrases in read.finished.items():
            kept = phrases if mentions else [{k: v for k, v in p.items() if k != "mentions"} for p in phrases]
            rows.append((numbers[index], {"id": block[index].id, "keyphrases": kept}))
        windows = {(numbers[index], window): values for (index, window), values in read.windows.items()}
        yield rows, windows, {numbers[index]: share for index, share in read.shares.items()}


class Progress:
    """The progress bar of the first process. It advances with every batch, also within a long document."""

    def __init__(self, corpus: Corpus, shard: ProcessShard, done: bytearray):
        self._shown = shard.rank == 0
        self._sizes = [max(1, size) for size in corpus.sizes()] if self._shown else []
        mine = [number for number in range(len(self._sizes)) if number in shard]
        self._documents, self._finished = len(mine), sum(done[number] for number in mine)
        self._read, self._begun = float(sum(self._sizes[n] for n in mine if done[n])), {}
        self._bar = tqdm(
            total=sum(self._sizes[number] for number in mine),
            initial=int(self._read),
            unit="B",
            unit_scale=True,
            disable=not self._shown,
            smoothing=0.05,
            miniters=1,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._bar.close()

    def update(self, shares: Mapping[int, float] = MappingProxyType({}), finished: Sequence[int] = ()) -> None:
        """Adds the shares of documents that were read, and the documents that are finished."""
        if not self._shown:
            return
        for number, share in shares.items():
            self._begun[number] = self._begun.get(number, 0.0) + share
            self._read += share * self._sizes[number]
        for number in finished:
            self._read += (1 - self._begun.pop(number, 0.0)) * self._sizes[number]
        self._finished += len(finished)
        self._bar.set_postfix_str(f"{self._finished:,} of {self._documents:,} documents", refresh=False)
        self._bar.update(round(self._read) - self._bar.n)


def describe_run(extract, corpus: Corpus, options: dict) -> dict:
    """Everything on which the results of a run depend: source, model, tokenizer and options."""
    columns = {name: getattr(corpus, name) for name in ("split", "text_column", "title_column", "id_column")}
    source = {"source": str(corpus.source), **columns, "documents": len(corpus), "content": corpus.fingerprint()}
    name = str(getattr(extract.model, "name_or_path", "") or type(extract.model).__name__)
    weights, tokenizer = hash_weights(extract.model), hash_tokenizer(extract.tokenizer)
    model = {"model": name, "weights": weights, "tokenizer": tokenizer, **hash_config(extract.model.config)}
    settings = {**extract._preprocess_params, **extract._postprocess_params, **options}
    if (candidates := parse_candidates(settings.get("candidates"))) is not None:
        if candidates.per_document:
            raise ValueError(
                "candidates has one list per document. A corpus needs one list or mapping for all documents."
            )
        settings["candidates"] = candidates.fingerprint()
    return {**source, **model, **settings}
