# SPDX-License-Identifier: Apache-2.0
"""Experts, and the routing decisions of the rows of a batch (LM-Lexicon, Sect. 3).

Letters: B sequences, T tokens in each, N tokens in all, d hidden size, I the MLP's inner size, E experts, k experts per
token.

`experts_implementation` has transformers' values: `"eager"` is a loop over experts; `"batched_mm"` gathers the weights of
each token's (or row's) experts for one batched product; `"grouped_mm"` sorts tokens by expert for one grouped product. All
give the same values and gradients. Tokens are computed by `transformers.integrations.moe`. A row has one expert for all of
its tokens, and sorting these is slower than a loop over the experts that some row chose; this loop is `"grouped_mm"` for
rows. `sequence_soft` runs all experts on all tokens, in a loop whatever the setting.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from transformers.models.mixtral.modeling_mixtral import MixtralExperts


class RowsByExpert:
    """The rows of a batch in the order of their experts; index `(B,)` is read from the device once, unless it is known."""

    def __init__(self, index: torch.Tensor, experts: list[int] | None = None):
        self.index, self.known = index, experts

    @cached_property
    def groups(self) -> list[tuple[int, int]]:
        """(expert, number of its rows) for each expert that some row chose."""
        self.known = self.known or self.index.tolist()
        return sorted(Counter(self.known).items())

    @cached_property
    def order(self) -> torch.Tensor:
        """(B,): the rows, sorted by expert."""
        return self.index.argsort(stable=True)


@dataclass(eq=False)
class RoutingDecision:
    """The routing of each row of a batch, which holds for all of its later tokens too."""

    index: torch.Tensor  # (B,), the row's expert; the one with the largest weight if all are weighted
    weights: torch.Tensor | None = None  # (B, E), all experts weighted; or (B,), exactly 1, with the gate's gradient
    logits: torch.Tensor | None = None  # (B, E), if a gate decided: the mean of its logits over the row's prompt
    rows: RowsByExpert | None = None

    def __post_init__(self):
        self.rows = self.rows or RowsByExpert(self.index)

    def select(self, rows: list[int]) -> "RoutingDecision":
        """The decisions of these rows, which may repeat."""
        known = self.rows.known and [self.rows.known[row] for row in rows]
        order = torch.tensor(rows, dtype=torch.long, device=self.index.device)  # also of no rows
        index, weights, logits = (p if p is None else p[order] for p in (self.index, self.weights, self.logits))
        return RoutingDecision(index, weights, logits, RowsByExpert(index, known))


class RoutedExperts:
    """A mix-in for modules that hold experts. They are called with x and the choices of tokens or the decisions of rows.

    They are called as modules, and their weights are not read from outside: hooks on them (sharding, offloading) run.
    Subclasses have these methods:

    - `_unbind_experts`: the weights of each expert, with one stacked gradient; indexing would add up E full ones.
    - `expert_forward`: x (..., d) -> (..., d) by the weights of one expert.
    - `_batched_rows`: x (B, T, d), index (B,) -> (B, T, d), each row by a copy of the weights of its expert.
    """

    def forward_rows(self, x: torch.Tensor, decision: RoutingDecision) -> torch.Tensor:
        """x (B, T, d) -> (B, T, d): each row by its own expert, or by a weighted sum of all."""
        weights = decision.weights
        if weights is not None and weights.dim() == 2:
            outputs = (self.expert_forward(x, expert) for expert in self._unbind_experts())
            return sum(y * weights[:, e, None, None] for e, y in enumerate(outputs)).to(x.dtype)
        if torch.compiler.is_compiling() or self.config._experts_implementation == "batched_mm":
            y = self._batched_rows(x, decision.index.to(x.device))  # reads no decision from the device
        else:
            y = self._grouped_rows(x, decision.rows)
        return y if weights is None else (y * weights.to(y.device)[:, None, None]).to(y.dtype)

    def _grouped_rows(self, x: torch.Tensor, rows: RowsByExpert) -> torch.Tensor:
        """One expert per row; computes only experts that some row chose."""
        experts, groups = self._unbind_experts(), rows.groups
        if len(groups) == 1:
            return self.expert_forward(x, experts[groups[0][0]])
        order = rows.order.to(x.device)
        parts = x[order].split([size for _, size in groups])
        outputs = [self.expert_forward(part, experts[e]) for part, (e, _) in zip(parts, groups, strict=True)]
        return torch.cat(outputs)[order.argsort()]


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

    def expert_forward(self, x, weights):
        """See `RoutedExperts`."""
        gate, up, down = weights
        return F.linear(self.act_fn(F.linear(x, gate)) * F.linear(x, up), down)

    def _batched_rows(self, x, index):
        if self.config._experts_implementation == "grouped_mm" and fits_grouped_mm(self.down_proj):  # compiled
            tokens = x.flatten(0, 1)
            chosen = index.repeat_interleave(x.shape[1])[:, None]
            return self(tokens, chosen, x.new_ones(chosen.shape)).view_as(x)
        gate, up = (x @ self.gate_up_proj[index].transpose(1, 2)).chunk(2, dim=-1)
        return (self.act_fn(gate) * up) @ self.down_proj[index].transpose(1, 2)

    def forward(self, x: torch.Tensor, choice: torch.Tensor | RoutingDecision, weights: torch.Tensor | None = None):
        """x (N, d), index (N, k), weights (N, k) -> (N, d); or x (B, T, d) and a `RoutingDecision` -> (B, T, d)."""
        if isinstance(choice, RoutingDecision):
            return self.forward_rows(x, choice)
        if self.config._experts_implementation == "grouped_mm" and not fits_grouped_mm(self.down_proj):
            return MixtralExperts.forward.__wrapped__(self, x, choice, weights)  # the plain loop
        return super().forward(x, choice, weights)
