"""A linear-chain CRF over some positions of each row: likelihood, marginals and best path in log2 W steps.

Letters: B rows, S positions, C tags, W positions that take part in the longest row (the paper's words), n elements
of a level of the tree.

The recursions of a CRF are products of C x C matrices, over (logsumexp, +) or (max, +), and a product may be taken in
any order. So neighbours are multiplied in pairs, level by level, and not one position after the other: a few large
operations in place of W small ones (as in torch-struct: Rush 2020). Tags and time stand before the batch, (C, C, n, B),
so that each reduction over a tag runs along contiguous memory.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

# Stands for log 0 where gradients flow: -inf there gives nan, as inf - inf.
LOG_ZERO = -1e30


class ChainLayout:
    """Which positions form each row's chain: those where the mask is non-zero, moved up to the left.

    Args:
        mask (`(B, S)`): non-zero where a position takes part; holes and padding may stand anywhere.

    Attributes:
        inside (`(B, S)`): the mask as booleans.
        counts (`(B,)`): positions of each chain.
        order (`(B, W)`): where each position of a chain stands in its row; after the last one, anything.
        valid (`(W, B)`): true at the positions of a chain.
    """

    def __init__(self, mask: torch.Tensor):
        self.inside = mask != 0
        self.counts = self.inside.sum(1)
        if torch.compiler.is_compiling():
            # A graph cannot read the longest chain's length, and by powers of two a few graphs serve all lengths.
            width = 1
            while width < mask.shape[1]:
                width *= 2
        else:
            width = max([1, *self.counts.tolist()])
        order = (~self.inside).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
        self.order = F.pad(order, (0, width - order.shape[1]))
        self.valid = torch.arange(width, device=mask.device).unsqueeze(1) < self.counts

    def align(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S) -> (W, B), or (B, S, C) -> (C, W, B): the chains' values, and 0 after their ends."""
        order = self.order if x.dim() == 2 else self.order.unsqueeze(2).expand(-1, -1, x.shape[2])
        aligned = x.gather(1, order).permute(*reversed(range(x.dim())))
        return aligned.masked_fill(~self.valid, 0).contiguous()

    def restore(self, y: torch.Tensor, fill: float) -> torch.Tensor:
        """(W, B) -> (B, S), or (C, W, B) -> (B, S, C): each value at its own position, and `fill` outside the mask."""
        rank = (self.inside.cumsum(1) - 1).clamp(min=0)  # (B, S)
        inside = self.inside
        if y.dim() == 3:
            rank, inside = rank.unsqueeze(2).expand(-1, -1, y.shape[0]), inside.unsqueeze(2)
        return y.permute(*reversed(range(y.dim()))).gather(1, rank).masked_fill(~inside, fill)


def log_sum_exp(x: torch.Tensor, dim: int) -> torch.Tensor:
    """log sum exp(x) over one dimension; faster than torch.logsumexp, which takes the exponentials again for its gradient."""
    top = x.detach().amax(dim, keepdim=True)
    return (x - top).exp().sum(dim).log() + top.squeeze(dim)


def largest(x: torch.Tensor, dim: int) -> torch.Tensor:
    """max x over one dimension: the sum of the (max, +) semiring."""
    return x.amax(dim)


