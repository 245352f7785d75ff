# SPDX-License-Identifier: Apache-2.0
"""SEKE's head: sparse experts, then a recurrent encoder, over the states of any encoder (Martinc et al. 2025, Sect. 3.1).

Letters: B documents, S sub-tokens, T real tokens of the batch, d hidden size, I expert width, E experts, k per token,
N non-empty documents, L the longest of them.

The head runs only on the T real tokens, time-major (the order of a `PackedSequence`). Padding therefore costs nothing and
changes nothing, wherever it is in a row.
"""

from collections.abc import Iterator
from copy import copy
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from transformers.integrations.moe import _grouped_mm  # and torch.ops.transformers.grouped_mm_fallback


class PackedTokens:
    """Positions of the real tokens of a padded batch, in packed order: time-major, longest document first.

    Args:
        mask (`(B, S)`): non-zero at real tokens; padding may be on the left, on the right or in between.

    Attributes:
        index (`(T,)`): each token's position in the flattened (B*S) batch.
        row (`(T,)`): each token's document, numbered from the longest.
        time (`(T,)`): each token's position among the real tokens of its document.
        lengths (`(N,)`): number of tokens of each non-empty document, descending.
        batch_sizes (`(L,)`, on the CPU): number of documents that have a token at each time, as in a `PackedSequence`.
    """

    def __init__(self, mask: torch.Tensor):
        self.shape = mask.shape
        real = mask != 0
        time = real.cumsum(1) - 1  # (B, S)
        lengths = real.sum(1)  # (B,)
        rank = lengths.argsort(descending=True, stable=True).argsort()  # (B,), 0 for the longest
        flat = real.flatten().nonzero().squeeze(1)  # (T,)
        row = rank[flat // mask.shape[1]]
        time = time.flatten()[flat]
        order = (time * mask.shape[0] + row).argsort()
        self.index, self.row, self.time = flat[order], row[order], time[order]
        self.lengths = lengths.sort(descending=True).values
        self.lengths = self.lengths[self.lengths > 0]

    @cached_property
    def batch_sizes(self) -> torch.Tensor:
        """See above."""
        return torch.bincount(self.time).cpu()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "PackedTokens":
        """Copies the positions to a device. Those of a mask on the CPU are found without waiting for a GPU."""
        moved = copy(self)
        moved.batch_sizes = self.batch_sizes
        for name in ("index", "row", "time", "lengths"):
            setattr(moved, name, getattr(self, name).to(device, non_blocking=non_blocking))
        return moved

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, ...) -> (T, ...)."""
        return x.flatten(0, 1)[self.index]

    def scatter(self, y: torch.Tensor, fill: float = 0) -> torch.Tensor:
        """(T, ...) -> (B, S, ...), with `fill` at padding."""
        full = y.new_full((self.shape[0] * self.shape[1], *y.shape[1:]), fill)
        return full.index_copy(0, self.index, y).unflatten(0, self.shape)


def float32_or_more(x: torch.Tensor) -> torch.dtype:
    """The dtype for sums over x: float64 for float64, float32 for all others."""
    return torch.promote_types(x.dtype, torch.float32)


class NoisyTopKRouter(nn.Module):
    """H(x) = x W_g + b_g + eps * softplus(x W_noise + b_noise);  G(x) = softmax(KeepTopK(H(x), k))   (SEKE Sect. 3.1; Shazeer et al. 2017, Eq. 3-5)

    eps ~ N(0, 1) in training and 0 in eval, so two eval passes agree bit for bit. With k = 1 the weight is 1 and has the
    gradient of the full softmax's probability (straight-through estimate); otherwise the gate would get no gradient.
    """  # fmt: skip

    def __init__(self, hidden_size: int, num_experts: int, num_experts_per_tok: int):
        super().__init__()
        self.k = num_experts_per_tok
        self.gate = nn.Linear(hidden_size, num_experts)
        self.noise = nn.Linear(hidden_size, num_experts)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Routes tokens.

        Args:
            x (`(T, d)`): token states.

        Returns:
            Logits without noise `(T, E)`, weights `(T, k)` that sum to 1, and expert indices `(T, k)`, highest weight first.
        """
        logits = self.gate(x)  # (T, E)
        noisy = logits
        if self.training:
            noisy = logits + torch.randn_like(logits) * F.softplus(self.noise(x))
        top, index = noisy.topk(self.k, dim=-1)  # (T, k)
        if self.k == 1:
            p = noisy.softmax(-1, dtype=float32_or_more(noisy)).gather(-1, index)
            weights = 1 + (p - p.detach())
        else:
            weights = top.softmax(-1, dtype=float32_or_more(top))
        return logits, weights.to(x.dtype), index


