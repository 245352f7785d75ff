"""Training beside a frozen copy of the MLPs (FlexOlmo, arXiv 2507.07024): experts that were trained apart agree without joint training."""

from copy import deepcopy
from functools import partial

import torch
from torch import nn

GATE = "anchor_gate"


def add_anchors(model: nn.Module) -> None:
    """Mixes the output of each MLP with that of a frozen copy: y = p_0 MLP_0(x) + p_1 MLP(x), p = softmax(x W).

    The gate's two rows begin at zero, an even mixture. The copies are no parameters of the model, so checkpoints hold the expert in the
    layout of a dense model, and the gates as `mlp.anchor_gate.weight`.
    """
    for layer in model.model.layers:
        frozen, weight = deepcopy(layer.mlp).requires_grad_(False), layer.mlp.down_proj.weight
        gate = nn.Linear(model.config.hidden_size, 2, bias=False, device=weight.device, dtype=weight.dtype)
        nn.init.zeros_(gate.weight)
        setattr(layer.mlp, GATE, gate)
        layer.mlp.register_forward_hook(partial(mix, frozen))


def mix(frozen: nn.Module, mlp: nn.Module, arguments: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    """The hook of an MLP that mixes its output with that of its frozen copy."""
    (x,) = arguments
    shares = getattr(mlp, GATE)(x).float().softmax(-1).to(output.dtype)
    return shares[..., :1] * frozen.to(x.device)(x) + shares[..., 1:] * output
