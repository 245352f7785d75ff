"""Deputy experts and the selectors that choose them, in formulations with the same values (MoeSumm, Sect. 4).

Letters: B rows, T tokens in each, n tokens in all, d hidden size, N deputies, h a deputy's inner size (the
paper's d_h), E datasets, g_p the weight of a token's chosen deputy p.
"""

import torch
import torch.nn.functional as F
from torch import nn

# On a GPU, up to so many columns of all deputies are computed for all tokens: sorting tokens would cost more.
DENSE_COLUMNS = 2**21


class DatasetSelectors(nn.Module):
    """c_e(a) = a W_e, with one W_e for each dataset e   (MoeSumm, Eq. 4)

    Args:
        num_selectors: E, or 1 for a selector that knows no datasets.
        num_deputies: N.
        hidden_size: d.
    """

    def __init__(self, num_selectors: int, num_deputies: int, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_selectors, num_deputies, hidden_size))

    def forward(self, x: torch.Tensor, dataset_ids: torch.Tensor | None) -> torch.Tensor:
        """x (B, T, d), ids (B,) -> logits (B, T, N); those of the first selector for a row without a dataset (-1)."""
        if len(self.weight) == 1:
            return F.linear(x, self.weight[0])
        return x @ self.weight[dataset_ids.clamp(min=0)].mT  # (B, T, d) @ (B, d, N)


