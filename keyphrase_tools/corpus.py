"""A corpus of any size in, its keyphrases out, a JSON line a document.

While it runs, finished documents stand in OUT.parts, a file for each process; the same call goes on where it stopped, with
as many processes as there are then. At the end OUT has all documents in their order, and the folder is gone.
"""

import json
import os
import shutil
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm


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

    source: str
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
            with path.open("rb") as lines:
                self._length = sum(1 for line in lines if line.strip())
        else:
            self._dataset = open_dataset(self.source, self.split)
            self._rows, self._length = self._of_dataset, len(self._dataset)
        if not self._length:
            raise ValueError(f"There are no documents in {self.source}.")

    def __len__(self) -> int:
        return self._length

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

    A document that cannot be read has `{"id", "error"}`, and the others go on. Places refer to what the pipeline searches:
    the text, or title and text joined (see there). Start the same call again after an interruption.

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
        ValueError: for an unfinished run of other documents or with other options; what differs is named.
    """
    output, parts = Path(output), Path(f"{output}.parts")
    if rank == 0:
        if output.exists():
            raise FileExistsError(f"{output} is there already, and finished. Choose another name, or delete it.")
        begin(parts, describe(extract, corpus, options | {"mentions": mentions}))
    wait()
    done = read_done(parts, len(corpus))
    wait()  # before any part grows
    left = deque()

    def contents() -> Iterator[dict]:
        for document in corpus.read(lambda number: not done[number] and number % processes == rank):
            left.append(document)
            if document.content is not None:
                yield document.content

    mine = sum(1 for number in range(rank, len(corpus), processes) if not done[number])
    bar = tqdm(total=mine, unit="document", disable=rank != 0, smoothing=0.05)
    with (parts / f"{rank}.jsonl").open("a", encoding="utf-8") as file, bar:

        def write(row: dict, number: int):
            file.write(f"{number}\t{json.dumps(row, ensure_ascii=False)}\n")
            bar.update()

        for phrases in extract(contents(), batch_size=batch_size, **options):
            write_errors(left, write)
            document = left.popleft()
            kept = phrases if mentions else [{k: v for k, v in p.items() if k != "mentions"} for p in phrases]
            write({"id": document.id, "keyphrases": kept}, document.number)
            file.flush()
        write_errors(left, write)
    wait()
    finished = join(parts, output, len(corpus)) if rank == 0 else Finished(len(corpus), 0)
    wait()
    return finished


def write_errors(left: deque, write: Callable[[dict, int], None]):
    """Those documents at the head of the queue that could not be read."""
    while left and left[0].content is None:
        document = left.popleft()
        write({"id": document.id, "error": document.error}, document.number)


def describe(extract, corpus: Corpus, options: dict) -> dict:
    """What a run must have in common with the one that it goes on with."""
    of_corpus = {
        name: getattr(corpus, name) for name in ("source", "split", "text_column", "title_column", "id_column")
    }
    model = str(getattr(extract.model, "name_or_path", "") or type(extract.model).__name__)
    return {**of_corpus, "documents": len(corpus), "model": model, **options}


def begin(parts: Path, about: dict):
    """A new folder of parts, or an old one whose lines are whole."""
    parts.mkdir(parents=True, exist_ok=True)
    path = parts / "about.json"
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        for name in {**before, **about}:
            if before.get(name) != about.get(name):
                raise ValueError(
                    f"{parts} is of an unfinished run with {name}={before.get(name)!r}, and this one has "
                    f"{about.get(name)!r}. Go on with what it had, or delete the folder."
                )
    else:
        new = path.with_suffix(".new")
        new.write_text(json.dumps(about, ensure_ascii=False, indent=1), encoding="utf-8")
        new.replace(path)
    for part in parts.glob("*.jsonl"):
        with part.open("rb+") as file:
            file.truncate(whole_lines(file))


def whole_lines(file) -> int:
    """Where the last whole line of a binary file ends."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - 65536)
        file.seek(start)
        if (cut := file.read(end - start).rfind(b"\n")) >= 0:
            return start + cut + 1
        end = start
    return 0


def lines_of(part: Path) -> Iterable[tuple[int, int]]:
    """Number and place of each line."""
    place = 0
    with part.open("rb") as file:
        for line in file:
            yield int(line[: line.index(b"\t")]), place
            place += len(line)


def read_done(parts: Path, documents: int) -> bytearray:
    done = bytearray(documents)
    for part in parts.glob("*.jsonl"):
        for number, _ in lines_of(part):
            done[number] = 1
    return done


def join(parts: Path, output: Path, documents: int) -> Finished:
    """All parts as one file in the documents' order.

    Raises:
        RuntimeError: where documents are missing, because a process failed.
    """
    files = sorted(parts.glob("*.jsonl"))
    part_of, place_of = array("i", [-1]) * documents, array("q", [0]) * documents
    for i, part in enumerate(files):
        for number, place in lines_of(part):
            part_of[number], place_of[number] = i, place
    missing = sum(1 for i in part_of if i < 0)
    if missing:
        raise RuntimeError(f"{missing:,} documents are missing: a process failed. Start the same command again.")
    new, errors = Path(f"{output}.new"), 0
    opened = [part.open("rb") for part in files]
    try:
        with new.open("wb") as out:
            for i, place in zip(part_of, place_of, strict=True):
                opened[i].seek(place)
                line = opened[i].readline()
                line = line[line.index(b"\t") + 1 :]
                errors += b'"error": ' in line and "error" in json.loads(line)
                out.write(line)
            out.flush()
            os.fsync(out.fileno())
    finally:
        for file in opened:
            file.close()
    new.replace(output)
    shutil.rmtree(parts)
    return Finished(documents, errors)
