# SPDX-License-Identifier: Apache-2.0
"""The options of a call of `pipeline("keyphrase-extraction")`, checked in one place for pipelines, classes, servers and commands."""

from collections.abc import Callable
from functools import partial
from numbers import Integral, Real
from typing import Any

from run_tools.errors import UserError, did_you_mean, short_repr

from .candidates import Candidates
from .titles import MAX_TITLE_LENGTH
from .words import check_language

UNSET: Any = object()  # where None is a value
MIN_PHRASES = 5  # of a text that has so many


def check_whole_number(name: str, value, least: int = 1) -> int | None:
    """Returns an integer of at least `least`, or `None`. Raises a `UserError` for another value."""
    if value is None or (isinstance(value, Integral) and not isinstance(value, bool) and value >= least):
        return None if value is None else int(value)
    raise UserError(f"{name}={short_repr(value)} is not a whole number of at least {least}, or None for the default.")


def check_batch_size(value) -> int | None:
    """Returns a number of windows per batch, or `None` for the default. Raises a `UserError` for another value."""
    return check_whole_number("batch_size", value)


def check_number(name: str, value, least: float = 0, most: float = 1, inside: bool = False) -> float | None:
    """Returns a number from `least` to `most`, with `inside` between them, or `None`. Raises a `UserError` for another value."""
    if value is None:
        return None
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not (least < value < most if inside else least <= value <= most):  # also refuses NaN
        limits = "between {:g} and {:g}" if inside else "from {:g} to {:g}"
        raise UserError(f"{name}={short_repr(value)} is not a number {limits.format(least, most)}.")
    return float(value)


def check_temperature(value) -> float | None:
    """Returns the temperature of a model's scores, or `None`. Raises a `UserError` for another value than a number above 0."""
    return check_number("config.keyphrase_temperature", value, most=float("inf"), inside=True)


def check_type(name: str, kind: type, what: str, value):
    """Returns a value of a type, or `None`. Raises a `UserError` for another value, which is not `what` it should be."""
    if value is None or isinstance(value, kind):
        return value
    raise UserError(f"{name}={short_repr(value)} is not {what}.")


def parse_candidates(value) -> Candidates | None:
    """The argument `candidates` as an object; `None` for no candidates."""
    return value if value is None or isinstance(value, Candidates) else Candidates(value)


# name -> its check, and what None means
OPTIONS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "top_k": (partial(check_whole_number, "top_k"), None),
    "min_phrases": (partial(check_whole_number, "min_phrases", least=0), MIN_PHRASES),
    "min_score": (partial(check_number, "min_score"), None),
    "style": (partial(check_type, "style", str, "a name"), None),
    "threshold": (partial(check_number, "threshold", inside=True), None),
    "overlap": (partial(check_whole_number, "overlap", least=0), None),
    "max_length": (partial(check_whole_number, "max_length"), None),
    "max_title_length": (partial(check_whole_number, "max_title_length"), MAX_TITLE_LENGTH),
    "candidates": (parse_candidates, None),
    "nested": (partial(check_type, "nested", bool, "True or False"), True),
    "diversity": (partial(check_number, "diversity"), 0.0),
    "language": (check_language, None),
}


def check_call_options(**options) -> dict[str, Any]:
    """The options of a call with valid values; `None` means the default of the option, whatever the pipeline's own is.

    Args:
        options: as in a call of `KeyphraseExtractionPipeline`. Those that are `UNSET` are left out.

    Raises:
        TypeError: for an unknown option.
        ValueError: for a value of another type or out of range, including NaN; and for a threshold together with candidates.

    >>> check_call_options(top_k=5, diversity=None)
    {'top_k': 5, 'diversity': 0.0}
    """
    checked = {}
    for name, value in options.items():
        if name not in OPTIONS:
            known = [*OPTIONS, "batch_size"]
            raise TypeError(f"keyphrase-extraction got an unexpected argument {name!r}.{did_you_mean(name, known)}")
        if value is not UNSET:
            check, default = OPTIONS[name]
            value = check(value)
            checked[name] = default if value is None else value
    if checked.get("candidates") is not None and checked.get("threshold") is not None:
        raise UserError(f"threshold={checked['threshold']} has no effect on candidates. Pass min_score.")
    return checked
