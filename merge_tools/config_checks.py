"""Checks of a config.json: values that no model can have, and whether transformers can open it.

Importing transformers costs seconds of processor time. A configuration whose fields all have ordinary values needs no trial: it
differs from one that was tried only in sizes. Any other is tried: its class, one layer without weights, and the RoPE frequencies are
built, in a process of its own unless transformers is imported already.
"""

import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from run_tools.errors import short_repr

from .tensor_files import TORCH_NAMES

Checks = dict[str, tuple[str, Callable[[Any], bool]]]  # field -> what it must be, validator

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "max_position_embeddings")
LARGEST = 2**40
FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_cache", "use_sliding_window")


def is_finite(value: Any) -> bool:
    """Whether the value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_token_id(value: Any) -> bool:
    """Whether the value is an id, or -1, with which old configurations mark that there is none."""
    return type(value) is int and value >= -1


FIELDS: Checks = {
    **dict.fromkeys(
        (*SIZES, *OPTIONAL_SIZES), ("a positive integer", lambda v: type(v) is int and 0 < v < LARGEST)
    ),
    **dict.fromkeys(FLAGS, ("true or false", lambda v: isinstance(v, bool))),
    **dict.fromkeys(("bos_token_id", "pad_token_id"), ("a token id", is_token_id)),
    "eos_token_id": (
        "a token id or a list of them",
        lambda v: is_token_id(v) or (isinstance(v, list) and bool(v) and all(map(is_token_id, v))),
    ),
    "rms_norm_eps": ("a number above 0 and below 1", lambda v: is_finite(v) and 0 < v < 1),
    "attention_dropout": ("a number from 0 to 1", lambda v: is_finite(v) and 0 <= v <= 1),
    "initializer_range": ("a number of at least 0", lambda v: is_finite(v) and v >= 0),
    "hidden_act": ("the name of an activation", lambda v: isinstance(v, str)),
    "rope_theta": ("a positive number", lambda v: is_finite(v) and v > 0),
    "dtype": ("the name of a dtype", lambda v: v in TORCH_NAMES.values()),
    "torch_dtype": ("the name of a dtype", lambda v: v in TORCH_NAMES.values()),
    "rope_parameters": ("a dict", lambda v: isinstance(v, dict)),
    "rope_scaling": ("a dict", lambda v: isinstance(v, dict)),
}  # fmt: skip
ROPE_FIELDS: Checks = {
    "rope_theta": FIELDS["rope_theta"],
    "rope_type": ("a name", lambda v: isinstance(v, str)),
    "type": ("a name", lambda v: isinstance(v, str)),
    **dict.fromkeys(
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "attention_factor"),
        ("a positive number", lambda v: is_finite(v) and v > 0),
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
        f"{key}{where} must be {expected}, got {short_repr(value)}"
        for key, value, expected, valid in checked
        if not valid(value)
    ]


def non_finite(content: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """The path and value of each number that is NaN or infinite."""
    if isinstance(content, float) and not math.isfinite(content):
        yield path, content
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield from non_finite(value, f"{path}.{key}" if path else str(key))


ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
# Fields whose values are checked elsewhere, or that `find_opening_error` leaves out.
IGNORED = {
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "auto_map", "rms_norm_eps",
    "attention_dropout", "initializer_range", "rope_theta", "bos_token_id", "eos_token_id", "pad_token_id",
    "attn_implementation", "rope_parameters", "rope_scaling",
}  # fmt: skip
# Value or values of other fields that need no trial.
ORDINARY: dict[str, tuple] = {
    "hidden_act": ACTIVATIONS, "pretraining_tp": (1,), "output_router_logits": (False,), "router_jitter_noise": (0.0,),
    "router_aux_loss_coef": (0.0, 0.001), "use_sliding_window": (False,), "qkv_bias": (True,), "norm_topk_prob": (True,),
    "decoder_sparse_step": (1,), "mlp_only_layers": ([], None), "return_dict": (True,), "use_return_dict": (True,),
    "output_hidden_states": (False,), "output_attentions": (False,), "is_encoder_decoder": (False,),
    "chunk_size_feed_forward": (0,), "problem_type": (None,), "quantization_config": (None,), "per_layer_config": (None,),
    "partial_rotary_factor": (None, 1, 1.0), "original_max_position_embeddings": (None,),
}  # fmt: skip
COUNTS = (
    "num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
    "max_window_layers",
)  # fmt: skip
# Other fields that the classes or their base class read: a configuration that has one is tried.
TRIED = {"id2label", "label2id", "num_labels", "experts_implementation", "embed_dim", "num_heads", "mtp_layer_types"}
LENGTH = "original_max_position_embeddings"
LLAMA3 = {"factor", "low_freq_factor", "high_freq_factor", LENGTH}
MODEL_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")


def is_plain(config: dict[str, Any]) -> bool:
    """Whether a model of a known type has ordinary values in all fields that its class reads."""
    if config.get("model_type") not in MODEL_TYPES or find_value_errors(config) or TRIED & set(config):
        return False
    if any(config[key] not in values for key, values in ORDINARY.items() if key in config):
        return False
    if any(type(config[key]) is not int or config[key] < 1 for key in COUNTS if key in config):
        return False
    if any(config[key] is None for key in (*OPTIONAL_SIZES, *FLAGS, "rms_norm_eps", "rope_theta") if key in config):
        return False
    window, layers = config.get("sliding_window"), config.get("layer_types")
    if window is not None and (type(window) is not int or window < 1):
        return False
    if layers is not None and layers != ["full_attention"] * config["num_hidden_layers"]:
        return False
    padding, heads = config.get("pad_token_id"), config["num_attention_heads"]
    return (
        (padding is None or (is_token_id(padding) and 0 <= padding < config["vocab_size"]))
        and (config["hidden_size"] % heads == 0)
        and config.get("head_dim", config["hidden_size"] // heads) % 2 == 0
        and all(
            config.get(key) is None or is_plain_rope(config[key], config.get("max_position_embeddings", 0))
            for key in ("rope_parameters", "rope_scaling")
        )
    )


def is_plain_rope(settings: dict[str, Any], positions: int) -> bool:
    """Whether RoPE settings are the default ones, or complete ones of llama3."""
    names = {key for key, value in settings.items() if value is not None} - {"rope_theta", "type", "rope_type"}
    kinds = {settings[key] for key in ("type", "rope_type") if settings.get(key) is not None}
    if not kinds <= {"default", "llama3"} or len(kinds) > 1:
        return False
    if "llama3" not in kinds:
        return not names
    if names != LLAMA3 or not all(type(settings[key]) is float for key in LLAMA3 - {LENGTH}):
        return False
    rising = 0 < settings["low_freq_factor"] < settings["high_freq_factor"]
    return rising and settings["factor"] >= 1 and type(settings[LENGTH]) is int and 0 < settings[LENGTH] < positions


TIMEOUT = 300  # seconds
NOT_CARRIED = {"auto_map", "attn_implementation", "_attn_implementation", "layer_types", "torch_dtype"}


def find_opening_errors(configs: list[dict[str, Any]]) -> list[str | None]:
    """The first error that opening a model with each configuration gives, on one line; None if it opens."""
    if "transformers" in sys.modules:
        return [find_opening_error(config) for config in configs]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-P", "-c", f"from {__name__} import main; main()"]
    done = subprocess.run(
        command, input=json.dumps(configs), capture_output=True, text=True, timeout=TIMEOUT, env=environment
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ImportError(f"transformers could not check the configurations: {lines[-1]:.200}")
    return json.loads(done.stdout.splitlines()[-1])


class Warnings(logging.Handler):
    """Collects the warnings that transformers logs about invalid RoPE settings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord):
        """Keeps a warning about a value that must be another."""
        message = record.getMessage()
        if "must be" in message or "Missing validation function" in message:
            self.messages.append(message)


