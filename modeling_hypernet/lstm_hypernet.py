# SPDX-License-Identifier: Apache-2.0
"""An LSTM whose weights are generated for each text from the last state of another LSTM (Duan et al. 2021, Eq. 3-8).

Letters: B texts, U tokens of the longest meta-text, L tokens of the longest main text, N_x the backbone's hidden size,
N_z size of the meta-text's vector z, N_h hidden size; u meta-text, v main text. Gates are in the order f, i, c, o.

Texts are left-aligned and come with their lengths; padding changes nothing.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

GATES = 4  # f, i, c, o


class LstmWeights(NamedTuple):
    """W_Ih (B, 4, N_h, N_h), W_Ix (B, 4, N_h, N_x), W_Ib (B, 4, N_h): one LSTM per text."""

    hidden: torch.Tensor
    input: torch.Tensor
    bias: torch.Tensor


class MetaEncoder(nn.Module):
    """z = P LSTM(H^u), the state after the last token of the meta-text   (Duan et al. 2021, Eq. 3)

    In the paper z has 16 or 32 numbers and the LSTM a hidden size of 512; P is a projection without bias between them.
    z is normalised to mean 0 and length 1, which is not in the paper: without it z and with it all generated weights grow
    until gradients explode (benchmarks/log/hypernetworks.md).

    Args:
        input_size: N_x.
        meta_embedding_size: N_z.
        meta_hidden_size: hidden size of the LSTM; `None` for N_z, without P.
    """

    def __init__(self, input_size: int, meta_embedding_size: int, meta_hidden_size: int | None):
        super().__init__()
        self.lstm = nn.LSTM(input_size, meta_hidden_size or meta_embedding_size, batch_first=True)
        self.projection = nn.Linear(meta_hidden_size, meta_embedding_size, bias=False) if meta_hidden_size else None

    def forward(self, u: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """H^u (B, U, N_x), lengths (B,) of at least 1 -> z (B, N_z)."""
        states, _ = self.lstm(u.to(self.lstm.weight_ih_l0.dtype))
        last = (lengths - 1).clamp(min=0)[:, None, None].expand(-1, 1, states.shape[-1])
        z = states.gather(1, last).squeeze(1)
        if self.projection is not None:
            z = self.projection(z)
        return F.layer_norm(z, z.shape[-1:]) * z.shape[-1] ** -0.5


class WeightGenerator(nn.Module):
    """W_Ih = W_hz z,  W_Ix = W_xz z,  W_Ib = W_bz z   (Duan et al. 2021, Eq. 4-6)

    Args:
        meta_embedding_size: N_z.
        input_size: N_x.
        hidden_size: N_h.
    """

    def __init__(self, meta_embedding_size: int, input_size: int, hidden_size: int):
        super().__init__()
        self.hidden = nn.Parameter(torch.empty(GATES, hidden_size, hidden_size, meta_embedding_size))
        self.input = nn.Parameter(torch.empty(GATES, hidden_size, input_size, meta_embedding_size))
        self.bias = nn.Parameter(torch.empty(GATES, hidden_size, meta_embedding_size))

    def forward(self, z: torch.Tensor) -> LstmWeights:
        """z (B, N_z) -> the weights, in float32 or float64."""
        dtype = torch.promote_types(z.dtype, torch.float32)
        # one product each; the product of z with a parameter of several dimensions would copy the parameter
        generated = (
            F.linear(z, W.flatten(0, -2)).unflatten(1, W.shape[:-1]) for W in (self.hidden, self.input, self.bias)
        )
        return LstmWeights(*(w.to(dtype) for w in generated))


def to_torch_gate_order(w: torch.Tensor) -> torch.Tensor:
    """(4, N_h, ...) of f, i, c~, o -> (4 N_h, ...) of i, f, c~, o, the order of PyTorch's kernels."""
    f, i, *others = w.unbind(0)  # indexing would have a slower backward pass
    return torch.cat([i, f, *others])


def lstm_per_example(x: torch.Tensor, lengths: torch.Tensor, weights: LstmWeights) -> torch.Tensor:
    """PyTorch's LSTM kernel once per text. For a CPU: a text's weights stay in a core's cache from step to step, and no step
    is computed for padding.

    x (B, L, N_x), lengths (B,) -> (B, L, N_h), 0 at padding.
    """
    H = weights.bias.shape[-1]
    start, no_bias = x.new_zeros(1, 1, H), x.new_zeros(GATES * H)
    rows = []
    # unbind gives one stacked gradient; indexing would add up B gradients of full size
    for v, length, *of_text in zip(x.unbind(0), lengths.tolist(), *(w.unbind(0) for w in weights), strict=True):
        if length:
            A, X, b = map(to_torch_gate_order, of_text)
            kernel = ([X, A, b, no_bias], True, 1, 0.0, torch.is_grad_enabled(), False, True)
            states = torch.lstm(v[None, :length], (start, start), *kernel)[0][0]
        else:
            states = v.new_zeros(0, H)
        rows.append(F.pad(states, (0, 0, 0, x.shape[1] - length)))
    return torch.stack(rows)


