"""Experts, and the decisions that rows of a batch reach them by (LM-Lexicon, paper's Sect. 3).

Letters: B sequences, T tokens in each, N tokens in all, d input size, I the MLP's inner size, E experts, k experts per
token.

`experts_implementation` is transformers' own: `"eager"`, a loop over experts; `"batched_mm"`, the weights of each
token's experts (or each row's) gathered, and one batched product; `"grouped_mm"`, tokens sorted by expert, and one
grouped product. All give the same values and gradients. Tokens are computed by `transformers.integrations.moe`. A row
has one expert for all of its tokens, and sorting them is slower than a loop over the experts that some row chose, which
is what `"grouped_mm"` is for rows; `sequence_soft` runs all experts on all tokens, in a loop whatever the setting.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations.moe import _batched_linear, _grouped_linear
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

LINEAR_IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")


class RowGroups:
    """The rows of a batch by expert. Read from the device once, when first asked for, and then kept with the decision.

    Args:
        index (`(B,)`): each row's expert.
        experts: the same as a list, where it is known.
    """

    def __init__(self, index: torch.Tensor, experts: list[int] | None = None):
        self.index, self.experts = index, experts
        self._groups = self._order = None

    def _sort(self):
        if self.experts is None:
            self.experts = self.index.tolist()
        by_expert = {}
        for row, expert in enumerate(self.experts):
            by_expert.setdefault(expert, []).append(row)
        grouped = sum(by_expert.values(), [])
        device = self.index.device
        self._groups = []
        for expert, rows in by_expert.items():
            first, last = rows[0], rows[-1]
            together = last - first + 1 == len(rows)  # then a view serves, without a copy
            self._groups.append((expert, slice(first, last + 1) if together else torch.tensor(rows, device=device)))
        if grouped != sorted(grouped):
            self._order = torch.tensor(grouped, device=device).argsort()

    @property
    def groups(self) -> list[tuple[int, torch.Tensor | slice]]:
        """(expert, its rows) for each expert that some row chose."""
        if self._groups is None:
            self._sort()
        return self._groups

    @property
    def order(self) -> torch.Tensor | None:
        """(B,): from the groups, one after the other, back to the batch's order; `None` where they are in it."""
        if self._groups is None:
            self._sort()
        return self._order


@dataclass(eq=False)
class Decision:
    """What was decided for each row of a batch, and is kept for all of its later tokens.

    Args:
        index (`(B,)`): the row's expert; the heaviest one where all are weighted.
        weights (`(B, E)`: all experts weighted; `(B,)`: exactly 1, with the gate's gradient; or `None`).
        logits (`(B, E)`, where a gate decided): its mean over the row's prompt.
    """

    index: torch.Tensor
    weights: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    rows: RowGroups | None = None

    def __post_init__(self):
        if self.rows is None:
            self.rows = RowGroups(self.index)

    def select(self, rows: list[int]) -> "Decision":
        """The decisions of these rows, which may repeat."""
        known = self.rows.experts and [self.rows.experts[row] for row in rows]
        if known and known == self.rows.experts and self.weights is self.logits is None:
            return self
        at = torch.tensor(rows, device=self.index.device)
        index, weights, logits = (p if p is None else p[at] for p in (self.index, self.weights, self.logits))
        return Decision(index, weights, logits, RowGroups(index, known))


