"""The files of a corpus: what a path or pattern names, and their common format."""

import os
from functools import partial
from pathlib import PurePosixPath

FORMATS = {".txt": "txt", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "csv"}
FORMATS |= {".parquet": "parquet"}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


def find_files(source: str, output: str | os.PathLike | None = None) -> tuple:
    """The file system and the sorted paths of a source, and the folder from which its files are named. That folder depends on the
    source alone: a file that is added later changes no name.

    In a folder or pattern, an `output` and its blocks are left out, so that a command that writes beside its source can be repeated.

    Raises:
        FileNotFoundError: if there are no such files.
        ValueError: if the source is a pipe or a device.
        ImportError: if the package for the protocol is not installed.
    """
    from fsspec.core import url_to_fs  # comes with torch

    fs, path = url_to_fs(source)
    if fs.isfile(path):
        return fs, [path], str(PurePosixPath(path).parent)
    root = PurePosixPath(path)
    if fs.isdir(path):
        found = [p for p in fs.find(path) if suffix(p) in FORMATS]
        hidden = {
            p
            for p in found
            if any(part.startswith((".", "_")) for part in PurePosixPath(p).relative_to(path.rstrip("/") or "/").parts)
        }
        paths = [p for p in found if p not in hidden]
    elif any(character in path for character in "*?["):
        root = next(folder for folder in root.parents if not set(str(folder)) & set("*?["))
        hides = not PurePosixPath(path).name.startswith(".")
        found = [p for p in fs.glob(path) if not (hides and PurePosixPath(p).name.startswith("."))]
        paths = [p for p in found if not fs.isdir(p)]  # also links to nothing, to be reported
    elif fs.exists(path):
        raise ValueError(f"{source} is not a regular file. Write its content to a file, and pass that.")
    else:
        raise FileNotFoundError(
            f"{source} does not exist. Pass a file, a folder or a pattern of .txt, .jsonl, .csv, .tsv or .parquet files."
        )
    if output is not None and "file" in fs.protocol:
        own = PurePosixPath(os.path.abspath(output))
        blocks = own.with_name(f"{own.name}.parts")
        paths = [p for p in paths if not {own, blocks} & {PurePosixPath(p), *PurePosixPath(p).parents}]
    if not paths:
        raise FileNotFoundError(f"There are no .txt, .jsonl, .csv, .tsv or .parquet files in {source}.")
    return fs, sorted(paths), str(root)


def suffix(path: str) -> str:
    """The suffix that names the format, without that of a compression."""
    name = PurePosixPath(path.lower())
    return PurePosixPath(name.stem).suffix if name.suffix in COMPRESSED else name.suffix


def find_format(source: str, paths: list[str]) -> str:
    """The format of all files. Raises a `ValueError` if it is not known, or differs."""
    suffixes = sorted({suffix(path) for path in paths})
    unknown = [name for name in suffixes if name not in FORMATS]
    if unknown:
        raise ValueError(f"{source} has the unknown suffix {unknown[0]!r}. Use .txt, .jsonl, .csv, .tsv or .parquet.")
    formats = {FORMATS[name] for name in suffixes}
    if len(formats) > 1:
        raise ValueError(
            f"{source} has files of different formats, {', '.join(suffixes)}. Pass a pattern such as '*{suffixes[0]}'."
        )
    return formats.pop()


def count_lines(path: str) -> int:
    """The number of lines of a local file."""
    with open(path, "rb") as file:
        chunks = iter(partial(file.read, 1 << 20), b"")
        ends = [(chunk.count(b"\n"), chunk[-1:]) for chunk in chunks]
    return sum(count for count, _ in ends) + bool(ends and ends[-1][1] != b"\n")
