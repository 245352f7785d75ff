"""Errors that a user can fix, and how errors and values are shown."""

import difflib
import sys
from collections.abc import Iterable

PLAIN = (OSError, ValueError, TypeError, ImportError, FloatingPointError)  # whose message suffices


class UserError(ValueError):
    """What a user gave is wrong. The message names the option or file and its value; control characters are escaped."""

    def __init__(self, message: str):
        super().__init__("\n".join(map(escape, message.split("\n"))))


def escape(text: str) -> str:
    """The text with control characters, lone surrogates and other invisible characters as escape sequences."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelt one probably means, if one is close."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Returns `' Did you mean "x"?'` for the closest known name, or the known ones if none is close."""
    known = sorted(known)
    if close := closest(name, known):
        return f" Did you mean {prefix + close!r}?"
    return f" Choose from: {', '.join(prefix + k for k in known)}." if len(known) <= 40 else ""


def one_line(error: BaseException) -> str:
    """The message of an exception on one line, without the number of an `OSError`, and after the type of a rare one."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror is not None:
        text = f"{error.strerror}{f': {error.filename}' if error.filename else ''}."
    elif not text or not (isinstance(error, PLAIN) or type(error) is RuntimeError):
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    return escape(" ".join(text.split()))


def print_error(message: str, level: str = "error") -> None:
    """Prints a message to the standard error, below a progress bar that an error has left there."""
    if "tqdm" in sys.modules and sys.modules["tqdm"].tqdm._instances:
        print(file=sys.stderr)
    print(f"{level}: {message}", file=sys.stderr, flush=True)


def short_repr(value) -> str:
    """`repr` of at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
