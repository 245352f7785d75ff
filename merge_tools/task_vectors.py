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
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .averaging import from_float, to_float32, to_float64
from .checkpoints import Source
from .slices import Average, Slice

MAGNITUDE = np.uint32(0x7FFFFFFF)  # the bits of a float32 without its sign: ordered like the magnitudes
FINE = 15  # bits of a magnitude that the first count ignores
WORDS = 16  # random numbers of 16 bits per step of the counter of Philox
STEPS = 1 << 16  # the density of DARE is a multiple of 1 / STEPS
# elements: arrays that the processor's cache holds, and few calls, between which threads wait for each other
CACHED = 1 << 16
SAMPLES, SAMPLE = 256, 4096  # places, and at most so many elements at each, from which a cutoff is estimated
SHARE = 64  # of so many elements at most one is in the sample
MARGIN = 0.01  # of the elements, on both sides of an estimate
RANGE = 1 << 20  # the widest range of an estimate: the memory of its counts


class TaskVectors(Average):
    """The base plus the merged task vectors of the experts, by the method of this name."""

    needs_base = of_differences = True
    density = 0.5

    def __init__(self, name: str):
        self.name = name

    def bound(self, largest: float, base: float, density: float) -> float:
        """As in `Average`."""
        return base + (largest + base) / density

    def describe(self, names: Sequence[str], base: str, density: float | None) -> str:
        """As in `Average`."""
        return f"{self.name} (density {density:g}) of {', '.join(names)} over {base}"

    def blocks(self, part: Slice, out: str) -> Iterator[np.ndarray]:
        """As in `Average`, in blocks that are the smaller, the more experts there are."""
        assert part.base is not None
        drops = self.name != "ties" and keep_probability(part.density) < 1
        cutoffs = [ties_cutoff(part, source) if self.name == "ties" else np.uint32(0) for source in part.sources]
        dtypes, base_dtype = part.dtypes, part.base.entry(part.tensor).dtype
        position, limit = part.start, int(keep_probability(part.density) * STEPS)
        total = WeightedSum() if self.name == "dare" else SignElectedMean(part.weights)
        for raw_base, *raws in part.read_all(len(part.sources)):
            stop = position + len(raw_base)
            words = (
                [random_words(part.seed, s.name, part.tensor, position, stop) for s in part.sources] if drops else []
            )
            for start in range(0, len(raw_base), CACHED):
                piece = slice(start, start + CACHED)
                task = TaskBase(raw_base[piece], base_dtype)
                total.reset(len(task.raw))
                for expert, raw in enumerate(raws):
                    vector = task.difference(raw[piece], dtypes[expert])
                    if drops:
                        np.multiply(vector, words[expert][piece] < limit, out=vector)
                    elif cutoffs[expert]:
                        np.multiply(vector, magnitudes_of(vector) >= cutoffs[expert], out=vector)
                    total.add(vector, part.weights[expert])
                merged = total.result()
                if self.name != "ties":
                    merged /= keep_probability(part.density)
                merged += to_float64(task.raw, base_dtype)
                yield from_float(merged, out)
            position = stop


def keep_probability(density: float) -> float:
    """The probability with which DARE keeps an element."""
    return max(1, round(density * STEPS)) / STEPS


def ties_cutoff(part: Slice, source: Source) -> np.uint32:
    """The bits of the smallest magnitude that TIES keeps of an expert, over the elements that the base has too."""
    assert part.base is not None
    tensor, base = part.tensor, part.base
    entry, base_entry = source.entry(tensor), base.entry(tensor)
    count = min(base_entry.elements, entry.elements)
    keep = max(1, round(part.density * count))
    if keep >= count:
        return np.uint32(0)

    def magnitudes(start: int = 0, stop: int = count) -> Iterator[np.ndarray]:
        for raw, raw_base in part.read((source, base), start, stop):
            bits = np.empty(len(raw), np.uint32)
            for first in range(0, len(raw), CACHED):
                piece = slice(first, first + CACHED)
                vector = TaskBase(raw_base[piece], base_entry.dtype).difference(raw[piece], entry.dtype)
                magnitudes_of(vector, out=bits[piece])
            yield bits

    is_stored = source.is_verbatim(tensor) and base.is_verbatim(tensor)  # parts of it can be read
    return largest(magnitudes, keep, estimate(magnitudes, count, keep) if is_stored else None)


class TaskBase:
    """Elements of the base, from which experts differ."""

    def __init__(self, raw: np.ndarray, dtype: str):
        self.raw, self.dtype = raw, dtype
        self.single = to_float32(raw, dtype) if dtype != "F64" else np.empty(0, np.float32)

    def difference(self, raw: np.ndarray, dtype: str) -> np.ndarray:
        """x - x_base as float32, rounded once."""
        with np.errstate(over="ignore", invalid="ignore"):  # infinities are reported when the result is written
            if "F64" in (dtype, self.dtype):
                return (to_float64(raw, dtype) - to_float64(self.raw, self.dtype)).astype(np.float32)
            return np.subtract(to_float32(raw, dtype), self.single)


class WeightedSum:
    """sum_e w_e t_e in float64."""

    def reset(self, count: int):
        """Starts with new elements."""
        self.total = np.zeros(count)

    def add(self, vector: np.ndarray, weight: float):
        """Adds an expert."""
        self.total += np.multiply(vector, weight, dtype=np.float64)

    def result(self) -> np.ndarray:
        """The sum."""
        return self.total


class SignElectedMean:
    """The weighted mean of the positive or of the negative values, whichever have the larger weighted sum; in float64.

    Equal weights cancel out, so that their shares are counts.
    """

    def __init__(self, weights: tuple[float, ...]):
        self.equal = len(set(weights)) == 1
        self.dtype = np.dtype(np.uint8 if self.equal and len(weights) < 256 else np.float64)

    def reset(self, count: int):
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
        for start in range(0, len(block), CACHED):
            piece = block[start : start + CACHED]
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