class RoutedExperts:
    """Experts called with x and either a token's choice or a row's decision; a mix-in for modules that hold them.

    They are called as modules, and never reached into from outside, so that hooks on them (sharding, offloading) run.
    """

    def per_expert(self) -> list[tuple[torch.Tensor, ...]]:
        """Each expert's weights. Unbound all at once: one stacked gradient, where indexing adds up E full ones."""
        raise NotImplementedError

    def expert(self, e: int) -> tuple[torch.Tensor, ...]:
        """One expert's weights, where no other is at work: its gradient is a copy into zeros, without the stacking."""
        raise NotImplementedError

    def one_expert(self, x: torch.Tensor, weights: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """x (..., d) -> (..., out) by one expert's weights."""
        raise NotImplementedError

    def by_row(self, x: torch.Tensor, decision: Decision) -> torch.Tensor:
        """x (B, T, d) -> (B, T, out): each row by its own expert, or by all of them, weighted."""
        weights = decision.weights
        if weights is not None and weights.dim() == 2:
            y = sum(
                self.one_expert(x, expert) * weights[:, e, None, None] for e, expert in enumerate(self.per_expert())
            )
            return y.to(x.dtype)
        if torch.compiler.is_compiling():
            y = self.compiled_rows(x, decision.index.to(x.device))
        elif self.config._experts_implementation == "batched_mm":
            y = self.batched_rows(x, decision.index.to(x.device))
        else:
            y = self.grouped_rows(x, decision)
        return y if weights is None else (y * weights.to(y.device)[:, None, None]).to(y.dtype)

    def grouped_rows(self, x: torch.Tensor, decision: Decision) -> torch.Tensor:
        """One expert a row, and only experts that some row chose."""
        groups, order, outputs = decision.rows.groups, decision.rows.order, []
        experts = self.per_expert() if len(groups) > 1 else {groups[0][0]: self.expert(groups[0][0])}
        for e, rows in groups:
            rows = rows if isinstance(rows, slice) else rows.to(x.device)
            outputs.append(self.one_expert(x[rows], experts[e]))
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return y if order is None else y[order.to(x.device)]

    def batched_rows(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """x (B, T, d), index (B,) -> (B, T, out): each row by a copy of its expert's weights."""
        raise NotImplementedError

    def compiled_rows(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """The same without reading the decision from the device, which would break a compiled graph."""
        return self.batched_rows(x, index)


def fits_grouped_mm(weight: torch.Tensor) -> bool:
    """Whether torch's grouped product takes these weights (E, out, in): no float64, and rows of a multiple of 16 bytes
    in both orders. It raises otherwise."""
    _, out, d = weight.shape
    numbers = 16 // weight.element_size()
    return weight.dtype != torch.float64 and out % numbers == 0 and d % numbers == 0


class LexiconExperts(RoutedExperts, MixtralExperts):
    """E_i(x) = (act(x W_i,gate) * x W_i,up) W_i,down: E Llama MLPs in Mixtral's two parameters."""

    def per_expert(self):
        gate_up, down = self.gate_up_proj.unbind(0), self.down_proj.unbind(0)
        return [(*gu.chunk(2), d) for gu, d in zip(gate_up, down, strict=True)]  # (I, d), (I, d), (d, I)

    def expert(self, e):
        return *self.gate_up_proj[e].chunk(2), self.down_proj[e]

    def one_expert(self, x, weights):
        gate, up, down = weights
        return F.linear(self.act_fn(F.linear(x, gate)) * F.linear(x, up), down)

    def batched_rows(self, x, index):
        gate, up = (x @ self.gate_up_proj[index].transpose(1, 2)).chunk(2, dim=-1)
        return (self.act_fn(gate) * up) @ self.down_proj[index].transpose(1, 2)

    def compiled_rows(self, x, index):
        if self.config._experts_implementation != "grouped_mm" or not fits_grouped_mm(self.down_proj):
            return self.batched_rows(x, index)
        B, T, d = x.shape
        chosen = index[:, None].expand(B, T).reshape(-1, 1)
        return self.forward(x.reshape(-1, d), chosen, x.new_ones(B * T, 1)).view(B, T, d)

    def forward(self, x: torch.Tensor, choice: torch.Tensor | Decision, weights: torch.Tensor | None = None):
        """x (N, d), index (N, k), weights (N, k) -> (N, d); or x (B, T, d) and a `Decision` -> (B, T, d)."""
        if isinstance(choice, Decision):
            return self.by_row(x, choice)
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

    def per_expert(self):
        biases = [None] * len(self.weight) if self.bias is None else self.bias.unbind(0)
        return list(zip(self.weight.unbind(0), biases, strict=True))

    def expert(self, e):
        return self.weight[e], None if self.bias is None else self.bias[e]

    def one_expert(self, x, weights):
        return F.linear(x, *weights)

    def batched_rows(self, x, index):
        y = x @ self.weight[index].transpose(1, 2)
        return y if self.bias is None else y + self.bias[index][:, None]

    def forward(self, x: torch.Tensor, choice: torch.Tensor | Decision, weights: torch.Tensor | None = None):
        """x (N, d), index (N, k), weights (N, k) -> (N, out); or x (B, T, d) and a `Decision` -> (B, T, out).

        Raises:
            ValueError: for an `experts_implementation` that transformers has for whole MLPs alone.
        """
        if isinstance(choice, Decision):
            return self.by_row(x, choice)
        implementation = self.config._experts_implementation
        if implementation not in LINEAR_IMPLEMENTATIONS:
            raise ValueError(
                f"experts_implementation={implementation!r} is for whole MLPs, and this model routes single linear "
                f"layers. Use one of {', '.join(map(repr, LINEAR_IMPLEMENTATIONS))}."
            )
        if implementation == "eager" or (implementation == "grouped_mm" and not fits_grouped_mm(self.weight)):
            return reference_experts(self, x, choice, weights).to(x.dtype)
        k, flat = choice.shape[1], choice.flatten()  # (N k,)
        if implementation == "batched_mm":
            y = _batched_linear(x.repeat_interleave(k, dim=0), self.weight[flat], self._biases(flat))
        else:
            y = self._grouped(x, flat, k)
        # added up in the order of the tokens: no order of addition that could vary
        return (y.view(-1, k, y.shape[-1]) * weights[..., None]).sum(1).to(x.dtype)

    def _grouped(self, x: torch.Tensor, flat: torch.Tensor, k: int) -> torch.Tensor:
        """x (N, d), the tokens' experts (N k,) -> (N k, out), not yet weighted."""
        experts, order = flat.sort(stable=True)
        # where each expert's tokens end, without reading anything from the device
        every = torch.arange(len(self.weight), device=experts.device)
        ends = torch.searchsorted(experts, every, right=True, out_int32=True)
        weight, kind = self.weight, x.device.type
        if torch.is_autocast_enabled(kind):  # the grouped product does not look
            weight = weight.to(torch.get_autocast_dtype(kind))
        y = _grouped_linear(x[order // k], weight, ends, self._biases(experts))
        return y[order.argsort()]

    def _biases(self, experts: torch.Tensor) -> torch.Tensor | None:
        return None if self.bias is None else self.bias[experts]


def reference_experts(
    experts: RoutedExperts, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """y_n = sum_j w_nj E_{i_nj}(x_n) as a loop over experts: what every faster formulation must equal, with gradients;
    and what `"eager"` is for linear layers.

    x (N, d), index (N, k), weights (N, k) -> (N, out).
    """
    y = 0
    for e, expert in enumerate(experts.per_expert()):
        share = ((index == e) * weights).sum(1, keepdim=True)  # (N, 1)
        y = y + share * experts.one_expert(x, expert)
    return y
