# SPDX-License-Identifier: Apache-2.0
"""Sparse self-attention with relative positions (Xu et al. 2021, Sect. 2), over all pairs of tokens.

Letters: B texts, L tokens of the longest text, n queries of a chunk, H hidden size, A heads, d = H / A; i a query's position,
j a key's; g lead tokens, w window, k keys by score.

The head dimension comes before the batch, (A, B, L, d): a term that depends only on the offset i - j is then one product for
all texts.
"""

from dataclasses import dataclass

import torch
from torch import nn

MAX_SCORES = 1 << 25  # scores in memory at once, over all heads, texts and pairs
ALL = slice(None)


def top_k_mask(scores: torch.Tensor, k: int, mask: torch.Tensor) -> torch.Tensor:
    """Scores (..., n, L), a mask that broadcasts to them -> true at each query's k largest among the keys in the mask   (Eq. 7)

    If the mask has fewer than k keys, all are selected. Of equal scores the first ones are taken. It has no gradient.
    """
    scores = scores.detach().masked_fill(~mask, float("-inf"))
    k = min(k, scores.shape[-1])
    least = scores.topk(k, dim=-1).values[..., -1:]
    above, tied = scores > least, scores == least
    room = k - above.sum(-1, keepdim=True)
    return (above | (tied & (tied.cumsum(-1, dtype=torch.int32) <= room))) & mask


@dataclass(frozen=True)
class SparsePattern:
    """The visible keys of each token: lead or neighbour or top-k   (Eq. 8)

    With all switches off every token attends to all. The configuration has the defaults and validates the numbers.

    Args:
        lead: g; the first g tokens attend to all tokens, and all tokens to them.
        window: w; a token attends to floor(w / 2) neighbours on either side, and itself.
        top_k: k; keys by their scores, for each head and query, selected among all keys.
        use_lead, use_window, use_top_k: alpha, beta, gamma.
    """

    lead: int = 10
    window: int = 50
    top_k: int = 10
    use_lead: bool = True
    use_window: bool = True
    use_top_k: bool = True

    def mask(self, length: int, device=None, rows: slice = ALL) -> torch.Tensor:
        """(L, L), or those rows of it: the lead and window masks, without top-k."""
        position = torch.arange(length, device=device)
        full = not (self.use_lead or self.use_window or self.use_top_k)
        visible = torch.full((1, length), full, device=device).expand(len(position[rows]), -1)
        if self.use_lead:  # i or j is among the first g tokens   (Eq. 5)
            lead = position < self.lead
            visible = visible | lead[rows, None] | lead
        if self.use_window:  # |i - j| <= floor(w / 2)   (Eq. 6)
            visible = visible | ((position[rows, None] - position).abs() <= self.window // 2)
        return visible


def sinusoids(positions: torch.Tensor, width: int, dtype=torch.float32) -> torch.Tensor:
    """Positions (...) -> (..., width): [sin(p f_0), ..., cos(p f_0), ...], f_m = 10000^(-2m / width)."""
    float_dtype = torch.promote_types(dtype, torch.float32)
    frequencies = 10000 ** (-torch.arange(0, width, 2, device=positions.device, dtype=float_dtype) / width)
    angles = positions.to(float_dtype)[..., None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], -1).to(dtype)


def relative_shift(x: torch.Tensor) -> torch.Tensor:
    """(..., n, n + m) -> (..., n, m): row a shifted by n - 1 - a to the left   (Dai et al. 2019, App. B)

    If column t of x has offset o - t, then column j of the result has o - (n - 1) + a - j, which is i - j in each row. The
    last column of x is never read; it only sets the stride of the rows.
    """
    n, width = x.shape[-2:]
    flat = x.flatten(-2)[..., n - 1 : n - 1 + n * (width - 1)]
    return flat.unflatten(-1, (n, width - 1))[..., : width - n]


