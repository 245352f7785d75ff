"""Checks of values: NaN and infinity, and values that the dtype of the output cannot represent.

float16, whose largest value is 65,504, is looked at before anything is written: tensors that are converted to it, or computed in it.
One whose inputs are all within the range needs no computation; any other is computed as it would be written.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from .averaging import convert, to_float32, to_float64
from .checkpoints import Source
from .findings import Report, count_more
from .output_tensors import OutputTensor, overflow_message
from .slices import MEAN, Slice
from .source_scan import scan_file
from .tensor_files import (
    DTYPE_BYTES,
    EXPONENTS,
    FLOATS,
    PIECE,
    RANGES,
    TensorEntry,
    has_nonfinite,
    read_all,
    read_blocks,
    sample_blocks,
    sample_nonfinite,
)  # fmt: skip

LIMIT = 65520.0  # the smallest value that is rounded to infinity in float16


def check_values(report: Report, sources: list[Source], deep: bool, dtype: str | None = None) -> None:
    """Looks for NaN and infinity, and for values that exceed the range of the output's dtype.

    Looks at samples of every tensor, or at all elements if `deep`.
    """
    bad_by_file: dict[Path, list[str]] = {}
    for source in sources:
        for file in source.files:
            if file not in bad_by_file:
                entries = source.tensors_of(file)
                bad_by_file[file] = list(scan_file(file, entries).nonfinite) if deep else sample_nonfinite(entries)
        bad = [name for file in source.files for name in bad_by_file[file]]
        problem = describe_nonfinite(bad) if bad else find_overflow(source, dtype, deep)
        fine = "all finite" if deep else "finite in all samples"
        report.add("error" if problem else "ok", "values", source.name, problem or fine)


def find_overflow(source: Source, dtype: str | None, deep: bool) -> str | None:
    """The message for the first tensor with values that the output's dtype cannot represent, if there is one."""
    for file in source.files:
        for entry in source.tensors_of(file):
            out = FLOATS[dtype] if dtype else entry.dtype
            if entry.dtype not in EXPONENTS or RANGES[out] >= RANGES[entry.dtype] or out == "F16":  # `check_float16`
                continue
            blocks = read_blocks(entry, PIECE) if deep else sample_blocks(entry)
            if any(has_nonfinite(convert(raw, entry.dtype, out), out) for raw in blocks):
                return overflow_message(entry.name, out)
    return None


def describe_nonfinite(names: list[str]) -> str:
    """The message for tensors with NaN or infinity."""
    subject = f"{names[0]!r} holds" if len(names) == 1 else f"{names[0]!r} and {count_more(names, 'tensor')} hold"
    return f"{subject} NaN or infinity: the expert is broken. Use an earlier checkpoint."


def check_float16(report: Report, tensors: Iterable[OutputTensor]) -> None:
    """Checks that a mixture in float16 can hold its values; names one tensor of each source."""
    known = set()
    for tensor, source in find_float16_overflows(tensors):
        if source.name not in known:
            known.add(source.name)
            report.add("error", "values", source.name, overflow_message(tensor.slices[0].tensor, "F16"))


def find_float16_overflows(tensors: Iterable[OutputTensor]) -> Iterator[tuple[OutputTensor, Source]]:
    """The tensors that would hold values above the range of float16, each with the source of the largest value."""
    known: dict[TensorEntry, float] = {}
    for tensor in tensors:
        bounds = [
            (bound(tensor.dtype, part, source, known), source) for part in tensor.slices for source in part.sources
        ]
        if not bounds:
            continue
        largest, source = max(bounds, key=lambda pair: pair[0])
        if largest >= LIMIT and any(has_nonfinite(raw, tensor.dtype) for raw in tensor.blocks()):
            yield tensor, source


def bound(out: str, part: Slice, source: Source, known: dict[TensorEntry, float]) -> float:
    """An upper bound of what float16 must hold because of a source; 0 if it need not hold anything else than the source does.

    `known` keeps the largest magnitude of the entries that were read.
    """
    entry, plain = source.entry(part.tensor), source.is_verbatim(part.tensor)
    rounded = {out} if plain else {out, entry.dtype}  # a changed weight is rounded to its base's dtype first
    if "F16" not in rounded or (plain and entry.dtype == "F16" and part.average is MEAN):
        return 0.0
    largest = largest_magnitude(entry, known)
    if not plain and source.adapter:
        a, b, scaling = source.adapter.lora_pairs[part.tensor]
        columns, rows = (to_float64(read_all(half), half.dtype).reshape(half.shape) for half in (a, b))
        lengths = np.linalg.norm(rows, axis=1).max() * np.linalg.norm(columns, axis=0).max()
        largest += abs(scaling) * float(lengths)  # Cauchy-Schwarz
    base = largest_magnitude(part.base.entry(part.tensor), known) if part.base else 0.0
    return part.average.bound(largest, base, part.density)


def largest_magnitude(entry: TensorEntry, known: dict[TensorEntry, float]) -> float:
    """The largest magnitude in a stored tensor, compared as integers: without the sign, floats are in their order."""
    if entry not in known:
        width = DTYPE_BYTES[entry.dtype]
        largest = np.zeros(1, f"<u{width}")
        for raw in read_blocks(entry, PIECE):
            largest = np.maximum(largest, (raw & ((1 << (8 * width - 1)) - 1)).max(initial=0))
        known[entry] = float(to_float32(largest, entry.dtype)[0])
    return known[entry]