def lstm_batched(x: torch.Tensor, lengths: torch.Tensor, weights: LstmWeights) -> torch.Tensor:
    """All texts at each step: one product for all inputs, and one per step. For a GPU.

    x (B, L, N_x), lengths (B,), descending -> (B, L, N_h), 0 at padding.
    """
    A, X, b = (w.flatten(1, 2) for w in weights)
    # at every step the active texts are the first ones
    active_per_step = (lengths[:, None] > torch.arange(x.shape[1], device=x.device)).sum(0).tolist()
    return Recurrence.apply(torch.baddbmm(b[:, None], x, X.mT), A, [n for n in active_per_step if n])


class Recurrence(torch.autograd.Function):
    """Eq. 7-8 for all texts at once:

    (f, i, c~, o) = W_Ih h_{t-1} + W_Ix v_t + W_Ib
    c_t = s(f) c_{t-1} + s(i) tanh(c~);   h_t = s(o) tanh(c_t)

    The gradient of W_Ih is one product: autograd would add up one of that size per step, which takes five times as long.
    """

    @staticmethod
    def forward(ctx, pre: torch.Tensor, A: torch.Tensor, active_per_step: list[int]) -> torch.Tensor:
        """W_Ix v_t + W_Ib (B, L, 4 N_h), W_Ih (B, 4 N_h, N_h), number of texts at each step -> states (B, L, N_h)."""
        B, L, H = len(A), pre.shape[1], A.shape[-1]
        gates, cells, states = torch.zeros_like(pre), pre.new_zeros(B, L, H), pre.new_zeros(B, L, H)
        h = c = pre.new_zeros(B, H)
        for t, n in enumerate(active_per_step):
            g = torch.baddbmm(pre[:n, t, :, None], A[:n], h[:n, :, None]).squeeze(2)
            f, i, new, o = g.chunk(GATES, 1)
            f, i, new, o = f.sigmoid(), i.sigmoid(), new.tanh(), o.sigmoid()
            c = f * c[:n] + i * new
            h = o * c.tanh()
            gates[:n, t], cells[:n, t], states[:n, t] = torch.cat([f, i, new, o], 1), c, h
        ctx.save_for_backward(A, gates, cells, states)
        ctx.active_per_step = active_per_step
        return states

    @staticmethod
    def backward(ctx, d_states: torch.Tensor):
        """Gradients of `pre` and `A`."""
        A, gates, cells, states = ctx.saved_tensors
        f, i, new, o = gates.chunk(GATES, 2)  # (B, L, N_h) each
        previous, out = F.pad(cells, (0, 0, 1, 0))[:, :-1], cells.tanh()  # c_{t-1}, tanh(c_t)
        # the gradient of each gate is dc (dh for o) times its factor
        factor = torch.stack([previous * f * (1 - f), new * i * (1 - i), i * (1 - new**2), out * o * (1 - o)], 2)
        through = o * (1 - out**2)
        d_pre = torch.zeros_like(factor)  # (B, L, 4, N_h)
        dh, dc = torch.zeros_like(states[:, 0]), torch.zeros_like(states[:, 0])
        for t, n in reversed([*enumerate(ctx.active_per_step)]):
            d = d_states[:n, t] + dh[:n]
            dc[:n] += d * through[:n, t]
            d_pre[:n, t, :3] = dc[:n, None] * factor[:n, t, :3]
            d_pre[:n, t, 3] = d * factor[:n, t, 3]
            dc[:n] *= f[:n, t]
            dh[:n] = torch.bmm(d_pre[:n, t].flatten(1)[:, None], A[:n]).squeeze(1)
        d_pre = d_pre.flatten(2)  # 0 at padding
        return d_pre, torch.bmm(d_pre[:, 1:].mT, states[:, :-1]), None


class GeneratedLstm(nn.Module):
    """H^S = LSTM_{W(z)}(H^v): encodes each text with weights that are generated from its meta-text's z   (Eq. 4-8)

    Args:
        meta_embedding_size, input_size, hidden_size: N_z, N_x, N_h.
        bidirectional: whether a second set of generated weights encodes the text in reverse.
    """

    def __init__(self, meta_embedding_size: int, input_size: int, hidden_size: int, bidirectional: bool):
        super().__init__()
        self.generators = nn.ModuleList(
            WeightGenerator(meta_embedding_size, input_size, hidden_size) for _ in range(1 + bidirectional)
        )

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, z: torch.Tensor, lstm=None) -> torch.Tensor:
        """H^v (B, L, N_x), lengths (B,), z (B, N_z) -> H^S (B, L, N_h), or (B, L, 2 N_h) if bidirectional; 0 at padding. By
        default with the `lstm` that is fastest on the device.
        """
        lstm = lstm or (lstm_per_example if x.device.type == "cpu" else lstm_batched)
        order = lengths.argsort(descending=True)
        if lstm is lstm_batched:  # before z becomes weights, which are large
            x, lengths, z = x[order], lengths[order], z[order]
        states = []
        for direction, generator in enumerate(self.generators):
            weights = generator(z)
            inputs = x.to(weights.bias.dtype)
            if direction == 0:
                states.append(lstm(inputs, lengths, weights))
            else:
                reverse_states = lstm(reverse_sequences(inputs, lengths), lengths, weights)
                states.append(reverse_sequences(reverse_states, lengths))
        y = torch.cat(states, -1)
        return y[order.argsort()] if lstm is lstm_batched else y


def reverse_sequences(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Reverses the tokens of each text in (B, L, ...); padding is not moved."""
    position = torch.arange(x.shape[1], device=x.device)
    index = torch.where(position < lengths[:, None], lengths[:, None] - 1 - position, position)
    return x.gather(1, index[..., None].expand_as(x))
