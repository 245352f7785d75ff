"""A claim on a folder: the record of the command that fills it, its settings, and every file that it writes.

A file is named in the record before it is written, so a run that is killed at any moment leaves no file without a name. Only files
that the record names are read, counted or removed. Anything else in the folder is the user's, and then the folder is refused.
A name may have one folder in front, such as "templates/rag.jinja".
"""

import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

from .errors import UserError
from .files import describe_space, write_file

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)
RECORD = "run.record"  # the first line has the command and its settings, each further one a file
LOCK = "run.lock"
TEMPORARY = re.compile(r"\.(.+)\.\d+\.tmp")  # as `files.write_file` names a file until it is complete


class FileEntry(NamedTuple):
    """A file of a record. Its size and hash are `None` until it is complete if it is written piece by piece."""

    size: int | None = None
    sha256: str | None = None


class Claim:
    """The record of a folder.

    Attributes:
        command: what fills the folder, such as "extract".
        settings: those of the run, as JSON.
        files: the entries of the record by name.
    """

    def __init__(self, folder: Path, command: str, settings: dict, files: dict[str, FileEntry]):
        self.folder, self.command, self.settings, self.files = folder, command, settings, files

    @classmethod
    def read(cls, folder: str | Path) -> "Claim | None":
        """The claim on a folder, `None` if the folder does not exist or is empty. Raises a `UserError` if the folder has no
        record or a damaged one, or holds a file that the record does not name, or one that is not as it was written. The
        message names the file and the fix.
        """
        folder = Path(folder)
        if not os.path.lexists(folder):
            return None
        if folder.is_symlink() or not folder.is_dir():
            raise UserError(
                f"{folder} is in the way: it is not a folder of a run. Move it away, or choose another output."
            )
        record = folder / RECORD
        if not os.path.lexists(record):
            if (foreign := find_foreign(folder, (RECORD,))) is not None:
                raise UserError(
                    f"{folder} holds {foreign!r}, but no record ({RECORD}) of a run that wrote it. Move the folder away, delete it, "
                    "or choose another output."
                )
            return None
        claim = cls(folder, *_read_record(record))
        if (foreign := find_foreign(folder, {RECORD, *claim.files})) is not None:
            raise UserError(f"{folder} holds {foreign!r}, which its record does not name. Move that file away.")
        for name, known in claim.files.items():
            with suppress(FileNotFoundError):
                if known.size not in (None, size := (folder / name).stat().st_size):
                    raise _changed(folder / name, f"it has {size:,} bytes, not {known.size:,}")
        return claim

    @classmethod
    def create(cls, folder: str | Path, command: str, settings: Mapping) -> "Claim":
        """Claims a folder that does not exist or is empty. Raises a `UserError` for another one."""
        if (claim := cls.read(folder)) is not None:
            raise UserError(f"{folder} is of a run of {claim.command!r}. Delete it, or choose another output.")
        claim = cls(Path(folder), command, json.loads(json.dumps(settings, default=str)), {})
        claim.folder.mkdir(parents=True, exist_ok=True)
        first = {"command": command, "settings": claim.settings}
        line = json.dumps(first, ensure_ascii=False) + "\n"
        # a lone surrogate, as in a path, is written as its JSON escape
        write_file(claim.folder / RECORD, line.encode("utf-8", "backslashreplace"))
        return claim

    def name_file(self, name: str, entry: FileEntry | None = None) -> Path:
        """Names a file in the record, before it is written or once its content is known, and returns its path."""
        if not is_plain_name(name):
            raise ValueError(f"{name!r} is not the name of a file.")
        entry = entry or FileEntry()
        fields = {"file": name, **{key: value for key, value in entry._asdict().items() if value is not None}}
        line = (json.dumps(fields) + "\n").encode()
        record = self.folder / RECORD
        try:
            with record.open("r+b") as file:
                content_end = file.seek(0, os.SEEK_END)
                end = _end_of_last_line(file, content_end)
                if end != content_end:  # a line that a killed process has begun
                    file.truncate(end)
                file.seek(end)
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise describe_space(error, record) from error
        self.files[name] = entry
        return self.folder / name

    def write(self, name: str, content: bytes) -> Path:
        """Names a file with its size and hash, then writes it: it is complete or does not exist."""
        path = self.name_file(name, FileEntry(len(content), hashlib.sha256(content).hexdigest()))
        path.parent.mkdir(exist_ok=True)
        write_file(path, content)
        return path

    def complete(self) -> dict[str, Path]:
        """The complete files by name, in the order of their names."""
        paths = {name: self.folder / name for name, entry in self.files.items() if entry.size is not None}
        return {name: path for name, path in sorted(paths.items()) if path.exists()}

    def check_hash(self, name: str, sha256: str) -> None:
        """Raises a `UserError` if a file that was read has another hash than in the record."""
        if self.files[name].sha256 != sha256:
            raise _changed(self.folder / name, "its content has changed")

    def clear(self) -> None:
        """Removes the files that the record names, then the record: the folder can be claimed again."""
        for name in self.files:
            (self.folder / name).unlink(missing_ok=True)
        for inner in {(self.folder / name).parent for name in self.files} - {self.folder}:
            with suppress(OSError):  # another file is in it
                inner.rmdir()
        for path in list(self.folder.iterdir()):
            if _is_temporary(path.name, {RECORD, *self.files}):
                path.unlink(missing_ok=True)
        (self.folder / RECORD).unlink(missing_ok=True)
        self.files = {}

    def remove(self) -> None:
        """Clears the folder and removes it, unless it holds another file."""
        self.clear()
        remove_empty(self.folder)


