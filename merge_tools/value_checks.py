"""Checks of values: NaN and infinity, and values that the dtype of the output cannot represent."""

from pathlib import Path

from .checkpoints import Source
from .findings import Report
from .float16_range import find_overflows
from .plan import OutputTensor, convert, overflow_message
from .source_scan import scan_file
from .tensor_files import EXPONENTS, FLOATS, PIECE, RANGES, has_nonfinite, read_blocks, sample_blocks, sample_nonfinite


def check_values(report: Report, sources: list[Source], deep: bool, dtype: str | None = None):
    """Looks for NaN and infinity, and for values that exceed the range of the output's dtype.

    Looks at samples of every tensor, or at all elements if `deep`.
    """
    bad_by_file: dict[Path, list[str]] = {}
    for source in sources:
        for file in source.files:
            if file in bad_by_file:
                continue
            entries = source.tensors_of(file)
            bad_by_file[file] = list(scan_file(file, entries).nonfinite) if deep else sample_nonfinite(entries)
        bad = [name for file in source.files for name in bad_by_file[file]]
        over = None if bad else find_overflow(source, dtype, deep)
        if bad:
            report.add("error", "values", source.name, describe_nonfinite(bad))
        elif over:
            report.add("error", "values", source.name, over)
        else:
            report.add("ok", "values", source.name, "all finite" if deep else "finite in all samples")


def check_float16(report: Report, tensors: list[OutputTensor]):
    """Checks that a mixture in float16 can hold its values; names one tensor of each source."""
    known = set()
    for tensor, source in find_overflows(tensors):
        if source.name not in known:
            known.add(source.name)
            message = overflow_message(tensor.tensor, "F16", any(part.merge for part in tensor.slices))
            report.add("error", "values", source.name, message)


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
    more = len(names) - 1
    subject = f"{names[0]!r} holds" if not more else f"{names[0]!r} and {more} more tensor{'s' * (more > 1)} hold"
    return f"{subject} NaN or infinity: the expert is broken. Use an earlier checkpoint."
