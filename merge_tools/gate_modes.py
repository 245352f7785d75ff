"""The values of a recipe's `gate_mode`: how the gates of routers get their first values.

A gate is a matrix `(E, d)` with one row per expert. To add a mode, write a `DrawnMode` or a `TextMode` here, and add it to
GATE_MODES, see CONTRIBUTING.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

GATE_STD = 0.02  # with N(0, 1), logits would be of the order of sqrt(d) and an untrained router overconfident
SHORTEST = 1e-8  # length that a vector is divided by at least, as in mergekit-moe


class GateMode:
    """A value of `gate_mode`.

    Attributes:
        name: the value.
        texts: the key of an expert with the texts that its row is computed from; empty if there are none.
        only_hidden: whether rows are hidden states, so that layers with other inputs cannot have such gates.
    """

    texts = ""
    only_hidden = False

    def __init__(self, name: str):
        self.name = name


class DrawnMode(GateMode):
    """A mode without texts: `verify` computes its gates again, and a new expert's row does not depend on the other experts."""

    def rows(self, seed: list[int], width: int, experts: Iterable[int]) -> np.ndarray:
        """The rows of some experts, `(E, width)`, float64; zeros.

        Args:
            seed: the recipe's seed and the numbers of the router.
            experts: the number that seeds each expert's row.
        """
        return np.zeros((len(list(experts)), width))


class RandomMode(DrawnMode):
    """Rows from N(0, 0.02). They are seeded by router and expert, so adding an expert does not change the other rows."""

    def rows(self, seed: list[int], width: int, experts: Iterable[int]) -> np.ndarray:
        """As in `DrawnMode`."""
        return np.stack([np.random.default_rng([*seed, e]).standard_normal(width) * GATE_STD for e in experts])


class OrthogonalMode(RandomMode):
    """Random rows at right angles to each other (Saxe et al. 2014), of the length that rows of `random` have on average.

    Row e is that of `random` minus its projection on the rows before (Gram-Schmidt). From row `width` on they are those of `random`.
    """

    def rows(self, seed: list[int], width: int, experts: Iterable[int]) -> np.ndarray:
        """As in `DrawnMode`."""
        experts = list(experts)
        drawn = super().rows(seed, width, range(max(experts) + 1))
        for e, row in enumerate(drawn[:width]):
            for before in drawn[:e]:
                row -= (row * before).sum() / (before * before).sum() * before
            row *= GATE_STD * width**0.5 / np.sqrt((row * row).sum())
        return drawn[experts]


class AnchorMode(GateMode):
    """The rows that each expert has learned beside a frozen copy of the base, see `anchors`."""


class TextMode(GateMode):
    """A mode that computes rows from the base model's states on each expert's texts, without padding.

    Attributes:
        state: which states: "router" (the input of the routed module), "layer" (the input of its layer) or "embedding".
        like_mergekit: whether values are those of mergekit-moe, which gives each text the first special token only.
        max_samples: the number of an expert's `samples` that are used.
        enough_tokens: the number of tokens per dimension from which an expert has enough; 0 for all of its texts.
    """

    max_samples = 256
    enough_tokens = 0

    def __init__(
        self, name: str, state: str, texts: str = "positive_prompts", statistics: type["MeanDifference"] | None = None
    ):
        super().__init__(name)
        self.state, self.texts, self._statistics = state, texts, statistics or MeanDifference
        self.like_mergekit = self.only_hidden = state != "router"

    def statistics(self, experts: int, width: int) -> "MeanDifference":
        """What is accumulated for one router."""
        return self._statistics(experts, width)


def mean_state(states: Any) -> np.ndarray:
    """The mean over the tokens of a tensor `(T, d)`, float64."""
    return states.double().mean(0).cpu().numpy()


class MeanDifference:
    """Row e is the mean vector of the texts of expert e, minus that of its negative texts.

    It is accumulated text by text, so that memory does not grow with the texts.
    """

    normalise_means = normalise_rows = weigh_by_tokens = False

    def __init__(self, experts: int, width: int):
        self.sums, self.counts = np.zeros((experts, 2, width)), np.zeros((experts, 2))

    def vector(self, states: Any) -> np.ndarray:
        """The vector of a text, given its states as a tensor `(T, d)`: their mean."""
        return mean_state(states)

    def add(self, expert: int, negative: bool, states: Any) -> None:
        """Adds a text, given its states as a tensor `(T, d)`."""
        weight = len(states) if self.weigh_by_tokens else 1
        self.sums[expert, int(negative)] += self.vector(states) * weight
        self.counts[expert, int(negative)] += weight

    def rows(self) -> np.ndarray:
        """The rows `(E, d)`, float64."""
        means = self.sums / np.maximum(self.counts, 1)[..., None]
        if self.normalise_means:
            means = with_length_1(means)
        rows = means[:, 0] - means[:, 1]
        return with_length_1(rows) if self.normalise_rows else rows


class TokenMean(MeanDifference):
    """The mean over all tokens of an expert's samples."""

    weigh_by_tokens = True


class SampleMode(TextMode):
    """A mode that reads the beginnings of an expert's samples, in an order that the seed draws, until it has enough tokens."""

    enough_tokens = 8


class RidgeMode(SampleMode):
    """Ridge regression of each token's expert on the router's inputs, see `ridge`; its statistics are saved, see `gate_statistics`."""

    max_samples = 4096


class LastToken(MeanDifference):
    """The states of the last tokens; rows have length 1, as in mergekit-moe."""

    normalise_rows = True

    def vector(self, states: Any) -> np.ndarray:
        """The state of the last token."""
        return states[-1].double().cpu().numpy()


class EmbeddingSum(MeanDifference):
    """The summed embeddings of the tokens; sums and rows have length 1, as in mergekit-moe."""

    normalise_means = normalise_rows = True

    def vector(self, states: Any) -> np.ndarray:
        """The sum of the embeddings."""
        return states.double().sum(0).cpu().numpy()


def with_length_1(rows: np.ndarray) -> np.ndarray:
    """Vectors along the last axis, each divided by its length, or by 1e-8 if it is shorter, as in mergekit-moe."""
    lengths = np.array([np.linalg.norm(row) for row in rows.reshape(-1, rows.shape[-1])])
    return rows / np.maximum(lengths, SHORTEST).reshape(*rows.shape[:-1], 1)


GATE_MODES: dict[str, GateMode] = {
    mode.name: mode
    for mode in (
        RandomMode("random"),
        DrawnMode("zeros"),
        OrthogonalMode("orthogonal"),
        TextMode("hidden", "layer", statistics=LastToken),
        TextMode("cheap_embed", "embedding", statistics=EmbeddingSum),
        TextMode("router_input", "router"),
        SampleMode("centroid", "router", "samples", TokenMean),
        RidgeMode("ridge", "router", "samples"),
        AnchorMode("anchor"),
        DrawnMode("none"),
    )
}
