"""Mixtures of mergekit 0.1.5, whose fused expert tensors llama.cpp and vLLM cannot read: split into one tensor per expert."""

import re
from pathlib import Path
from typing import Any

from .checkpoints import Source, open_source
from .config_checks import find_value_errors
from .errors import MergeError
from .families import MIXTURES, MixtureClass
from .layout import rope_config_v4_and_v5
from .output_config import to_json_bytes
from .output_folder import write_output
from .output_tensors import OutputTensor, copy_tensor
from .shard_writer import Progress
from .slices import Slice
from .tokenizers import carried_files

FUSED = re.compile(r"(model\.layers\.\d+)\.mlp\.experts\.(gate_up_proj|down_proj)")
GATE = re.compile(r"(model\.layers\.\d+)\.mlp\.gate\.weight")


def split_fused_experts(folder: str | Path, out: str | Path, *, progress: Progress | None = None) -> dict[str, Any]:
    """Writes a mixture of mergekit 0.1.5 again, with the names that stock files of its class have. Values do not change.

    Args:
        folder: the mixture, with `experts.gate_up_proj` `(E, 2 i, d)` and `experts.down_proj` `(E, d, i)` in each layer.
        out: output folder, which must not exist or be empty.
        progress: receives the progress of each phase.

    Returns:
        What was written.

    Raises:
        MergeError: if the folder has no fused tensors, their shapes do not match config.json, or `out` is not free.
    """
    source = open_source("mixture", str(folder))
    model_type = source.config.get("model_type")
    if not isinstance(model_type, str) or model_type not in MIXTURES:
        raise MergeError(f"{folder} has model_type {model_type!r:.60}. Give a mixture: {', '.join(MIXTURES)}.")
    if errors := find_value_errors(source.config):
        raise MergeError(f"{folder}/config.json: {errors[0]}. Copy or download it again.")
    entries = source.checkpoint.entries
    if not any(FUSED.fullmatch(name) for name in entries):
        raise MergeError(f"{folder} has no fused tensor such as mlp.experts.gate_up_proj: there is nothing to split.")
    mixture, tensors = MIXTURES[model_type], list[OutputTensor]()
    for name, entry in entries.items():
        if match := FUSED.fullmatch(name):
            tensors += split_experts(source, name, f"{match[1]}.{mixture.block}.experts", mixture)
        else:
            stored = GATE.sub(rf"\1.{mixture.block}.gate.weight", name)
            tensors.append(copy_tensor(stored, name, entry.dtype, source))
    files = carried_files(source.folder) | {
        "config.json": to_json_bytes(
            {
                **dict.fromkeys(mixture.counts, mixture.count(source.config)),
                **source.config,
                **rope_config_v4_and_v5(source.config),
            }
        )
    }
    return write_output(Path(out), tensors, [source], progress, lambda scans: files)


def split_experts(source: Source, name: str, prefix: str, mixture: MixtureClass) -> list[OutputTensor]:
    """The tensors of the experts in a fused tensor, each a range of its elements."""
    entry, config = source.entry(name), source.config
    linears = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
    d, inner = config["hidden_size"], config.get(mixture.sizes[-1])
    shape = (inner, d) if len(linears) == 2 else (d, inner)
    expected = (mixture.count(config), len(linears) * shape[0] if shape[0] else None, shape[1])
    if entry.shape != expected:
        raise MergeError(f"{name!r} has shape {list(entry.shape)}, but config.json requires {list(expected)}.")
    size, tensors = shape[0] * shape[1], []
    for position in range(entry.shape[0] * len(linears)):
        expert, linear = divmod(position, len(linears))
        part = Slice(name, (source,), (1.0,), position * size, (position + 1) * size)
        stored = f"{prefix}.{expert}.{mixture.names[linears[linear]]}.weight"
        tensors.append(OutputTensor(stored, entry.dtype, shape, (part,)))
    return tensors
