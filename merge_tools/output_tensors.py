"""The tensors of an output, and the slices of tensors of the sources that they are computed from."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .checkpoints import Source
from .slices import MEAN, Slice
from .tensor_files import DTYPE_BYTES, TORCH_NAMES, TensorEntry

CENTROIDS = "domain_centroids"  # the tensor of the centroids of the experts' clusters


@dataclass(frozen=True)
class OutputTensor:
    """A tensor of the output: slices of tensors of the sources, or the raw elements `values`."""

    name: str
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    slices: tuple[Slice, ...] = ()
    values: np.ndarray | None = None

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.elements * DTYPE_BYTES[self.dtype]

    @property
    def copy_source(self) -> TensorEntry | None:
        """The stored tensor that can be copied byte by byte, or None if the tensor has to be computed."""
        if len(self.slices) != 1 or len(self.slices[0].sources) != 1 or self.slices[0].average is not MEAN:
            return None
        (part,) = self.slices
        entry = part.sources[0].entry(part.tensor)
        same = entry.dtype == self.dtype and entry.nbytes == self.nbytes
        return entry if same and part.sources[0].is_verbatim(part.tensor) else None

    @property
    def raw(self) -> np.ndarray:
        """The raw elements of a tensor that has values of its own."""
        assert self.values is not None
        return self.values

    def entries(self) -> list[TensorEntry]:
        """The stored tensors that it is computed from."""
        return [entry for part in self.slices for entry in part.entries()]

    def blocks(self) -> Iterator[np.ndarray]:
        """Yields the raw elements in blocks."""
        if self.values is not None:
            yield self.values.reshape(-1)
        for part in self.slices:
            yield from part.average.blocks(part, self.dtype)

    @property
    def overflow(self) -> str:
        """The message if its values exceed the range of its dtype."""
        if self.dtype != "F16" and any(part.average.density is not None for part in self.slices):
            return f"{self.name!r} overflows {TORCH_NAMES[self.dtype]}. Use a larger density."
        return overflow_message(self.name, self.dtype)


def overflow_message(name: str, dtype: str) -> str:
    """The message for a tensor whose values exceed the range of the output's dtype."""
    largest = {"F16": "float16's maximum of 65,504", "BF16": "bfloat16's maximum of 3.39e38"}
    remedy = "Use dtype: bfloat16 or float32." if dtype == "F16" else "Its expert is broken. Use an earlier checkpoint."
    return f"{name!r} has values above {largest.get(dtype, f'the maximum of {TORCH_NAMES[dtype]}')}. {remedy}"


def zeros(name: str, dtype: str, shape: tuple[int, ...]) -> OutputTensor:
    """A tensor of zeros."""
    return OutputTensor(name, dtype, shape, values=np.zeros(shape, f"<u{DTYPE_BYTES[dtype]}"))


def copy_tensor(name: str, tensor: str, dtype: str, source: Source) -> OutputTensor:
    """A tensor of one source under another name."""
    entry = source.entry(tensor)
    return OutputTensor(name, dtype, entry.shape, (Slice(tensor, (source,), (1.0,), 0, entry.elements),))
