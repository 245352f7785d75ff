# SPDX-License-Identifier: Apache-2.0
"""Experts, and the routing decisions of the rows of a batch (LM-Lexicon, Sect. 3).

Letters: B sequences, T tokens in each, N tokens in all, d input size, I the MLP's inner size, E experts, k experts per
token.

`experts_implementation` has transformers' values: `"eager"` is a loop over experts; `"batched_mm"` gathers the weights of
each token's (or row's) experts for one batched product; `"grouped_mm"` sorts tokens by expert for one grouped product. All
give the same values and gradients. Tokens are computed by `transformers.integrations.moe`. A row has one expert for all of
its tokens, and sorting these is slower than a loop over the experts that some row chose; this loop is `"grouped_mm"` for
rows. `sequence_soft` runs all experts on all tokens, in a loop whatever the setting.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations.moe import _batched_linear, _grouped_linear
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

LINEAR_IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")


class RowsByExpert:
    """The rows of a batch by expert; index `(B,)` is read from the device once, unless it is known as a list, `experts`."""

    def __init__(self, index: torch.Tensor, experts: list[int] | None = None):
        self.index, self.experts = index, experts

    @cached_property
    def _by_expert(self) -> dict[int, list[int]]:
        self.experts = self.experts or self.index.tolist()
        by_expert = {}
        for row, expert in enumerate(self.experts):
            by_expert.setdefault(expert, []).append(row)
        return by_expert

    @cached_property
    def groups(self) -> list[tuple[int, torch.Tensor | slice]]:
        """(expert, its rows) for each expert that some row chose; a slice, and so a view, of neighbouring rows."""
        return [
            (e, slice(r[0], r[-1] + 1) if r[-1] - r[0] + 1 == len(r) else torch.tensor(r, device=self.index.device))
            for e, r in self._by_expert.items()
        ]

    @cached_property
    def order(self) -> torch.Tensor | None:
        """(B,): from the concatenated groups back to the order of the batch; `None` if they are in it already."""
        grouped_rows = sum(self._by_expert.values(), [])
        in_order = grouped_rows == sorted(grouped_rows)
        return None if in_order else torch.tensor(grouped_rows, device=self.index.device).argsort()


@dataclass(eq=False)
class RoutingDecision:
    """The routing of each row of a batch, which holds for all of its later tokens too."""

    index: torch.Tensor  # (B,), the row's expert; the one with the largest weight if all are weighted
    weights: torch.Tensor | None = None  # (B, E), all experts weighted; or (B,), exactly 1, with the gate's gradient
    logits: torch.Tensor | None = None  # (B, E), if a gate decided: the mean of its logits over the row's prompt
    rows: RowsByExpert | None = None

    def __post_init__(self):
        if self.rows is None:
            self.rows = RowsByExpert(self.index)

    def select(self, rows: list[int]) -> "RoutingDecision":
        """The decisions of these rows, which may repeat."""
        known = self.rows.experts and [self.rows.experts[row] for row in rows]
        if known and known == self.rows.experts and self.weights is self.logits is None:
            return self
        order = torch.tensor(rows, device=self.index.device)
        index, weights, logits = (p if p is None else p[order] for p in (self.index, self.weights, self.logits))
        return RoutingDecision(index, weights, logits, RowsByExpert(index, known))


class RoutedExperts:
    """A mix-in for modules that hold experts. They are called with x and the choices of tokens or the decisions of rows.

    They are called as modules, and their weights are not read from outside: hooks on them (sharding, offloading) run.
    Subclasses have these methods:

    - `_unbind_experts`: the weights of each expert, with one stacked gradient; indexing would add up E full ones.
    - `_select_expert`: the weights of the only active expert, whose gradient is copied into zeros, without stacking.
    - `expert_forward`: x (..., d) -> (..., out) by the weights of one expert.
    - `_batched_rows`: x (B, T, d), index (B,) -> (B, T, out), each row by a copy of the weights of its expert.
    """

    def forward_rows(self, x: torch.Tensor, decision: RoutingDecision) -> torch.Tensor:
        """x (B, T, d) -> (B, T, out): each row by its own expert, or by a weighted sum of all."""
        weights = decision.weights
        if weights is not None and weights.dim() == 2:
            outputs = (self.expert_forward(x, expert) for expert in self._unbind_experts())
            return sum(y * weights[:, e, None, None] for e, y in enumerate(outputs)).to(x.dtype)
        if torch.compiler.is_compiling():
            y = self.compiled_rows(x, decision.index.to(x.device))
        elif self.config._experts_implementation == "batched_mm":
            y = self._batched_rows(x, decision.index.to(x.device))
        else:
            y = self.grouped_rows(x, decision)
        return y if weights is None else (y * weights.to(y.device)[:, None, None]).to(y.dtype)

    def grouped_rows(self, x: torch.Tensor, decision: RoutingDecision) -> torch.Tensor:
        """One expert per row; computes only experts that some row chose."""
        groups, order, outputs = decision.rows.groups, decision.rows.order, []
        experts = self._unbind_experts() if len(groups) > 1 else {groups[0][0]: self._select_expert(groups[0][0])}
        for e, rows in groups:
            rows = rows if isinstance(rows, slice) else rows.to(x.device)
            outputs.append(self.expert_forward(x[rows], experts[e]))
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return y if order is None else y[order.to(x.device)]

    def compiled_rows(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """`_batched_rows` without reading the decision from the device, which would break a compiled graph."""
        return self._batched_rows(x, index)


def fits_grouped_mm(weight: torch.Tensor) -> bool:
    """Whether torch's grouped product takes these weights (E, out, in): no float64, and rows of a multiple of 16 bytes
    in both orders. torch raises an error otherwise."""
    _, out, d = weight.shape
    numbers = 16 // weight.element_size()
    return weight.dtype != torch.float64 and out % numbers == 0 and d % numbers == 0


class LexiconExperts(RoutedExperts, MixtralExperts):
    """E_i(x) = (act(x W_i,gate) * x W_i,up) W_i,down: E Llama MLPs in Mixtral's two parameters."""

    def _unbind_experts(self):
        gate_up, down = self.gate_up_proj.unbind(0), self.down_proj.unbind(0)
        return [(*gu.chunk(2), d) for gu, d in zip(gate_up, down, strict=True)]  # (I, d), (I, d), (d, I)

    def _select_expert(self, e):
        return *self.gate_up_proj[e].chunk(2), self.down_proj[e]

    def expert_forward(self, x, weights):
        """See `RoutedExperts`."""
        gate, up, down = weights
        return F.linear(self.act_fn(F.linear(x, gate)) * F.linear(x, up), down)

    def _batched_rows(self, x, index):
        gate, up = (x @ self.gate_up_proj[index].transpose(1, 2)).chunk(2, dim=-1)
        return (self.act_fn(gate) * up) @ self.down_proj[index].transpose(1, 2)

    def compiled_rows(self, x, index):
        """See `RoutedExperts`."""
        if self.config._experts_implementation != "grouped_mm" or not fits_grouped_mm(self.down_proj):
            return self._batched_rows(x, index)
        B, T, d = x.shape
        chosen = index[:, None].expand(B, T).reshape(-1, 1)
        return self.forward(x.reshape(-1, d), chosen, x.new_ones(B * T, 1)).view(B, T, d)

    def forward(self, x: torch.Tensor, choice: torch.Tensor | RoutingDecision, weights: torch.Tensor | None = None):
        """x (N, d), index (N, k), weights (N, k) -> (N, d); or x (B, T, d) and a `RoutingDecision` -> (B, T, d)."""
        if isinstance(choice, RoutingDecision):
            return self.forward_rows(x, choice)
        if self.config._experts_implementation == "grouped_mm" and not fits_grouped_mm(self.down_proj):
            return MixtralExperts.forward.__wrapped__(self, x, choice, weights)  # the plain loop
        return super().forward(x, choice, weights)


