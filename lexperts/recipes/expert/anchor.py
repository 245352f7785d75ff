"""Training beside a frozen copy of the MLPs (FlexOlmo, arXiv 2507.07024): experts that were trained apart agree without joint training."""

import torch
from torch import nn

GATE = "anchor_gate"


def add_anchors(model: nn.Module) -> None:
    """Mixes the output of each MLP with that of a frozen copy: y = p_0 MLP_0(x) + p_1 MLP(x), p = softmax(x W).

    The gate's two rows begin at zero, an even mixture. The copies are no parameters of the model, so checkpoints hold the expert in the
    layout of a dense model, and the gates as `mlp.anchor_gate.weight`.
    """
    for layer in model.model.layers:
        frozen = [
            weight.detach().clone()
            for weight in (layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight, layer.mlp.down_proj.weight)
        ]
        gate = nn.Linear(model.config.hidden_size, 2, bias=False, device=frozen[0].device, dtype=frozen[0].dtype)
        nn.init.zeros_(gate.weight)
        setattr(layer.mlp, GATE, gate)
        layer.mlp.register_forward_hook(mix_with(frozen))


def mix_with(frozen: list[torch.Tensor]):
    """The hook of an MLP that mixes its output with that of these frozen weights (gate, up, down)."""

    def mix(mlp, arguments, output):
        x = arguments[0]
        gate, up, down = (weight.to(x.device) for weight in frozen)
        anchor = nn.functional.linear(mlp.act_fn(nn.functional.linear(x, gate)) * nn.functional.linear(x, up), down)
        shares = getattr(mlp, GATE)(x).float().softmax(-1).to(output.dtype)
        return shares[..., :1] * anchor + shares[..., 1:] * output

    return mix
