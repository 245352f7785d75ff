# SPDX-License-Identifier: Apache-2.0
"""A linear-chain CRF over the masked positions of each row: likelihood, marginals and best path in log2 W steps. Also BIO
helpers: the outside label and the allowed transitions.

Letters: B rows, S positions, C tags, W masked positions of the longest row (the paper's words), n elements of a level of
the tree.

The recursions of a CRF are products of C x C matrices, over (logsumexp, +) or (max, +), and products are associative.
Neighbours are therefore multiplied in pairs, level by level, instead of one position after the other: a few large
operations instead of W small ones (as in torch-struct: Rush 2020). Tags and time are the first dimensions and the batch
the last, (C, C, n, B), so reductions over a tag run along contiguous memory.
"""

from collections.abc import Mapping

import torch
from torch import nn
from transformers import initialization as init

from .segments_hypernet import LeftAlignedTokens

# Replaces log 0 where gradients flow; -inf would give nan, as inf - inf.
LOG_ZERO = -1e30


def align_chains(mask: torch.Tensor) -> LeftAlignedTokens:
    """The chain of each row: the positions with a non-zero mask (B, S), left-aligned; holes and padding may be anywhere."""
    inside = mask != 0
    if torch.compiler.is_compiling():
        # A graph cannot depend on the longest chain's length; with powers of two a few graphs serve all lengths.
        width = 1
        while width < mask.shape[1]:
            width *= 2
    else:
        width = max([1, *inside.sum(1).tolist()])
    return LeftAlignedTokens(inside, width)


def log_sum_exp(x: torch.Tensor, dim: int) -> torch.Tensor:
    """log sum exp(x) over one dimension; faster than torch.logsumexp, whose backward pass computes the exponentials again."""
    top = x.detach().amax(dim, keepdim=True)
    return (x - top).exp().sum(dim).log() + top.squeeze(dim)


