"""Self-attention in which a token sees a part of its text, at positions that count from itself (Xu et al. 2021, Sect. 2).

Letters: B texts, L tokens of the longest text, H hidden size, A heads, d = H / A; i a query's position, j a key's;
g lead tokens, w window, k keys by score, N tokens of a segment. For the blocks: C queries of a block, D = ceil(L / C)
blocks, r = floor(w / 2) reach.

Heads stand before the batch, (A, B, L, d): what depends on the offset i - j alone is then one product for all texts.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers.utils import logging

from .patterns_exhird import SparsePattern, segment_mask, top_k_mask

logger = logging.get_logger(__name__)

RELATIVE = ("shared", "separate", "none", None)
IMPLEMENTATIONS = ("auto", "dense", "block")
BLOCK = 64  # fewest queries of a block: with 32 to 64 it is fastest on a CPU
PAIRS = 1 << 25  # so many scores are held at once, of heads, texts and pairs together
LONG = 20_000  # tokens from which all pairs take minutes


def refuse_odd(width: int):
    if width % 2:
        raise ValueError(
            f"width={width} is odd: each frequency of the sinusoids has a sine and a cosine. "
            f"Use a hidden size, or with relative='none' a head's width, of {width + 1} or another even number."
        )


def sinusoids(positions: torch.Tensor, width: int, dtype=torch.float32) -> torch.Tensor:
    """Positions (...) -> (..., width): [sin(p f_0), ..., cos(p f_0), ...], f_m = 10000^(-2m / width)."""
    refuse_odd(width)
    kind = torch.promote_types(dtype, torch.float32)
    frequencies = 10000 ** (-torch.arange(0, width, 2, device=positions.device, dtype=kind) / width)
    angles = positions.to(kind)[..., None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], -1).to(dtype)


class Relative(NamedTuple):
    """What Eq. 9 adds to plain attention: u (A, d), v (A, d) and W, which projects R, or `None` for R as it is."""

    content_bias: torch.Tensor
    position_bias: torch.Tensor
    project: nn.Module | None

    def rows(self, offsets: torch.Tensor) -> torch.Tensor:
        """Offsets (...) -> r = R W (A, ..., d)."""
        A, d = self.position_bias.shape
        if self.project is None:
            R = sinusoids(offsets, d, self.position_bias.dtype)
            return R.expand(A, *R.shape)
        R = sinusoids(offsets, A * d, self.position_bias.dtype)
        return self.project(R).unflatten(-1, (A, d)).movedim(-2, 0)


def rows_below(relative: Relative | None, first: int, count: int, device) -> torch.Tensor | None:
    """r (A, count, d) of the offsets first, first - 1, ..."""
    return None if relative is None else relative.rows(torch.arange(first, first - count, -1, device=device))


def offset_scores(q: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """q (A, ..., d), r (A, m, d) -> q r^T (A, ..., m)."""
    return (q.flatten(1, -2) @ r.mT).unflatten(1, q.shape[1:-1])


def queries(q: torch.Tensor, relative: Relative | None, scale: float) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q (A, ..., d) -> scale (q + u), which meets the keys, and scale (q + v), which meets the offsets."""
    if relative is None:
        return scale * q, None
    u, v = (bias.view(len(q), *[1] * (q.dim() - 2), -1) for bias in (relative.content_bias, relative.position_bias))
    return scale * (q + u), scale * (q + v)


def skew(x: torch.Tensor) -> torch.Tensor:
    """(..., n, n + m) -> (..., n, m): row a moved n - 1 - a to the left   (Dai et al. 2019, App. B)

    Where x has offset o - t in column t, the result has o - (n - 1) + a - j in column j: i - j in each row. The last
    column of x is never read; it keeps the rows at their distance.
    """
    n, width = x.shape[-2:]
    flat = x.flatten(-2)[..., n - 1 : n - 1 + n * (width - 1)]
    return flat.unflatten(-1, (n, width - 1))[..., : width - n]


