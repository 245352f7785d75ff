"""TIES and DARE: merges of task vectors, the differences between experts and their base, streamed in blocks.

The task vector of expert e is t_e = x_e - x_base, in float32 (rounded once). The merged tensor is x_base + m, computed in
float64 and rounded once. With weights w_e that sum to 1 and the density p:

- ties (Yadav et al. 2023): of each tensor, t_e keeps its p largest magnitudes, and all that are equal to the smallest of these.
  The sign of an element is that of the larger sum of |w_e t_e|, over the positive or over the negative t_e; m is the weighted
  mean of the kept values with this sign, or 0 if both sums are equal.
- dare (Yu et al. 2024): t_e keeps each element with probability p, and m = sum_e w_e t_e / p. p is rounded to a multiple of
  2^-16, and is at least that.
- dare_ties: t_e keeps elements as in dare; signs and means are those of ties, divided by p.

Nothing depends on the size of blocks: the p n largest of n magnitudes are found by counting, and the random numbers
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
WORDS = 16  # random numbers of 16 bits per step of the counter of Philox
STEPS = 1 << 16  # the density of DARE is a multiple of 1 / STEPS
PIECE = (
    1 << 16
)  # elements: arrays that the processor's cache holds, and few calls, between which threads wait for each other
SAMPLES, SAMPLE = 256, 4096  # places, and at most so many elements at each, from which a cutoff is estimated
SHARE = 64  # of so many elements at most one is in the sample
MARGIN = 0.01  # of the elements, on both sides of an estimate
RANGE = 1 << 20  # the widest range of an estimate: the memory of its counts

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
        dtypes, base_dtype = [source.entry(tensor).dtype for source in sources], self.base.entry(tensor).dtype
        position = span.start
        total = Sum() if self.method == "dare" else ElectedMean(weights)
        streams = [read(source, span.start, span.stop, size) for source in (self.base, *sources)]
        for raw_base, *raws in zip(*streams, strict=True):
            words = [self.random_words(source, tensor, position, position + len(raw_base)) for source in sources]
            for start in range(0, len(raw_base), PIECE):
                piece = slice(start, start + PIECE)
                task = TaskBase(raw_base[piece], base_dtype)
                total.clear(len(task.raw))
                for expert, raw in enumerate(raws):
                    vector = task.difference(raw[piece], dtypes[expert])
                    if words[expert] is not None:
                        np.multiply(vector, words[expert][piece] < int(self.probability * STEPS), out=vector)
                    elif cutoffs[expert]:
                        np.multiply(vector, magnitudes_of(vector) >= cutoffs[expert], out=vector)
                    total.add(vector, weights[expert])
                merged = total.result()
                if self.method != "ties":
                    merged /= self.probability
                merged += to_float64(task.raw, base_dtype)
                yield from_float(merged, out)
            position += len(raw_base)

    @property
    def probability(self) -> float:
        """The probability with which DARE keeps an element."""
        return max(1, round(self.density * STEPS)) / STEPS

    def cutoff(self, tensor: str, source: Source, read: Blocks, elements: int) -> np.uint32:
        """The bits of the smallest magnitude that TIES keeps of an expert, over the elements that the base has too."""
        count = min(self.base.entry(tensor).elements, source.entry(tensor).elements)
        keep = max(1, round(self.density * count))
        if self.method != "ties" or keep >= count:
            return np.uint32(0)
        dtypes = source.entry(tensor).dtype, self.base.entry(tensor).dtype

        def magnitudes(start: int = 0, stop: int = count) -> Iterator[np.ndarray]:
            for raw, base in zip(*(read(s, start, stop, elements) for s in (source, self.base)), strict=True):
                bits = np.empty(len(raw), np.uint32)
                for first in range(0, len(raw), PIECE):
                    piece = slice(first, first + PIECE)
                    vector = TaskBase(base[piece], dtypes[1]).difference(raw[piece], dtypes[0])
                    magnitudes_of(vector, out=bits[piece])
                yield bits

        is_stored = source.is_verbatim(tensor) and self.base.is_verbatim(tensor)  # parts of it can be read
        return largest(magnitudes, keep, estimate(magnitudes, count, keep) if is_stored else None)

    def random_words(self, source: Source, tensor: str, start: int, stop: int) -> np.ndarray | None:
        """The random numbers by which elements of an expert are kept; None if that does not depend on any."""
        if self.method == "ties" or self.probability == 1:
            return None
        return random_words(self.seed, source.name, tensor, start, stop)


class TaskBase:
    """Elements of the base, from which experts differ."""

    def __init__(self, raw: np.ndarray, dtype: str):
        self.raw, self.dtype = raw, dtype
        self.single = to_float32(raw, dtype) if dtype != "F64" else None

    def difference(self, raw: np.ndarray, dtype: str) -> np.ndarray:
        """x - x_base as float32, rounded once."""
        with np.errstate(over="ignore", invalid="ignore"):  # infinities are reported when the result is written
            if "F64" in (dtype, self.dtype):
                return (to_float64(raw, dtype) - to_float64(self.raw, self.dtype)).astype(np.float32)
            return np.subtract(to_float32(raw, dtype), self.single)


class Sum:
    """sum_e w_e t_e in float64."""

    def clear(self, count: int):
        """Starts with new elements."""
        self.total = np.zeros(count)

    def add(self, vector: np.ndarray, weight: float):
        """Adds an expert."""
        self.total += np.multiply(vector, weight, dtype=np.float64)

    def result(self) -> np.ndarray:
        """The sum."""
        return self.total


class ElectedMean:
    """The weighted mean of the positive or of the negative values, whichever have the larger weighted sum; in float64.

    Equal weights cancel out, so that their shares are counts.
    """

    def __init__(self, weights: tuple[float, ...]):
        self.equal = len(set(weights)) == 1
        self.dtype = np.dtype(np.uint8 if self.equal and len(weights) < 256 else np.float64)

    def clear(self, count: int):
        """Starts with new elements."""
        self.up, self.down = np.zeros((2, count))
        self.share_up, self.share_down = np.zeros((2, count), self.dtype)

    def add(self, vector: np.ndarray, weight: float):
        """Adds an expert."""
        wide = vector.astype(np.float64)
        positive, negative = (vector > 0).view(np.uint8), (vector < 0).view(np.uint8)
        if not self.equal:
            wide *= weight
            positive, negative = positive * weight, negative * weight
        self.share_up += positive
        self.share_down += negative
        self.up += np.maximum(wide, 0)
        self.down += np.minimum(wide, 0, out=wide)

    def result(self) -> np.ndarray:
        """The mean, or 0 where the sums cancel out."""
        order = self.up + self.down
        is_up = order > 0
        merged, share = np.where(is_up, self.up, self.down), np.where(is_up, self.share_up, self.share_down)
        return np.divide(merged, share, out=np.zeros(len(order)), where=order != 0)


def magnitudes_of(vector: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """The magnitudes of float32 values as integers of the same order."""
    return np.bitwise_and(vector.view(np.uint32), MAGNITUDE, out=out)


def estimate(magnitudes: Callable[[int, int], Iterator[np.ndarray]], count: int, rank: int) -> tuple[int, int] | None:
    """A range, first and one past the last, that most likely holds the element with this rank; from samples all over."""
    size = min(count // (SAMPLES * SHARE), SAMPLE)
    if size * SAMPLES < 1 / MARGIN**2:  # the sample's error would exceed the margin
        return None
    starts = (count - size) * np.arange(SAMPLES) // (SAMPLES - 1)
    found = np.sort(np.concatenate([block for start in starts for block in magnitudes(start, start + size)]))
    above, margin = len(found) * rank / count, len(found) * MARGIN
    low, high = (
        found[int(np.clip(len(found) - place, 0, len(found) - 1))] for place in (above + margin, above - margin)
    )
    return int(low), int(high) + 1


def largest(
    magnitudes: Callable[[], Iterator[np.ndarray]], rank: int, near: tuple[int, int] | None = None
) -> np.uint32:
    """The element with this rank, 1 for the largest, among blocks of integers below 2^31.

    They are read once if it lies in the range `near`, and otherwise twice more.
    """

    def find(counts: np.ndarray, rank: int) -> tuple[int, int]:
        """The bin of a rank, and the rank within the bin."""
        above = np.cumsum(counts[::-1])
        index = int(np.searchsorted(above, rank))
        return len(counts) - 1 - index, rank - (int(above[index - 1]) if index else 0)

    if near is not None and near[1] - near[0] <= RANGE:
        above, counts = count_range(magnitudes(), *near)
        if 0 < rank - above <= counts.sum():
            return np.uint32(near[0] + find(counts, rank - above)[0])
    counts = np.zeros(1 << (31 - FINE), np.int64)
    for block in magnitudes():
        counts += np.bincount(block >> FINE, minlength=len(counts))
    coarse, rank = find(counts, rank)
    counts = np.zeros(1 << FINE, np.int64)
    for block in magnitudes():
        inside = block[(block >> FINE) == coarse]
        counts += np.bincount(inside & (len(counts) - 1), minlength=len(counts))
    return np.uint32(coarse << FINE | find(counts, rank)[0])


def count_range(blocks: Iterator[np.ndarray], low: int, high: int) -> tuple[int, np.ndarray]:
    """The number of integers from `high` on, and how often each from `low` to `high` occurs."""
    above, counts, inside, waiting = 0, np.zeros(high - low, np.int64), [], 0
    for block in blocks:
        for start in range(0, len(block), PIECE):
            piece = block[start : start + PIECE]
            above += np.count_nonzero(piece >= high)
            piece = piece - np.uint32(low)  # what is smaller wraps around, to more than high - low
            inside.append(piece.take(np.flatnonzero(piece < high - low)))
            waiting += len(inside[-1])
        if waiting > len(counts):
            counts += np.bincount(np.concatenate(inside), minlength=len(counts))
            inside, waiting = [], 0
    if inside:
        counts += np.bincount(np.concatenate(inside), minlength=len(counts))
    return above, counts


def random_words(seed: int, expert: str, tensor: str, start: int, stop: int) -> np.ndarray:
    """Uniform integers below 2^16 for the elements `start` to `stop` of an expert's tensor, by the generator Philox."""
    digest = hashlib.sha256(repr((seed, expert, tensor)).encode()).digest()
    first = start // WORDS
    generator = np.random.Philox(key=int.from_bytes(digest[:16], "little"), counter=first)
    raw = generator.random_raw(-(-(stop - first * WORDS) // 4)).astype("<u8", copy=False)
    return raw.view("<u2")[start - first * WORDS :][: stop - start]
