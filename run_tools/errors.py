"""Errors that a user can fix, and how errors and values are shown."""

import difflib
import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a disk, a quota, the limit of file sizes
PLAIN = (OSError, ValueError, TypeError, ImportError, FloatingPointError)  # whose message suffices
REPEAT = "Repeat the command."
RESUME = "Repeat the command to resume."
DEBUG: ContextVar[bool] = ContextVar("debug", default=False)  # whether errors show their traceback


class UserError(ValueError):
    """What a user gave is wrong. The message names the option or file and its value; control characters in it are escaped."""

    def __init__(self, message: str):
        super().__init__("\n".join(map(escape, message.split("\n"))))


def escape(text: str) -> str:
    """The text with control characters, lone surrogates and other invisible characters as escape sequences."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelt one probably means, if one is close."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Returns `' Did you mean "x"?'` for the closest known name, or the list of known names if none is close and they are few."""
    known = sorted(known)
    if close := closest(name, known):
        return f" Did you mean {prefix + close!r}?"
    return f" Choose from: {', '.join(prefix + k for k in known)}." if len(known) <= 40 else ""


def one_line(error: BaseException) -> str:
    """The message of an exception on one line. Errors of the operating system have no number, others of no known kind their type."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror is not None:
        text = f"{error.strerror}{f': {error.filename}' if error.filename else ''}."
    elif not text or not (isinstance(error, PLAIN) or type(error) is RuntimeError):
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    return escape(" ".join(text.split()))


def print_error(message: str, level: str = "error") -> None:
    """Prints each line of a message to the standard error, below a progress bar that an error has left there."""
    progress = sys.modules.get("tqdm.std")
    files = [getattr(bar.fp, "_wrapped", bar.fp) for bar in progress.tqdm._instances] if progress else []
    if sys.stderr in files:
        print(file=sys.stderr)
    for line in message.splitlines():
        print(f"{level}: {line}", file=sys.stderr, flush=True)


@contextmanager
def user_errors(
    debug: bool = False,
    *,
    report: Callable[[str, str], None] = print_error,
    interrupted: str | Callable[[], str] = REPEAT,
    full: str | Callable[[], str] = "",
) -> Iterator[None]:
    """Ends the process with one line for any error, and status 2; after Ctrl-C with 130.

    Args:
        debug: raise errors instead, with their traceback.
        report: prints a message, given its level: "error" or "interrupted".
        interrupted, full: how to resume after Ctrl-C, and after a disk was full, or functions that say it then.
    """
    token = DEBUG.set(debug)
    try:
        yield
    except KeyboardInterrupt:
        report(interrupted if isinstance(interrupted, str) else interrupted(), "interrupted")
        sys.exit(130)
    except BrokenPipeError:  # of `lexperts ... | head`
        with suppress(OSError, ValueError):  # discards what is still to be written, also at the process's end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if debug or hasattr(error, "exit_code"):  # of typer, which ends a command by such an exception
            raise
        message = str(error) if isinstance(error, UserError) else one_line(error)
        if full and isinstance(error, OSError) and error.errno in FULL:
            message += f" {full if isinstance(full, str) else full()}"
        report(message, "error")
        sys.exit(2)
    finally:
        DEBUG.reset(token)


def short_repr(value) -> str:
    """`repr` of at most 80 characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer with more digits than Python prints; nested too deeply
        return f"a {type(value).__name__} that is too long to print"
    return text if len(text) <= 80 else text[:77] + "..."


def format_size(count: float) -> str:
    """Bytes with a unit: 7.30 GB."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.3g} {units[0]}"


def join_names(names: list[str], limit: int = 3) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def expand_user(path: str | Path) -> Path:
    """The path with `~` replaced by the home folder; that of an unknown user stays as it is, as in a shell."""
    return Path(os.path.expanduser(path))


class SettingsMismatchError(UserError):
    """A folder holds the results of other settings, or is not known to be of a run."""


def is_encodable(text: str) -> bool:
    """Whether a text can be written as UTF-8, i.e. has no lone surrogates."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def repr_path(path: str | Path) -> str:
    """`repr` of a path of at most 300 characters; a longer one loses its middle, for its end says most."""
    text = repr(str(path))
    return text if len(text) <= 300 else f"{text[:148]}...{text[-149:]}"
