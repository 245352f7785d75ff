# SPDX-License-Identifier: Apache-2.0
"""Deputy experts, and the selectors that choose among them (MoeSumm, Sect. 4).

Letters: B rows, T tokens in each, n tokens in all, d hidden size, N deputies, h a deputy's inner size (the
paper's d_h), E datasets, g_p the weight of a token's chosen deputy p.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations.moe import _grouped_mm

# On a GPU, all deputies are computed for all tokens up to this number of columns; sorting tokens would cost more.
BATCHED_COLUMNS = 2**21


class DatasetSelectors(nn.Module):
    """c_e(a) = a W_e, with one W_e for each dataset e   (MoeSumm, Eq. 4); with one selector for all, the plain gate of Eq. 3"""

    def __init__(self, num_selectors: int, num_deputies: int, hidden_size: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_selectors, num_deputies, hidden_size))
        self.register_parameter("bias", nn.Parameter(torch.empty(num_selectors, num_deputies)) if bias else None)

    def forward(self, x: torch.Tensor, dataset_ids: torch.Tensor | None) -> torch.Tensor:
        """x `(B, T, d)`, dataset_ids `(B,)` -> logits `(B, T, N)`; a row without a dataset (-1) uses the first selector."""
        if len(self.weight) == 1:
            return F.linear(x, self.weight[0], None if self.bias is None else self.bias[0])
        ids = dataset_ids.clamp(min=0)
        logits = x @ self.weight[ids].mT  # (B, T, d) @ (B, d, N)
        return logits if self.bias is None else logits + self.bias[ids][:, None]


class DeputyExperts(nn.Module):
    """W2_p act(g_p (A W1_p + b1_p)), p each token's deputy: the term that Eq. 6-7 add to the main expert   (MoeSumm, Sect. 4)

    With `gated`, as the MLP of a Llama:  W2_p (act(g_p A W1_p) * A V_p)   (Shazeer 2020, Eq. 6); `up_proj` then holds W1 and V.
    The output bias is the main expert's alone. `act`, which is 0 at 0, and the `dropout` after it are the backbone's.

    Since act(0) = 0, an unselected deputy contributes exactly nothing, so these implementations agree:

    - `eager`: the formula as a loop over deputies. The others must equal it in values and in all gradients.
    - `batched_mm`: all deputies as N*h columns, masked before the activation. Two matrix products, and no sorting.
    - `grouped_mm`: tokens sorted by deputy, and transformers' grouped matrix product.
    """

    def __init__(
        self, num_deputies: int, hidden_size: int, inner_size: int, act: nn.Module, dropout: float,
        gated: bool = False, bias: bool = True,
    ):  # fmt: skip
        super().__init__()
        N, d, h = num_deputies, hidden_size, inner_size
        self.act, self.dropout, self.gated = act, dropout, gated
        columns = 2 * h if gated else h
        self.up_proj = nn.Parameter(torch.empty(N, columns, d))
        self.register_parameter("up_bias", nn.Parameter(torch.empty(N, columns)) if bias else None)
        self.down_proj = nn.Parameter(torch.empty(N, h, d))

    def forward(self, x, index, gate, implementation: str = "auto") -> torch.Tensor:
        """x `(n, d)`, each token's deputy `(n,)`, its weight g_p `(n,)` -> `(n, d)`."""
        if implementation == "auto":
            implementation = self.choose_implementation(len(x), x.device.type)
        return getattr(self, implementation)(x, index, gate)

    def choose_implementation(self, n: int, device: str) -> str:
        """The fastest implementation for n tokens."""
        large = n * self.up_proj.shape[0] * self.up_proj.shape[1] > BATCHED_COLUMNS
        return "grouped_mm" if (device == "cpu" or large) and not torch.compiler.is_compiling() else "batched_mm"

    def inner(self, pre: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """act(g_p (A W1_p + b1_p)), with the gate inside the activation as printed in Eq. 6; with `gated` times A V_p."""
        pre, values = pre.chunk(2, -1) if self.gated else (pre, None)
        H = self.act(pre * gate.to(pre.dtype))
        return F.dropout(H if values is None else H * values, self.dropout, self.training)

    def eager(self, x, index, gate):
        """A loop over deputies."""
        y = torch.zeros_like(x)
        # unbind gives one stacked gradient per parameter; indexing would add up N gradients of full size
        biases = [None] * len(self.up_proj) if self.up_bias is None else self.up_bias.unbind(0)
        for i, (U, b, D) in enumerate(zip(self.up_proj.unbind(0), biases, self.down_proj.unbind(0), strict=True)):
            token = (index == i).nonzero().squeeze(1)
            y = y.index_add(0, token, (self.inner(F.linear(x[token], U, b), gate[token, None]) @ D).to(y.dtype))
        return y

    def batched_mm(self, x, index, gate):
        """All deputies for all tokens, masked."""
        N, columns = self.up_proj.shape[:2]
        gates = gate.new_zeros(len(x), N).scatter(1, index[:, None], gate[:, None])  # (n, N)
        bias = None if self.up_bias is None else self.up_bias.flatten()
        pre = F.linear(x, self.up_proj.flatten(0, 1), bias)  # (n, N*h), or with `gated` (n, N*2h)
        inner = self.inner(pre.unflatten(1, (N, columns)), gates[..., None])  # (n, N, h)
        return inner.flatten(1) @ self.down_proj.flatten(0, 1)

    def grouped_mm(self, x, index, gate):
        """Each deputy for its own tokens, which are sorted by deputy."""
        order = index.argsort(stable=True)
        ends = F.one_hot(index, len(self.up_proj)).sum(0).cumsum(0).to(torch.int32)  # (N,)
        pre = grouped_product(x[order], self.up_proj.mT, ends)  # (n, h), or with `gated` (n, 2h)
        if self.up_bias is not None:
            pre = pre + self.up_bias[index[order]].to(pre.dtype)
        inner = self.inner(pre, gate[order, None])
        y = grouped_product(inner, self.down_proj, ends)
        return torch.empty_like(y).index_copy(0, order, y)


def grouped_product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The product of x `(n, d)`, sorted into N groups that end at `ends` `(N,)`, with each group's weight `(N, d, h)`."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    # torch's kernel needs rows of 16 bytes and does not support float64; transformers' fallback has no such limits
    aligned = all(size * weight.element_size() % 16 == 0 for size in weight.shape[1:])
    if len(x) and aligned and weight.dtype != torch.float64:
        return _grouped_mm(x, weight, ends)
    return torch.ops.transformers.grouped_mm_fallback(x.to(weight.dtype), weight, ends)


class DeputyFeedForward(nn.Module):
    """The selectors and deputies of one layer, beside its main expert   (MoeSumm, Eq. 4-7); arguments as for these

    Without a main expert it is the mixture of MoeSumm, Eq. 2-3, x = sum_{i in T} G_i(a) E_i(a), with one expert in T.
    """

    def __init__(
        self, config, hidden_size: int, inner_size: int, act: nn.Module, dropout: float,
        gated: bool = False, bias: bool = True,
    ):  # fmt: skip
        super().__init__()
        self.config = config
        self.selectors = DatasetSelectors(config.num_selectors, config.num_deputies, hidden_size, config.selector_bias)
        self.experts = DeputyExperts(config.num_deputies, hidden_size, inner_size, act, dropout, gated, bias)

    def route(self, x: torch.Tensor, dataset_ids: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """G = softmax(c);  p = argmax_i G_i;  g_p = G_p   (MoeSumm, Eq. 5; of the plain gate Eq. 3)

        x `(B, T, d)`, dataset_ids `(B,)` -> gate `(B, T)`, which is 0 in rows without a dataset, and index `(B, T)`.
        """
        logits = self.selectors(x, dataset_ids)  # (B, T, N)
        gate, index = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).max(-1)
        if not self.config.main_expert:
            gate = 1 + (gate - gate.detach())
        elif dataset_ids is not None:
            gate = gate * (dataset_ids >= 0)[:, None]
        return gate.to(x.dtype), index

    def forward(self, A: torch.Tensor, X: torch.Tensor, routing, layer_idx: int):
        """Adds the deputies' output to the main expert's   (MoeSumm, Eq. 6-7)

        The attention's output A and the main expert's output X, both `(B, T, d)` -> X `(B, T, d)`, and `None` or, with
        `gate_position="layer_output"`, each token's gate `(B, T, 1)`.
        """
        routing = routing.to(A.device)
        rows, ids = routing.rows, routing.dataset_ids
        x = A if rows is None else A[rows]
        if ids is not None and rows is not None:
            ids = ids[rows]
        gate, index = self.route(x, ids)
        routing.record(layer_idx, gate, index, A.shape[:2])
        factor = None
        if self.config.gate_position == "layer_output":
            # rows without a dataset, whose gate is 0, use the main expert only
            used = torch.ones_like(gate) if ids is None else (ids >= 0).to(gate.dtype)[:, None].expand_as(gate)
            gate, factor = used, torch.where(used > 0, gate, 1)[..., None].to(X.dtype)
        output = self.experts(x.flatten(0, 1), index.flatten(), gate.flatten(), self.config._experts_implementation)
        output = output.view_as(x).to(X.dtype)
        if rows is None:
            return X + output, factor
        if factor is not None:
            factor = X.new_ones(*X.shape[:2], 1).index_copy(0, rows, factor)
        return X.index_add(0, rows, output), factor
