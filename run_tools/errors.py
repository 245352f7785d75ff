"""Errors that a user can fix, and how errors and values are shown."""

import difflib
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PLAIN = (OSError, ValueError, TypeError, ImportError, FloatingPointError)  # whose message suffices


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
def user_errors() -> Iterator[None]:
    """Ends the process with one line for any error, and status 2; after Ctrl-C with 130."""
    try:
        yield
    except KeyboardInterrupt:
        print_error("Repeat the command.", "interrupted")
        sys.exit(130)
    except BrokenPipeError:  # of `lexperts-lite ... | head`
        with suppress(OSError, ValueError):  # discards what is still to be written, also at the process's end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        print_error(str(error) if isinstance(error, UserError) else one_line(error))
        sys.exit(2)


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
