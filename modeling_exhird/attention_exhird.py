# SPDX-License-Identifier: Apache-2.0
"""Sparse self-attention with relative positions (Xu et al. 2021, Sect. 2).

Letters: B texts, L tokens of the longest text, H hidden size, A heads, d = H / A; i a query's position, j a key's;
g lead tokens, w window, k keys by score, N tokens of a segment. For the blocks: C queries of a block, D = ceil(L / C)
blocks, r = floor(w / 2) reach.

The head dimension comes before the batch, (A, B, L, d): a term that depends only on the offset i - j is then one product for
all texts.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers.utils import logging

from .patterns_exhird import SparsePattern, segment_mask, top_k_mask

logger = logging.get_logger(__name__)

BLOCK_SIZE = 64  # minimum number of queries of a block; 32 to 64 is fastest on a CPU
MAX_SCORES = 1 << 25  # scores in memory at once, over all heads, texts and pairs
WARN_LENGTH = 20_000  # with more tokens, scoring all pairs takes minutes


def sinusoids(positions: torch.Tensor, width: int, dtype=torch.float32) -> torch.Tensor:
    """Positions (...) -> (..., width): [sin(p f_0), ..., cos(p f_0), ...], f_m = 10000^(-2m / width)."""
    float_dtype = torch.promote_types(dtype, torch.float32)
    frequencies = 10000 ** (-torch.arange(0, width, 2, device=positions.device, dtype=float_dtype) / width)
    angles = positions.to(float_dtype)[..., None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], -1).to(dtype)


class RelativeTerms(NamedTuple):
    """The parameters of Eq. 9: u (A, d), v (A, d), and W, which projects R, or `None` for R without a projection."""

    content_bias: torch.Tensor
    position_bias: torch.Tensor
    project: nn.Module | None

    def keys(self, offsets: torch.Tensor) -> torch.Tensor:
        """Offsets (...) -> r = R W (A, ..., d)."""
        A, d = self.position_bias.shape
        if self.project is None:
            R = sinusoids(offsets, d, self.position_bias.dtype)
            return R.expand(A, *R.shape)
        R = sinusoids(offsets, A * d, self.position_bias.dtype)
        return self.project(R).unflatten(-1, (A, d)).movedim(-2, 0)


def offset_keys(relative: RelativeTerms | None, first: int, count: int, device) -> torch.Tensor | None:
    """r (A, count, d) of the offsets first, first - 1, ..., or `None` without relative positions."""
    return None if relative is None else relative.keys(torch.arange(first, first - count, -1, device=device))


def offset_scores(q: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """q (A, ..., d), r (A, m, d) -> q r^T (A, ..., m)."""
    return (q.flatten(1, -2) @ r.mT).unflatten(1, q.shape[1:-1])


def biased_queries(
    q: torch.Tensor, relative: RelativeTerms | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q (A, ..., d) -> scale (q + u), to be multiplied with the keys, and scale (q + v), with the offsets."""
    if relative is None:
        return scale * q, None
    u, v = (bias.view(len(q), *[1] * (q.dim() - 2), -1) for bias in (relative.content_bias, relative.position_bias))
    return scale * (q + u), scale * (q + v)


def relative_shift(x: torch.Tensor) -> torch.Tensor:
    """(..., n, n + m) -> (..., n, m): row a shifted by n - 1 - a to the left   (Dai et al. 2019, App. B)

    If column t of x has offset o - t, then column j of the result has o - (n - 1) + a - j, which is i - j in each row. The
    last column of x is never read; it only sets the stride of the rows.
    """
    n, width = x.shape[-2:]
    flat = x.flatten(-2)[..., n - 1 : n - 1 + n * (width - 1)]
    return flat.unflatten(-1, (n, width - 1))[..., : width - n]


def band(x: torch.Tensor, width: int) -> torch.Tensor:
    """(..., n, m) -> (..., n, width): row a shifted by a to the right, padded with 0."""
    n, m = x.shape[-2:]
    flat = F.pad(x, (0, width + 1 - m)).flatten(-2)
    return flat[..., : n * width].unflatten(-1, (n, width))


