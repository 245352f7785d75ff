# SPDX-License-Identifier: Apache-2.0
"""The masks of sparse attention (Xu et al. 2021, Sect. 2.1).

Letters: L tokens, i a query's position, j a key's; g lead tokens, w window, k keys by score, N tokens of a segment.
"""

from dataclasses import dataclass

import torch

ALL = slice(None)


def top_k_mask(scores: torch.Tensor, k: int, mask: torch.Tensor) -> torch.Tensor:
    """Scores (..., L, L), a mask that broadcasts to them -> true at each query's k largest among the keys in the mask   (Eq. 7)

    If the mask has fewer than k keys, all are selected. Of equal scores the first ones are taken. It has no gradient.
    """
    scores = scores.detach().masked_fill(~mask, float("-inf"))
    k = min(k, scores.shape[-1])
    least = scores.topk(k, dim=-1).values[..., -1:]
    above, tied = scores > least, scores == least
    room = k - above.sum(-1, keepdim=True)
    return (above | (tied & (tied.cumsum(-1, dtype=torch.int32) <= room))) & mask


def segment_mask(length: int, N: int, device=None, rows: slice = ALL) -> torch.Tensor:
    """(L, L), or those rows of it: true where i and j are in the same segment of N tokens   (Eq. 1-3)"""
    segment = torch.arange(length, device=device) // N
    return segment[rows, None] == segment


@dataclass(frozen=True)
class SparsePattern:
    """The visible keys of each token: lead or neighbour or top-k, and in the same segment   (Eq. 8)

    The default numbers are ours; the paper does not state its own. With all switches off every token attends to its whole
    segment. A token with no visible key gets a zero output; with the lead mask alone this happens in later segments. The
    configuration validates the numbers.

    Args:
        lead: g; the first g tokens attend to all tokens, and all tokens to them.
        window: w; a token attends to floor(w / 2) neighbours on either side, and itself.
        top_k: k; keys by their scores, for each head and query, selected among all keys of the segment.
        use_lead, use_window, use_top_k: alpha, beta, gamma.
        segment: N; attention stays within segments of N tokens. `None` for no segments.
    """

    lead: int = 10
    window: int = 50
    top_k: int = 10
    use_lead: bool = True
    use_window: bool = True
    use_top_k: bool = True
    segment: int | None = None

    @property
    def sparse(self) -> bool:
        """Whether any mask is on."""
        return self.use_lead or self.use_window or self.use_top_k

    def covers_segments(self, length: int) -> bool:
        """Whether every token of a text of this length attends to its whole segment."""
        N = min(self.segment or length, length)
        return not self.sparse or (self.use_window and self.window // 2 >= N - 1)

    def mask(self, length: int, device=None, rows: slice = ALL) -> torch.Tensor:
        """(L, L), or those rows of it: the lead and window masks, without top-k and segments."""
        position = torch.arange(length, device=device)
        visible = torch.full((1, length), not self.sparse, device=device).expand(len(position[rows]), -1)
        if self.use_lead:  # i or j is among the first g tokens   (Eq. 5)
            lead = position < self.lead
            visible = visible | lead[rows, None] | lead
        if self.use_window:  # |i - j| <= floor(w / 2)   (Eq. 6)
            visible = visible | ((position[rows, None] - position).abs() <= self.window // 2)
        return visible