class DeputyExperts(nn.Module):
    """W2_p act(g_p (A W1_p + b1_p)), p each token's deputy: what Eq. 6-7 add to the main expert   (MoeSumm, Sect. 4)

    As act(0) = 0, a deputy that was not chosen adds exactly nothing, so that these give the same:

    - `dense`: all deputies as N*h columns, masked before the activation. Two plain products, and no sorting.
    - `grouped`: tokens sorted by deputy, each deputy on its own run of them.
    - `loop`: the formula as a loop over deputies; what the others must equal, in values and in all gradients.

    The deputies' weights lie in 3-D parameters, so that one that nobody chose gets a gradient of zeros and not none.

    Args:
        num_deputies: N.
        hidden_size: d.
        inner_size: h.
        act: the backbone's activation function, 0 at 0.
        dropout: after the activation, as in the backbone.
    """

    def __init__(self, num_deputies: int, hidden_size: int, inner_size: int, act: nn.Module, dropout: float):
        super().__init__()
        N, d, h = num_deputies, hidden_size, inner_size
        self.act, self.dropout = act, dropout
        self.up_proj = nn.Parameter(torch.empty(N, h, d))
        self.up_bias = nn.Parameter(torch.empty(N, h))
        self.down_proj = nn.Parameter(torch.empty(N, h, d))

    def forward(self, x, index, gate, implementation: str = "auto") -> torch.Tensor:
        """x (n, d), index (n,), gate (n,) -> (n, d)."""
        if implementation == "auto":
            implementation = self.fastest(len(x), x.device.type)
        return getattr(self, implementation)(x, index, gate)

    def fastest(self, n: int, device: str) -> str:
        """The formulation to take for n tokens (benchmarks/moesumm_speed.py)."""
        if torch.compiler.is_compiling():
            return "dense"  # one graph: the lengths of runs would be read from the device
        return "grouped" if device == "cpu" or n * self.up_bias.numel() > DENSE_COLUMNS else "dense"

    def inner(self, pre: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """The gate stands before the activation, as printed in Eq. 6."""
        return F.dropout(self.act(pre * gate.to(pre.dtype)), self.dropout, self.training)

    def by_deputy(self):
        # unbind: one stacked gradient for each parameter, where indexing would add up N gradients of full size
        return zip(self.up_proj.unbind(0), self.up_bias.unbind(0), self.down_proj.unbind(0), strict=True)

    def dense(self, x, index, gate):
        N, h = self.up_bias.shape
        gates = gate.new_zeros(len(x), N).scatter(1, index[:, None], gate[:, None])  # (n, N)
        pre = F.linear(x, self.up_proj.flatten(0, 1), self.up_bias.flatten())  # (n, N*h)
        inner = self.inner(pre.unflatten(1, (N, h)), gates[..., None])  # (n, N, h)
        return inner.flatten(1) @ self.down_proj.flatten(0, 1)

    def grouped(self, x, index, gate):
        if grouped_mm_fits(x, self.up_proj):
            return self.grouped_by_kernel(x, index, gate)
        counts, order = torch.bincount(index, minlength=len(self.up_proj)).tolist(), None
        if max(counts) < len(x):  # in decoding, beams often agree: then there is nothing to sort
            order = index.argsort(stable=True)
            x, gate = x.index_select(0, order), gate.index_select(0, order)
        runs = zip(x.split(counts), gate[:, None].split(counts), self.by_deputy(), strict=True)
        # an empty run counts where gradients are: all parameters belong to the graph, whoever was chosen
        y = [self.inner(F.linear(run, U, b), g) @ D for run, g, (U, b, D) in runs if len(run) or U.requires_grad]
        y = torch.cat(y) if len(y) > 1 else y[0] if y else x
        return y if order is None else torch.empty_like(y).index_copy(0, order, y)

    def grouped_by_kernel(self, x, index, gate):
        """The same by one kernel for all runs, whose lengths never leave the device."""
        order = index.argsort(stable=True)
        offsets = F.one_hot(index, len(self.up_proj)).sum(0).cumsum(0).to(torch.int32)  # (N,)
        up, down = self.up_proj.to(x.dtype), self.down_proj.to(x.dtype)
        pre = F.grouped_mm(x.index_select(0, order), up.mT, offs=offsets)  # (n, h)
        inner = self.inner(pre + self.up_bias[index[order]].to(x.dtype), gate[order][:, None])
        y = F.grouped_mm(inner, down, offs=offsets)
        return torch.empty_like(y).index_copy(0, order, y)

    def loop(self, x, index, gate):
        y = torch.zeros_like(x)
        for i, (U, b, D) in enumerate(self.by_deputy()):
            token = (index == i).nonzero().squeeze(1)
            y = y.index_add(0, token, (self.inner(F.linear(x[token], U, b), gate[token, None]) @ D).to(y.dtype))
        return y


def grouped_mm_fits(x: torch.Tensor, up_proj: torch.Tensor) -> bool:
    """Whether torch's kernel for grouped products is there and takes these: bfloat16 on a GPU, rows of 16 bytes."""
    if x.device.type != "cuda" or x.dtype != torch.bfloat16 or not len(x) or not hasattr(F, "grouped_mm"):
        return False
    return torch.cuda.get_device_capability(x.device) >= (8, 0) and all(size % 8 == 0 for size in up_proj.shape[1:])


class Deputies(nn.Module):
    """What stands beside the main expert of one layer: its selectors and its deputies   (MoeSumm, Eq. 4-7)

    Args:
        config: the model's.
        hidden_size: d.
        inner_size: h.
        act, dropout: the backbone layer's.
    """

    def __init__(self, config, hidden_size: int, inner_size: int, act: nn.Module, dropout: float):
        super().__init__()
        self.config = config
        self.selectors = DatasetSelectors(config.num_selectors, config.num_deputies, hidden_size)
        self.experts = DeputyExperts(config.num_deputies, hidden_size, inner_size, act, dropout)

    def choose(
        self, x: torch.Tensor, dataset_ids: torch.Tensor | None, forced: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """G = softmax(c);  p = argmax_i G_i;  g_p = G_p   (MoeSumm, Eq. 5)

        x (B, T, d), ids (B,) -> gate (B, T), which is 0 in rows without a dataset, and index (B, T). With one deputy
        forced, the softmax is over that one, and the gate 1.
        """
        if forced is not None:
            index = torch.full(x.shape[:2], forced, dtype=torch.long, device=x.device)
            return x.new_ones(x.shape[:2]), index
        logits = self.selectors(x, dataset_ids)  # (B, T, N)
        gate, index = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).max(-1)
        if not self.config.main_expert:
            gate = 1 + (gate - gate.detach())
        elif dataset_ids is not None:
            gate = gate * (dataset_ids >= 0)[:, None]
        return gate.to(x.dtype), index

    def forward(self, A: torch.Tensor, X: torch.Tensor, routing, number: int):
        """Adds the deputies' part to the main expert's answer   (MoeSumm, Eq. 6-7)

        Args:
            A (`(B, T, d)`): the attention's output.
            X (`(B, T, d)`): the main expert's answer to it.
            routing: the pass's.
            number: the layer's.

        Returns:
            X `(B, T, d)`, and `None` or, with `gate_position="layer_output"`, each token's gate `(B, T, 1)`.
        """
        rows, ids = routing.rows, routing.dataset_ids
        x = A if rows is None else A[rows]
        if ids is not None and rows is not None:
            ids = ids[rows]
        gate, index = self.choose(x, ids, routing.forced)
        routing.record(number, gate, index, A.shape[:2])
        found = self.experts(x.flatten(0, 1), index.flatten(), gate.flatten(), self.config._experts_implementation)
        return add_rows(X, found.view_as(x).to(X.dtype), rows), None


def add_rows(X: torch.Tensor, part: torch.Tensor, rows) -> torch.Tensor:
    """X (B, T, ...) with `part` (b, T, ...) added in the rows that it stands for."""
    if rows is None:
        return X + part
    if isinstance(rows, slice):  # from 0
        return torch.cat([X[rows] + part, X[rows.stop :]])
    return X.index_add(0, rows, part)
