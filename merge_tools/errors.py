"""MergeError, which carries one message for the user, and helpers that format messages."""

import difflib
from collections.abc import Iterable
from pathlib import Path


class MergeError(ValueError):
    """An error in the recipe, a source or the output path. The message states what is wrong and how to fix it.

    Control characters in names and values are escaped: they would change a terminal.
    """

    def __init__(self, message: str):
        super().__init__("\n".join(map(escape, message.split("\n"))))


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


def expand_user(path: str | Path) -> Path:
    """The path with `~` replaced by the home folder; raises a `MergeError` for the home of an unknown user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise MergeError(
            f"{str(path)!r}: the user does not exist. Write the path in full, or start it with ./"
        ) from error


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns `' Did you mean "x"?'` for the closest known name, or the list of known names if none is close."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else f" Choose from: {', '.join(known)}."


def short_reason(error: Exception) -> str:
    """The message of an exception on one line of at most 120 characters."""
    text = " ".join((str(error) if isinstance(error, ValueError | OSError) else repr(error)).split())
    return text if len(text) <= 120 else text[:117] + "..."


def short_repr(value) -> str:
    """`repr` of at most 80 characters."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python prints
        return f"a {type(value).__name__} with too many digits"
    return text if len(text) <= 80 else text[:77] + "..."


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
