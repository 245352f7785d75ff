# SPDX-License-Identifier: Apache-2.0
"""Checkpoint layout: one tensor per expert on disk, one for all experts in memory.

On disk an expert is a Mixtral expert or a plain linear layer. Each can be read, added and removed by itself, and a mixture
of whole MLPs opens as a stock Mixtral.
"""

import re

import torch
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming

from .configuration_lexicon import LexiconConfig

# For from_pretrained and save_pretrained. Dots are escaped and names complete, because saving applies these in reverse:
# the plain Llama names of layers that are not routed must not match.
MIXTRAL_EXPERT = r"\.block_sparse_moe\.experts\.*."
register_checkpoint_conversion_mapping(
    LexiconConfig.model_type,
    [
        WeightRenaming(r"\.block_sparse_moe\.gate\.weight", r"\.mlp\.gate\.weight"),
        WeightConverter(
            [MIXTRAL_EXPERT + r"w1\.weight", MIXTRAL_EXPERT + r"w3\.weight"],
            r"\.mlp\.experts\.gate_up_proj",
            [MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        WeightConverter(MIXTRAL_EXPERT + r"w2\.weight", r"\.mlp\.experts\.down_proj", [MergeModulelist(dim=0)]),
        WeightConverter(r"_proj\.experts\.*.weight", r"_proj\.experts\.weight", [MergeModulelist(dim=0)]),
        WeightConverter(r"_proj\.experts\.*.bias", r"_proj\.experts\.bias", [MergeModulelist(dim=0)]),
    ],
    overwrite=True,
)

MLP_KEY = re.compile(r"(.*)\.block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight")
LINEAR_KEY = re.compile(r"(.*_proj\.experts)\.(\d+)\.(weight|bias)")


def parse_expert_key(key: str) -> tuple[str, int, int | None] | None:
    """A key on disk -> the parameter in memory that it is part of, its expert, and its half (0 or 1) of `gate_up_proj`."""
    if match := MLP_KEY.fullmatch(key):
        layer, expert, part = match.groups()
        name = "down_proj" if part == "w2" else "gate_up_proj"
        return f"{layer}.mlp.experts.{name}", int(expert), {"w1": 0, "w2": None, "w3": 1}[part]
    if match := LINEAR_KEY.fullmatch(key):
        return f"{match[1]}.{match[3]}", int(match[2]), None
    return None


def fuse_expert_keys(
    state_dict: dict[str, torch.Tensor], parameters: dict[str, torch.Tensor], strict: bool
) -> dict[str, torch.Tensor]:
    """Converts a state dict with the layout on disk, or in memory, to the layout in memory.

    If only some experts are present, as in one file of several, the others keep the values of `parameters`; with `strict`
    such keys are returned unchanged, and torch reports them.
    """
    converted, parts = {}, {}
    for key, tensor in state_dict.items():
        target = parse_expert_key(key)
        if target is None or target[0] not in parameters or target[1] >= len(parameters[target[0]]):
            converted[key.replace(".block_sparse_moe.gate.", ".mlp.gate.")] = tensor
        else:
            parts.setdefault(target[0], []).append((key, *target[1:], tensor))
    for name, pieces in parts.items():
        stacked = parameters[name].detach().clone()
        if strict and len(pieces) < len(stacked) * (2 if pieces[0][2] is not None else 1):
            converted.update({key: tensor for key, *_, tensor in pieces})
            continue
        for _, expert, half, tensor in pieces:
            part = stacked[expert] if half is None else stacked[expert].chunk(2)[half]
            part.copy_(tensor)
        converted[name] = stacked
    return converted