def visible_softmax(scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Scores (..., n, m), overwritten, and a mask `visible` that broadcasts to them -> softmax over the visible keys.

    Masked scores get a finite number, since -inf would give nan in a row without a visible key.
    """
    dtype = torch.promote_types(scores.dtype, torch.float32)
    return scores.masked_fill_(~visible, torch.finfo(scores.dtype).min).softmax(-1, dtype=dtype)


def attend(scores: torch.Tensor, visible: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Scores (..., n, m), overwritten, a mask `visible`, v (..., m, d) -> softmax(scores) v (..., n, d), 0 without a visible key."""
    weights = visible_softmax(scores, visible).to(v.dtype)
    return (weights @ v).masked_fill(~visible.any(-1, keepdim=True), 0)


def row_scores(q, k, relative: RelativeTerms | None, scale: float, r: torch.Tensor | None) -> torch.Tensor:
    """q (A, B, n, d) of n tokens, k (A, B, L, d) of all -> scores (A, B, n, L)   (Eq. 9)

    A_ij = scale (q_i k_j^T + q_i r_{i-j}^T + u k_j^T + v r_{i-j}^T),  r = R W

    r (A, n + L, d) has the offsets from (last query - first key) down to (first query - last key - 1).
    """
    to_keys, to_offsets = biased_queries(q, relative, scale)
    scores = to_keys @ k.mT
    if r is not None:
        scores += relative_shift(offset_scores(to_offsets, r))
    return scores


def dense_attention(q, k, v, mask, pattern: SparsePattern, relative: RelativeTerms | None = None, scale: float = 1.0):
    """Attention over all pairs of tokens, the reference for faster implementations.

    Queries of long texts are processed in chunks: time grows with L^2, and without gradients memory does not.

    q, k, v (A, B, L, d), mask (B, L) -> (A, B, L, d), 0 for tokens without a visible key, undefined outside the mask.
    """
    return torch.cat([attend(*rows, v) for rows in dense_scores(q, k, mask, pattern, relative, scale)], 2)


def attention_weights(q, k, mask, pattern: SparsePattern, relative: RelativeTerms | None = None, scale: float = 1.0):
    """The attention weights (B, A, L, L), 0 where j is not visible to i or i is padding; for `output_attentions`."""
    chunks = [
        visible_softmax(scores, visible).masked_fill(~visible, 0).to(q.dtype)
        for scores, visible in dense_scores(q, k, mask, pattern, relative, scale)
    ]
    return torch.cat(chunks, 2).transpose(0, 1) * mask[:, None, :, None]


def dense_scores(q, k, mask, pattern: SparsePattern, relative: RelativeTerms | None, scale: float):
    """Yields, for chunks of queries, scores (A, B, n, L) and a mask of the visible keys."""
    (A, B, L, _), device = q.shape, q.device
    r = offset_keys(relative, L - 1, 2 * L, device)
    n = max(1, MAX_SCORES // max(1, A * B * L))
    for start in range(0, L, n):
        end = min(start + n, L)
        rows = slice(start, end)
        scores = row_scores(q[:, :, rows], k, relative, scale, None if r is None else r[:, L - end : 2 * L - start])
        allowed = mask[:, None]  # (B, 1, L)
        if pattern.segment is not None:
            allowed = allowed & segment_mask(L, pattern.segment, device, rows)
        visible = pattern.mask(L, device, rows)
        if pattern.use_top_k:
            visible = visible | top_k_mask(scores, pattern.top_k, allowed)
        yield scores, visible & allowed


def block_sparse_attention(
    q, k, v, mask, pattern: SparsePattern, relative: RelativeTerms | None = None, scale: float = 1.0
):
    """The same for patterns without top-k, with cost linear in L.

    A block of C queries attends to the keys of its own block, r more on either side, and the g lead keys, under one softmax;
    the g lead queries attend to all keys.

    q, k, v (A, B, L, d), mask (B, L) -> (A, B, L, d), 0 for tokens without a visible key, undefined outside the mask.
    """
    L = q.shape[2]
    if pattern.covers_segments(L):
        return segment_attention(q, k, v, mask, min(pattern.segment or L, L), relative, scale)
    g = min(pattern.lead, L) if pattern.use_lead else 0
    y = window_attention(q, k, v, mask, g, pattern, relative, scale)
    if not g:
        return y
    visible = mask[:, None]
    if pattern.segment is not None:
        segment = torch.arange(L, device=q.device) // pattern.segment
        visible = visible & (segment[:g, None] == segment)
    r = offset_keys(relative, g - 1, g + L, q.device)
    lead = attend(row_scores(q[:, :, :g], k, relative, scale, r), visible, v)
    return torch.cat([lead, y[:, :, g:]], 2)


def blocks(x: torch.Tensor, C: int, dim: int) -> torch.Tensor:
    """(..., L, ...) -> (..., D, C, ...), padded with 0."""
    if pad := -x.shape[dim] % C:
        x = F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, pad))
    return x.unflatten(dim, (-1, C))


