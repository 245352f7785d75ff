# SPDX-License-Identifier: Apache-2.0
"""Experts of low rank: one MLP that all share, and two thin matrices per expert and linear layer, as in FlexMoRE (arXiv 2602.08818).

Letters: N tokens, d hidden size, I the MLP's inner size, E experts, k experts per token, r the rank.

    W_i = W + B_i A_i,   A_i (r, in), B_i (out, r)
    E_i(x) = (act(x W_i,gate) * x W_i,up) W_i,down

The products with W are computed once per token, not once per expert: with k experts a token costs little more than in the dense model.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import _batched_linear, _grouped_linear

from .experts_lexicon import RoutedExperts, RoutingDecision, fits_grouped_mm


class LowRankExperts(RoutedExperts, nn.Module):
    """E_i(x) = (act(x W_i,gate) * x W_i,up) W_i,down with W_i = W + B_i A_i; see the module.

    Parameters: `shared_gate_up` (2 I, d) and `shared_down` (d, I), and of all experts `gate_up_a` (E, 2 r, d), `gate_b` and
    `up_b` (E, I, r), `down_a` (E, r, I), `down_b` (E, d, r).
    """

    FACTORS = ("gate_up_a", "gate_b", "up_b", "down_a", "down_b")

    def __init__(self, config):
        super().__init__()
        E, d, width, r = config.num_local_experts, config.hidden_size, config.intermediate_size, config.expert_rank
        self.config, self.act_fn = config, ACT2FN[config.hidden_act]
        self.shared_gate_up = nn.Parameter(torch.empty(2 * width, d))
        self.shared_down = nn.Parameter(torch.empty(d, width))
        self.gate_up_a = nn.Parameter(torch.empty(E, 2 * r, d))
        self.gate_b, self.up_b = (nn.Parameter(torch.empty(E, width, r)) for _ in range(2))
        self.down_a = nn.Parameter(torch.empty(E, r, width))
        self.down_b = nn.Parameter(torch.empty(E, d, r))

    def _unbind_experts(self):
        return list(zip(*(getattr(self, name).unbind(0) for name in self.FACTORS), strict=True))

    def expert_forward(self, x, weights):
        """See `RoutedExperts`."""
        gate_up_a, gate_b, up_b, down_a, down_b = weights
        gate, up = F.linear(x, self.shared_gate_up).chunk(2, -1)
        thin_gate, thin_up = F.linear(x, gate_up_a).chunk(2, -1)
        h = self.act_fn(gate + F.linear(thin_gate, gate_b)) * (up + F.linear(thin_up, up_b))
        return F.linear(h, self.shared_down) + F.linear(F.linear(h, down_a), down_b)

    def _batched_rows(self, x, index):
        gate_up_a, gate_b, up_b, down_a, down_b = (getattr(self, name)[index].transpose(1, 2) for name in self.FACTORS)
        gate, up = F.linear(x, self.shared_gate_up).chunk(2, -1)
        thin_gate, thin_up = (x @ gate_up_a).chunk(2, -1)
        h = self.act_fn(gate + thin_gate @ gate_b) * (up + thin_up @ up_b)
        return F.linear(h, self.shared_down) + (h @ down_a) @ down_b

    def forward(self, x: torch.Tensor, choice: torch.Tensor | RoutingDecision, weights: torch.Tensor | None = None):
        """x (N, d), index (N, k), weights (N, k) -> (N, d); or x (B, T, d) and a `RoutingDecision` -> (B, T, d)."""
        if isinstance(choice, RoutingDecision):
            return self.forward_rows(x, choice)
        N, k = choice.shape
        product, order = self._product(choice.flatten())
        rows = torch.arange(N * k, device=x.device) if order is None else order
        tokens = rows // k  # the token of each product
        gate, up = F.linear(x, self.shared_gate_up).chunk(2, -1)
        thin_gate, thin_up = product(x[tokens], self.gate_up_a).chunk(2, -1)
        h = self.act_fn(gate[tokens] + product(thin_gate, self.gate_b)) * (up[tokens] + product(thin_up, self.up_b))
        h = h * weights.flatten()[rows, None].to(h.dtype)  # the rest is linear
        thin = product(product(h, self.down_a), self.down_b)
        if order is not None:
            back = order.argsort()
            h, thin = h[back], thin[back]
        # summed in the order of the tokens, so that the result is deterministic
        return F.linear(h.view(N, k, -1).sum(1), self.shared_down) + thin.view(N, k, -1).sum(1)

    def _product(self, experts: torch.Tensor):
        """The experts of N k rows -> a function of rows and one of the stacked factors, and the order of rows that it expects, or
        `None` for the given order.
        """
        implementation = self.config._experts_implementation
        if implementation == "batched_mm":
            return lambda x, weight: _batched_linear(x, weight[experts], None), None
        chosen, order = experts.sort(stable=True)
        ids = torch.arange(len(self.down_a), device=experts.device)
        ends = torch.searchsorted(chosen, ids, right=True, out_int32=True)
        if implementation == "eager" or not all(fits_grouped_mm(getattr(self, name)) for name in self.FACTORS):
            sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
            return lambda x, weight: torch.cat([F.linear(*p) for p in zip(x.split(sizes), weight, strict=True)]), order
        return lambda x, weight: _grouped_linear(x, weight.to(x.dtype), ends, None), order
