"""An LSTM whose weights another LSTM writes, for each text its own (Duan et al. 2021, Eq. 3-8).

Letters: B texts, U tokens of the longest meta-text, L tokens of the longest main text, N_x the backbone's hidden size,
N_z the meta-text's vector z, N_h hidden size; u meta-text, v main text. Gates stand in the order f, i, c, o.

Texts are left-aligned, with their lengths beside them: padding costs nothing and changes nothing.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

GATES = 4  # f, i, c, o


class LstmWeights(NamedTuple):
    """W_Ih (B, 4, N_h, N_h), W_Ix (B, 4, N_h, N_x), W_Ib (B, 4, N_h): one LSTM for each text."""

    hidden: torch.Tensor
    input: torch.Tensor
    bias: torch.Tensor


class MetaEncoder(nn.Module):
    """z = P LSTM(H^u), the state after the last token of the meta-text   (Duan et al. 2021, Eq. 3)

    The paper has z of 16 or 32 numbers and a hidden size of 512; P, a projection without bias, brings them together.

    Args:
        input_size: N_x.
        meta_size: N_z.
        meta_hidden_size: of the LSTM; `None` for one of N_z, without P.
        normalize: whether z is brought to mean 0 and length 1. Not in the paper.
    """

    def __init__(self, input_size: int, meta_size: int, meta_hidden_size: int | None, normalize: bool):
        super().__init__()
        self.lstm = nn.LSTM(input_size, meta_hidden_size or meta_size, batch_first=True)
        self.projection = nn.Linear(meta_hidden_size, meta_size, bias=False) if meta_hidden_size else None
        self.normalize = normalize

    def forward(self, u: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """H^u (B, U, N_x), lengths (B,) of 1 or more -> z (B, N_z)."""
        states, _ = self.lstm(u.to(self.lstm.weight_ih_l0.dtype))
        last = (lengths - 1).clamp(min=0)[:, None, None].expand(-1, 1, states.shape[-1])
        z = states.gather(1, last).squeeze(1)
        if self.projection is not None:
            z = self.projection(z)
        return F.layer_norm(z, z.shape[-1:]) * z.shape[-1] ** -0.5 if self.normalize else z


class WeightGenerator(nn.Module):
    """W_Ih = W_hz z,  W_Ix = W_xz z,  W_Ib = W_bz z   (Duan et al. 2021, Eq. 4-6)

    Args:
        meta_size: N_z.
        input_size: N_x.
        hidden_size: N_h.
        base: whether what z writes is added to weights that all texts share: W_hz z + W_h0 and so on. Not in the paper.
    """

    def __init__(self, meta_size: int, input_size: int, hidden_size: int, base: bool = False):
        super().__init__()
        shapes = {"hidden": (hidden_size, hidden_size), "input": (hidden_size, input_size), "bias": (hidden_size,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(GATES, *shape, meta_size)))
            self.register_parameter(f"base_{name}", nn.Parameter(torch.empty(GATES, *shape)) if base else None)

    def forward(self, z: torch.Tensor) -> LstmWeights:
        """z (B, N_z) -> the weights, in float32 or better."""
        kind = torch.promote_types(z.dtype, torch.float32)
        pairs = ((self.hidden, self.base_hidden), (self.input, self.base_input), (self.bias, self.base_bias))
        # one product each; z by a parameter of several dimensions would copy it
        written = (
            F.linear(z, W.flatten(0, -2), None if W_0 is None else W_0.flatten()).unflatten(1, W.shape[:-1])
            for W, W_0 in pairs
        )
        return LstmWeights(*(w.to(kind) for w in written))


def read_by_loop(x: torch.Tensor, lengths: torch.Tensor, weights: LstmWeights) -> torch.Tensor:
    """The formulas text by text and step by step: what every faster formulation must equal   (Eq. 7-8)

    (f, i, c~, o) = W_Ih h_{t-1} + W_Ix v_t + W_Ib
    c_t = s(f) c_{t-1} + s(i) tanh(c~);   h_t = s(o) tanh(c_t)

    x (B, L, N_x), lengths (B,) -> (B, L, N_h), 0 beyond a text's end.
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


def in_torch_order(w: torch.Tensor) -> torch.Tensor:
    """(4, N_h, ...) of f, i, c~, o -> (4 N_h, ...) of i, f, c~, o, which PyTorch's kernels take."""
    f, i, *others = w.unbind(0)  # an index would be slower to derive
    return torch.cat([i, f, *others])


def read_by_text(x: torch.Tensor, lengths: torch.Tensor, weights: LstmWeights) -> torch.Tensor:
    """PyTorch's LSTM kernel once for each text. Its weights then stay in a core's cache from step to step, which is
    what reading all texts side by side costs on a CPU; a text is read to its end and not beyond.

    x (B, L, N_x), lengths (B,) -> (B, L, N_h), 0 beyond a text's end.
    """
    H = weights.bias.shape[-1]
    none, no_bias = x.new_zeros(1, 1, H), x.new_zeros(GATES * H)
    rows = []
    # unbind: one stacked gradient, where indexing would add up B gradients of full size
    for v, length, *own in zip(x.unbind(0), lengths.tolist(), *(w.unbind(0) for w in weights), strict=True):
        if length:
            A, X, b = map(in_torch_order, own)
            kernel = ([X, A, b, no_bias], True, 1, 0.0, torch.is_grad_enabled(), False, True)
            states = torch.lstm(v[None, :length], (none, none), *kernel)[0][0]
        else:
            states = v.new_zeros(0, H)
        rows.append(F.pad(states, (0, 0, 0, x.shape[1] - length)))
    return torch.stack(rows)


