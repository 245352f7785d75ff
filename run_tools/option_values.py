"""What makes an option's value invalid: numbers out of range, NaN, empty texts, control characters, unknown choices."""

import math
from dataclasses import dataclass
from typing import Any

from .errors import did_you_mean, is_encodable

LARGEST = 2**31 - 1  # of an integer, which libraries below hold in 32 bits
LARGEST_SEED = 2**32 - 1  # of NumPy


@dataclass(frozen=True)
class Limits:
    """The valid values of an option: `least <= value <= most`, and `above < value < below` if they are given."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()

    def describe(self) -> str:
        """The valid values, such as "at least 1" or "a, b".

        >>> Limits(least=0, most=LARGEST_SEED).describe()
        'from 0 to 4294967295'
        """
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.least is not None and self.most is not None:
            return f"from {self.least:.15g} to {self.most:.15g}"
        bounds = [("at least", self.least), ("above", self.above), ("at most", self.most), ("below", self.below)]
        return " and ".join(f"{word} {bound:.15g}" for word, bound in bounds if bound is not None)

    def contain(self, value: Any) -> bool:
        """Whether a value is valid."""
        if self.choices:
            return value in self.choices
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )


ANY = Limits()


def find_problem(value: Any, limits: Limits = ANY) -> str | None:
    """What is wrong with a value, and how to fix it; `None` if it is valid.

    >>> find_problem(0, Limits(least=1))
    'must be at least 1.'
    """
    if isinstance(value, str):
        if limits.choices and value not in limits.choices:
            return f"is not known.{did_you_mean(value, limits.choices)}"
        return find_text_problem(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if not math.isfinite(value):
        return f"is not a finite number. Use a number{' ' + limits.describe() if limits != ANY else ''}."
    if not limits.contain(value):
        return f"must be {limits.describe()}."
    if isinstance(value, int) and abs(value) > LARGEST and limits.most is None:
        return f"is too large. Use at most {LARGEST:,}."
    return None


def find_text_problem(text: str) -> str | None:
    """What is wrong with a text or a path; `None` if it is valid. Tabs and line breaks are."""
    if not text:
        return "is empty. Give a value, or leave the option out."
    if not is_encodable(text):
        return "is not valid UTF-8. Rename the file, or type the text again."
    if any(ord(c) < 32 and c not in "\t\n\r" or ord(c) == 127 for c in text):
        return "has a control character. Type it again without."
    return None
