"""Errors that a user can fix, and helpers that format their messages."""

import difflib
import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

FULL = {
    errno.ENOSPC: ("The disk has no space left", "Free some space"),
    errno.EDQUOT: ("The user's quota has no space left", "Free some space"),
    errno.EFBIG: ("The limit of file sizes is reached", "Raise it, see `ulimit -f`"),
}
PLAIN_ERRORS = (OSError, ValueError, TypeError, ImportError, FloatingPointError)  # whose message suffices
USER_ERRORS = (*PLAIN_ERRORS, RuntimeError, MemoryError)
MOST_LISTED = 40  # names in a message
REPEAT = "Repeat the command."
RESUME = "Repeat the command to resume."
DEBUG: ContextVar[bool] = ContextVar("debug", default=False)  # whether errors show their traceback


class UserError(ValueError):
    """An error in what a user gave. The message states the name and the value that are wrong, and how to fix it.

    Control characters in names and values are escaped: they would change a terminal.
    """

    def __init__(self, message: str):
        super().__init__("\n".join(map(escape, message.split("\n"))))


class SettingsMismatchError(UserError):
    """A file or folder holds the results of other settings, or is not known to be of a run; the message says how it differs."""


def escape(text: str) -> str:
    """The text with control characters, lone surrogates and other invisible characters as escape sequences."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def is_encodable(text: str) -> bool:
    """Whether a text can be written as UTF-8, i.e. has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelt one probably means, if one is close."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Returns `' Did you mean "x"?'` for the closest known name, or the list of known names if none is close and they are few."""
    known = sorted(known)
    close = closest(name, known)
    if close:
        return f" Did you mean {prefix + close!r}?"
    return f" Choose from: {', '.join(prefix + k for k in known)}." if len(known) <= MOST_LISTED else ""


def one_line(error: BaseException) -> str:
    """The message of an exception on one line. Errors of the operating system have no number, others of no known kind their type."""
    if isinstance(error, OSError) and error.strerror is not None:
        text = f"{error.strerror}{f': {error.filename}' if error.filename else ''}."
        text += f" {FULL[error.errno][1]}." if error.errno in FULL else ""
    elif isinstance(error, KeyError):  # its text is the repr of the key
        text = f"KeyError: {error}"
    elif str(error) and (isinstance(error, PLAIN_ERRORS) or type(error) is RuntimeError or hasattr(error, "status")):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return escape(" ".join(text.split()))


def print_error(message: str, level: str = "error") -> None:
    """Prints each line of a message to the standard error, below a progress bar that an error has left there."""
    progress = sys.modules.get("tqdm.std")
    files = [getattr(bar.fp, "_wrapped", bar.fp) for bar in progress.tqdm._instances] if progress else []
    if sys.stderr in files:
        print(file=sys.stderr)
    for line in message.splitlines():
        print(f"{level}: {line}", file=sys.stderr, flush=True)


def called(text: str | Callable[[], str]) -> str:
    """A text, or that of a function."""
    return text if isinstance(text, str) else text()


@contextmanager
def user_errors(
    debug: bool = False,
    *,
    report: Callable[[str, str], None] = print_error,
    interrupted: str | Callable[[], str] = REPEAT,
    full: str | Callable[[], str] = "",
) -> Iterator[None]:
    """Ends the process with one line for any error, which every command does by this function. (A `UserError` of several
    problems has a line for each.)

    The exit status is 2 for errors that a user can fix, 1 for others, 130 after Ctrl-C, and that of an error with a `status`.

    Args:
        debug: raise errors instead, with their traceback.
        report: prints a message, given its level: "error" or "interrupted".
        interrupted: how to resume after Ctrl-C, or a function that says it then.
        full: how to resume after a disk was full, in the same way.
    """
    token = DEBUG.set(debug)
    try:
        yield
    except KeyboardInterrupt as error:
        report(called(interrupted), "interrupted")
        sys.exit(getattr(error, "status", 130))
    except BrokenPipeError:  # of `lexperts ... | head`
        with suppress(OSError, ValueError):  # discards what is still to be written, also at the process's end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if debug or hasattr(error, "exit_code"):  # of typer, which ends a command by such an exception
            raise
        disk_is_full = isinstance(error, OSError) and error.errno in FULL
        message = str(error) if isinstance(error, UserError) else one_line(error)
        report(message + (f" {called(full)}" if disk_is_full and full else ""), "error")
        sys.exit(getattr(error, "status", 2 if isinstance(error, USER_ERRORS) else 1))
    finally:
        DEBUG.reset(token)


def short_reason(error: Exception) -> str:
    """The message of an exception on one line of at most 120 characters."""
    text = one_line(error)
    return text if len(text) <= 120 else text[:117] + "..."


def short_repr(value) -> str:
    """`repr` of at most 80 characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer with more digits than Python prints; nested too deeply
        return f"a {type(value).__name__} that is too long to print"
    return text if len(text) <= 80 else text[:77] + "..."


def repr_path(path: str | Path) -> str:
    """`repr` of a path of at most 300 characters; a longer one loses its middle, for its end says most."""
    text = repr(str(path))
    return text if len(text) <= 300 else f"{text[:148]}...{text[-149:]}"


def format_size(count: float) -> str:
    """Bytes with a unit: 7.30 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}" if count < 1000 else f"{count:,.0f} {unit}"


def join_names(names: list[str], limit: int = 3) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def expand_user(path: str | Path) -> Path:
    """The path with `~` replaced by the home folder; raises a `UserError` for the home of an unknown user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(
            f"{str(path)!r}: the user does not exist. Write the path in full, or start it with ./"
        ) from error
