"""Values of a config.json that no model can have: found without importing a framework."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from .tensor_files import TORCH_NAMES

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "max_position_embeddings")
LARGEST = 2**40
FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_cache", "use_sliding_window")


def is_number(value: Any) -> bool:
    """Whether the value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_token_id(value: Any) -> bool:
    """Whether the value is an id, or -1, with which old configurations mark that there is none."""
    return type(value) is int and value >= -1


# Field -> (what it must be, validator).
FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(
        (*SIZES, *OPTIONAL_SIZES), ("a positive integer", lambda v: type(v) is int and 0 < v < LARGEST)
    ),
    **dict.fromkeys(FLAGS, ("true or false", lambda v: isinstance(v, bool))),
    **dict.fromkeys(("bos_token_id", "pad_token_id"), ("a token id", is_token_id)),
    "eos_token_id": (
        "a token id or a list of them",
        lambda v: is_token_id(v) or (isinstance(v, list) and bool(v) and all(map(is_token_id, v))),
    ),
    "rms_norm_eps": ("a number above 0 and below 1", lambda v: is_number(v) and 0 < v < 1),
    "attention_dropout": ("a number from 0 to 1", lambda v: is_number(v) and 0 <= v <= 1),
    "initializer_range": ("a number of at least 0", lambda v: is_number(v) and v >= 0),
    "hidden_act": ("the name of an activation", lambda v: isinstance(v, str)),
    "rope_theta": ("a positive number", lambda v: is_number(v) and v > 0),
    "dtype": ("the name of a dtype", lambda v: v in TORCH_NAMES.values()),
    "torch_dtype": ("the name of a dtype", lambda v: v in TORCH_NAMES.values()),
    "rope_parameters": ("a dict", lambda v: isinstance(v, dict)),
    "rope_scaling": ("a dict", lambda v: isinstance(v, dict)),
}  # fmt: skip
ROPE_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "rope_theta": FIELDS["rope_theta"],
    "rope_type": ("a name", lambda v: isinstance(v, str)),
    "type": ("a name", lambda v: isinstance(v, str)),
    **dict.fromkeys(
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "attention_factor"),
        ("a positive number", lambda v: is_number(v) and v > 0),
    ),
}


def find_value_errors(config: dict[str, Any]) -> list[str]:
    """Fields that are missing or have values that no model can have, one line per field."""
    errors = [f"{key} is missing" for key in SIZES if config.get(key) is None]
    errors += find_invalid(config, FIELDS, "")
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(config.get(key), dict):
            errors += find_invalid(config[key], ROPE_FIELDS, f" in {key}")
    if not errors:
        heads, groups = config["num_attention_heads"], config.get("num_key_value_heads")
        if groups and heads % groups:
            errors.append(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={groups}")
        errors += find_contradictions(config)
        errors += [f"{path} is {number}, which is not finite" for path, number in non_finite(config)]
    return errors


def find_contradictions(config: dict[str, Any]) -> list[str]:
    """RoPE settings that have different values in the spellings of transformers 4 and 5."""
    old, new = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    places = {"rope_parameters": new, "rope_scaling": old, "config.json": config}
    errors = []
    for names in (("rope_type", "type"), *((key,) for key in ROPE_FIELDS if key not in ("rope_type", "type"))):
        where = ("config.json",) if names == ("rope_theta",) else ()
        found = {
            f"{name} in {place}": places[place][name]
            for place in ("rope_parameters", "rope_scaling", *where)
            for name in names
            if places[place].get(name) is not None
        }
        if len(set(found.values())) > 1:
            errors.append(
                "RoPE settings contradict each other: " + ", ".join(f"{k} is {v!r:.60}" for k, v in found.items())
            )
    return errors


def find_invalid(content: dict[str, Any], fields: dict, where: str) -> list[str]:
    """The fields that are set to an invalid value."""
    checked = ((key, content[key], *fields[key]) for key in fields if content.get(key) is not None)
    return [
        f"{key}{where} must be {expected}, got {shorten(value)}"
        for key, value, expected, valid in checked
        if not valid(value)
    ]


def shorten(value: Any) -> str:
    """`repr` of at most 60 characters, also of a number with many digits."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    return f"{value!r:.60}"


def non_finite(content: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """The path and value of each number that is NaN or infinite."""
    if isinstance(content, float) and not math.isfinite(content):
        yield path, content
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield from non_finite(value, f"{path}.{key}" if path else str(key))
