"""Slices: ranges of a tensor of the output, each merged from some sources by one average, block by block."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from .averaging import convert, mean_equal, mean_float64
from .checkpoints import Source
from .tensor_files import PIECE, TensorEntry

CHUNK = PIECE  # elements: the inputs and the sum of a mean stay in the processor's cache


class Average(ABC):
    """A value of the recipe's `average`: how a weight that is not routed is merged.

    Attributes:
        name: the value.
        needs_base: whether the recipe must have `base_model`.
        density: the default of the recipe's `density`; None if the average has no such option.
        experts: the only number of experts that it is defined for; None for any.
        of_differences: whether what is merged are the experts' differences from the base, also that of a single expert.
    """

    name = ""
    needs_base = False
    density: float | None = None
    experts: int | None = None
    of_differences = False

    def sources(self, base: Source, experts: list[Source], weights: dict[int, float]) -> list[Source]:
        """The sources that are merged: all experts with a positive weight. `weights` maps the `id` of an expert to its weight."""
        return [expert for expert in experts if weights[id(expert)] > 0]

    @abstractmethod
    def blocks(self, part: "Slice", out: str) -> Iterator[np.ndarray]:
        """Yields the merged raw elements of a slice in the dtype `out`, in blocks."""

    def bound(self, largest: float, base: float, density: float) -> float:
        """An upper bound of the merged magnitudes, given the largest ones of the experts and of the base."""
        return largest

    def describe(self, names: Sequence[str], base: str, density: float | None) -> str:
        """Where the merged weights come from."""
        return f"{self.name} of {', '.join(names)}"


class Mean(Average):
    """sum_e w_e x_e in float64, rounded once."""

    name = "mean"

    def blocks(self, part: "Slice", out: str) -> Iterator[np.ndarray]:
        """As in `Average`. A single source is converted, or copied if it has this dtype."""
        dtypes, equal = part.dtypes, len(set(part.weights)) == 1
        for raws in part.read_all():
            if len(raws) == 1:
                yield convert(raws[0], dtypes[0], out)
            elif equal:
                yield mean_equal(raws, dtypes, out)
            else:
                yield mean_float64(raws, dtypes, list(part.weights), out)


MEAN = Mean()


@dataclass(frozen=True)
class Slice:
    """Elements `start` to `stop` of the sources' `tensor`, merged by an average."""

    tensor: str
    sources: tuple[Source, ...]
    weights: tuple[float, ...]  # sum to 1
    start: int
    stop: int
    average: Average = field(default=MEAN)
    base: Source | None = None  # from which the sources differ, for averages of differences
    density: float = 1.0
    seed: int = 0

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of the sources."""
        return [source.entry(self.tensor).dtype for source in self.sources]

    @property
    def kind(self) -> tuple:
        """What adjacent slices must have in common to be joined."""
        return [id(source) for source in self.sources], self.average

    @property
    def key(self) -> tuple:
        """What determines the values besides the recipe and the weights of the sources."""
        return (
            self.tensor,
            [source.name for source in self.sources],
            [source.scaling(self.tensor) for source in self.inputs],
            self.weights,
            self.start,
            self.stop,
            self.average.name,
        )

    @property
    def inputs(self) -> tuple[Source, ...]:
        """The base first, if there is one, then the sources."""
        return (*([self.base] if self.base else []), *self.sources)

    def entries(self) -> list[TensorEntry]:
        """The stored tensors that it is computed from."""
        return [source.entry(self.tensor) for source in self.inputs]

    def read(self, sources: Iterable[Source], start: int, stop: int, share: int = 1) -> Iterator[list[np.ndarray]]:
        """Yields the raw elements `start` to `stop` of some sources in blocks of the same position, `share` times smaller than usual."""
        blocks = [source.blocks(self.tensor, max(CHUNK // share, 1), start, stop) for source in sources]
        yield from map(list, zip(*blocks, strict=True))

    def read_all(self, share: int = 1) -> Iterator[list[np.ndarray]]:
        """Yields its raw elements in all sources, in the base first if there is one."""
        return self.read(self.inputs, self.start, self.stop, share)
