# SPDX-License-Identifier: Apache-2.0
"""Linear layers with a difference of low rank from pretrained weights (LoRA; Hu et al. 2022, Eq. 3, with alpha = r).

    W' = W + B A,   A (r, in), B (out, r)

W is frozen. B starts at 0, so that a new model equals its backbone. Names of tensors are those of peft: `q_proj.weight`,
`q_proj.lora_A.weight`, `q_proj.lora_B.weight`; of an adapter of peft with another alpha, B is to be multiplied by alpha / r.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init


class LowRankLinear(nn.Linear):
    """y = x W^T + b + x A^T B^T, on the weight and bias of a linear layer."""

    def __init__(self, linear: nn.Linear, rank: int):
        super(nn.Linear, self).__init__()  # nn.Linear's own would allocate another weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        options = {"bias": False, "device": linear.weight.device, "dtype": linear.weight.dtype}
        self.lora_A = nn.Linear(linear.in_features, rank, **options)
        self.lora_B = nn.Linear(rank, linear.out_features, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., in) -> (..., out)"""
        return F.linear(x, self.weight, self.bias) + self.lora_B(self.lora_A(x))

    def initialise(self):
        """A as in peft and B = 0, unless they have been loaded; also keeps transformers from drawing them again."""
        init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        init.zeros_(self.lora_B.weight)
        self.lora_A._is_hf_initialized = self.lora_B._is_hf_initialized = True

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """The linear layer with the weight W', computed in float32."""
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        difference = self.lora_B.weight.float() @ self.lora_A.weight.float()
        linear.weight = nn.Parameter((self.weight.float() + difference).to(self.weight.dtype))
        linear.bias = self.bias
        return linear


def replace_linears(layers: nn.Module, old: type[nn.Linear], make):
    """Replaces every linear layer of exactly this class inside a module by `make(linear)`."""
    found = [
        (parent, name, child)
        for parent in layers.modules()
        for name, child in parent.named_children()
        if type(child) is old
    ]
    for parent, name, child in found:
        setattr(parent, name, make(child))
