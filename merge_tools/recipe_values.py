"""What the values of a recipe's keys must be."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from run_tools.errors import is_encodable

from .averages import AVERAGES
from .families import LINEARS, MIXTURES
from .gate_modes import GATE_MODES

POLICIES = ("token", "sequence_soft", "sequence_hard", "domain")
DTYPES = ("bfloat16", "float16", "float32")
ALLOWANCES = {
    "vocab": "experts with longer vocabularies; rows that only some experts have are the mean of those",
    "tokenizer": "experts with different tokenizers; the base model's is written",
    "rope": "experts with different RoPE settings; the base model's are written",
}


def is_text(value) -> bool:
    """Whether the value is a non-empty string or a path."""
    if not isinstance(value, str | Path):
        return False
    text = str(value)
    return bool(text.strip()) and "\0" not in text and is_encodable(text)


def is_name(value) -> bool:
    """Whether the value can be the name of an expert: one line that is safe in files, tables and terminals."""
    return (
        is_text(value) and str(value).isprintable() and not set(str(value)) & {"/", "\\"} and value not in (".", "..")
    )


def is_non_negative(value) -> bool:
    """Whether the value is a finite number of at least 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e300


def is_count(value) -> bool:
    """Whether the value is an integer of at least 0 that fits into 63 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def list_of(is_valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A validator of lists whose items are all valid."""
    return lambda value: isinstance(value, list | tuple) and all(map(is_valid, value))


PATH = ("a path", is_text)
PATH_OR_ID = ("a path or a Hub id", is_text)
TEXTS = ("a string or a list of strings, none of them empty", list_of(is_text))
CHOICES: dict[str, tuple[str, ...]] = {
    "gate_mode": tuple(GATE_MODES), "routing_policy": POLICIES, "average": tuple(AVERAGES), "attention": ("shared", "routed"),
    "format": ("auto", *MIXTURES, "lexicon"), "dtype": DTYPES, "allow": tuple(ALLOWANCES), "router_layers": ("mlp", *LINEARS),
}  # fmt: skip
# Key -> (what it must be, validator).
VALIDATORS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "base_model": PATH_OR_ID,
    "router_layers": ("mlp or a list of linear layers", list_of(is_text)),
    "router_layers_index": (
        "a list of different layer indices (integers of at least 0)",
        lambda value: bool(value) and list_of(is_count)(value) and len(set(value)) == len(value),
    ),
    "experts_per_token": ("a positive integer", lambda value: is_count(value) and value > 0),
    "tokenizer_source": ("base, union or the name of an expert", is_text),
    "density": ("a number above 0 and at most 1", lambda value: is_non_negative(value) and 0 < value <= 1),
    "weights": ("a list with one number of at least 0 per expert", list_of(is_non_negative)),
    "centroids": PATH,
    "embedder": ("a name", is_text),
    "rank": (
        "an integer of at least 1, or a share of energy above 0 and below 1",
        lambda value: (is_count(value) and value > 0) or (isinstance(value, float) and 0 < value < 1),
    ),
    "include_base": (
        "true, false, or a mapping with positive_prompts or samples",
        lambda value: isinstance(value, bool | dict),
    ),
    "gate_tokens": ("an integer of at least 1", lambda value: is_count(value) and value > 0),
    "allow": (f"a list of {', '.join(ALLOWANCES)}", list_of(is_text)),
    "seed": ("an integer of at least 0", is_count),
    "source_model": PATH_OR_ID,
    "name": ("a string of printable characters without slashes (put quotes around a number or a date)", is_name),
    "positive_prompts": TEXTS,
    "negative_prompts": TEXTS,
    "samples": PATH,
    "weight": ("a number of at least 0", is_non_negative),
}
