# SPDX-License-Identifier: Apache-2.0
"""The options of a call of `pipeline("keyphrase-extraction")`, checked in one place for pipelines, classes, servers and commands."""

from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any

try:
    from run_tools.errors import UserError, did_you_mean, short_repr
except ImportError:  # this file travels with checkpoints, to machines without Lexperts
    UserError, short_repr = ValueError, "{!r:.80}".format

    def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
        """The known names."""
        return f" Choose from: {', '.join(sorted(known))}."


from .candidates import MATCH_CASE, parse_candidates
from .titles import MAX_TITLE_LENGTH
from .windows import ON_LONG
from .words import check_language

UNSET: Any = object()  # where None is a value


def check_whole_number(name: str, value, least: int = 1, none: str = "the default") -> int | None:
    """Returns an integer of at least `least`, or `None`.

    Raises:
        UserError: for another value; `none` says what `None` means.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral):
        fix = f"Use an integer of at least {least}, or None for {none}."
        raise UserError(f"{name}={short_repr(value)} is not a whole number. {fix}")
    if value < least:
        raise UserError(f"{name}={short_repr(value)} must be at least {least}, or None for {none}.")
    return int(value)


def check_batch_size(value) -> int | None:
    """Returns a number of windows per batch, or `None` for the default; raises a `UserError` for another value."""
    return check_whole_number("batch_size", value)


def check_share(name: str, value, meaning: str, inside: bool = False) -> float | None:
    """Returns a number from 0 to 1, with `inside` between them, or `None`; raises a `UserError` for another value."""
    if value is None:
        return None
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not (0 < value < 1 if inside else 0 <= value <= 1):  # also refuses NaN
        limits = "between 0 and 1" if inside else "from 0 to 1"
        raise UserError(f"{name}={short_repr(value)} must be a number {limits}: {meaning}.")
    return float(value)


def check_temperature(value) -> float | None:
    """Returns the temperature of a model's scores, or `None`; raises a `UserError` for another value than a number above 0."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < value < float("inf"):
        name = "config.keyphrase_temperature"
        raise UserError(f"{name}={short_repr(value)} must be a number above 0. Use 1 or None for no change.")
    return float(value)


def check_choice(name: str, value, choices: tuple) -> Any:
    """Returns one of the choices, or `None`; raises a `UserError` for another value."""
    if value is None or any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        return value
    raise UserError(f"{name}={short_repr(value)} is not known. Use one of {', '.join(map(repr, choices))}.")


def check_style(value) -> str | None:
    """Returns the name of a style, or `None`; raises a `UserError` for another value. A model checks whether it has the style."""
    if value is None or isinstance(value, str):
        return value
    raise UserError(f"style={short_repr(value)} is not a name. Use one of config.styles, or None.")


# name -> its check, and what None means
OPTIONS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "top_k": (lambda value: check_whole_number("top_k", value, none="all keyphrases"), None),
    "min_score": (lambda value: check_share("min_score", value, "the lowest score of a keyphrase"), None),
    "style": (check_style, None),
    "threshold": (lambda value: check_share("threshold", value, "the probability of a word", inside=True), None),
    "on_long": (lambda value: check_choice("on_long", value, ON_LONG), ON_LONG[0]),
    "overlap": (lambda value: check_whole_number("overlap", value, 0, none="a quarter of a window"), None),
    "max_length": (lambda value: check_whole_number("max_length", value, none="the model's limit"), None),
    "max_title_length": (lambda value: check_whole_number("max_title_length", value), MAX_TITLE_LENGTH),
    "is_split_into_words": (lambda value: check_choice("is_split_into_words", value, (True, False)), False),
    "candidates": (parse_candidates, None),
    "match_case": (lambda value: check_choice("match_case", value, MATCH_CASE), MATCH_CASE[0]),
    "nested": (lambda value: check_choice("nested", value, (True, False)), True),
    "diversity": (lambda value: check_share("diversity", value, "0 chooses by score only, 1 by difference"), 0.0),
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
            raise TypeError(
                f"keyphrase-extraction got an unexpected argument {name!r}.{did_you_mean(name, [*OPTIONS, 'batch_size'])}"
            )
        if value is not UNSET:
            check, default = OPTIONS[name]
            value = check(value)
            checked[name] = default if value is None else value
    if checked.get("candidates") is not None and checked.get("threshold") is not None:
        raise UserError(
            f"threshold={checked['threshold']} has no effect on candidates. Leave it out, or pass min_score."
        )
    return checked
