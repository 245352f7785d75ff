"""The output of a command: whether its path is free, whether it fits on the disk, and how it is written."""

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from run_tools.errors import expand_user, format_size, is_encodable, short_reason

from .checkpoints import Source
from .errors import MergeError
from .findings import Report
from .output_tensors import OutputTensor
from .shard_writer import COMMAND, Progress, write_checkpoint
from .staging import open_claim, partial_folder
from .value_checks import check_float16

LONGEST_NAME = 255  # bytes, of a file or a folder
SLACK = 16 << 20  # bytes reserved for files other than tensors


def write_output(
    out: Path,
    tensors: list[OutputTensor],
    sources: list[Source],
    progress: Progress | None,
    make_files: Callable[[dict], dict[str, bytes]],
    beside: Mapping[str, list[OutputTensor]] | None = None,
) -> dict[str, Any]:
    """Checks the output path and the values, writes the tensors, those of other files `beside` them, and then the files that
    `make_files` builds from the scan results.
    """
    report = Report()
    nbytes = sum(tensor.nbytes for group in (tensors, *(beside or {}).values()) for tensor in group)
    check_output_path(report, out, sources)
    check_disk(report, out, nbytes)
    check_float16(report, tensors)
    report.raise_for_errors()
    write_checkpoint(out, tensors, sources, make_files, progress, beside=beside)
    return {"out": str(out), "tensors": len(tensors), "bytes": nbytes}


def check_output_path(report: Report, out: Path, sources: Iterable[Source]) -> None:
    """Checks that the output folder is free and outside the sources."""
    try:
        problem = find_output_problem(expand_user(out).resolve(), sources)
    except MergeError as error:  # an unknown user, a staging folder of anything else
        problem = str(error)
    except (ValueError, OSError) as error:  # a null character, a name that is too long
        problem = f"is not a path that can be written ({short_reason(error)}). Choose another folder."
    report.add("error" if problem else "ok", "output", str(out), problem or "is free")


def find_output_problem(target: Path, sources: Iterable[Source]) -> str | None:
    """Why nothing can be written to the folder, if so."""
    if not is_encodable(str(target)) or len(partial_folder(target).name.encode()) > LONGEST_NAME:
        return "is not UTF-8, or its name is too long. Choose another folder."
    for source in sources:
        for folder in {source.checkpoint.folder.resolve(), source.folder.resolve()}:
            relation = "is" if target == folder else "contains" if target in folder.parents else "is inside"
            if relation != "is inside" or folder in target.parents:
                return f"{relation} the source {source.name!r}, which must not be modified. Choose another folder."
    if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
        return "exists and is not empty. Choose another folder, or delete it first."
    parent = existing_parent(target)
    if not parent.is_dir():
        return f"cannot be created: {parent} is a file. Choose another folder."
    if not os.access(parent, os.W_OK | os.X_OK):
        return f"cannot be created: {parent} is not writable. Choose another folder."
    open_claim(partial_folder(target), COMMAND)
    return None


def existing_parent(path: Path) -> Path:
    """The closest parent that exists."""
    return next((parent for parent in path.parents if os.path.lexists(parent)), path)


def check_disk(report: Report, out: Path, needed: int) -> None:
    """Checks the free disk space; the partial output of an interrupted run counts as free."""
    target = expand_user(out).resolve()
    free = shutil.disk_usage(existing_parent(target)).free
    partial = partial_folder(target)
    if partial.is_dir():  # `find_output_problem` has looked at it
        free += sum(file.stat().st_blocks * 512 for file in partial.iterdir())
    if free < needed + SLACK:
        message = f"{format_size(needed + SLACK)} are needed, but {format_size(free)} are free. Free some disk space."
        report.add("error", "disk", str(out), message)
    else:
        report.add("ok", "disk", str(out), f"{format_size(needed)} of {format_size(free)} free")
