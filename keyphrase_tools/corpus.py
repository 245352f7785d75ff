"""A corpus of any size in, its keyphrases out, a JSON line a document.

While it runs, what is read is in OUT.parts, batch by batch; the same call resumes where it stopped, with as many processes as
there are then. At the end OUT has all documents in their order, and the folder is gone.
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

from .clean_text import clean
from .corpus_parts import PartWriter, Windows, merge_parts, open_parts, read_done, read_windows
from .fingerprints import hash_config, hash_files, hash_lines, hash_tokenizer, hash_weights
from .input_documents import blocks
from .words import join_title

SUFFIXES = (".jsonl", ".ndjson", ".json", "")  # of an output, which is JSON Lines
BATCHES = 16  # of documents that are sorted by length together, about


class Document(NamedTuple):
    """`content` is what the pipeline reads, or `None` where `error` says why it cannot be read."""

    number: int
    id: str | int
    content: dict | None
    error: str | None = None


@dataclass
class Corpus:
    """Documents of a folder of .txt files, a JSON Lines file or a data set, read as they are asked for.

    Args:
        source: a folder of .txt files, whose relative names are the ids; a .jsonl file; or the Hub id or folder of a data set.
        split: of a data set.
        text_column, title_column, id_column: of files of rows; a text may be a list of words. Without an id a document
            has its number.

    Raises:
        FileNotFoundError: for a source that is neither a folder nor a file nor a data set.
        ValueError: for an empty one.
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
        """Of its documents: a file's content, a folder's names, sizes and times of change, or that of the data set."""
        if self._files:
            return hash_files(Path(self.source), self._files)
        return self._digest if self._rows == self._of_lines else self._dataset._fingerprint

    def sizes(self) -> array:
        """About how long each document is, to estimate how long it takes to read: in bytes, or characters of a data set."""
        if self._files:
            return array("Q", (path.stat().st_size for path in self._files))
        if self._rows == self._of_lines:
            with open(self.source, "rb") as lines:
                return array("Q", (len(line) for line in lines if line.strip()))
        texts = (
            self._dataset[self.text_column] if self.text_column in self._dataset.column_names else [None] * len(self)
        )
        return array("Q", (len(text) if isinstance(text, str) else sum(map(len, text or [])) for text in texts))

    def read(self, wanted: Callable[[int], bool] = lambda number: True) -> Iterator[Document]:
        """The documents whose numbers are wanted, in order."""
        return self._rows(wanted)

    def _of_files(self, wanted) -> Iterator[Document]:
        for number, path in enumerate(self._files):
            if wanted(number):
                name = path.relative_to(self.source).as_posix()
                try:
                    yield Document(number, name, {"text": path.read_text(encoding="utf-8")})
                except (OSError, UnicodeDecodeError) as error:
                    yield Document(number, name, None, f"{type(error).__name__}: {error}")

    def _of_lines(self, wanted) -> Iterator[Document]:
        with open(self.source, "rb") as lines:
            for number, line in enumerate(line for line in lines if line.strip()):
                if not wanted(number):
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:  # not JSON, or not UTF-8
                    yield Document(number, number, None, f"{type(error).__name__}: {error}")
                else:
                    yield self._of_row(number, row)

    def _of_dataset(self, wanted) -> Iterator[Document]:
        numbers = [number for number in range(self._length) if wanted(number)]
        for number, row in zip(numbers, self._dataset.select(numbers), strict=True):
            yield self._of_row(number, row)

    def _of_row(self, number: int, row) -> Document:
        if not isinstance(row, Mapping):
            return Document(number, number, None, f"a JSON object is wanted, not a {type(row).__name__}")
        name, text = row.get(self.id_column), row.get(self.text_column)
        name = number if name is None else name
        if isinstance(text, list) and all(isinstance(word, str) for word in text):
            text = " ".join(text)
        title = row.get(self.title_column) if self.title_column else None
        if not isinstance(text, str) or not isinstance(title, str | None):
            wrong = self.title_column if isinstance(text, str) else self.text_column
            known = ", ".join(map(repr, row))
            return Document(number, name, None, f"{wrong!r} is {row.get(wrong)!r:.60} and no text; columns: {known}")
        return Document(number, name, {"title": title, "text": text})


def read_texts(corpus: Corpus, most: int | None = None) -> tuple[dict[int, str], dict[int, str]]:
    """The first documents as the pipeline reads them, title and text as one -> texts, and what is wrong with others, by number."""
    texts, errors = {}, {}
    for document in corpus.read(lambda number: most is None or number < most):
        content = document.content
        text = clean(join_title(content.get("title"), content["text"])) if content else ""
        if text.strip():
            texts[document.number] = text
        else:
            errors[document.number] = document.error or "it is empty"
    return texts, errors


def open_dataset(name: str, split: str):
    """A split of a data set on the Hub or in a folder of its own.

    Raises:
        FileNotFoundError: where there is none.
    """
    if name.endswith((".jsonl", ".json", ".txt")):
        raise FileNotFoundError(f"There is no file {name}.")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError("A data set of the Hub needs datasets: pip install lexperts[train]") from error
    try:
        return load_dataset(name, split=split)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{name!r} is no folder of .txt files and no .jsonl file, and could not be opened as a data set with split={split!r}: "
            f"{error}"
        ) from error


class Finished(NamedTuple):
    """What a call of `extract_corpus` has done: documents in the output, and those that could not be read."""

    documents: int
    errors: int


