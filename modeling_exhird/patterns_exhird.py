"""Who sees whom: the masks of sparse attention (Xu et al. 2021, Sect. 2.1).

Letters: L tokens, i a query's position, j a key's; g lead tokens, w window, k keys by score, N tokens of a segment.
"""

from dataclasses import dataclass

import torch

ALL = slice(None)


def lead_mask(length: int, g: int, device=None, rows: slice = ALL) -> torch.Tensor:
    """(L, L), or those rows of it: true where i or j is among the first g tokens   (Eq. 5)"""
    lead = torch.arange(length, device=device) < g
    return lead[rows, None] | lead


def window_mask(length: int, w: int, device=None, rows: slice = ALL) -> torch.Tensor:
    """(L, L), or those rows of it: true where |i - j| <= floor(w / 2)   (Eq. 6)"""
    place = torch.arange(length, device=device)
    return (place[rows, None] - place).abs() <= w // 2


def top_k_mask(scores: torch.Tensor, k: int, mask: torch.Tensor) -> torch.Tensor:
    """Scores (..., L, L), mask that fits them -> true at each query's k largest among the keys in the mask   (Eq. 7)

    With fewer than k keys in the mask these are all; of equal scores the first ones are taken. It has no gradient.
    """
    scores = scores.detach().masked_fill(~mask, float("-inf"))
    k = min(k, scores.shape[-1])
    least = scores.topk(k, dim=-1).values[..., -1:]
    above, level = scores > least, scores == least
    room = k - above.sum(-1, keepdim=True)
    return (above | (level & (level.cumsum(-1, dtype=torch.int32) <= room))) & mask


def segment_mask(length: int, N: int, device=None, rows: slice = ALL) -> torch.Tensor:
    """(L, L), or those rows of it: true where i and j stand in the same N tokens   (Eq. 1-3)"""
    segment = torch.arange(length, device=device) // N
    return segment[rows, None] == segment


@dataclass(frozen=True)
class SparsePattern:
    """Which tokens see each other: lead or neighbour or top-k, and in the same segment   (Eq. 8)

    The numbers are ours: the paper does not state its own. With all switches off every token sees its whole segment.
    Where a pattern leaves a token nobody to see, as lead tokens alone do in later segments, the token reads 0.

    Args:
        lead: g; the first g tokens see all and are seen by all.
        window: w; a token sees floor(w / 2) neighbours on either side, and itself.
        top_k: k; keys by their scores, for each head and query, chosen among all keys of the segment.
        use_lead, use_window, use_top_k: alpha, beta, gamma.
        segment: N; no token sees beyond its N tokens. `None` for a whole text.
    """

    lead: int = 10
    window: int = 50
    top_k: int = 10
    use_lead: bool = True
    use_window: bool = True
    use_top_k: bool = True
    segment: int | None = None

    def __post_init__(self):
        for name in ("lead", "window", "top_k"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} is negative: it counts tokens. Use {name}=0 or more.")
        if self.use_top_k and self.top_k == 0:
            raise ValueError("top_k=0 chooses no key for any token. Use top_k=1 or more, or use_top_k=False.")
        if self.use_lead and self.lead == 0 and not (self.use_window or self.use_top_k):
            raise ValueError(
                "lead=0 without a window or top-k lets no token see any. Use lead=1 or more, or use_lead=False."
            )
        if self.segment is not None and self.segment < 1:
            raise ValueError(
                f"segment={self.segment} has no room for a token. "
                "Use segment=1 or more, or segment=None for a text without segments."
            )

    @property
    def sparse(self) -> bool:
        return self.use_lead or self.use_window or self.use_top_k

    def sees_segments(self, length: int) -> bool:
        """Whether a token of a text of that length sees its whole segment in any case."""
        N = min(self.segment or length, length)
        return not self.sparse or (self.use_window and self.window // 2 >= N - 1)

    def mask(self, length: int, device=None, rows: slice = ALL) -> torch.Tensor:
        """(L, L), or those rows of it: who sees whom by lead and window; top-k and segments come on top."""
        seen = torch.full((1, length), not self.sparse, device=device).expand(len(range(length)[rows]), -1)
        if self.use_lead:
            seen = seen | lead_mask(length, self.lead, device, rows)
        if self.use_window:
            seen = seen | window_mask(length, self.window, device, rows)
        return seen