def split_pairs(elements: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(C, C, n, B) -> left and right factors (C, C, n // 2, B) of the next level's products."""
    even = elements.shape[2] // 2 * 2
    return elements[:, :, 0:even:2].contiguous(), elements[:, :, 1:even:2].contiguous()


def product_tree(elements: torch.Tensor, add) -> list[torch.Tensor]:
    """Elements (C, C, n, B) -> all levels of products, from the elements to the product of all (C, C, 1, B).

    An element [i, j] is the score of tag j after tag i. The product of a run of elements is the same for the run's ends:
    the scores of the tags between are summed by `add`.
    """
    levels = [elements]
    while levels[-1].shape[2] > 1:
        left, right = split_pairs(levels[-1])
        product = add(left.unsqueeze(2) + right.unsqueeze(0), 1)  # (C, C, C, n // 2, B) -> (C, C, n // 2, B)
        if levels[-1].shape[2] % 2:
            product = torch.cat([product, levels[-1][:, :, -1:]], 2)
        levels.append(product)
    return levels


def interleave(between: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Values at the n + 1 bounds of a level (., n + 1, B) and between the factors of each pair -> values at all bounds of the
    level below."""
    h = between.shape[1]
    mixed = torch.stack([bounds[:, :h], between], 2).flatten(1, 2)
    return torch.cat([mixed, bounds[:, h:]], 1)


class LinearChainCrf(nn.Module):
    """Scores a whole sequence of tags: each tag by its emission, each pair of neighbours by a transition.

    log p(y | x) = s_{y_1} + sum_t e_t[y_t] + sum_{t > 1} T[y_{t-1}, y_t] + r_{y_W} - log Z

    with `start` s (C,), `end` r (C,), `transitions` T (C, C), emissions e and Z the sum of the exponentiated scores of
    all sequences. From Lafferty et al. (2001); the decoder of Duan et al. 2021, Sect. 3.3.

    A row's sequence consists of its positions with a non-zero mask, in order: holes are skipped, padding may be on either
    side, and values outside the mask change nothing. Computed in float32, or in float64 if the emissions or parameters are
    float64. An emission of -inf excludes a tag. The cost grows with C^3, so this is for few tags, as in BIO; with nine or
    more, a loop over positions is as fast on a CPU.
    """

    def __init__(self, num_tags: int):
        super().__init__()
        self.num_tags = num_tags
        self.start = nn.Parameter(torch.empty(num_tags))
        self.end = nn.Parameter(torch.empty(num_tags))
        self.transitions = nn.Parameter(torch.empty(num_tags, num_tags))
        self.reset_parameters()

    def reset_parameters(self):
        """Initialises all scores from U(-0.1, 0.1), except those that were loaded."""
        for parameter in self.parameters():
            init.uniform_(parameter, -0.1, 0.1)

    def log_likelihood(self, emissions: torch.Tensor, tags: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """emissions (B, S, C), tags (B, S), mask (B, S) -> log p(tags | emissions) (B,), 0 for a row without positions."""
        chain, valid, e, end = self._align(emissions, mask)
        elements = self._elements(e, valid, self.start, self.transitions, LOG_ZERO)
        log_z = log_sum_exp(product_tree(elements, log_sum_exp)[-1][0, :, 0] + end, 0)  # (B,)

        # (W, B), and 0 after the end, where element [0, 0] is 0
        y = chain.gather(tags.long()[..., None]).squeeze(2).T.contiguous()
        previous = torch.cat([torch.zeros_like(y[:1]), y[:-1]]) * valid
        steps = elements.gather(1, y.expand(self.num_tags, 1, -1, -1)).squeeze(1).gather(0, previous.unsqueeze(0))
        last = y.gather(0, (chain.lengths - 1).clamp(min=0).unsqueeze(0))  # (1, B)
        gold = steps.sum((0, 1)) + end.expand(-1, y.shape[1]).gather(0, last).squeeze(0)
        return (gold - log_z).masked_fill(chain.lengths == 0, 0)

    def log_marginals(self, emissions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """emissions (B, S, C), mask (B, S) -> log p(y_t = c | emissions) (B, S, C), 0 outside the mask.

        Forward scores alpha and backward scores beta are passed down the tree: from the bounds of the whole chain to the
        bounds of ever shorter runs, and finally to each position.
        """
        chain, valid, e, end = self._align(emissions, mask)
        elements = self._elements(e, valid, self.start, self.transitions, LOG_ZERO)
        levels = product_tree(elements, log_sum_exp)
        first = torch.full_like(e[:, :1], LOG_ZERO)
        first[0] = 0  # tag 0 precedes every chain
        alpha = torch.cat([first, levels[-1][0]], 1)  # (C, 2, B)
        beta = end.unsqueeze(1).expand_as(alpha)  # not used at the first bound
        for level in reversed(levels[:-1]):
            left, right = split_pairs(level)
            h = left.shape[2]
            before = log_sum_exp(alpha[:, :h].unsqueeze(1) + left, 0)
            after = log_sum_exp(right + beta[:, 1 : h + 1].unsqueeze(0), 1)
            alpha, beta = interleave(before, alpha), interleave(after, beta)
        return chain.scatter((alpha + beta)[:, 1:].log_softmax(0).permute(2, 1, 0))

    @torch.no_grad()
    def viterbi(
        self, emissions: torch.Tensor, mask: torch.Tensor, allowed: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """emissions (B, S, C), mask (B, S) -> the best path (B, S), -1 outside the mask, and its score (B,).

        The score is the unnormalised log p + log Z, and 0 for a row without positions. Ties are broken deterministically.

        Args:
            emissions (`(B, S, C)`): scores of the tags.
            mask (`(B, S)`): non-zero at the positions of the chain.
            allowed: booleans (C,) for the first tag, and (C, C) for tag j after tag i. Other paths are excluded; if none
                is left, the score is -inf and the tags are undefined.
        """
        chain, valid, e, end = self._align(emissions, mask)
        start, transitions = self.start, self.transitions
        if allowed is not None:
            start = start.masked_fill(~allowed[0].to(start.device, torch.bool), float("-inf"))
            transitions = transitions.masked_fill(~allowed[1].to(start.device, torch.bool), float("-inf"))
        levels = product_tree(self._elements(e, valid, start, transitions, float("-inf")), torch.amax)
        score, last = (levels[-1][0, :, 0] + end).max(0)  # (B,)
        y = torch.stack([torch.zeros_like(last), last]).unsqueeze(0)  # (1, 2, B): tags at the bounds
        for level in reversed(levels[:-1]):
            left, right = split_pairs(level)
            C, h = left.shape[1:3]
            left = left.gather(0, y[:, :h].expand(C, -1, -1).unsqueeze(0)).squeeze(0)  # (C, h, B)
            right = right.gather(1, y[:, 1 : h + 1].expand(C, -1, -1).unsqueeze(1)).squeeze(1)
            y = interleave((left + right).argmax(0, keepdim=True), y)
        score = score + e.amax(0).sum(0)
        return chain.scatter(y[0, 1:].T[..., None], fill=-1).squeeze(2), score.masked_fill(chain.lengths == 0, 0)

    def _align(self, emissions: torch.Tensor, mask: torch.Tensor):
        """The chains, true at their positions (W, B), emissions e (C, W, B) and end scores r (C, 1), in the computation's dtype."""
        if emissions.shape != (*mask.shape, self.num_tags):
            raise ValueError(
                f"emissions of shape {tuple(emissions.shape)} do not match a mask of shape {tuple(mask.shape)} and "
                f"{self.num_tags} tags. Pass emissions of shape {(*mask.shape, self.num_tags)}."
            )
        dtype = torch.promote_types(torch.promote_types(emissions.dtype, self.transitions.dtype), torch.float32)
        chain = align_chains(mask)
        e = chain.gather(emissions).permute(2, 1, 0).contiguous().to(dtype)
        return chain, chain.valid.T.contiguous(), e, self.end.to(dtype).unsqueeze(1)

    def _elements(self, e, valid, start, transitions, log_zero: float) -> torch.Tensor:
        """e (C, W, B) -> (C, C, W, B): the score of tag j at position t after tag i, minus the position's largest emission.

        Tag 0 precedes the first position (only row 0 is used there). After a chain's end the elements are the identity of
        the product, which keeps the last tag.
        """
        C, W = e.shape[:2]
        # A constant at a position changes no probability, and small numbers keep their precision in long sums.
        e = (e - e.detach().amax(0)).clamp(min=LOG_ZERO)
        first = start.expand(C, C).unsqueeze(2)
        steps = torch.cat([first, transitions.unsqueeze(2).expand(-1, -1, W - 1)], 2).to(e.dtype)  # (C, C, W)
        identity = torch.full((C, C), log_zero, dtype=e.dtype, device=e.device).fill_diagonal_(0)
        return torch.where(valid, steps.unsqueeze(3) + e.unsqueeze(0), identity[:, :, None, None])


def outside_label_id(id2label: dict[int, str]) -> int:
    """The id of the label O; 0 if no label has this name."""
    ids = {name.upper(): i for i, name in id2label.items()}
    return ids.get("O", ids.get("OUTSIDE", 0))


def allowed_transitions(id2label: Mapping[int, str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Booleans (C,) for labels that may be first, and (C, C) for label j after label i: I-X only after B-X or I-X."""
    names = [id2label[i].upper().replace("_", "-") for i in sorted(id2label)]
    is_inside = [name == "I" or name.startswith("I-") for name in names]
    in_phrase = [i or name == "B" or name.startswith("B-") for i, name in zip(is_inside, names, strict=True)]
    types = [name.partition("-")[2] for name in names]
    follows = [
        [not inside or (in_phrase[i] and types[i] == types[j]) for j, inside in enumerate(is_inside)]
        for i in range(len(names))
    ]
    return ~torch.tensor(is_inside), torch.tensor(follows)