class SparseRelativeAttention(nn.Module):
    """Multi-head attention under a sparse pattern, with the scores of Eq. 9.

    A_ij = scale (q_i k_j^T + q_i r_{i-j}^T + u k_j^T + v r_{i-j}^T),  r = R W

    Query, value and output projections have biases, as in OpenNMT. A bias of the key projection would add the same number
    to all scores of a query, so W_k of Eq. 9, which also projects R, and W_{k,R} have none. `content_bias` (u) and
    `position_bias` (v) are not initialised here but by the model.

    Args:
        hidden_size, num_heads: H, A.
        pattern: the visible keys of each token.
        relative: "shared", Eq. 9 as printed: W_k projects both the tokens and R; "separate", R has its own projection
            (Transformer-XL); "none", neither is projected, and a head's keys are its slice of x (TENER); `None`,
            plain attention without positions.
    """

    def __init__(self, hidden_size: int, num_heads: int, pattern: SparsePattern, relative: str | None = "shared"):
        super().__init__()
        width = hidden_size // num_heads
        self.num_heads, self.pattern, self.relative, self.scale = num_heads, pattern, relative, width**-0.5
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = None if relative == "none" else nn.Linear(hidden_size, hidden_size, bias=relative != "shared")
        self.value = nn.Linear(hidden_size, hidden_size)
        self.position = nn.Linear(hidden_size, hidden_size, bias=False) if relative == "separate" else None
        self.output = nn.Linear(hidden_size, hidden_size)
        for name in ("content_bias", "position_bias"):
            bias = None if relative is None else nn.Parameter(torch.empty(num_heads, width))
            self.register_parameter(name, bias)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """x (B, L, H), mask (B, L), true at the tokens, which come first -> (B, L, H), 0 outside the mask.

        Queries of long texts are processed in chunks: time grows with L^2, and without gradients memory does not.
        """
        B, L, _ = x.shape
        projected = (x if linear is None else linear(x) for linear in (self.query, self.key, self.value))
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).permute(2, 0, 1, 3) for y in projected)  # (A, B, L, d)
        r = None if self.relative is None else self.offset_keys(L, x)
        n = max(1, MAX_SCORES // max(1, self.num_heads * B * L))
        chunks = (slice(start, min(start + n, L)) for start in range(0, L, n))
        y = torch.cat([self.attend(q[:, :, rows], k, v, r, mask, rows) for rows in chunks], 2)
        return self.output(y.permute(1, 2, 0, 3).flatten(2)).masked_fill(~mask[..., None], 0)

    def offset_keys(self, L: int, x: torch.Tensor) -> torch.Tensor:
        """r (A, 2 L, d) of the offsets L - 1, L - 2, ..., -L."""
        A, d = self.position_bias.shape
        project = {"shared": self.key, "separate": self.position, "none": None}[self.relative]
        offsets = torch.arange(L - 1, -L - 1, -1, device=x.device)
        R = sinusoids(offsets, d if project is None else A * d, self.position_bias.dtype)
        return R.expand(A, *R.shape) if project is None else project(R).unflatten(-1, (A, d)).movedim(-2, 0)

    def attend(self, q, k, v, r, mask: torch.Tensor, rows: slice) -> torch.Tensor:
        """q (A, B, n, d) of some rows, k and v (A, B, L, d), r (A, 2 L, d) -> (A, B, n, d)."""
        L = k.shape[2]
        if r is None:
            scores = (self.scale * q) @ k.mT  # (A, B, n, L)
        else:
            u, w = self.content_bias[:, None, None], self.position_bias[:, None, None]
            r = r[:, L - rows.stop : 2 * L - rows.start]  # from the last query's to the first's
            to_offsets = ((self.scale * (q + w)).flatten(1, 2) @ r.mT).unflatten(1, q.shape[1:3])
            scores = (self.scale * (q + u)) @ k.mT + relative_shift(to_offsets)
        visible = self.pattern.mask(L, q.device, rows)
        if self.pattern.use_top_k:
            visible = visible | top_k_mask(scores, self.pattern.top_k, mask[:, None])  # (A, B, n, L)
        # a finite number, since -inf would give nan in an empty text
        scores = scores.masked_fill(~(visible & mask[:, None]), torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)
        return weights @ v
