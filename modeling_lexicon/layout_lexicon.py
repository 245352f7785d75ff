"""One tensor an expert on disk, one for all experts in memory.

On disk an expert is a Mixtral expert or a plain linear layer, so that each can be read, added and taken out by itself,
and so that what is a Mixtral opens as one.
"""

import re

import torch
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming

from .configuration_lexicon import LexiconConfig

# For from_pretrained and save_pretrained. Dots are escaped and names complete, because saving reads these backwards:
# the plain Llama names of layers that are not routed must match nothing here.
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


def locate(key: str) -> tuple[str, int, int | None] | None:
    """The parameter in memory that a key on disk is a part of, its expert, and its half (0 or 1) of two."""
    if match := MLP_KEY.fullmatch(key):
        layer, expert, part = match.groups()
        name = "down_proj" if part == "w2" else "gate_up_proj"
        return f"{layer}.mlp.experts.{name}", int(expert), {"w1": 0, "w2": None, "w3": 1}[part]
    if match := LINEAR_KEY.fullmatch(key):
        return f"{match[1]}.{match[3]}", int(match[2]), None
    return None


def as_in_memory(
    state_dict: dict[str, torch.Tensor], parameters: dict[str, torch.Tensor], strict: bool
) -> dict[str, torch.Tensor]:
    """A state dict in the layout on disk, or in that of memory, in that of memory.

    Where only some of the experts are there, as in one file of several, the others keep the values of `parameters`;
    with `strict` such parts stay as they are, for torch to complain about.
    """
    found, parts = {}, {}
    for key, tensor in state_dict.items():
        place = locate(key)
        if place is None or place[0] not in parameters or place[1] >= len(parameters[place[0]]):
            found[key.replace(".block_sparse_moe.gate.", ".mlp.gate.")] = tensor
        else:
            parts.setdefault(place[0], []).append((key, *place[1:], tensor))
    for name, pieces in parts.items():
        whole = parameters[name].detach().clone()
        if strict and len(pieces) < len(whole) * (2 if pieces[0][2] is not None else 1):
            found.update({key: tensor for key, *_, tensor in pieces})
            continue
        for _, expert, half, tensor in pieces:
            target = whole[expert] if half is None else whole[expert].chunk(2)[half]
            target.copy_(tensor)
        found[name] = whole
    return found