class LinearExperts(RoutedExperts, nn.Module):
    """E_i(x) = x W_i + b_i: E linear layers in 3-D parameters."""

    def __init__(self, config, in_features: int, out_features: int, bias: bool):
        super().__init__()
        self.config, num_experts = config, config.num_local_experts
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(num_experts, out_features)) if bias else None

    def _unbind_experts(self):
        biases = [None] * len(self.weight) if self.bias is None else self.bias.unbind(0)
        return list(zip(self.weight.unbind(0), biases, strict=True))

    def _select_expert(self, e):
        return self.weight[e], None if self.bias is None else self.bias[e]

    def expert_forward(self, x, weights):
        """See `RoutedExperts`."""
        return F.linear(x, *weights)

    def _batched_rows(self, x, index):
        y = x @ self.weight[index].transpose(1, 2)
        return y if self.bias is None else y + self.bias[index][:, None]

    def forward(self, x: torch.Tensor, choice: torch.Tensor | RoutingDecision, weights: torch.Tensor | None = None):
        """x (N, d), index (N, k), weights (N, k) -> (N, out); or x (B, T, d) and a `RoutingDecision` -> (B, T, out).

        Raises a `ValueError` for an `experts_implementation` that supports whole MLPs only.
        """
        if isinstance(choice, RoutingDecision):
            return self.forward_rows(x, choice)
        implementation = self.config._experts_implementation
        if implementation not in LINEAR_IMPLEMENTATIONS:
            raise ValueError(
                f"experts_implementation={implementation!r} supports whole MLPs only, and this model routes single "
                f"linear layers. Use one of {', '.join(map(repr, LINEAR_IMPLEMENTATIONS))}."
            )
        if implementation == "eager" or (implementation == "grouped_mm" and not fits_grouped_mm(self.weight)):
            return loop_over_experts(self, x, choice, weights).to(x.dtype)
        k, flat = choice.shape[1], choice.flatten()  # (N k,)
        if implementation == "batched_mm":
            y = _batched_linear(x.repeat_interleave(k, dim=0), self.weight[flat], self._biases(flat))
        else:
            y = self._grouped(x, flat, k)
        # summed in the order of the tokens, so that the result is deterministic
        return (y.view(-1, k, y.shape[-1]) * weights[..., None]).sum(1).to(x.dtype)

    def _grouped(self, x: torch.Tensor, flat: torch.Tensor, k: int) -> torch.Tensor:
        """x (N, d), the tokens' experts (N k,) -> (N k, out), not yet weighted."""
        experts, order = flat.sort(stable=True)
        # the end of each expert's tokens, without reading from the device
        expert_ids = torch.arange(len(self.weight), device=experts.device)
        ends = torch.searchsorted(experts, expert_ids, right=True, out_int32=True)
        weight, device_type = self.weight, x.device.type
        if torch.is_autocast_enabled(device_type):  # the grouped product ignores autocast
            weight = weight.to(torch.get_autocast_dtype(device_type))
        y = _grouped_linear(x[order // k], weight, ends, self._biases(experts))
        return y[order.argsort()]

    def _biases(self, experts: torch.Tensor) -> torch.Tensor | None:
        return None if self.bias is None else self.bias[experts]


def loop_over_experts(experts: RoutedExperts, x, index, weights) -> torch.Tensor:
    """y_n = sum_j w_nj E_{i_nj}(x_n), the reference for values and gradients: x (N, d), index (N, k), weights (N, k)."""
    y = 0
    for e, expert in enumerate(experts._unbind_experts()):
        share = ((index == e) * weights).sum(1, keepdim=True)  # (N, 1)
        y = y + share * experts.expert_forward(x, expert)
    return y
