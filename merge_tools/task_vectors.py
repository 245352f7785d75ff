"""TIES and DARE: merges of task vectors, the differences between experts and their base, streamed in blocks.

The task vector of expert e is t_e = x_e - x_base, in float32 (rounded once). The merged tensor is x_base + m, computed in
float64 and rounded once, where w_e are weights that sum to 1 and p is the density:

- ties (Yadav et al. 2023): of each tensor, t_e keeps its p largest magnitudes. The sign of an element is that of
  sum_e w_e t_e, and m is the weighted mean of the kept values with this sign; 0 if the sum is 0.
- dare (Yu et al. 2024): t_e keeps each element with probability p, and m = sum_e w_e t_e / p.
- dare_ties: t_e keeps elements as in dare, signs and means are those of ties, divided by p.

Nothing depends on the size of blocks: the p n largest of n magnitudes are found by counting all of them, and the random numbers
of DARE are a function of seed, expert, tensor and position.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from .averaging import from_float, to_float32, to_float64
from .checkpoints import Source

TASK_METHODS = ("ties", "dare", "dare_ties")
DEFAULT_DENSITY = 0.5
MAGNITUDE = np.uint32(0x7FFFFFFF)  # the bits of a float32 without its sign: ordered like the magnitudes
FINE = 15  # bits of a magnitude that the first count ignores
WORDS = 8  # random numbers of 32 bits per step of the counter of Philox

Blocks = Callable[[Source, int, int, int], Iterator[np.ndarray]]  # source, start, stop, elements -> raw elements


@dataclass(frozen=True)
class TaskMerge:
    """How task vectors are merged: the base, the method, the share of elements that are kept, and the seed of DARE."""

    base: Source
    method: str
    density: float
    seed: int

    def key(self, tensor: str, sources: tuple[Source, ...]) -> tuple:
        """Everything that the result depends on besides the weights and the experts' tensors."""
        names = [source.name for source in sources]
        return self.base.origin, str(self.base.entry(tensor).file), self.method, self.density, self.seed, names

    def blocks(
        self, tensor: str, sources: tuple[Source, ...], weights: tuple[float, ...], span: range, out: str, read: Blocks,
        elements: int,
    ) -> Iterator[np.ndarray]:  # fmt: skip
        """Yields the raw elements of `span`, in blocks of at most `elements` for all experts together.

        Args:
            tensor: the name of a tensor that the base and all experts have.
            sources, weights: the experts, and their weights, which sum to 1.
            span: positions in the flattened tensor.
            out: dtype of the result.
            read: yields the raw elements of a source from a start to a stop, some at a time.
        """
        size = max(elements // len(sources), 1)
        cutoffs = [self.cutoff(tensor, source, read, elements) for source in sources]
        position = span.start
        streams = [read(source, span.start, span.stop, size) for source in (self.base, *sources)]
        for raw_base, *raws in zip(*streams, strict=True):
            stop = position + len(raw_base)
            base = to_float64(raw_base, self.base.entry(tensor).dtype)
            vectors = []
            for source, raw, cutoff in zip(sources, raws, cutoffs, strict=True):
                vector = difference(raw, source.entry(tensor).dtype, raw_base, self.base.entry(tensor).dtype)
                vectors.append(self.thin(vector, cutoff, tensor, source, position))
            merged = combine(vectors, weights, elect=self.method != "dare")
            if self.method != "ties":
                merged /= self.density
            yield from_float(base + merged, out)
            position = stop

    def cutoff(self, tensor: str, source: Source, read: Blocks, elements: int) -> np.uint32:
        """The bits of the smallest magnitude that TIES keeps of an expert, over the elements that the base has too."""
        count = min(self.base.entry(tensor).elements, source.entry(tensor).elements)
        keep = max(1, round(self.density * count))
        if self.method != "ties" or keep >= count:
            return np.uint32(0)
        dtypes = source.entry(tensor).dtype, self.base.entry(tensor).dtype

        def magnitudes() -> Iterator[np.ndarray]:
            for raw, base in zip(*(read(s, 0, count, elements) for s in (source, self.base)), strict=True):
                yield difference(raw, dtypes[0], base, dtypes[1]).view(np.uint32) & MAGNITUDE

        return largest(magnitudes, keep)

    def thin(self, vector: np.ndarray, cutoff: np.uint32, tensor: str, source: Source, start: int) -> np.ndarray:
        """The vector with zeros where an element is not kept. Elements equal to the cutoff are all kept."""
        if self.method == "ties":
            dropped = (vector.view(np.uint32) & MAGNITUDE) < cutoff
        elif self.density < 1:
            words = random_words(self.seed, source.name, tensor, start, start + len(vector))
            dropped = words >= round(self.density * 2**32)
        else:
            return vector
        vector[dropped] = 0
        return vector


def difference(raw: np.ndarray, dtype: str, raw_base: np.ndarray, base_dtype: str) -> np.ndarray:
    """x - x_base as float32, rounded once."""
    if "F64" in (dtype, base_dtype):
        return (to_float64(raw, dtype) - to_float64(raw_base, base_dtype)).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # infinities are reported when the result is written
        return np.subtract(to_float32(raw, dtype), to_float32(raw_base, base_dtype))


def largest(magnitudes: Callable[[], Iterator[np.ndarray]], rank: int) -> np.uint32:
    """The element with this rank, 1 for the largest, among blocks of integers below 2^31, which are read twice."""

    def find(counts: np.ndarray, rank: int) -> tuple[int, int]:
        """The bin of a rank, and the rank within the bin."""
        above = np.cumsum(counts[::-1])
        index = int(np.searchsorted(above, rank))
        return len(counts) - 1 - index, rank - (int(above[index - 1]) if index else 0)

    counts = np.zeros(1 << (31 - FINE), np.int64)
    for block in magnitudes():
        counts += np.bincount(block >> FINE, minlength=len(counts))
    coarse, rank = find(counts, rank)
    counts = np.zeros(1 << FINE, np.int64)
    for block in magnitudes():
        inside = block[(block >> FINE) == coarse]
        counts += np.bincount(inside & (len(counts) - 1), minlength=len(counts))
    return np.uint32(coarse << FINE | find(counts, rank)[0])


def random_words(seed: int, expert: str, tensor: str, start: int, stop: int) -> np.ndarray:
    """Uniform integers below 2^32 for the elements `start` to `stop` of an expert's tensor, by the generator Philox."""
    digest = hashlib.sha256(repr((seed, expert, tensor)).encode()).digest()
    first = start // WORDS
    generator = np.random.Philox(key=int.from_bytes(digest[:16], "little"), counter=first)
    raw = generator.random_raw(-(-(stop - first * WORDS) // 2)).astype("<u8", copy=False)
    return raw.view("<u4")[start - first * WORDS :][: stop - start]


def combine(vectors: list[np.ndarray], weights: tuple[float, ...], elect: bool) -> np.ndarray:
    """sum_e w_e t_e in float64; with `elect` the weighted mean of the values whose sign is that of this sum, or 0."""
    total = sum(vector.astype(np.float64) * weight for vector, weight in zip(vectors, weights, strict=True))
    if not elect:
        return total
    merged, shares = np.zeros(len(total)), np.zeros(len(total))
    sign = np.sign(total)
    for vector, weight in zip(vectors, weights, strict=True):
        agrees = (np.sign(vector) == sign) & (sign != 0)
        merged += np.where(agrees, vector, 0).astype(np.float64) * weight
        shares += agrees * weight
    return np.divide(merged, shares, out=merged, where=shares > 0)