def pairs(elements: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(C, C, n, B) -> the left and the right factors (C, C, n // 2, B) of the level above."""
    even = elements.shape[2] // 2 * 2
    return elements[:, :, 0:even:2].contiguous(), elements[:, :, 1:even:2].contiguous()


def product_tree(elements: torch.Tensor, add) -> list[torch.Tensor]:
    """Elements (C, C, n, B) -> all levels of products, from the elements to the product of all (C, C, 1, B).

    An element [i, j] is the score of tag j after tag i, and so is the product of a run of elements, summed by `add`
    over the tags between.
    """
    levels = [elements]
    while levels[-1].shape[2] > 1:
        left, right = pairs(levels[-1])
        product = add(left.unsqueeze(2) + right.unsqueeze(0), 1)  # (C, C, C, n // 2, B) -> (C, C, n // 2, B)
        if levels[-1].shape[2] % 2:
            product = torch.cat([product, levels[-1][:, :, -1:]], 2)
        levels.append(product)
    return levels


def insert(between: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """What holds at the n + 1 bounds of a level (., n + 1, B) and between each pair's factors -> at all bounds below."""
    h = between.shape[1]
    mixed = torch.stack([bounds[:, :h], between], 2).flatten(1, 2)
    return torch.cat([mixed, bounds[:, h:]], 1)


class LinearChainCrf(nn.Module):
    """Scores a whole sequence of tags: each tag by its emission, each neighbourhood by a transition.

    log p(y | x) = s_{y_1} + sum_t e_t[y_t] + sum_{t > 1} T[y_{t-1}, y_t] + r_{y_W} - log Z

    with `start` s (C,), `end` r (C,), `transitions` T (C, C), emissions e and Z the sum of the exponentiated scores of
    all sequences. From Lafferty et al. (2001); the decoder of Duan et al. 2021, Sect. 3.3.

    A row's sequence is its positions with a non-zero mask, in their order: holes are skipped, padding may stand on
    either side, and what stands outside the mask changes nothing. All is calculated in float32, or float64 if the
    emissions or parameters are. An emission of -inf rules a tag out. The work grows with C^3: made for few tags, as in
    BIO; from nine on, a loop over positions is as fast on a CPU.
    """

    def __init__(self, num_tags: int):
        super().__init__()
        self.num_tags = num_tags
        self.start = nn.Parameter(torch.empty(num_tags))
        self.end = nn.Parameter(torch.empty(num_tags))
        self.transitions = nn.Parameter(torch.empty(num_tags, num_tags))
        self.reset_parameters()

    def reset_parameters(self):
        """Draws all scores from U(-0.1, 0.1), except those that were loaded."""
        for parameter in self.parameters():
            init.uniform_(parameter, -0.1, 0.1)

    def extra_repr(self) -> str:
        return f"num_tags={self.num_tags}"

    def log_likelihood(self, emissions: torch.Tensor, tags: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """emissions (B, S, C), tags (B, S), mask (B, S) -> log p(tags | emissions) (B,), 0 for a row without positions."""
        chain, e, end = self._read(emissions, mask)
        elements = self._elements(e, chain.valid, self.start, self.transitions, LOG_ZERO)
        log_z = log_sum_exp(product_tree(elements, log_sum_exp)[-1][0, :, 0] + end, 0)  # (B,)

        y = chain.align(tags.long())  # (W, B), and 0 after the end, where element [0, 0] is 0
        before = torch.cat([torch.zeros_like(y[:1]), y[:-1]]) * chain.valid
        steps = elements.gather(1, y.expand(self.num_tags, 1, -1, -1)).squeeze(1).gather(0, before.unsqueeze(0))
        last = y.gather(0, (chain.counts - 1).clamp(min=0).unsqueeze(0))  # (1, B)
        gold = steps.sum((0, 1)) + end.expand(-1, y.shape[1]).gather(0, last).squeeze(0)
        return (gold - log_z).masked_fill(chain.counts == 0, 0)

    def log_marginals(self, emissions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """emissions (B, S, C), mask (B, S) -> log p(y_t = c | emissions) (B, S, C), 0 outside the mask.

        From the root of the tree down, alpha (what comes before) and beta (what comes after) reach the bounds of ever
        shorter runs, and in the end each position.
        """
        chain, e, end = self._read(emissions, mask)
        elements = self._elements(e, chain.valid, self.start, self.transitions, LOG_ZERO)
        levels = product_tree(elements, log_sum_exp)
        first = torch.full_like(e[:, :1], LOG_ZERO)
        first[0] = 0  # tag 0 stands before every chain
        alpha = torch.cat([first, levels[-1][0]], 1)  # (C, 2, B)
        beta = end.unsqueeze(1).expand_as(alpha)  # at the first bound never read
        for level in reversed(levels[:-1]):
            left, right = pairs(level)
            h = left.shape[2]
            before = log_sum_exp(alpha[:, :h].unsqueeze(1) + left, 0)
            after = log_sum_exp(right + beta[:, 1 : h + 1].unsqueeze(0), 1)
            alpha, beta = insert(before, alpha), insert(after, beta)
        return chain.restore((alpha + beta)[:, 1:].log_softmax(0), 0.0)

    @torch.no_grad()
    def viterbi(
        self,
        emissions: torch.Tensor,
        mask: torch.Tensor,
        allowed: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """emissions (B, S, C), mask (B, S) -> the best path (B, S), -1 outside the mask, and its score (B,).

        The score is the unnormalised one, log p + log Z, and 0 for a row without positions. Of equal paths always the
        same is taken.

        Args:
            allowed: booleans (C,) and (C, C): the tags that may start and the tag j that may follow tag i. Other paths
                are never taken; where there is no path left, the score is -inf and the tags mean nothing.
        """
        chain, e, end = self._read(emissions, mask)
        start, transitions = self.start, self.transitions
        if allowed is not None:
            start = start.masked_fill(~allowed[0].to(start.device, torch.bool), float("-inf"))
            transitions = transitions.masked_fill(~allowed[1].to(start.device, torch.bool), float("-inf"))
        levels = product_tree(self._elements(e, chain.valid, start, transitions, float("-inf")), largest)
        score, last = (levels[-1][0, :, 0] + end).max(0)  # (B,)
        y = torch.stack([torch.zeros_like(last), last]).unsqueeze(0)  # (1, 2, B): tags at the bounds
        for level in reversed(levels[:-1]):
            left, right = pairs(level)
            C, h = left.shape[1:3]
            left = left.gather(0, y[:, :h].expand(C, -1, -1).unsqueeze(0)).squeeze(0)  # (C, h, B)
            right = right.gather(1, y[:, 1 : h + 1].expand(C, -1, -1).unsqueeze(1)).squeeze(1)
            y = insert((left + right).argmax(0, keepdim=True), y)
        score = score + e.amax(0).sum(0)
        return chain.restore(y[0, 1:], -1), score.masked_fill(chain.counts == 0, 0)

    def _read(self, emissions: torch.Tensor, mask: torch.Tensor) -> tuple[ChainLayout, torch.Tensor, torch.Tensor]:
        """-> the chains, their emissions e (C, W, B) and the end scores r (C, 1), in the dtype of the calculation."""
        if emissions.shape != (*mask.shape, self.num_tags):
            raise ValueError(
                f"emissions of shape {tuple(emissions.shape)} do not fit a mask of shape {tuple(mask.shape)} and "
                f"{self.num_tags} tags. Pass emissions of shape {(*mask.shape, self.num_tags)}."
            )
        dtype = torch.promote_types(torch.promote_types(emissions.dtype, self.transitions.dtype), torch.float32)
        chain = ChainLayout(mask)
        return chain, chain.align(emissions).to(dtype), self.end.to(dtype).unsqueeze(1)

    def _elements(self, e, valid, start, transitions, log_zero: float) -> torch.Tensor:
        """e (C, W, B) -> (C, C, W, B): the score of tag j at position t after tag i, less the position's largest emission.

        What comes before the first position is tag 0 (row 0 is read there), and after a chain's end the elements are
        the identity of the product, so that the last tag stays.
        """
        C, W = e.shape[:2]
        # A constant at a position changes no probability, and small numbers keep their digits in long sums.
        e = (e - e.detach().amax(0)).clamp(min=LOG_ZERO)
        first = start.expand(C, C).unsqueeze(2)
        steps = torch.cat([first, transitions.unsqueeze(2).expand(-1, -1, W - 1)], 2).to(e.dtype)  # (C, C, W)
        identity = torch.full((C, C), log_zero, dtype=e.dtype, device=e.device).fill_diagonal_(0)
        return torch.where(valid, steps.unsqueeze(3) + e.unsqueeze(0), identity[:, :, None, None])
