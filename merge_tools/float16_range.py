"""Whether float16, whose largest value is 65,504, can hold the values of a mixture: found before anything is written.

Only tensors that are converted to float16, or computed in it, are looked at. A tensor whose inputs are
all within the range needs no computation; any other is computed as it would be written.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from .averaging import to_float32, to_float64
from .checkpoints import Source, read_all
from .plan import OutputTensor, Slice
from .tensor_files import DTYPE_BYTES, PIECE, TensorEntry, has_nonfinite, read_blocks

LIMIT = 65520.0  # the smallest value that is rounded to infinity


def find_overflows(tensors: Iterable[OutputTensor]) -> Iterator[tuple[OutputTensor, Source]]:
    """The tensors that would hold values above the range of float16, each with the source of the largest value."""
    known: dict[TensorEntry, float] = {}
    for tensor in tensors:
        bounds = [(bound(tensor, part, source, known), source) for part in tensor.slices for source in part.sources]
        largest, source = max(bounds, key=lambda pair: pair[0], default=(0.0, None))
        if largest >= LIMIT and any(has_nonfinite(raw, tensor.dtype) for raw in tensor.blocks()):
            yield tensor, source


def bound(tensor: OutputTensor, part: Slice, source: Source, known: dict[TensorEntry, float]) -> float:
    """An upper bound of what float16 must hold because of a source; 0 if it need not hold anything else than the source does.

    `known` keeps the largest magnitude of the entries that were read.
    """
    entry, plain = source.entry(tensor.tensor), source.is_verbatim(tensor.tensor)
    rounded = (
        {tensor.dtype} if plain else {tensor.dtype, entry.dtype}
    )  # a changed weight is rounded to its base's dtype first
    if "F16" not in rounded or (plain and entry.dtype == "F16" and part.merge is None):
        return 0.0
    largest = largest_magnitude(entry, known)
    if not plain:
        a, b, scaling = source.adapter.lora_pairs[tensor.tensor]
        columns, rows = (to_float64(*read_all(half)).reshape(half.shape) for half in (a, b))
        lengths = np.linalg.norm(rows, axis=1).max() * np.linalg.norm(columns, axis=0).max()
        largest += abs(scaling) * float(lengths)  # Cauchy-Schwarz
    if part.merge:
        base = largest_magnitude(part.merge.base.entry(tensor.tensor), known)
        largest = base + (largest + base) / part.merge.density
    return largest


def largest_magnitude(entry: TensorEntry, known: dict[TensorEntry, float]) -> float:
    """The largest magnitude in a stored tensor, compared as integers: without the sign, floats are in their order."""
    if entry not in known:
        width = DTYPE_BYTES[entry.dtype]
        largest = np.zeros(1, f"<u{width}")
        for raw in read_blocks(entry, PIECE):
            largest = np.maximum(largest, (raw & ((1 << (8 * width - 1)) - 1)).max(initial=0))
        known[entry] = float(to_float32(largest, entry.dtype)[0])
    return known[entry]
