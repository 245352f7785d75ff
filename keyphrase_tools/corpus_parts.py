"""OUT.parts: what an unfinished `extract_corpus` has read so far, and what it has to have in common with its next start.

about.json      what the results depend on
0.jsonl, ...    a file for each process: `number TAB row`, a line for each finished document, in the order they were read
0.windows, ...  a file for each process: `number TAB window TAB values`, of documents that are not finished yet
"""

import base64
import json
import os
import shutil
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

Windows = dict[tuple[int, int], tuple[np.ndarray, np.ndarray | None]]  # (document, window) -> what the model gave


def open_parts(parts: Path, about: dict) -> None:
    """A new folder, or an old one whose lines are whole.

    Raises:
        ValueError: for an old one of which something differs, by name.
    """
    parts.mkdir(parents=True, exist_ok=True)
    path = parts / "about.json"
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        if differences := describe_differences(before, about):
            raise ValueError(
                f"{parts} is of an unfinished run that differs from this one: {'; '.join(differences)}. Start again with what "
                "it had, or delete that folder to start over."
            )
    else:
        new = path.with_suffix(".new")
        new.write_text(json.dumps(about, ensure_ascii=False, indent=1), encoding="utf-8")
        new.replace(path)
    for part in (*parts.glob("*.jsonl"), *parts.glob("*.windows")):
        with part.open("rb+") as file:
            file.truncate(whole_lines(file))


FINGERPRINTS = {
    "weights": "the model's weights (it was trained again, or replaced, at the same place)",
    "tokenizer": "the tokenizer",
    "content": "the documents of the source (it has changed)",
}


def describe_differences(before: Mapping, about: Mapping) -> list[str]:
    """What differs, by name; where a model or a source has another name, its fingerprints say nothing new."""
    names = [name for name in {**before, **about} if before.get(name) != about.get(name)]
    if "model" in names and "weights" not in names:
        names.remove("model")  # moved
    elif "model" in names:
        names = [name for name in names if name not in ("weights", "tokenizer") and not name.startswith("config.")]
    if "source" in names:
        names = [name for name in names if name != ("content" if "content" in names else "source")]
    return [
        FINGERPRINTS[name] if name in FINGERPRINTS else f"{name}={before.get(name)!r} then, {about.get(name)!r} now"
        for name in names
    ]


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
    """For each document 1 if it is finished, else 0."""
    done = bytearray(documents)
    for part in parts.glob("*.jsonl"):
        for number, _ in lines_of(part):
            done[number] = 1
    return done


def read_windows(parts: Path, done: bytearray) -> Windows:
    """The windows of documents that are not finished."""
    known = {}
    for part in sorted(parts.glob("*.windows")):
        with part.open("rb") as file:
            for line in file:
                number, window, p, tags = line.rstrip(b"\n").split(b"\t")
                if not done[int(number)]:
                    p = np.frombuffer(base64.b64decode(p), np.float32).reshape(-1, 3)
                    tags = np.frombuffer(base64.b64decode(tags), np.int64) if tags else None
                    known[int(number), int(window)] = p, tags
    return known


class PartWriter:
    """A process's own two files, written batch by batch."""

    def __init__(self, parts: Path, rank: int):
        self._rows = (parts / f"{rank}.jsonl").open("ab")
        self._windows = (parts / f"{rank}.windows").open("ab")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._rows.close()
        self._windows.close()

    def write(self, rows: Iterable[tuple[int, dict]], windows: Windows | None = None) -> None:
        """Finished documents, and windows of those that are not; both are in the files when this returns."""
        for (number, window), (p, tags) in (windows or {}).items():
            values = [p.astype(np.float32), *([] if tags is None else [tags.astype(np.int64)])]
            written = b"\t".join([base64.b64encode(x.tobytes()) for x in values] + [b""] * (tags is None))
            self._windows.write(b"%d\t%d\t%b\n" % (number, window, written))
        self._windows.flush()
        lines = (f"{number}\t{json.dumps(row, ensure_ascii=False)}\n" for number, row in rows)
        self._rows.write("".join(lines).encode("utf-8", "backslashreplace"))  # a lone surrogate as JSON escapes it
        self._rows.flush()

    def forget_windows(self) -> None:
        """All documents that were begun are finished."""
        self._windows.truncate(0)


def merge_parts(parts: Path, output: Path, documents: int) -> int:
    """All parts as one file in the documents' order -> how many documents could not be read.

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
            for line in _lines_at(opened, part_of, place_of):
                errors += b'"error": ' in line and "error" in json.loads(line)
                out.write(line)
            out.flush()
            os.fsync(out.fileno())
    finally:
        for file in opened:
            file.close()
    new.replace(output)
    shutil.rmtree(parts)
    return errors


def _lines_at(opened: list, part_of: array, place_of: array) -> Iterator[bytes]:
    """The documents' lines, without their numbers."""
    for i, place in zip(part_of, place_of, strict=True):
        opened[i].seek(place)
        line = opened[i].readline()
        yield line[line.index(b"\t") + 1 :]