def read_by_step(x: torch.Tensor, lengths: torch.Tensor, weights: LstmWeights) -> torch.Tensor:
    """All texts at each step: one product for all inputs, and one for each step. For a GPU.

    x (B, L, N_x), lengths (B,) -> (B, L, N_h), 0 beyond a text's end.
    """
    A, X, b = (w.flatten(1, 2) for w in weights)
    order = lengths.argsort(descending=True)  # the texts that go on at a step are then the first ones
    longer = (lengths[:, None] > torch.arange(x.shape[1], device=x.device)).sum(0).tolist()  # texts at each step
    pre = torch.baddbmm(b[:, None], x, X.mT)[order]  # (B, L, 4 N_h)
    return Recurrence.apply(pre, A[order], longer)[order.argsort()]


class Recurrence(torch.autograd.Function):
    """h_t of Eq. 7-8 for all texts. Its backward pass keeps the gates' gradients of all steps and makes that of W_Ih by
    one product: adding up L gradients of that size would be most of the time.
    """

    @staticmethod
    def forward(ctx, pre: torch.Tensor, A: torch.Tensor, longer: list[int]) -> torch.Tensor:
        """W_Ix v_t + W_Ib (B, L, 4 N_h), longest text first; W_Ih (B, 4 N_h, N_h); texts at each step (L) -> (B, L, N_h)."""
        B, L, H = len(A), pre.shape[1], A.shape[-1]
        gates, cells, states = torch.zeros_like(pre), pre.new_zeros(B, L, H), pre.new_zeros(B, L, H)
        h = c = pre.new_zeros(B, H)
        for t, n in enumerate(longer):
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
        ctx.longer = longer
        return states

    @staticmethod
    def backward(ctx, d_states: torch.Tensor):
        A, gates, cells, states = ctx.saved_tensors
        B, L, H = states.shape
        f, i, new, o = gates.unflatten(2, (GATES, H)).unbind(2)  # (B, L, N_h) each
        before = F.pad(cells, (0, 0, 1, 0))[:, :-1]  # c_{t-1}
        out = cells.tanh()
        # what a step's dc, or dh for o, is multiplied by to give each gate's gradient
        factor = torch.stack([before * f * (1 - f), new * i * (1 - i), i * (1 - new**2), out * o * (1 - o)], 2)
        through = o * (1 - out**2)
        d_gates = torch.zeros_like(factor)  # (B, L, 4, N_h)
        dh, dc = states.new_zeros(B, H), states.new_zeros(B, H)
        for t in range(L - 1, -1, -1):
            n = ctx.longer[t]
            if not n:
                continue
            d = d_states[:n, t] + dh[:n]
            dc[:n] += d * through[:n, t]
            d_gates[:n, t, :3] = dc[:n, None] * factor[:n, t, :3]
            d_gates[:n, t, 3] = d * factor[:n, t, 3]
            dc[:n] *= f[:n, t]
            dh[:n] = torch.bmm(d_gates[:n, t].flatten(1)[:, None], A[:n]).squeeze(1)
        d_gates = d_gates.flatten(2)  # (B, L, 4 N_h); 0 where a text has ended
        return d_gates, torch.bmm(d_gates[:, 1:].mT, states[:, :-1]), None


READERS = {"loop": read_by_loop, "by_text": read_by_text, "by_step": read_by_step}


def fastest(device: torch.device) -> str:
    """The formulation to take (benchmarks/hypernet_speed.py)."""
    return "by_text" if device.type == "cpu" else "by_step"


class GeneratedLstm(nn.Module):
    """H^S = LSTM_{W(z)}(H^v): reads each text by weights that its meta-text's z has written   (Eq. 4-8)

    Args:
        meta_size, input_size, hidden_size: N_z, N_x, N_h.
        bidirectional: whether a second set of weights reads from the end, beside it.
        base: whether z's weights are added to some that all texts share.
    """

    def __init__(self, meta_size: int, input_size: int, hidden_size: int, bidirectional: bool, base: bool = False):
        super().__init__()
        self.generators = nn.ModuleList(
            WeightGenerator(meta_size, input_size, hidden_size, base) for _ in range(1 + bidirectional)
        )

    def forward(self, x, lengths, z, implementation: str = "auto") -> torch.Tensor:
        """H^v (B, L, N_x), lengths (B,), z (B, N_z) -> H^S (B, L, N_h), or (B, L, 2 N_h); 0 beyond a text's end."""
        read = READERS[fastest(x.device) if implementation == "auto" else implementation]
        states = []
        for number, generator in enumerate(self.generators):
            weights = generator(z)
            given = x.to(weights.bias.dtype)
            if number == 0:
                states.append(read(given, lengths, weights))
            else:
                states.append(backwards(read(backwards(given, lengths), lengths, weights), lengths))
        return torch.cat(states, -1)


def backwards(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """(B, L, ...) with each text's tokens in reverse; padding stays where it is."""
    place = torch.arange(x.shape[1], device=x.device)
    index = torch.where(place < lengths[:, None], lengths[:, None] - 1 - place, place)
    return x.gather(1, index[..., None].expand_as(x))
