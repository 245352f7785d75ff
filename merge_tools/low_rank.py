"""Experts of low rank: the difference of an expert's MLP from the base's, as two thin matrices per linear layer, as in FlexMoRE
(arXiv 2602.08818).

For a matrix W_i (m, n) of expert i and the base's W, with the singular value decomposition W_i - W = U S V', the r largest
singular values S_r and their vectors:

    B = U_r S_r^1/2  (m, r),   A = S_r^1/2 V_r'  (r, n),   energy = sum(S_r^2) / sum(S^2)
"""

from collections.abc import Iterator, Sequence
from threading import Lock

import numpy as np

from .averaging import from_float, to_float32, to_float64
from .checkpoints import Source
from .errors import MergeError
from .layout import RoutedPart, Shape
from .output_tensors import OutputTensor
from .slices import Average, Slice
from .tensor_files import read_all
from .value_checks import describe_nonfinite


def spectrum(difference: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The squared singular values of a matrix (m, n), ascending, and the singular vectors of its shorter side as columns; float64."""
    small = difference if difference.shape[0] <= difference.shape[1] else difference.T
    squares, vectors = np.linalg.eigh(small @ small.T)
    return np.maximum(squares, 0), vectors


def decompose(difference: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray, float]:
    """(m, n) float64 -> A (rank, n), B (m, rank) and the energy that B A keeps; of a matrix of zeros the energy is 1."""
    squares, vectors = spectrum(difference)
    energy = squares[-rank:].sum() / squares.sum() if squares.any() else 1.0
    chosen, sigma = vectors[:, -rank:][:, ::-1], np.sqrt(squares[-rank:][::-1])
    root = np.sqrt(sigma)
    inverse = np.divide(1, root, out=np.zeros_like(root), where=root > 0)
    if difference.shape[0] <= difference.shape[1]:  # the vectors are U
        return (chosen.T @ difference) * inverse[:, None], chosen * root, float(energy)
    return (chosen * root).T, (difference @ chosen) * inverse, float(energy)


class Factors:
    """The factors of one matrix of one expert, which are computed once for both of their tensors and their energy."""

    def __init__(self, rank: int):
        self.rank = rank
        self._energy: float | None = None
        self._lock, self._halves = Lock(), dict[str, np.ndarray]()

    def take(self, half: str, part: Slice) -> np.ndarray:
        """A or B of the expert in a slice."""
        with self._lock:
            if half not in self._halves:
                self._compute(part)
            return self._halves.pop(half)

    def energy(self, part: Slice) -> float:
        """The energy that they keep; a resumed run, which keeps complete files, has to compute it."""
        with self._lock:
            if self._energy is None:
                self._compute(part)
                self._halves.clear()
            assert self._energy is not None
            return self._energy

    def _compute(self, part: Slice) -> None:
        assert part.base is not None
        difference = matrix(part.sources[0], part.tensor) - matrix(part.base, part.tensor)
        self._halves["A"], self._halves["B"], self._energy = decompose(difference, self.rank)


def matrix(source: Source, tensor: str) -> np.ndarray:
    """A matrix of a source in float64, with its adapter applied; raises a `MergeError` if it has NaN or infinity."""
    entry = source.entry(tensor)
    values = np.concatenate([to_float64(raw, entry.dtype) for raw in source.blocks(tensor)]).reshape(entry.shape)
    if not np.isfinite(values).all():
        raise MergeError(f"{source.name}: {describe_nonfinite([tensor])}")
    return values


class Factor(Average):
    """One of the two factors of an expert's difference from the base."""

    name = "low_rank"
    needs_base = of_differences = True

    def __init__(self, half: str, factors: Factors):
        self.half, self.factors = half, factors

    def blocks(self, part: Slice, out: str) -> Iterator[np.ndarray]:
        """As in `Average`."""
        yield from_float(np.ascontiguousarray(self.factors.take(self.half, part)).ravel(), out)


class Expanded(Average):
    """A matrix of an expert from the base's and the factors in a mixture: W + B A, in float32."""

    name = "expanded"

    def __init__(self, a: str, b: str):
        self.a, self.b = a, b

    def blocks(self, part: Slice, out: str) -> Iterator[np.ndarray]:
        """As in `Average`."""
        source = part.sources[0]
        a, b, base = (stored(source, name) for name in (self.a, self.b, part.tensor))
        yield from_float((base + b @ a).ravel(), out)


def stored(source: Source, tensor: str) -> np.ndarray:
    """A tensor of a file in float32."""
    entry = source.entry(tensor)
    return to_float32(read_all(entry), entry.dtype).reshape(entry.shape)


def factor_tensors(
    part: RoutedPart, index: int, shape: Shape, dtype: str, base: Source, expert: Source
) -> list[OutputTensor]:
    """The factors of an expert at a router, as its expert of this index."""
    tensors, factors = [], {dense: Factors(part.rank) for dense, _ in part.expert_tensors(shape)}
    for dense, suffix in part.expert_tensors(shape):
        half, size = suffix.split(".")[1], shape.tensors()[dense]
        factor = Factor(half, factors[dense])
        slices = (Slice(dense, (expert,), (1.0,), 0, size[0] * size[1], factor, base),)
        tensors.append(OutputTensor(part.expert(index, suffix), dtype, part.factor_size(half, size), slices))
    return tensors


def product(tensor: OutputTensor) -> np.ndarray:
    """B A of the expert and matrix of which a tensor is one of the factors, (m, n), float64."""
    part = tensor.slices[0]
    assert isinstance(part.average, Factor)
    factors = part.average.factors
    return factors.take("B", part) @ factors.take("A", part)


def expanded_tensor(name: str, dense: str, part: RoutedPart, index: int, source: Source, shape: Shape) -> OutputTensor:
    """The matrix of an expert of a mixture, which is called `dense` in a dense model, in full."""
    size, short = shape.tensors()[dense], part.mixture.names[dense.split(".")[-2]]
    a, b = (part.expert(index, f"{short}.{half}.weight") for half in "AB")
    base = f"{part.prefix}.base.{short}.weight"
    slices = (Slice(base, (source,), (1.0,), 0, size[0] * size[1], Expanded(a, b)),)
    return OutputTensor(name, source.entry(base).dtype, size, slices)


def energies(tensors: Sequence[OutputTensor], count: int) -> list[float | None]:
    """The mean energy that the factors of each of `count` experts keep; `None` for experts whose tensors are copied."""
    found: list[list[float]] = [[] for _ in range(count)]
    for tensor in tensors:
        factor = tensor.slices[0].average if tensor.slices else None
        if isinstance(factor, Factor) and factor.half == "A":
            energy = factor.factors.energy(tensor.slices[0])
            found[int(tensor.name.split(".experts.")[1].split(".")[0])].append(energy)
    return [round(float(np.mean(own)), 4) if own else None for own in found]


def rank_for(energy: float, parts: list[RoutedPart], shape: Shape, base: Source, experts: Sequence[Source]) -> int:
    """The smallest rank at which every matrix of every expert keeps this share of its energy."""
    rank = 1
    for part in (part for part in parts if part.rank):
        for dense in dict.fromkeys(dense for dense, _ in part.expert_tensors(shape)):
            original = matrix(base, dense)
            for expert in experts:
                squares = spectrum(matrix(expert, dense) - original)[0][::-1].cumsum()
                if squares[-1] > 0:
                    rank = max(rank, int(np.searchsorted(squares, energy * squares[-1])) + 1)
    return rank


def check_rank(rank: int, shape: Shape) -> None:
    """Raises a `MergeError` for a rank above that of the MLPs' matrices."""
    most = min(shape.hidden_size, shape.intermediate_size)
    if rank > most:
        raise MergeError(f"rank: {rank} exceeds that of the experts' matrices, {most}. Use {most} or less.")