def band(x: torch.Tensor, width: int) -> torch.Tensor:
    """(..., n, m) -> (..., n, width): row a moved a to the right, 0 around it."""
    n, m = x.shape[-2:]
    flat = F.pad(x, (0, width + 1 - m)).flatten(-2)
    return flat[..., : n * width].unflatten(-1, (n, width))


def attend(scores: torch.Tensor, seen: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Scores (..., n, m), which it overwrites, seen that fits them, v (..., m, d) -> softmax(scores) v (..., n, d).

    0 where a query sees nobody: a finite number stands for -inf, which would make nan of it.
    """
    kind = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.masked_fill_(~seen, torch.finfo(scores.dtype).min).softmax(-1, dtype=kind)
    return (weights.to(v.dtype) @ v).masked_fill(~seen.any(-1, keepdim=True), 0)


def row_scores(q, k, relative: Relative | None, scale: float, r: torch.Tensor | None) -> torch.Tensor:
    """q (A, B, n, d) of n tokens, k (A, B, L, d) of all -> scores (A, B, n, L)   (Eq. 9)

    A_ij = scale (q_i k_j^T + q_i r_{i-j}^T + u k_j^T + v r_{i-j}^T),  r = R W

    r (A, n + L, d) has the last one's offset from the first key, and all below, to the first one's from beyond the last.
    """
    to_keys, to_offsets = queries(q, relative, scale)
    scores = to_keys @ k.mT
    if r is not None:
        scores += skew(offset_scores(to_offsets, r))
    return scores


def dense_attention(q, k, v, mask, pattern: SparsePattern, relative: Relative | None = None, scale: float = 1.0):
    """The formulas with all pairs of tokens: what every faster formulation must equal.

    Long texts' queries take turns, so that time grows with L^2, and without gradients memory does not.

    q, k, v (A, B, L, d), mask (B, L) -> (A, B, L, d), 0 where a token sees nobody, anything outside the mask.
    """
    return torch.cat([attend(*rows, v) for rows in dense_scores(q, k, mask, pattern, relative, scale)], 2)


def attention_weights(q, k, mask, pattern: SparsePattern, relative: Relative | None = None, scale: float = 1.0):
    """The softmax of the same, which nothing else needs whole -> (B, A, L, L), 0 where i does not see j or is padding."""
    kind, found = torch.promote_types(q.dtype, torch.float32), []
    for scores, seen in dense_scores(q, k, mask, pattern, relative, scale):
        weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1, dtype=kind)
        found.append(weights.masked_fill(~seen, 0).to(q.dtype))
    return torch.cat(found, 2).transpose(0, 1) * mask[:, None, :, None]


def dense_scores(q, k, mask, pattern: SparsePattern, relative: Relative | None, scale: float):
    """Some queries at a time: their scores with all keys, (A, B, n, L), and which of these they see."""
    (A, B, L, _), device = q.shape, q.device
    r = rows_below(relative, L - 1, 2 * L, device)
    n = max(1, PAIRS // max(1, A * B * L))
    for start in range(0, L, n):
        end = min(start + n, L)
        rows = slice(start, end)
        scores = row_scores(q[:, :, rows], k, relative, scale, None if r is None else r[:, L - end : 2 * L - start])
        allowed = mask[:, None]  # (B, 1, L)
        if pattern.segment is not None:
            allowed = allowed & segment_mask(L, pattern.segment, device, rows)
        seen = pattern.mask(L, device, rows)
        if pattern.use_top_k:
            seen = seen | top_k_mask(scores, pattern.top_k, allowed)
        yield scores, seen & allowed


def block_sparse_attention(q, k, v, mask, pattern: SparsePattern, relative: Relative | None = None, scale: float = 1.0):
    """The same for patterns without top-k, at a cost that grows with L and not with its square.

    A block of C queries meets the keys of its own block, r more on either side, and beside them the g lead keys, under
    one softmax; the g lead queries meet all keys.

    q, k, v (A, B, L, d), mask (B, L) -> (A, B, L, d), 0 where a token sees nobody, anything outside the mask.
    """
    refuse_top_k(pattern)
    L = q.shape[2]
    if pattern.sees_segments(L):
        return segment_attention(q, k, v, mask, min(pattern.segment or L, L), relative, scale)
    g = min(pattern.lead, L) if pattern.use_lead else 0
    y = near_attention(q, k, v, mask, g, pattern, relative, scale)
    if not g:
        return y
    seen = mask[:, None]
    if pattern.segment is not None:
        segment = torch.arange(L, device=q.device) // pattern.segment
        seen = seen & (segment[:g, None] == segment)
    r = rows_below(relative, g - 1, g + L, q.device)
    lead = attend(row_scores(q[:, :, :g], k, relative, scale, r), seen, v)
    return torch.cat([lead, y[:, :, g:]], 2)


def refuse_top_k(pattern: SparsePattern):
    if pattern.use_top_k:
        raise ValueError(
            f"implementation='block' cannot choose top_k={pattern.top_k} keys: it never makes the scores of all pairs. "
            "Use implementation='dense' or 'auto', or SparsePattern(use_top_k=False)."
        )


def blocks(x: torch.Tensor, C: int, dim: int) -> torch.Tensor:
    """(..., L, ...) -> (..., D, C, ...), 0 after the end."""
    if pad := -x.shape[dim] % C:
        x = F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, pad))
    return x.unflatten(dim, (-1, C))


def segment_attention(q, k, v, mask, N: int, relative: Relative | None, scale: float) -> torch.Tensor:
    """Each segment as a text of its own: offsets within it are the same."""
    B, L = mask.shape
    q, k, v = (blocks(x, N, 2).flatten(1, 2) for x in (q, k, v))  # (A, B D, N, d)
    scores = row_scores(q, k, relative, scale, rows_below(relative, N - 1, 2 * N, q.device))
    y = attend(scores, blocks(mask, N, 1).flatten(0, 1)[:, None], v)
    return y.unflatten(1, (B, -1)).flatten(2, 3)[:, :, :L]


def block_keys(x: torch.Tensor, C: int, g: int, r: int | None) -> torch.Tensor:
    """Keys or values (A, B, L, d) -> those that each block meets (A, D, B, K, d): the lead, and unless r is `None` the
    block itself with r more on either side, 0 beyond the ends.
    """
    lead = x[:, None, :, :g]
    x = blocks(x, C, 2).transpose(1, 2)
    parts = [lead.expand(-1, x.shape[1], -1, -1, -1)]
    if r is not None:
        before = F.pad(x[:, :-1, :, C - r :], (0, 0) * 3 + (1, 0))
        after = F.pad(x[:, 1:, :, :r], (0, 0) * 3 + (0, 1))
        parts += [before, x, after]
    return torch.cat(parts, 3)


def near_attention(q, k, v, mask, g: int, pattern: SparsePattern, relative: Relative | None, scale: float):
    """Each query with its window and the g lead keys; what it gives for the lead queries is not the pattern's."""
    (B, L), device = mask.shape, q.device
    r = pattern.window // 2 if pattern.use_window else None
    C = max(BLOCK, r or 0)
    to_keys, to_offsets = queries(blocks(q, C, 2).transpose(1, 2).contiguous(), relative, scale)  # (A, D, B, C, d)
    D = to_keys.shape[1]

    start = torch.arange(0, D * C, C, device=device)[:, None]
    i = start + torch.arange(C, device=device)  # (D, C): where the queries stand
    j = torch.arange(g, device=device).expand(D, -1)  # (D, K): and the keys
    if r is not None:
        j = torch.cat([j, start + torch.arange(-r, C + r, device=device)], 1)
    lead = torch.arange(j.shape[1], device=device) < g
    there = mask[:, j.clamp(0, L - 1)] & (lead | ((j >= g) & (j < L)))  # (B, D, K): no lead key a second time
    i, j = i[:, :, None], j[:, None]
    seen = lead | ((i - j).abs() <= (r or 0))  # (D, C, K)
    if pattern.segment is not None:
        seen = seen & (i // pattern.segment == j // pattern.segment)
    seen = seen[:, None] & there.transpose(0, 1)[:, :, None]  # (D, B, C, K)

    scores = to_keys @ block_keys(k, C, g, r).mT  # (A, D, B, C, K)
    if relative is not None:
        parts = []
        if g:  # which each block meets at offsets of its own
            rows = relative.rows(start + torch.arange(C - 1, -g - 1, -1, device=device))  # (A, D, C + g, d)
            parts.append(skew((to_offsets.flatten(2, 3) @ rows.mT).unflatten(2, (B, C))))
        if r is not None:
            offsets = torch.arange(r, -r - 1, -1, device=device)
            parts.append(band(offset_scores(to_offsets, relative.rows(offsets)), C + 2 * r))
        scores += torch.cat(parts, -1)
    y = attend(scores, seen, block_keys(v, C, g, r))
    return y.transpose(1, 2).flatten(2, 3)[:, :, :L]


def faster(pattern: SparsePattern, length: int) -> str:
    """The implementation to take, by times of a forward and a backward pass on a CPU."""
    if pattern.use_top_k:
        return "dense"
    if pattern.sees_segments(length):
        return "block" if length > 2 * (pattern.segment or length) else "dense"
    reach = pattern.window // 2 if pattern.use_window else 0
    keys = pattern.use_lead * pattern.lead + pattern.use_window * (max(BLOCK, reach) + 2 * reach)
    return "block" if length > keys + 2 * BLOCK else "dense"


class SparseRelativeAttention(nn.Module):
    """Attention of several heads under a sparse pattern, with Eq. 9's scores.

    Query, value and output projections have biases, as in OpenNMT. A bias of the key projection would add the same to
    all scores of a query; so there is none where that projection is Eq. 9's W_k, which R passes too, nor in W_{k,R}.
    `content_bias` (u) and `position_bias` (v) are left empty, for the model to initialise.

    Args:
        hidden_size, num_heads: H, A.
        pattern: who sees whom.
        relative: "shared", Eq. 9 as printed: W_k projects both the tokens and R; "separate", R by a matrix of its own
            (Transformer-XL); "none", neither is projected, and a head's keys are its slice of x (TENER); `None`,
            plain attention without positions.
        scale: whether the scores are divided by sqrt(d).
        implementation: "dense", "block", or "auto" for what is faster.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        pattern: SparsePattern,
        *,
        relative: str | None = "shared",
        scale: bool = True,
        implementation: str = "auto",
    ):
        super().__init__()
        width = hidden_size // max(1, num_heads)
        if num_heads < 1 or hidden_size % num_heads:
            raise ValueError(
                f"hidden_size={hidden_size} is not divisible by num_heads={num_heads}: each head takes an equal part. "
                f"Use a multiple of the heads, such as hidden_size={max(1, num_heads) * 64}."
            )
        for name, value, known in (
            ("relative", relative, RELATIVE),
            ("implementation", implementation, IMPLEMENTATIONS),
        ):
            if value not in known:
                raise ValueError(f"{name}={value!r} is unknown. Use one of {', '.join(map(repr, known))}.")
        if implementation == "block":
            refuse_top_k(pattern)
        if relative is not None:
            refuse_odd(width if relative == "none" else hidden_size)
        self.num_heads, self.pattern, self.relative, self.implementation = num_heads, pattern, relative, implementation
        self.scale = width**-0.5 if scale else 1.0
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = None if relative == "none" else nn.Linear(hidden_size, hidden_size, bias=relative != "shared")
        self.value = nn.Linear(hidden_size, hidden_size)
        self.position = nn.Linear(hidden_size, hidden_size, bias=False) if relative == "separate" else None
        self.output = nn.Linear(hidden_size, hidden_size)
        for name in ("content_bias", "position_bias"):
            bias = None if relative is None else nn.Parameter(torch.empty(num_heads, width))
            self.register_parameter(name, bias)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, {self.pattern}, relative={self.relative!r}, scale={self.scale:.4g}"

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """x (B, L, H), mask (B, L), true at a row's tokens, which stand together -> (B, L, H), 0 outside the mask.

        Positions count from a row's first token: padding on either side changes nothing.
        """
        if mask.shape != x.shape[:2]:
            raise ValueError(
                f"a mask of shape {tuple(mask.shape)} does not fit x of shape {tuple(x.shape)}. "
                f"Pass a mask of shape {tuple(x.shape[:2])}, true at tokens."
            )
        mask = mask.bool()
        first = left_padding(mask)
        if first is None:
            return self.attend_aligned(x, mask)[0]
        return turn(self.attend_aligned(turn(x, first), turn(mask, first))[0], -first)

    def attend_aligned(
        self, x: torch.Tensor, mask: torch.Tensor, output_attentions: bool = False, first: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same for rows that start at the left; with `output_attentions` the weights (B, A, L, L) too, all pairs at once.

        Args:
            first (`(B,)`): how far rows were turned before, so that the weights are those of the rows as they were.
        """
        x = x.masked_fill(~mask[..., None], 0)
        given = (x if linear is None else linear(x) for linear in (self.query, self.key, self.value))
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).permute(2, 0, 1, 3) for y in given)  # (A, B, L, d)
        relative, weights = None, None
        if self.relative is not None:
            project = {"shared": self.key, "separate": self.position, "none": None}[self.relative]
            relative = Relative(self.content_bias, self.position_bias, project)
        if output_attentions:
            weights = used = attention_weights(q, k, mask, self.pattern, relative, self.scale)
            if first is not None:  # there and back: what is returned is what the loss goes through
                weights = turn_pairs(weights, -first)
                used = turn_pairs(weights, first)
            y = used.transpose(0, 1) @ v
        else:
            attention = block_sparse_attention if self.chosen(x.shape[1]) == "block" else dense_attention
            y = attention(q, k, v, mask, self.pattern, relative, self.scale)
        return self.output(y.permute(1, 2, 0, 3).flatten(2)).masked_fill(~mask[..., None], 0), weights

    def chosen(self, length: int) -> str:
        """Which implementation reads texts of so many tokens."""
        implementation = faster(self.pattern, length) if self.implementation == "auto" else self.implementation
        if implementation == "dense" and length > LONG:
            logger.warning_once(
                f"A text has {length:,} tokens, and attention with the top-k mask, or with none, makes all pairs of them: "
                "its time grows with the square. A model with use_top_k=False and a window reads it in linear time."
            )
        return implementation


def left_padding(mask: torch.Tensor) -> torch.Tensor | None:
    """Each row's first token (B,), or None where all rows start at the left. It waits for the device: ask once a pass."""
    # A graph cannot look whether all rows start at the left, and moves them all.
    if not torch.compiler.is_compiling() and bool(mask[:, 0].all()):
        return None
    return mask.to(torch.uint8).argmax(1)


def turn(x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """(B, L, ...), first (B,) -> each row turned so that position `first` becomes its first."""
    index = (torch.arange(x.shape[1], device=x.device) + first[:, None]) % x.shape[1]
    return x.gather(1, index.view(*index.shape, *[1] * (x.dim() - 2)).expand_as(x))


def turn_pairs(weights: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """(B, A, L, L): the same for queries and keys."""
    rows = turn(weights.permute(0, 2, 3, 1), first)
    return turn(rows.transpose(1, 2), first).permute(0, 3, 2, 1)