def segment_attention(q, k, v, mask, N: int, relative: RelativeTerms | None, scale: float) -> torch.Tensor:
    """Full attention within segments: each segment is treated as a separate text."""
    B, L = mask.shape
    q, k, v = (blocks(x, N, 2).flatten(1, 2) for x in (q, k, v))  # (A, B D, N, d)
    scores = row_scores(q, k, relative, scale, offset_keys(relative, N - 1, 2 * N, q.device))
    y = attend(scores, blocks(mask, N, 1).flatten(0, 1)[:, None], v)
    return y.unflatten(1, (B, -1)).flatten(2, 3)[:, :, :L]


def block_keys(x: torch.Tensor, C: int, g: int, r: int | None) -> torch.Tensor:
    """Keys or values (A, B, L, d) -> those that each block attends to (A, D, B, K, d): the lead, and unless r is `None` the
    block itself with r more on either side, padded with 0.
    """
    lead = x[:, None, :, :g]
    x = blocks(x, C, 2).transpose(1, 2)
    parts = [lead.expand(-1, x.shape[1], -1, -1, -1)]
    if r is not None:
        left = F.pad(x[:, :-1, :, C - r :], (0, 0) * 3 + (1, 0))
        right = F.pad(x[:, 1:, :, :r], (0, 0) * 3 + (0, 1))
        parts += [left, x, right]
    return torch.cat(parts, 3)


