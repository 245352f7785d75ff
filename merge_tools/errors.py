"""What a person can mend is a MergeError: one message, no traceback on the command line."""

import difflib
from collections.abc import Iterable


class MergeError(ValueError):
    """Something in the recipe, the sources or the place to write to; the message says what and how it is mended."""


def nearest(name: str, known: Iterable[str]) -> str:
    """' Did you mean "x"?' for the known name that is nearest, else the list of all."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(known)}."


def reason(error: Exception) -> str:
    """What went wrong, in one short line."""
    text = " ".join((str(error) if isinstance(error, ValueError | OSError) else repr(error)).split())
    return text if len(text) <= 120 else text[:117] + "..."


def size(count: float) -> str:
    """Bytes as people read them: 7.30 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}" if count < 1000 else f"{count:,.0f} {unit}"