def remove_empty(folder: Path) -> None:
    """Removes a folder that holds nothing but a lock."""
    remove_lock(folder)
    with suppress(OSError):  # not empty
        folder.rmdir()


def find_foreign(folder: Path, known: Collection[str]) -> str | None:
    """The name of the first entry that is not a plain file with a known name, a file that is being written, or an empty lock."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:  # of a process that is writing
            continue
        is_plain = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
        inner = [name.partition("/")[2] for name in known if name.startswith(f"{entry.name}/")]
        if inner and stat.S_ISDIR(status.st_mode):
            if (foreign := find_foreign(folder / entry.name, inner)) is not None:
                return f"{entry.name}/{foreign}"
            continue
        is_lock = entry.name == LOCK and status.st_size == 0
        if not is_plain or not (entry.name in known or is_lock or _is_temporary(entry.name, known)):
            return entry.name
    return None


def remove_lock(folder: Path) -> None:
    """Removes the lock of a folder."""
    lock = folder / LOCK
    with suppress(OSError):  # there is none
        if lock.stat().st_size == 0:
            lock.unlink()


@contextmanager
def locked(folder: Path, wait: bool = False) -> Iterator[IO[bytes]]:
    """Creates a folder, and locks it until the end of the context and of all processes that inherit the file it yields.

    Args:
        wait: for another process that has locked it, which is logged.

    Raises:
        BlockingIOError: if another process has locked it, without `wait`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("ab") as file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise BlockingIOError(
                    f"Another process writes {folder}. Wait for it, or stop it and repeat the command."
                ) from None
            logger.warning("Another process writes %s; waiting for it.", folder)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            pass
        yield file


def is_plain_name(name: object) -> bool:
    """Whether a name is that of a file in the folder itself, or in a folder in it."""
    parts = name.split("/") if isinstance(name, str) else []
    return len(parts) in (1, 2) and all(p not in ("", ".", "..") and not set(p) & {"\\", "\0"} for p in parts)


def _is_temporary(name: str, known: Collection[str]) -> bool:
    match = TEMPORARY.fullmatch(name)
    return match is not None and match[1] in known


def _changed(path: Path, reason: str) -> UserError:
    return UserError(f"{path} is not as this run wrote it: {reason}. Delete this file, and repeat the command.")


def _end_of_last_line(file, end: int) -> int:
    """The position after the last line end of a file."""
    while end:
        start = max(0, end - 4096)
        file.seek(start)
        if (found := file.read(end - start).rfind(b"\n")) >= 0:
            return start + found + 1
        end = start
    return 0


def _read_record(path: Path) -> tuple[str, dict, dict[str, FileEntry]]:
    """The command, the settings and the files of a record. A last line without its end is of a process that was killed."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    files = {}
    try:
        first, *entries = map(json.loads, lines)
        command, settings = first["command"], first["settings"]
        if not isinstance(command, str) or not isinstance(settings, dict):
            raise TypeError
        for entry in entries:
            if not is_plain_name(name := entry["file"]):
                raise ValueError
            files[name] = FileEntry(entry.get("size"), entry.get("sha256"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged, so the files beside it are not known to be of a run. Move the folder "
            "away, delete it, or choose another output."
        ) from error
    return command, settings, files
