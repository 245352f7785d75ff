"""The staging folder of an output: where it is, and whether a merge may use it."""

import json
import os
from collections.abc import Callable
from pathlib import Path

from .source_links import TEMPLATES


def partial_folder(out: Path) -> Path:
    """The staging folder of an output."""
    return out.parent / f".{out.name}.partial"


def find_staging_problem(folder: Path) -> str | None:
    """Why a path cannot be the staging folder, if so: only a folder whose files its journal lists may be emptied."""
    if not os.path.lexists(folder):
        return None
    if folder.is_symlink() or not folder.is_dir():
        return f"{folder} is not a folder that a merge has left. Move it away, or choose another output folder."
    known = journal_files(folder)
    for name, entry in staged_entries(folder):
        is_plain = entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_nlink == 1
        if not is_plain or name not in known:
            return (
                f"{folder} holds {name!r}, which its journal does not list as written by a merge. Move the folder "
                "away, or delete it."
            )
    return None


def staged_entries(folder: Path) -> list[tuple[str, os.DirEntry]]:
    """The entries of a staging folder and of the folder of templates in it, by their names from the staging folder."""
    entries = []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name == TEMPLATES and entry.is_dir(follow_symlinks=False):
            entries += [(f"{TEMPLATES}/{inner.name}", inner) for inner in os.scandir(entry.path)]
        else:
            entries.append((entry.name, entry))
    return entries


def empty_staging(folder: Path, keep: Callable[[str], bool]):
    """Removes the files of a staging folder that `find_staging_problem` has looked at, unless `keep` wants them; templates always."""
    for name, entry in staged_entries(folder):
        if "/" in name or not keep(name):
            os.unlink(entry.path)
    if (folder / TEMPLATES).is_dir():
        (folder / TEMPLATES).rmdir()


def journal_files(folder: Path) -> set[str]:
    """The names of the files that a merge has written to its staging folder, the journals among them."""
    known = set()
    for name in ("journal.jsonl", "journal.new"):
        path = folder / name
        if path.is_symlink() or not path.is_file():
            continue
        for number, line in enumerate(path.read_text(errors="replace", encoding="utf-8").splitlines()):
            try:
                content = dict(json.loads(line))
            except (ValueError, TypeError, RecursionError):  # truncated by an interruption
                break
            if number == 0 and not {"plan", "boot"} <= set(content):
                break
            files = content.get("files")
            known |= {name, *(file for file in files if isinstance(file, str))} if isinstance(files, list) else {name}
    return known
