# SPDX-License-Identifier: Apache-2.0
"""An LSTM whose weights are generated for each text from the last state of another LSTM (Duan et al. 2021, Eq. 3-8).

Letters: B texts, U tokens of the longest meta-text, L tokens of the longest main text, N_x the backbone's hidden size,
N_z size of the meta-text's vector z, N_h hidden size; u meta-text, v main text. Gates are in the order f, i, c, o.

Texts are left-aligned and come with their lengths, so padding costs nothing and changes nothing.
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

    Args:
        input_size: N_x.
        meta_embedding_size: N_z.
        meta_hidden_size: hidden size of the LSTM; `None` for N_z, without P.
        normalize: whether z is normalised to mean 0 and length 1. Not in the paper.
    """

    def __init__(self, input_size: int, meta_embedding_size: int, meta_hidden_size: int | None, normalize: bool):
        super().__init__()
        self.lstm = nn.LSTM(input_size, meta_hidden_size or meta_embedding_size, batch_first=True)
        self.projection = nn.Linear(meta_hidden_size, meta_embedding_size, bias=False) if meta_hidden_size else None
        self.normalize = normalize

    def forward(self, u: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """H^u (B, U, N_x), lengths (B,) of at least 1 -> z (B, N_z)."""
        states, _ = self.lstm(u.to(self.lstm.weight_ih_l0.dtype))
        last = (lengths - 1).clamp(min=0)[:, None, None].expand(-1, 1, states.shape[-1])
        z = states.gather(1, last).squeeze(1)
        if self.projection is not None:
            z = self.projection(z)
        return F.layer_norm(z, z.shape[-1:]) * z.shape[-1] ** -0.5 if self.normalize else z


class WeightGenerator(nn.Module):
    """W_Ih = W_hz z,  W_Ix = W_xz z,  W_Ib = W_bz z   (Duan et al. 2021, Eq. 4-6)

    Args:
        meta_embedding_size: N_z.
        input_size: N_x.
        hidden_size: N_h.
        shared_base: whether generated weights are added to weights that all texts share: W_hz z + W_h0 and so on. Not in
            the paper.
    """

    def __init__(self, meta_embedding_size: int, input_size: int, hidden_size: int, shared_base: bool = False):
        super().__init__()
        shapes = {"hidden": (hidden_size, hidden_size), "input": (hidden_size, input_size), "bias": (hidden_size,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(GATES, *shape, meta_embedding_size)))
            self.register_parameter(f"base_{name}", nn.Parameter(torch.empty(GATES, *shape)) if shared_base else None)

    def forward(self, z: torch.Tensor) -> LstmWeights:
        """z (B, N_z) -> the weights, in float32 or float64."""
        dtype = torch.promote_types(z.dtype, torch.float32)
        pairs = ((self.hidden, self.base_hidden), (self.input, self.base_input), (self.bias, self.base_bias))
        # one product each; the product of z with a parameter of several dimensions would copy the parameter
        generated = (
            F.linear(z, W.flatten(0, -2), None if W_0 is None else W_0.flatten()).unflatten(1, W.shape[:-1])
            for W, W_0 in pairs
        )
        return LstmWeights(*(w.to(dtype) for w in generated))


def lstm_eager(x: torch.Tensor, lengths: torch.Tensor, weights: LstmWeights) -> torch.Tensor:
    """The formulas text by text and step by step; the other implementations must equal it   (Eq. 7-8)

    (f, i, c~, o) = W_Ih h_{t-1} + W_Ix v_t + W_Ib
    c_t = s(f) c_{t-1} + s(i) tanh(c~);   h_t = s(o) tanh(c_t)

    x (B, L, N_x), lengths (B,) -> (B, L, N_h), 0 at padding.
    """
    rows = []
    for v, length, A, X, b in zip(x, lengths.tolist(), *weights, strict=True):
        h = c = b.new_zeros(b.shape[-1])
        states = []
        for t in range(length):
            f, i, new, o = A @ h + X @ v[t] + b
            c = f.sigmoid() * c + i.sigmoid() * new.tanh()
            h = o.sigmoid() * c.tanh()
            states.append(h)
        states = torch.stack(states) if states else b.new_zeros(0, b.shape[-1])
        rows.append(F.pad(states, (0, 0, 0, x.shape[1] - length)))
    return torch.stack(rows)


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
    return Recurrence.apply(torch.baddbmm(b[:, None], x, X.mT), A, active_per_step)


class Recurrence(torch.autograd.Function):
    """h_t of Eq. 7-8 for all texts.

    The backward pass keeps the gradients of the gates at all steps and computes the gradient of W_Ih by one product. Adding
    up L gradients of that size would take most of the time.
    """

    @staticmethod
    def forward(ctx, pre: torch.Tensor, A: torch.Tensor, active_per_step: list[int]) -> torch.Tensor:
        """Runs all steps.

        Args:
            pre (`(B, L, 4 N_h)`): W_Ix v_t + W_Ib, longest text first.
            A (`(B, 4 N_h, N_h)`): W_Ih.
            active_per_step: number of texts that have a token at each of the L steps.

        Returns:
            States (B, L, N_h).
        """
        B, L, H = len(A), pre.shape[1], A.shape[-1]
        gates, cells, states = torch.zeros_like(pre), pre.new_zeros(B, L, H), pre.new_zeros(B, L, H)
        h = c = pre.new_zeros(B, H)
        for t, n in enumerate(active_per_step):
            if not n:
                break
            g = torch.baddbmm(pre[:n, t, :, None], A[:n], h[:n, :, None]).squeeze(2).unflatten(1, (GATES, H))
            f, i, o = g[:, 0].sigmoid(), g[:, 1].sigmoid(), g[:, 3].sigmoid()
            new = g[:, 2].tanh()
            c = f * c[:n] + i * new
            h = o * c.tanh()
            gates[:n, t] = torch.cat([f, i, new, o], 1)
            cells[:n, t], states[:n, t] = c, h
        ctx.save_for_backward(A, gates, cells, states)
        ctx.active_per_step = active_per_step
        return states

    @staticmethod
    def backward(ctx, d_states: torch.Tensor):
        """Gradients of `pre` and `A`."""
        A, gates, cells, states = ctx.saved_tensors
        B, L, H = states.shape
        f, i, new, o = gates.unflatten(2, (GATES, H)).unbind(2)  # (B, L, N_h) each
        previous = F.pad(cells, (0, 0, 1, 0))[:, :-1]  # c_{t-1}
        out = cells.tanh()
        # the gradient of each gate is dc (dh for o) times its factor
        factor = torch.stack([previous * f * (1 - f), new * i * (1 - i), i * (1 - new**2), out * o * (1 - o)], 2)
        through = o * (1 - out**2)
        d_gates = torch.zeros_like(factor)  # (B, L, 4, N_h)
        dh, dc = states.new_zeros(B, H), states.new_zeros(B, H)
        for t in range(L - 1, -1, -1):
            n = ctx.active_per_step[t]
            if not n:
                continue
            d = d_states[:n, t] + dh[:n]
            dc[:n] += d * through[:n, t]
            d_gates[:n, t, :3] = dc[:n, None] * factor[:n, t, :3]
            d_gates[:n, t, 3] = d * factor[:n, t, 3]
            dc[:n] *= f[:n, t]
            dh[:n] = torch.bmm(d_gates[:n, t].flatten(1)[:, None], A[:n]).squeeze(1)
        d_gates = d_gates.flatten(2)  # (B, L, 4 N_h); 0 at padding
        return d_gates, torch.bmm(d_gates[:, 1:].mT, states[:, :-1]), None


LSTM_FUNCTIONS = {"eager": lstm_eager, "per_example": lstm_per_example, "batched": lstm_batched}


class GeneratedLstm(nn.Module):
    """H^S = LSTM_{W(z)}(H^v): encodes each text with weights that are generated from its meta-text's z   (Eq. 4-8)

    Args:
        meta_embedding_size, input_size, hidden_size: N_z, N_x, N_h.
        bidirectional: whether a second set of generated weights encodes the text in reverse.
        shared_base: whether generated weights are added to weights that all texts share.
    """

    def __init__(
        self,
        meta_embedding_size: int,
        input_size: int,
        hidden_size: int,
        bidirectional: bool,
        shared_base: bool = False,
    ):
        super().__init__()
        self.generators = nn.ModuleList(
            WeightGenerator(meta_embedding_size, input_size, hidden_size, shared_base) for _ in range(1 + bidirectional)
        )

    def forward(self, x, lengths, z, implementation: str = "auto") -> torch.Tensor:
        """H^v (B, L, N_x), lengths (B,), z (B, N_z) -> H^S (B, L, N_h), or (B, L, 2 N_h) if bidirectional; 0 at padding."""
        fastest = "per_example" if x.device.type == "cpu" else "batched"  # by benchmarks/speed.py
        name = fastest if implementation == "auto" else implementation
        lstm, states, order = LSTM_FUNCTIONS[name], [], lengths.argsort(descending=True)
        if name == "batched":  # z is sorted, before it becomes weights, which are large
            x, lengths, z = x[order], lengths[order], z[order]
        for direction, generator in enumerate(self.generators):
            weights = generator(z)
            inputs = x.to(weights.bias.dtype)
            if direction == 0:
                states.append(lstm(inputs, lengths, weights))
            else:
                reverse_states = lstm(reverse_sequences(inputs, lengths), lengths, weights)
                states.append(reverse_sequences(reverse_states, lengths))
        return torch.cat(states, -1)[order.argsort()] if name == "batched" else torch.cat(states, -1)


def reverse_sequences(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Reverses the tokens of each text in (B, L, ...); padding is not moved."""
    position = torch.arange(x.shape[1], device=x.device)
    index = torch.where(position < lengths[:, None], lengths[:, None] - 1 - position, position)
    return x.gather(1, index[..., None].expand_as(x))
