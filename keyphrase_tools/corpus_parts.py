"""The folder OUT.parts: the results of an unfinished `extract_corpus`, and the settings with which it must be resumed.

about.json      the settings on which the results depend
0.jsonl, ...    one file per process: `number TAB row` for each finished document, in the order in which they were read
0.windows, ...  one file per process: `number TAB window TAB values` for the windows of unfinished documents
"""

import base64
import json
import os
import shutil
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

Windows = dict[tuple[int, int], tuple[np.ndarray, np.ndarray | None]]  # (document, window) -> probabilities, tags


def open_parts(parts: Path, about: dict) -> None:
    """Creates the folder, or checks an existing one and removes its incomplete last lines.

    Raises:
        ValueError: if the settings of an existing folder differ; the message names them.
    """
    parts.mkdir(parents=True, exist_ok=True)
    path = parts / "about.json"
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        if differences := describe_differences(before, about):
            raise ValueError(
                f"{parts} holds an unfinished run with other settings: {'; '.join(differences)}. Repeat that run's "
                "settings, or delete the folder to start over."
            )
    else:
        new = path.with_suffix(".new")
        new.write_text(json.dumps(about, ensure_ascii=False, indent=1), encoding="utf-8")
        new.replace(path)
    for part in (*parts.glob("*.jsonl"), *parts.glob("*.windows")):
        with part.open("rb+") as file:
            file.truncate(end_of_last_line(file))


FINGERPRINTS = {
    "weights": "the model's weights (the checkpoint in that folder was replaced)",
    "tokenizer": "the tokenizer",
    "content": "the documents of the source (they have changed)",
}


def describe_differences(before: Mapping, about: Mapping) -> list[str]:
    """Messages that name the settings that differ. If a model or source was renamed, its other fingerprints are left out."""
    names = [name for name in {**before, **about} if before.get(name) != about.get(name)]
    if "model" in names and "weights" not in names:
        names.remove("model")  # it was only moved
    elif "model" in names:
        names = [name for name in names if name not in ("weights", "tokenizer") and not name.startswith("config.")]
    if "source" in names:
        names = [name for name in names if name != ("content" if "content" in names else "source")]
    return [
        FINGERPRINTS[name] if name in FINGERPRINTS else f"{name}={before.get(name)!r} before, {about.get(name)!r} now"
        for name in names
    ]


def end_of_last_line(file) -> int:
    """The offset after the last newline of a binary file."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - 65536)
        file.seek(start)
        if (newline := file.read(end - start).rfind(b"\n")) >= 0:
            return start + newline + 1
        end = start
    return 0


def line_offsets(part: Path) -> Iterable[tuple[int, int]]:
    """The document index and the file offset of each line."""
    offset = 0
    with part.open("rb") as file:
        for line in file:
            yield int(line[: line.index(b"\t")]), offset
            offset += len(line)


def read_done(parts: Path, documents: int) -> bytearray:
    """For each document, 1 if it is finished, else 0."""
    done = bytearray(documents)
    for part in parts.glob("*.jsonl"):
        for number, _ in line_offsets(part):
            done[number] = 1
    return done


def read_windows(parts: Path, done: bytearray) -> Windows:
    """The windows of unfinished documents."""
    cached = {}
    for part in sorted(parts.glob("*.windows")):
        with part.open("rb") as file:
            for line in file:
                number, window, p, tags = line.rstrip(b"\n").split(b"\t")
                if not done[int(number)]:
                    p = np.frombuffer(base64.b64decode(p), np.float32).reshape(-1, 3)
                    tags = np.frombuffer(base64.b64decode(tags), np.int64) if tags else None
                    cached[int(number), int(window)] = p, tags
    return cached


class PartWriter:
    """Appends to the two files of one process, batch by batch."""

    def __init__(self, parts: Path, rank: int):
        self._rows = (parts / f"{rank}.jsonl").open("ab")
        self._windows = (parts / f"{rank}.windows").open("ab")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._rows.close()
        self._windows.close()

    def write(self, rows: Iterable[tuple[int, dict]], windows: Windows | None = None) -> None:
        """Appends finished documents and the windows of unfinished ones, and flushes both files."""
        for (number, window), (p, tags) in (windows or {}).items():
            values = [p.astype(np.float32), *([] if tags is None else [tags.astype(np.int64)])]
            written = b"\t".join([base64.b64encode(x.tobytes()) for x in values] + [b""] * (tags is None))
            self._windows.write(b"%d\t%d\t%b\n" % (number, window, written))
        self._windows.flush()
        lines = (f"{number}\t{json.dumps(row, ensure_ascii=False)}\n" for number, row in rows)
        self._rows.write(
            "".join(lines).encode("utf-8", "backslashreplace")
        )  # writes a lone surrogate as its JSON escape
        self._rows.flush()

    def clear_windows(self) -> None:
        """Deletes the stored windows once their documents are finished."""
        self._windows.truncate(0)


def merge_parts(parts: Path, output: Path, documents: int) -> int:
    """Merges all parts into one file in the documents' order, and deletes the folder.

    Returns:
        The number of documents that could not be read.

    Raises:
        RuntimeError: if documents are missing because a process failed.
    """
    files = sorted(parts.glob("*.jsonl"))
    part_of, offset_of = array("i", [-1]) * documents, array("q", [0]) * documents
    for i, part in enumerate(files):
        for number, offset in line_offsets(part):
            part_of[number], offset_of[number] = i, offset
    missing = sum(1 for i in part_of if i < 0)
    if missing:
        raise RuntimeError(f"{missing:,} documents are missing because a process failed. Repeat the same command.")
    new, errors = Path(f"{output}.new"), 0
    part_files = [part.open("rb") for part in files]
    try:
        with new.open("wb") as out:
            for line in _lines_at(part_files, part_of, offset_of):
                errors += b'"error": ' in line and "error" in json.loads(line)
                out.write(line)
            out.flush()
            os.fsync(out.fileno())
    finally:
        for file in part_files:
            file.close()
    new.replace(output)
    shutil.rmtree(parts)
    return errors


def _lines_at(part_files: list, part_of: array, offset_of: array) -> Iterator[bytes]:
    """The documents' lines, without their indices."""
    for i, offset in zip(part_of, offset_of, strict=True):
        part_files[i].seek(offset)
        line = part_files[i].readline()
        yield line[line.index(b"\t") + 1 :]