def check_output(output: str | Path) -> None:
    """
    Raises:
        FileExistsError: for an output that is there.
        ValueError: for one whose name promises something else than JSON Lines.
    """
    output = Path(output)
    if output.exists():
        raise FileExistsError(f"{output} is there already, and finished. Choose another name, or delete it.")
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
) -> Finished:
    """Extracts the keyphrases of a corpus into a JSON Lines file, `{"id", "keyphrases": [{"keyphrase", "score", ...}]}`.

    A document that cannot be read has `{"id", "error"}`, and the others are read. Places are those of the pipeline: offsets in
    the text, or if the document has a title in that of the two which `field` names; in a list of words, in those words with
    blanks between. Start the same call again after an interruption: no batch is read twice, and with as many processes as
    before the output is the same, byte for byte, as that of a run without interruption.

    Args:
        extract: a keyphrase-extraction pipeline.
        output: the file, which must not be there yet.
        batch_size: windows that the model reads at once.
        rank, processes, wait: which process this is, of how many, and how it waits for all; of `accelerate.PartialState()`
            `process_index`, `num_processes` and `wait_for_everyone`.
        mentions: whether all places of a keyphrase are written.
        options: of the pipeline, such as `top_k` and `threshold`.

    Raises:
        FileExistsError: for an output that is there.
        ValueError: for an output with the suffix of another format, and for an unfinished run with another model, other
            documents or other options; what differs is named.
    """
    output, parts = Path(output), Path(f"{output}.parts")
    if rank == 0:
        check_output(output)
        open_parts(parts, describe(extract, corpus, options | {"mentions": mentions}))
    wait()
    done = read_done(parts, len(corpus))
    known = read_windows(parts, done)
    wait()  # before any part grows
    share = Share(len(corpus), batch_size, rank, processes)
    with PartWriter(parts, rank) as writer, Progress(corpus, share, done) as progress:
        for documents in share.read(corpus, done):
            unreadable = [d for d in documents if d.content is None and not done[d.number]]
            writer.write((d.number, {"id": d.id, "error": d.error}) for d in unreadable)
            progress.update(finished=[d.number for d in unreadable])
            for block in cut_blocks([d for d in documents if d.content is not None], share.block):
                if all(done[d.number] for d in block):
                    continue
                for rows, windows, shares in read_block(extract, block, done, known, mentions, batch_size, options):
                    writer.write(rows, windows)
                    progress.update(shares, [number for number, _ in rows])
                writer.forget_windows()
    wait()
    errors = merge_parts(parts, output, len(corpus)) if rank == 0 else 0
    wait()
    return Finished(len(corpus), errors)


class Share:
    """The documents that one of several processes reads: every so-many-th block of `block` documents with consecutive numbers.

    Blocks do not depend on what is done already, and so neither does what is read in one batch.
    """

    def __init__(self, documents: int, batch_size: int, rank: int, processes: int):
        most = BATCHES * batch_size
        fair = -(-documents // (4 * processes))  # that each process may have some
        self.block = most if processes == 1 else min(most, fair)
        self.rank, self.processes = rank, processes

    def __contains__(self, number: int) -> bool:
        return number // self.block % self.processes == self.rank

    def read(self, corpus: Corpus, done: bytearray) -> Iterator[list[Document]]:
        """Its blocks, those of which all documents are done left out."""

        def wanted(number: int) -> bool:
            start = number - number % self.block
            return number in self and not all(done[start : start + self.block])

        for _, documents in groupby(corpus.read(wanted), key=lambda document: document.number // self.block):
            yield list(documents)


def cut_blocks(documents: list[Document], most: int) -> Iterator[list[Document]]:
    """`input_documents.blocks` of documents, as the pipeline itself makes them."""
    place = 0
    for contents in blocks((document.content for document in documents), most):
        yield documents[place : place + len(contents)]
        place += len(contents)


def read_block(extract, block: list[Document], done: bytearray, known: Windows, mentions: bool, batch_size, options):
    """Batch by batch: rows with their documents' numbers, windows of documents that are not finished, shares read."""
    numbers = [document.number for document in block]
    place_of = {number: place for place, number in enumerate(numbers)}
    reads = extract.read_block(
        [document.content for document in block],
        batch_size=batch_size,
        first=numbers[0],
        done={place for place, number in enumerate(numbers) if done[number]},
        known={(place_of[n], window): values for (n, window), values in known.items() if n in place_of},
        **options,
    )
    for read in reads:
        rows = []
        for place, phrases in read.finished.items():
            kept = phrases if mentions else [{k: v for k, v in p.items() if k != "mentions"} for p in phrases]
            rows.append((numbers[place], {"id": block[place].id, "keyphrases": kept}))
        windows = {(numbers[place], window): values for (place, window), values in read.windows.items()}
        yield rows, windows, {numbers[place]: share for place, share in read.shares.items()}


class Progress:
    """The bar of the first process, which follows what is read: of a long document each batch of its windows."""

    def __init__(self, corpus: Corpus, share: Share, done: bytearray):
        self._shown = share.rank == 0
        self._sizes = [max(1, size) for size in corpus.sizes()] if self._shown else []
        mine = [number for number in range(len(self._sizes)) if number in share]
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
        """The shares of documents that were read, and the documents that are finished now."""
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


def describe(extract, corpus: Corpus, options: dict) -> dict:
    """What the results of a run depend on."""
    columns = {name: getattr(corpus, name) for name in ("split", "text_column", "title_column", "id_column")}
    source = {"source": str(corpus.source), **columns, "documents": len(corpus), "content": corpus.fingerprint()}
    name = str(getattr(extract.model, "name_or_path", "") or type(extract.model).__name__)
    weights, tokenizer = hash_weights(extract.model), hash_tokenizer(extract.tokenizer)
    model = {"model": name, "weights": weights, "tokenizer": tokenizer, **hash_config(extract.model.config)}
    return {**source, **model, **extract._preprocess_params, **extract._postprocess_params, **options}
