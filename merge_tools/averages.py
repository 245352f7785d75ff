"""The values of a recipe's `average`: how weights that are not routed are merged.

To add one, write a subclass of `Average` here, or in a module of its own, and add it to AVERAGES, see CONTRIBUTING.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from .averaging import mean_float64, to_float64
from .checkpoints import Source
from .slices import MEAN, Average, Mean, Slice
from .task_vectors import TaskVectors

PARALLEL = 0.9995  # cosine of two tensors from which they are averaged, as in mergekit


class Base(Mean):
    """A copy of the base's weights: the mean of one tensor."""

    name = "base"
    needs_base = True

    def sources(self, base: Source, experts: list[Source], weights: dict[int, float]) -> list[Source]:
        """The base."""
        return [base]

    def describe(self, names: Sequence[str], base: str, density: float | None) -> str:
        """As in `Average`."""
        return f"copied from the base ({base})"


class Slerp(Average):
    """Spherical linear interpolation of two tensors: sin((1 - t) a) / sin(a) x_1 + sin(t a) / sin(a) x_2   (Shoemake 1985)

    a is the angle between the tensors, and t the weight of the second expert. Where |cos(a)| > 0.9995 it is the weighted mean.
    """

    name = "slerp"
    experts = 2

    def blocks(self, part: Slice, out: str) -> Iterator[np.ndarray]:
        """As in `Average`. The factors are rounded to float32, so that they do not depend on the order of a sum."""
        products = np.zeros((2, 2))  # of the two tensors with each other and themselves
        for raws in part.read_all():
            pair = np.stack([to_float64(raw, dtype) for raw, dtype in zip(raws, part.dtypes, strict=True)])
            products += pair @ pair.T
        factors = slerp_factors(products, part.weights[1])
        for raws in part.read_all():
            yield mean_float64(raws, part.dtypes, factors, out)

    def bound(self, largest: float, base: float, density: float) -> float:
        """As in `Average`: the factors are largest for nearly opposite tensors, 1 / sin(a)."""
        return 2 * largest / math.sqrt(1 - PARALLEL**2)


def slerp_factors(products: np.ndarray, t: float) -> list[float]:
    """The factors of two tensors, given their scalar products `(2, 2)` and the weight of the second."""
    length = math.sqrt(products[0, 0] * products[1, 1])
    cosine = products[0, 1] / length if length > 0 else 1.0
    if abs(cosine) > PARALLEL:
        return [1 - t, t]
    angle = math.acos(cosine)
    return [float(np.float32(math.sin(share * angle) / math.sin(angle))) for share in (1 - t, t)]


AVERAGES: dict[str, Average] = {
    average.name: average
    for average in (MEAN, Base(), Slerp(), TaskVectors("ties"), TaskVectors("dare"), TaskVectors("dare_ties"))
}
WITH_DENSITY = tuple(name for name, average in AVERAGES.items() if average.density is not None)