class SekeExperts(nn.Module):
    """E_i(x) = Dropout(ReLU(x U_i + a_i) V_i + b_i) W_i + c_i, for all experts; y = sum_i G(x)_i E_i(x)   (SEKE Sect. 3.1)

    The weights of the E experts are stacked in one parameter per layer. An expert that no token chose therefore gets a
    gradient of zeros instead of none, which distributed training needs. `EXPERTS_IMPLEMENTATIONS` have the same values and
    gradients.
    """

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int, dropout: float):
        super().__init__()
        E, d, width = num_experts, hidden_size, intermediate_size
        self.num_experts, self.dropout = E, dropout
        self.up_proj = nn.Parameter(torch.empty(E, width, d))
        self.up_bias = nn.Parameter(torch.empty(E, width))
        self.down_proj = nn.Parameter(torch.empty(E, d, width))
        self.down_bias = nn.Parameter(torch.empty(E, d))
        self.out_proj = nn.Parameter(torch.empty(E, d, d))
        self.out_bias = nn.Parameter(torch.empty(E, d))

    def identity_init(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yields parameters and values with which E_i(x) = ReLU(x) - ReLU(-x) = x, plus the output of the other hidden units."""
        d = self.out_proj.shape[-1]
        eye = torch.eye(d, dtype=self.out_proj.dtype, device=self.out_proj.device)
        both = torch.cat([eye, -eye])  # (2d, d)
        up, down, up_bias = (p.detach().clone() for p in (self.up_proj, self.down_proj, self.up_bias))
        up[:, : 2 * d], down[:, :, : 2 * d], up_bias[:, : 2 * d] = both, both.T, 0.0
        yield from ((self.up_proj, up), (self.up_bias, up_bias), (self.down_proj, down))
        yield self.out_proj, eye.expand_as(self.out_proj)
        yield from ((p, torch.zeros_like(p)) for p in (self.down_bias, self.out_bias))

    def stacked_weights(self) -> tuple[torch.Tensor, ...]:
        """(U, a, V, b, W, c) of all experts, by name: parametrizations, such as an adapter's, change the parameters' order."""
        return self.up_proj, self.up_bias, self.down_proj, self.down_bias, self.out_proj, self.out_bias

    def unbind_experts(self) -> list[tuple[torch.Tensor, ...]]:
        """(U, a, V, b, W, c) of each expert."""
        # unbind gives one stacked gradient per parameter; indexing would add up E gradients of full size
        return list(zip(*(p.unbind(0) for p in self.stacked_weights()), strict=True))

    def expert_forward(self, x: torch.Tensor, weights: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """E_i(x) of one expert: x (T', d), its weights (U, a, V, b, W, c) -> (T', d)."""
        U, a, V, b, W, c = weights
        h = F.linear(F.relu(F.linear(x, U, a)), V, b)
        return F.linear(F.dropout(h, self.dropout, self.training), W, c)

    def forward(
        self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, implementation: str = "eager"
    ) -> torch.Tensor:
        """x (T, d), experts of each token (T, k), their weights (T, k), a name of `EXPERTS_IMPLEMENTATIONS` -> y (T, d)."""
        return EXPERTS_IMPLEMENTATIONS[implementation](self, x, index, weights) if len(x) else torch.zeros_like(x)


def eager_experts(experts: SekeExperts, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`"eager"` sorts the tokens by expert and runs each expert once. Shapes as in `SekeExperts.forward`."""
    order = index.flatten().argsort(stable=True)  # (T*k,)
    token = order // index.shape[1]
    counts = torch.bincount(index.flatten(), minlength=experts.num_experts).tolist()
    runs = zip(x[token].split(counts), experts.unbind_experts(), strict=True)  # E x (T_e, d)
    outputs = [experts.expert_forward(run, expert_weights) for run, expert_weights in runs if len(run)]
    y = torch.cat(outputs) * weights.flatten()[order].unsqueeze(1)
    return torch.zeros_like(y[: len(x)]).index_add(0, token, y)


def batched_experts(experts: SekeExperts, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`"batched_mm"` gathers a copy of the expert's weights per choice: no synchronisation, but memory of T k d I."""
    U, a, V, b, W, c = (p[index.flatten()] for p in experts.stacked_weights())  # (T*k, ...)
    h = x.repeat_interleave(index.shape[1], 0).unsqueeze(2)  # (T*k, d, 1)
    h = torch.baddbmm(b.unsqueeze(2), V, torch.baddbmm(a.unsqueeze(2), U, h).relu())
    h = F.dropout(h, experts.dropout, experts.training)
    y = torch.baddbmm(c.unsqueeze(2), W, h).unflatten(0, index.shape).squeeze(3)  # (T, k, d)
    return (y * weights.unsqueeze(2)).sum(1)


def grouped_experts(experts: SekeExperts, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`"grouped_mm"` sorts the tokens and calls PyTorch's grouped products: no synchronisation on a GPU."""
    expert, order = index.flatten().sort(stable=True)  # (T*k,)
    token = order // index.shape[1]
    every = torch.arange(experts.num_experts, device=x.device)
    ends = torch.searchsorted(expert, every, right=True, out_int32=True)  # (E,)
    U, a, V, b, W, c = experts.stacked_weights()
    h = (grouped_product(x[token], U, ends) + a[expert]).relu()
    h = F.dropout(grouped_product(h, V, ends) + b[expert], experts.dropout, experts.training)
    y = (grouped_product(h, W, ends) + c[expert]) * weights.flatten()[order].unsqueeze(1)
    return torch.zeros_like(y[: len(x)]).index_add(0, token, y)


def grouped_product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """x (n, in) sorted by expert, weight (E, out, in), end of each expert's rows in x (E,) -> (n, out).

    By transformers, which knows where PyTorch has a kernel; for float64 and for rows that are not a multiple of 16 bytes, which
    the kernel does not take, by its loop over experts.
    """
    aligned = all(size * weight.element_size() % 16 == 0 for size in weight.shape[1:])
    has_kernel = aligned and weight.dtype != torch.float64
    product = _grouped_mm if has_kernel else torch.ops.transformers.grouped_mm_fallback
    return product(x.to(weight.dtype), weight.mT, offs=ends)  # autocast does not support grouped products


EXPERTS_IMPLEMENTATIONS = {"eager": eager_experts, "batched_mm": batched_experts, "grouped_mm": grouped_experts}


class SekeMoe(nn.Module):
    """y = sum_i G(x)_i E_i(x): a sparse mixture of experts with a noisy top-k router   (SEKE Sect. 3.1)"""

    def __init__(self, config):
        super().__init__()
        d, E = config.hidden_size, config.num_experts
        self.router = NoisyTopKRouter(d, E, config.num_experts_per_tok)
        self.experts = SekeExperts(E, d, config.expert_intermediate_size, config.expert_dropout)

    def forward(
        self, x: torch.Tensor, implementation: str = "eager"
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (T, d) -> y (T, d), router logits (T, E), expert indices (T, k)."""
        logits, weights, index = self.router(x)
        return self.experts(x, index, weights, implementation), logits, index


try:  # without AVX-512, PyTorch's fused LSTM fails under a CPU's autocast ("could not create a primitive descriptor")
    LSTM_IN_BF16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
except (AttributeError, RuntimeError):  # a build without oneDNN, whose LSTM is not fused
    LSTM_IN_BF16 = True


class SekeRnn(nn.Module):
    """y + (h_forward + h_backward), h a stacked bidirectional LSTM or GRU over Dropout(y)   (SEKE Sect. 3.1)

    Runs over the real tokens of each document, so a document has the same states alone and in any batch, to rounding.
    """

    def __init__(self, config):
        super().__init__()
        self.dropout = nn.Dropout(config.rnn_dropout)
        rnn_class = nn.LSTM if config.rnn_type == "lstm" else nn.GRU
        d, depth = config.hidden_size, config.rnn_num_layers
        between = config.rnn_dropout if depth > 1 else 0.0
        self.recurrent = rnn_class(d, d, depth, dropout=between, bidirectional=True)

    def forward(self, y: torch.Tensor, tokens: PackedTokens) -> torch.Tensor:
        """y (T, d) in packed order -> (T, d)."""
        if len(y) == 0:
            return y
        if y.device.type == "cpu" and not LSTM_IN_BF16 and torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                return self.forward(y.float(), tokens)
        x = self.dropout(y)
        run = self._lstm_padded if self._padded_is_faster(x, tokens) else self._rnn_packed
        forward, backward = run(x, tokens).chunk(2, dim=-1)
        return y + forward + backward

    def _padded_is_faster(self, x: torch.Tensor, tokens: PackedTokens) -> bool:
        # On a CPU the fused LSTM kernel exists for padded input only (benchmarks/speed.py).
        N = len(tokens.lengths)
        if x.device.type != "cpu" or not isinstance(self.recurrent, nn.LSTM) or N == 1:
            return False
        return N * int(tokens.lengths[0]) < 2.5 * len(x)

    def _rnn_packed(self, x: torch.Tensor, tokens: PackedTokens) -> torch.Tensor:
        """(T, d) -> (T, 2d), by PyTorch's packed sequences."""
        return self.recurrent(PackedSequence(x, tokens.batch_sizes))[0].data

    @torch.compiler.disable
    def _lstm_padded(self, x: torch.Tensor, tokens: PackedTokens) -> torch.Tensor:
        """(T, d) -> (T, 2d), by one padded pass per layer and direction.

        For the backward direction each document is reversed, so in both directions padding comes last and cannot
        affect a real token.
        """
        row, time = tokens.row, tokens.time
        reversed_time = tokens.lengths[row] - 1 - time
        N, L = len(tokens.lengths), int(tokens.lengths[0])
        weights = self.recurrent.all_weights  # depth*2 x [w_ih, w_hh, b_ih, b_hh]
        for layer in range(self.recurrent.num_layers):
            if layer:
                x = F.dropout(x, self.recurrent.dropout, self.training)
            states = []
            for direction, step in enumerate((time, reversed_time)):
                padded = x.new_zeros(L, N, x.shape[1]).index_put((step, row), x)
                start = x.new_zeros(1, N, self.recurrent.hidden_size)
                kernel = (weights[2 * layer + direction], True, 1, 0.0, self.training, False, False)
                out = torch._VF.lstm(padded, (start, start), *kernel)[0]
                states.append(out[step, row])  # (T, d)
            x = torch.cat(states, dim=-1)
        return x


def load_balancing_loss(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """E * sum_e f_e P_e, with f_e the share of tokens that chose expert e and P_e its mean probability   (Fedus et al. 2022, Eq. 4-6)

    logits (T, E), index (T, k) -> a scalar: k for uniform routing, up to E for collapsed routing.
    """  # fmt: skip
    T, E = logits.shape
    dtype = float32_or_more(logits)
    f = torch.bincount(index.flatten(), minlength=E).to(dtype) / max(T, 1)  # (E,)
    P = logits.softmax(-1, dtype=dtype).sum(0) / max(T, 1)  # (E,)
    return E * (f * P).sum()


def router_z_loss(logits: torch.Tensor) -> torch.Tensor:
    """mean over tokens of (log sum_e exp(logit_e))^2   (Zoph et al. 2022, Eq. 5); logits (T, E) -> a scalar."""
    return logits.to(float32_or_more(logits)).logsumexp(-1).square().sum() / max(len(logits), 1)