def window_attention(q, k, v, mask, g: int, pattern: SparsePattern, relative: RelativeTerms | None, scale: float):
    """Each query with its window and the g lead keys. The outputs of the lead queries are incomplete and to be replaced."""
    (B, L), device = mask.shape, q.device
    r = pattern.window // 2 if pattern.use_window else None
    C = max(BLOCK_SIZE, r or 0)
    queries = blocks(q, C, 2).transpose(1, 2).contiguous()  # (A, D, B, C, d)
    to_keys, to_offsets = biased_queries(queries, relative, scale)
    D = to_keys.shape[1]

    start = torch.arange(0, D * C, C, device=device)[:, None]
    i = start + torch.arange(C, device=device)  # (D, C): positions of the queries
    j = torch.arange(g, device=device).expand(D, -1)  # (D, K): positions of the keys
    if r is not None:
        j = torch.cat([j, start + torch.arange(-r, C + r, device=device)], 1)
    lead = torch.arange(j.shape[1], device=device) < g
    valid = mask[:, j.clamp(0, L - 1)] & (lead | ((j >= g) & (j < L)))  # (B, D, K): each lead key only once
    i, j = i[:, :, None], j[:, None]
    visible = lead | ((i - j).abs() <= (r or 0))  # (D, C, K)
    if pattern.segment is not None:
        visible = visible & (i // pattern.segment == j // pattern.segment)
    visible = visible[:, None] & valid.transpose(0, 1)[:, :, None]  # (D, B, C, K)

    scores = to_keys @ block_keys(k, C, g, r).mT  # (A, D, B, C, K)
    if relative is not None:
        parts = []
        if g:  # their offsets differ from block to block
            rows = relative.keys(start + torch.arange(C - 1, -g - 1, -1, device=device))  # (A, D, C + g, d)
            parts.append(relative_shift((to_offsets.flatten(2, 3) @ rows.mT).unflatten(2, (B, C))))
        if r is not None:
            offsets = torch.arange(r, -r - 1, -1, device=device)
            parts.append(band(offset_scores(to_offsets, relative.keys(offsets)), C + 2 * r))
        scores += torch.cat(parts, -1)
    y = attend(scores, visible, block_keys(v, C, g, r))
    return y.transpose(1, 2).flatten(2, 3)[:, :, :L]


def choose_implementation(pattern: SparsePattern, length: int) -> str:
    """The faster implementation, "dense" or "block", by forward and backward times measured on a CPU."""
    if pattern.use_top_k:
        return "dense"
    if pattern.covers_segments(length):
        return "block" if length > 2 * (pattern.segment or length) else "dense"
    reach = pattern.window // 2 if pattern.use_window else 0
    keys = pattern.use_lead * pattern.lead + pattern.use_window * (max(BLOCK_SIZE, reach) + 2 * reach)
    return "block" if length > keys + 2 * BLOCK_SIZE else "dense"


class SparseRelativeAttention(nn.Module):
    """Multi-head attention under a sparse pattern, with the scores of Eq. 9.

    Query, value and output projections have biases, as in OpenNMT. A bias of the key projection would add the same number
    to all scores of a query, so W_k of Eq. 9, which also projects R, and W_{k,R} have none. `content_bias` (u) and
    `position_bias` (v) are not initialised here but by the model.

    Args:
        hidden_size, num_heads: H, A.
        pattern: the visible keys of each token.
        relative: "shared", Eq. 9 as printed: W_k projects both the tokens and R; "separate", R has its own projection
            (Transformer-XL); "none", neither is projected, and a head's keys are its slice of x (TENER); `None`,
            plain attention without positions.
        implementation: "dense", "block", or "auto" for the faster one.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        pattern: SparsePattern,
        *,
        relative: str | None = "shared",
        implementation: str = "auto",
    ):
        super().__init__()
        width = hidden_size // num_heads
        self.num_heads, self.pattern, self.relative, self.implementation = num_heads, pattern, relative, implementation
        self.scale = width**-0.5
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = None if relative == "none" else nn.Linear(hidden_size, hidden_size, bias=relative != "shared")
        self.value = nn.Linear(hidden_size, hidden_size)
        self.position = nn.Linear(hidden_size, hidden_size, bias=False) if relative == "separate" else None
        self.output = nn.Linear(hidden_size, hidden_size)
        for name in ("content_bias", "position_bias"):
            bias = None if relative is None else nn.Parameter(torch.empty(num_heads, width))
            self.register_parameter(name, bias)

    def extra_repr(self) -> str:
        """For `print(model)`."""
        return f"num_heads={self.num_heads}, {self.pattern}, relative={self.relative!r}, scale={self.scale:.4g}"

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, output_attentions: bool = False, shift: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x (B, L, H), mask (B, L), true at the tokens of a row, which start at position 0 -> (B, L, H), 0 outside the mask;
        and with `output_attentions` the weights (B, A, L, L), otherwise `None`.

        Args:
            shift (`(B,)`): how far the rows were rolled. The weights are rolled back.
        """
        x = x.masked_fill(~mask[..., None], 0)
        projected = (x if linear is None else linear(x) for linear in (self.query, self.key, self.value))
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).permute(2, 0, 1, 3) for y in projected)  # (A, B, L, d)
        relative, weights = None, None
        if self.relative is not None:
            project = {"shared": self.key, "separate": self.position, "none": None}[self.relative]
            relative = RelativeTerms(self.content_bias, self.position_bias, project)
        if output_attentions:
            weights = used = attention_weights(q, k, mask, self.pattern, relative, self.scale)
            if shift is not None:  # rolled back and forth, so that the returned weights are part of the graph
                weights = roll_pairs(weights, -shift)
                used = roll_pairs(weights, shift)
            y = used.transpose(0, 1) @ v
        else:
            attention = block_sparse_attention if self.implementation_for(x.shape[1]) == "block" else dense_attention
            y = attention(q, k, v, mask, self.pattern, relative, self.scale)
        return self.output(y.permute(1, 2, 0, 3).flatten(2)).masked_fill(~mask[..., None], 0), weights

    def implementation_for(self, length: int) -> str:
        """The implementation for texts of a given length; warns of texts that take minutes."""
        implementation = (
            choose_implementation(self.pattern, length) if self.implementation == "auto" else self.implementation
        )
        if implementation == "dense" and length > WARN_LENGTH:
            logger.warning_once(
                f"A text has {length:,} tokens, and attention with the top-k mask (or no mask) is quadratic in length. "
                "A model with use_top_k=False and a window is linear."
            )
        return implementation


def left_padding_lengths(mask: torch.Tensor) -> torch.Tensor | None:
    """The number of padding positions to the left of each row (B,), or `None` if no row has any.

    It synchronises with the device, so call it once per forward pass.
    """
    # A compiled graph cannot branch on values, and rolls all rows.
    if not torch.compiler.is_compiling() and bool(mask[:, 0].all()):
        return None
    return mask.to(torch.uint8).argmax(1)


def roll_rows(x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """(B, L, ...), shift (B,) -> each row rolled to the left by its shift."""
    index = (torch.arange(x.shape[1], device=x.device) + shift[:, None]) % x.shape[1]
    return x.gather(1, index.view(*index.shape, *[1] * (x.dim() - 2)).expand_as(x))


def roll_pairs(weights: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """(B, A, L, L): the same for both queries and keys."""
    rows = roll_rows(weights.permute(0, 2, 3, 1), shift)
    return roll_rows(rows.transpose(1, 2), shift).permute(0, 3, 2, 1)
