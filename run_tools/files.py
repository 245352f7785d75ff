"""Files that are complete or do not exist, also if the machine stops while they are written."""

import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)


def sha256_of(path: str | Path) -> str:
    """The SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_file(path: str | Path, content: bytes | str) -> None:
    """Writes a file under another name, flushes it to the disk and renames it. After an error, as of a full disk, no part of it is left."""
    path = Path(path)
    new = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path), new.open("wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Names the file in an `OSError` that does not, as that of a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


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
