"""LoRA adapters as peft saves them: which can be applied to the weights of their base, and how."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from run_tools.errors import short_reason

from .errors import MergeError
from .tensor_files import TORCH_NAMES, TensorEntry, read_header

MERGE_FIRST = "Merge it with peft's merge_and_unload() and use the result as the expert."
# Options of peft with which an adapter is not W + scaling * B A.
UNSUPPORTED_OPTIONS = (
    "use_dora", "fan_in_fan_out", "lora_bias", "layer_replication", "alora_invocation_tokens", "use_qalora",
)  # fmt: skip


@dataclass
class Adapter:
    """A LoRA adapter: W + scaling * B A for some linear layers, and full weights for others (`modules_to_save`)."""

    folder: Path
    config: dict
    lora_pairs: dict[str, tuple[TensorEntry, TensorEntry, float]]  # name of W -> A, B, scaling
    full_modules: dict[str, TensorEntry]
    files: list[Path]
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
        raise MergeError(f"{folder} has peft_type {config.get('peft_type')!r}; only LORA is supported. {MERGE_FIRST}")
    for key in UNSUPPORTED_OPTIONS:
        if config.get(key):
            raise MergeError(f"{folder} is an adapter with {key}, which is not supported. {MERGE_FIRST}")
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise MergeError(f"{folder} has no adapter_model.safetensors. Save the adapter again with save_pretrained().")
    halves: dict[str, dict[str, TensorEntry]] = {}
    full_modules = {}
    for entry in read_header(file):
        name = entry.name.removeprefix("base_model.model.")
        match = re.fullmatch(r"(.*)\.lora_([AB])\.weight", name)
        if entry.dtype not in TORCH_NAMES:
            raise MergeError(f"{file}: {entry.name!r} has dtype {entry.dtype}; quantised adapters are not supported.")
        if match:
            halves.setdefault(match[1], {})[match[2]] = entry
        elif "lora_" in name or "base_layer" in name:
            raise MergeError(f"{file} holds {entry.name!r}, which is not a plain LoRA weight. {MERGE_FIRST}")
        else:
            full_modules[name.replace(".modules_to_save.default.", ".").replace(".modules_to_save.", ".")] = entry
    if not halves and not full_modules:
        raise MergeError(f"{file} is empty. Save the adapter again.")
    pairs = {f"{module}.weight": lora_pair(folder, config, module, half) for module, half in halves.items()}
    return Adapter(folder, config, pairs, full_modules, [file])


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
