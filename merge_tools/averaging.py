"""Means of tensors with a single rounding, from raw elements to raw elements, block by block.

A running sum in bf16 gets a third of the elements wrong. A float32 sum rounded to bf16 is wrong where it falls on a tie
that the exact mean is not on. The functions here avoid both at about the cost of the float32 sum.
"""

import numpy as np

from .errors import MergeError

UPPER = np.uint32(0xFFFF0000)  # the upper of two neighbours in 32 bits
NUMPY_DTYPES = {"F16": np.float16, "F32": np.float32, "F64": np.float64}


def to_float64(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Converts raw elements (unsigned integers of the dtype's width) to float64."""
    return to_float32(raw, dtype).astype(np.float64) if dtype == "BF16" else view(raw, dtype).astype(np.float64)


def to_float32(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Converts raw elements to float32, exactly for all dtypes but F64."""
    if dtype == "BF16":
        return np.left_shift(raw, 16, dtype=np.uint32).view(np.float32)
    return view(raw, dtype).astype(np.float32)


def view(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Reinterprets raw elements of F16, F32 or F64 as numbers; raises a `MergeError` for other dtypes."""
    if dtype not in NUMPY_DTYPES:
        raise MergeError(f"Cannot average or convert a tensor of dtype {dtype}. Use a floating-point checkpoint.")
    return raw.view(NUMPY_DTYPES[dtype])


def from_float(values: np.ndarray, dtype: str) -> np.ndarray:
    """Converts float32 or float64 values to raw elements of the dtype: one rounding to nearest, ties to even.

    float32 values are not copied for F32: a file that is mapped stays on the disk.
    """
    with np.errstate(over="ignore"):
        single = values.astype(NUMPY_DTYPES.get(dtype, np.float32), copy=values.dtype != np.float32)
    if dtype != "BF16":
        return single.view(f"<u{single.itemsize}")
    bits = single.view(np.uint32)
    if values.dtype == np.float64:
        # If the float32 value is on a tie of bf16 but the float64 value is not, rounding twice would go wrong.
        tie = np.flatnonzero((bits & 0xFFFF) == 0x8000)
        if len(tie):
            rest = np.abs(values[tie]) - np.abs(single[tie].astype(np.float64))
            bits[tie] = bits[tie] + np.sign(rest).astype(np.int64).astype(np.uint32)
    return bf16_from_bits(bits)


def bf16_from_bits(bits: np.ndarray) -> np.ndarray:
    """Rounds the bits of finite float32 values to raw bf16, to nearest, ties to even."""
    return ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)


def convert(raw: np.ndarray, dtype: str, out: str) -> np.ndarray:
    """Converts raw elements to another dtype."""
    if dtype == out:
        return raw
    return from_float(view(raw, dtype) if dtype == "F64" else to_float32(raw, dtype), out)


def mean_float64(raws: list[np.ndarray], dtypes: list[str], weights: list[float], out: str) -> np.ndarray:
    """sum_e w_e x_e in float64, rounded once. The reference for the faster functions below."""
    return from_float(sum(to_float64(raw, d) * w for raw, d, w in zip(raws, dtypes, weights, strict=True)), out)


def mean_equal(raws: list[np.ndarray], dtypes: list[str], out: str) -> np.ndarray:
    """The mean of E tensors: the float64 mean rounded once, computed in float32 where that is exactly equal."""
    if out == "BF16" and all(dtype == "BF16" for dtype in dtypes):
        return mean_bf16(raws)
    return from_float(sum(map(to_float64, raws, dtypes)) / len(raws), out)


def mean_bf16(raws: list[np.ndarray]) -> np.ndarray:
    """The float64 mean rounded once, for E raw bf16 tensors of one shape, computed mostly in float32.

    The sum of E bf16 values is exact in float32 if their exponents differ by at most 24 - 8 - log2(E). The sum divided
    by E is then either a tie of bf16 or at least ulp / E away from one, which is more than the rounding error of
    float32. So rounding it to bf16 gives the same result as a single rounding. The few elements whose exponents differ
    more are computed again in float64, and so are blocks whose sums could overflow float32.
    """
    experts, count = len(raws), len(raws[0])
    if count % 2:
        return mean_bf16([np.append(raw, raw[-1:]) for raw in raws])[:-1]
    headroom = (experts - 1).bit_length()  # powers of two by which a sum of E values can be larger
    # Two neighbours at a time: shifted or masked, each half of 32 bits is a float32, without moving elements apart.
    even, odd, half = np.full((3, count // 2), 1 << 31, np.uint32)  # -0.0, the sum of no values
    largest, smallest, magnitude = (
        np.zeros(count, np.uint16),
        np.full(count, 0x7FFF, np.uint16),
        np.empty(count, np.uint16),
    )
    with np.errstate(over="ignore", invalid="ignore"):
        for raw in raws:
            pairs = raw.view(np.uint32)
            np.left_shift(pairs, 16, out=half)
            np.add(even.view(np.float32), half.view(np.float32), out=even.view(np.float32))
            np.bitwise_and(pairs, UPPER, out=half)
            np.add(odd.view(np.float32), half.view(np.float32), out=odd.view(np.float32))
            np.bitwise_and(raw, 0x7FFF, out=magnitude)
            np.maximum(largest, magnitude, out=largest)
            np.minimum(smallest, magnitude, out=smallest)
    if largest.max(initial=0) >= (255 - headroom) << 7:
        return from_float(sum(to_float64(raw, "BF16") for raw in raws) / experts, "BF16")
    for total in (even, odd):
        np.divide(total.view(np.float32), np.float32(experts), out=total.view(np.float32))
        np.right_shift(total, 16, out=half)  # rounds to nearest, ties to even
        np.bitwise_and(half, 1, out=half)
        np.add(half, 0x7FFF, out=half)
        np.add(total, half, out=total)
    np.right_shift(even, 16, out=even)
    np.bitwise_and(odd, UPPER, out=odd)
    mean = np.bitwise_or(even, odd, out=even).view(np.uint16)
    np.subtract(largest, smallest, out=largest)
    if largest.max(initial=0) >= (limit := (24 - 8 - headroom) << 7):
        inexact = np.flatnonzero(largest >= limit)
        mean[inexact] = from_float(sum(to_float64(raw[inexact], "BF16") for raw in raws) / experts, "BF16")
    return mean
