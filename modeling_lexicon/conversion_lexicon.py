# SPDX-License-Identifier: Apache-2.0
"""Checkpoint layout: one tensor per expert on disk, one for all experts in memory.

On disk each expert is a Mixtral expert, which can be read, added and removed by itself. A mixture opens as a stock Mixtral.
"""

import re

import torch
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming

from .configuration_lexicon import LexiconConfig

# For from_pretrained and save_pretrained. Dots are escaped and names complete, because saving applies these in reverse:
# the plain Llama names of layers that are not routed must not match.
MIXTRAL_EXPERT = r"\.block_sparse_moe\.experts\.*."
SHARED = r"\.block_sparse_moe\.base\."  # of experts of low rank
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
        WeightConverter(
            [SHARED + r"w1\.weight", SHARED + r"w3\.weight"], r"\.mlp\.experts\.shared_gate_up", [Concatenate(dim=0)]
        ),
        WeightRenaming(SHARED + r"w2\.weight", r"\.mlp\.experts\.shared_down"),
        WeightConverter(
            [MIXTRAL_EXPERT + r"w1\.A\.weight", MIXTRAL_EXPERT + r"w3\.A\.weight"],
            r"\.mlp\.experts\.gate_up_a",
            [MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        *(
            WeightConverter(MIXTRAL_EXPERT + part, r"\.mlp\.experts\." + name, [MergeModulelist(dim=0)])
            for part, name in (
                (r"w1\.B\.weight", "gate_b"),
                (r"w3\.B\.weight", "up_b"),
                (r"w2\.A\.weight", "down_a"),
                (r"w2\.B\.weight", "down_b"),
            )
        ),
    ],
    overwrite=True,
)

MLP_KEY = re.compile(r"(.*)\.block_sparse_moe\.(?:experts\.(\d+)|base)\.(w[123](?:\.[AB])?)\.weight")
# part of an expert on disk -> parameter in memory, and which half of it
HALVES = {
    "w1": ("gate_up_proj", 0), "w3": ("gate_up_proj", 1), "w2": ("down_proj", None), "w1.A": ("gate_up_a", 0), "w3.A": ("gate_up_a", 1),
    "w1.B": ("gate_b", None), "w3.B": ("up_b", None), "w2.A": ("down_a", None), "w2.B": ("down_b", None),
}  # fmt: skip
SHARED_HALVES = {"w1": ("shared_gate_up", 0), "w3": ("shared_gate_up", 1), "w2": ("shared_down", None)}


def parse_expert_key(key: str) -> tuple[str, int | None, int | None] | None:
    """A key on disk -> the parameter in memory that it is part of, its expert (`None` if all share it), and its half (0 or 1) of a
    parameter of two.
    """
    if not (match := MLP_KEY.fullmatch(key)):
        return None
    layer, expert, part = match.groups()
    name, half = (SHARED_HALVES if expert is None else HALVES).get(part, (None, None))
    return name and (f"{layer}.mlp.experts.{name}", expert and int(expert), half)


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
        if target is None or target[0] not in parameters or (target[1] or 0) >= len(parameters[target[0]]):
            converted[key.replace(".block_sparse_moe.gate.", ".mlp.gate.")] = tensor
        else:
            parts.setdefault(target[0], []).append((key, *target[1:], tensor))
    for name, pieces in parts.items():
        parameter, (_, expert, half, first) = parameters[name].detach(), pieces[0]
        is_partial = len(pieces) < (1 if expert is None else len(parameter)) * (1 if half is None else 2)
        if is_partial and (strict or parameter.is_meta):
            converted.update({key: tensor for key, *_, tensor in pieces})
            continue
        stacked = parameter.clone() if is_partial else first.new_empty(parameter.shape)
        for _, expert, half, tensor in pieces:
            part = stacked if expert is None else stacked[expert]
            part = part if half is None else part.chunk(2)[half]
            part.copy_(tensor)
        converted[name] = stacked
    return converted