def find_opening_error(config: dict[str, Any]) -> str | None:
    """The error that opening a model with this configuration gives, in this process."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if config["model_type"] == "lexicon":
        import modeling_lexicon  # noqa: F401  (registers LexiconForCausalLM)

    content = deepcopy(
        {key: value for key, value in config.items() if key not in NOT_CARRIED}
    )  # RoPE settings are changed
    content |= {"num_hidden_layers": 1, "dtype": "float32"}
    if content.get("router_layers_index") is not None:
        content["router_layers_index"] = [0]
    warnings, logger = Warnings(), logging.getLogger("transformers")
    logger.addHandler(warnings)
    try:
        made = CONFIG_MAPPING[config["model_type"]].from_dict(content)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(made)
        frequencies = type(model.model.rotary_emb)(made).inv_freq
        if warnings.messages:
            return " ".join(warnings.messages[0].split())
        if not bool(torch.isfinite(frequencies).all()):
            return "its RoPE settings give frequencies that are not finite"
        return None
    except Exception as error:  # whatever transformers raises for an invalid value
        text = " ".join(str(error).split())
        return (
            f"{type(error).__name__}: {text}" if isinstance(error, KeyError | AttributeError) else text or repr(error)
        )
    finally:
        logger.removeHandler(warnings)


def main():
    """Reads configurations as a JSON list from the standard input, and prints their errors as a JSON list."""
    configs = json.load(sys.stdin)
    print(json.dumps([find_opening_error(config) for config in configs]))
