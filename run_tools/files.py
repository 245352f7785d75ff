"""Files that are complete or do not exist, also if the machine stops while they are written."""

import errno
import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from .errors import FULL

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

# of drives that cannot flush a folder, such as network and FUSE drives
NO_FLUSH = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EACCES, errno.EPERM, errno.EBADF, errno.ENOSYS}


def sync(path: str | Path) -> None:
    """Writes a file, or the names in a folder, from memory to the disk. Folders on drives that cannot do so are left alone."""
    path = Path(path)
    folder = path.is_dir()
    if folder and os.name == "nt":
        return
    try:
        descriptor = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not folder or error.errno not in NO_FLUSH:
            raise


def hash_file(path: Path) -> str:
    """The SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_file(path: str | Path, content: bytes | str) -> None:
    """Writes a file under another name, flushes it to the disk and renames it. Raises an `OSError` if the disk is full,
    among others; no part of the file is left.
    """
    path = Path(path)
    new = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with new.open("wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise describe_space(error, path) from error


def describe_space(error: OSError, path: Path) -> OSError:
    """The error with a message that names the file; what to do if a disk or a quota is full."""
    if error.errno not in FULL:
        return error if error.filename else OSError(error.errno, error.strerror, str(path))
    problem, fix = FULL[error.errno]
    return OSError(f"{problem} for {path}. {fix}, and repeat the command to resume.")


@contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[IO[bytes]]:
    """Opens a file to append to it, and locks it until the end of the context.

    Args:
        wait: for another process that has locked it, which is logged.

    Raises:
        BlockingIOError: if another process has locked it, without `wait`.
    """
    with path.open("ab") as file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise BlockingIOError(f"Another process writes {path}. Wait for it, or stop it.") from None
            logger.warning("Another process writes %s; waiting for it.", path)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            pass
        yield file
