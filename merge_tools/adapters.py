"""LoRA adapters as peft saves them: which can be applied to the weights of their base, and how."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from run_tools.errors import join_names, short_reason, short_repr

from .errors import MergeError
from .tensor_files import TORCH_NAMES, TensorEntry, equal_tensors, read_header

MERGE_FIRST = (
    "Merge it with peft first: model.merge_and_unload().save_pretrained(FOLDER). Use that folder as the expert."
)
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# The fields of peft's LoraConfig with which an adapter equals `merge_and_unload`, see tests/merge_tools/test_adapter_options.py.
# The scaling is computed from these.
SCALING_OPTIONS = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
# Any value of these is right: they matter in training only, or say which modules have tensors.
FREE_OPTIONS = (
    "peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode",
    "target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save", "lora_dropout",
    "fan_in_fan_out", "ensure_weight_tying", "megatron_core", "qalora_group_size", "loftq_config",
    "eva_config", "corda_config", "lora_ga_config",
)  # fmt: skip
# Only these values of others are.
ACCEPTED_VALUES: dict[str, tuple] = {
    "init_lora_weights": (True, "gaussian", "orthogonal", "mica", "eva"),  # the others change the weights of the base
    "bias": ("none", "all", "lora_only"),
}
NEUTRAL: tuple = (None, False, [], {}, "")  # of every option, known or not
REASONS = {
    "init_lora_weights": "changes the weights of the base",
    "kasa_config": "changes the weights of the base",
    "alora_invocation_tokens": "acts on some tokens only",
    "arrow_config": "mixes several adapters per token",
}
REMEDIES = {
    "init_lora_weights": "Save it as a plain LoRA: save_pretrained(FOLDER, path_initial_model_for_weight_conversion=...). "
    "Or merge the trained model with peft: model.merge_and_unload().save_pretrained(FOLDER).",
    "alora_invocation_tokens": "Such an adapter cannot be merged. Train a LoRA without this option.",
    "arrow_config": "Such an adapter cannot be merged. Use its adapters as experts.",
}


@dataclass
class Adapter:
    """A LoRA adapter: W + scaling * B A for some linear layers, and full weights for others (`modules_to_save`)."""

    folder: Path
    config: dict
    lora_pairs: dict[str, tuple[TensorEntry, TensorEntry, float]]  # name of W -> A, B, scaling
    full_modules: dict[str, TensorEntry]
    stored: list[TensorEntry]  # all tensors of its file
    base_is_fallback: bool = False  # its own base was not found; the recipe's base_model is used

    @property
    def entries(self) -> list[TensorEntry]:
        """All tensors of the adapter."""
        return [entry for a, b, _ in self.lora_pairs.values() for entry in (a, b)] + list(self.full_modules.values())

    @property
    def changed(self) -> list[str]:
        """The names of the weights that the adapter changes."""
        return [*self.lora_pairs, *self.full_modules]


def open_adapter(folder: Path, config: dict[str, Any]) -> Adapter:
    """Opens a LoRA adapter as peft saves it.

    Raises a `MergeError` for other kinds of adapters, which have to be merged with peft first, and for broken files.
    """
    if config.get("peft_type") != "LORA":
        kind = short_repr(config.get("peft_type"))
        raise MergeError(f"{folder} is an adapter with peft_type={kind}, but only LORA is supported. {MERGE_FIRST}")
    check_options(folder, config)
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise MergeError(f"{folder} has no adapter_model.safetensors. Save the adapter again with save_pretrained().")
    halves: dict[str, dict[str, TensorEntry]] = {}
    full_modules, stored = {}, read_header(file)
    for entry in stored:
        name = entry.name.removeprefix("base_model.model.")
        match = re.fullmatch(r"(.*)\.lora_([AB])\.weight", name)
        if entry.dtype not in TORCH_NAMES:
            raise MergeError(f"{file}: {entry.name!r} has dtype {entry.dtype}; quantised adapters are not supported.")
        if match:
            halves.setdefault(match[1], {})[match[2]] = entry
        elif "lora_" in name:
            raise MergeError(f"{file} holds {entry.name!r}, which is not a plain LoRA weight. {MERGE_FIRST}")
        else:
            for wrapper in (".modules_to_save.default.", ".modules_to_save.", ".base_layer."):
                name = name.replace(wrapper, ".")
            full_modules[name] = entry
    if not halves and not full_modules:
        raise MergeError(f"{file} is empty. Save the adapter again.")
    pairs = {f"{module}.weight": lora_pair(folder, config, module, half) for module, half in halves.items()}
    return Adapter(folder, config, pairs, full_modules, stored)


def check_options(folder: Path, config: dict[str, Any]):
    """Raises a `MergeError` for the first option with which an adapter is not known to equal `merge_and_unload`."""
    for key, value in config.items():
        if key in (*SCALING_OPTIONS, *FREE_OPTIONS) or value in (*NEUTRAL, *ACCEPTED_VALUES.get(key, ())):
            continue
        reason = REASONS.get(key, "is not supported")
        remedy = REMEDIES.get(key, MERGE_FIRST)
        raise MergeError(f"{folder} is an adapter with {short_repr(key)}={short_repr(value)}, which {reason}. {remedy}")


def fit_to_base(adapter: Adapter, folder: Path, config: dict[str, Any], entries: dict[str, TensorEntry], fix: str):
    """Checks that an adapter changes tensors of its base in `folder`; removes a second copy of tied embeddings.

    Raises a `MergeError` if the base has no such tensors, or if only one of its tied embeddings and output layer changes.
    """
    if config.get("tie_word_embeddings"):
        weights = adapter.full_modules
        if EMBEDDINGS in weights and equal_tensors(weights[EMBEDDINGS], weights.get(HEAD)):  # `ensure_weight_tying`
            del weights[HEAD]
        elif apart := sorted({EMBEDDINGS, HEAD} & set(adapter.changed)):
            raise MergeError(
                f"The adapter {adapter.folder} changes {join_names(apart)}, which its base ties: the result has separate "
                f"embeddings and output layer. {MERGE_FIRST} Untie the base and the other experts, too (docs/adapters.md)."
            )
    for weight, (a, b, _) in adapter.lora_pairs.items():
        entry = entries.get(weight)
        if entry is None or entry.shape != (b.shape[0], a.shape[1]):
            actual = f"has {weight!r} of shape {list(entry.shape)}" if entry else f"has no tensor {weight!r}"
            raise MergeError(
                f"The adapter {adapter.folder} changes {weight!r} of shape [{b.shape[0]}, {a.shape[1]}], but its base "
                f"{folder} {actual}. {fix}."
            )
    for weight, entry in adapter.full_modules.items():
        if weight not in entries or entries[weight].shape != entry.shape:
            raise MergeError(
                f"The adapter {adapter.folder} replaces {weight!r} of shape {list(entry.shape)}, which its base "
                f"{folder} does not have. {MERGE_FIRST}"
            )


def lora_pair(
    folder: Path, config: dict, module: str, half: dict[str, TensorEntry]
) -> tuple[TensorEntry, TensorEntry, float]:
    """A, B and the scaling of one module; raises a `MergeError` if they do not match each other or the configuration."""
    if set(half) != {"A", "B"}:
        raise MergeError(f"{folder}: {module!r} has only lora_{''.join(half)}. Save the adapter again.")
    a, b = half["A"], half["B"]
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
        raise MergeError(
            f"{folder}: lora_A and lora_B of {module!r} have incompatible shapes {list(a.shape)} and {list(b.shape)}. "
            "Save the adapter again."
        )
    try:
        rank, scaling = lora_scaling(config, module)
    except (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError, re.error) as error:
        raise MergeError(
            f"{folder / 'adapter_config.json'} has no valid r and lora_alpha for {module!r} ({short_reason(error)}). "
            "Save the adapter again."
        ) from error
    if rank != a.shape[0]:
        raise MergeError(
            f"{folder}: {module!r} has rank {rank} in adapter_config.json and rank {a.shape[0]} in its tensors. Save the "
            "adapter again."
        )
    return a, b, scaling


def lora_scaling(config: dict, module: str) -> tuple[int, float]:
    """Rank r, and scaling alpha / r, or alpha / sqrt(r) with rsLoRA. Both can be set per module."""

    def module_value(patterns: dict | None, default):
        for pattern, value in (patterns or {}).items():
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                return value
        return default

    rank = module_value(config.get("rank_pattern"), config["r"])
    alpha = module_value(config.get("alpha_pattern"), config["lora_alpha"])
    scaling = float(alpha / (rank**0.5 if config.get("use_rslora") else rank))
    if not math.isfinite(scaling):
        raise ValueError(scaling)
    return rank, scaling
