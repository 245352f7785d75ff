"""Failures of single documents in a batch."""

import csv
import errno
import gzip
import lzma
import warnings
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any


def errors_of_zstd() -> list[type[Exception]]:
    """The exceptions of the packages that fsspec may use for .zst files."""
    found = []
    for package in ("compression.zstd", "backports.zstd", "zstandard"):
        with suppress(ImportError):
            found.append(import_module(package).ZstdError)
    return found


# of damaged files, see `is_data_error`
CONTENT_ERRORS: tuple[type[Exception], ...] = (
    *(ValueError, EOFError, OSError, RecursionError, csv.Error, zlib.error, lzma.LZMAError),
    *errors_of_zstd(),
)


# of one file, such as a link to nothing; others are of a disk or a connection, and all files would fail
FILE_ERRNOS = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG)


def is_data_error(error: Exception) -> bool:
    """Whether one of `CONTENT_ERRORS` is about one file or what it holds. Errors of disks have another errno, those of connections a
    class of their own.
    """
    if not isinstance(error, OSError) or isinstance(error, FileNotFoundError):
        return True
    if error.errno is None:
        return type(error) in (OSError, gzip.BadGzipFile)
    return error.errno in FILE_ERRNOS


def process_each(process: Callable[[Sequence], Sequence], items: Sequence) -> list[tuple]:
    """Processes items together, or if that fails, one at a time.

    Returns:
        For each item its result and `None`, or `None` and the reason of its failure.

    Warns:
        UserWarning: if items fail only together, as when a batch exceeds the memory: reading them one by one is slow.

    Raises:
        Exception: if all of several items fail other than by their values, or if the device fails (`torch.AcceleratorError`):
            then all that follow would fail too.
    """
    try:
        return [(result, None) for result in process(items)]
    except Exception as error:
        together = error
    results: list[tuple] = []
    errors = []
    for item in items:
        try:
            results += [(result, None) for result in process([item])]
        except Exception as error:
            if any(kind.__name__ == "AcceleratorError" for kind in type(error).__mro__):
                raise
            results.append((None, describe_error(error)))
            errors.append(error)
    if 1 < len(errors) == len(items) and not isinstance(errors[0], (ValueError, TypeError)):
        raise errors[0]
    if not errors and len(items) > 1:
        warnings.warn(
            f"{len(items)} items failed together ({describe_error(together)}), and none alone. Use a smaller batch.",
            stacklevel=2,
        )
    return results


def process_valid(
    process: Callable[[Any], Sequence],
    rows: Sequence,
    check: Callable[[Any], tuple[Any, str | None]],
    progress: Callable[[float], None] = lambda rows: None,
) -> list[tuple]:
    """As `process_each`, for the rows that a check accepts.

    Args:
        check: a row -> the item to process and `None`, or `None` and the reason why it cannot be processed.
        progress: is called with the number of rows that cannot be processed.
    """
    results: list[tuple] = [check(row) for row in rows]
    valid = [i for i, (_, error) in enumerate(results) if error is None]
    progress(len(rows) - len(valid))
    for i, result in zip(valid, process_each(process, [results[i][0] for i in valid]), strict=True):
        results[i] = result
    return results


def describe_error(error: Exception) -> str:
    """The message of an exception on one line, after its type unless it is an error of a value."""
    message = " ".join(str(error).split()) or type(error).__name__
    return message if isinstance(error, (ValueError, TypeError)) else f"{type(error).__name__}: {message}"
