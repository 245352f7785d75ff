"""Means of tensors, rounded once: raw elements in, raw elements out, block by block.

A running sum in bf16 leaves a third of the elements off; a float32 sum that is rounded to bf16 afterwards is right but
where it lands on a tie that the exact mean has missed. Both are avoided here at about the cost of the float32 sum.
"""

import numpy as np

from .errors import MergeError


def to_float64(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Raw elements (unsigned integers of the dtype's width) -> their values."""
    return to_float32(raw, dtype).astype(np.float64) if dtype == "BF16" else view(raw, dtype).astype(np.float64)


def to_float32(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Raw elements -> float32, exactly for all but F64."""
    if dtype == "BF16":
        return np.left_shift(raw, 16, dtype=np.uint32).view(np.float32)
    return view(raw, dtype).astype(np.float32)


def view(raw: np.ndarray, dtype: str) -> np.ndarray:
    kinds = {"F16": np.float16, "F32": np.float32, "F64": np.float64}
    if dtype not in kinds:
        raise MergeError(f"A tensor of dtype {dtype} cannot be averaged or converted: its values are no floats.")
    return raw.view(kinds[dtype])


def from_float(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 or float64 values -> raw elements of the dtype, to nearest, ties to even, in one rounding."""
    if dtype != "BF16":
        kinds = {"F16": np.float16, "F32": np.float32, "F64": np.float64}
        with np.errstate(over="ignore"):
            return values.astype(kinds[dtype]).view(f"<u{np.dtype(kinds[dtype]).itemsize}")
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    bits = single.view(np.uint32)
    if values.dtype == np.float64:
        # A float32 that lies on a tie of bf16 where the float64 does not would be rounded a second time, wrongly.
        tie = np.flatnonzero((bits & 0xFFFF) == 0x8000)
        if len(tie):
            rest = np.abs(values[tie]) - np.abs(single[tie].astype(np.float64))
            bits[tie] = bits[tie] + np.sign(rest).astype(np.int64).astype(np.uint32)
    return bf16_from_bits(bits)


def bf16_from_bits(bits: np.ndarray) -> np.ndarray:
    """Bits of finite float32 values -> raw bf16, to nearest, ties to even. Overwrites nothing."""
    return ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)


def mean_float64(raws: list[np.ndarray], dtypes: list[str], weights: list[float], out: str) -> np.ndarray:
    """sum_e w_e x_e in float64, rounded once: the reference, and the way for all but equal weights in bf16."""
    total = to_float64(raws[0], dtypes[0]) * weights[0]
    for raw, dtype, weight in zip(raws[1:], dtypes[1:], weights[1:], strict=True):
        total += to_float64(raw, dtype) * weight
    return from_float(total, out)


def mean_equal(raws: list[np.ndarray], dtypes: list[str], out: str) -> np.ndarray:
    """The mean of E tensors with equal weights: the float64 mean rounded once, in float32 where that is proven equal."""
    if out == "BF16" and all(dtype == "BF16" for dtype in dtypes):
        return mean_bf16(raws)
    total = to_float64(raws[0], dtypes[0])
    for raw, dtype in zip(raws[1:], dtypes[1:], strict=True):
        total += to_float64(raw, dtype)
    return from_float(total / len(raws), out)


def mean_bf16(raws: list[np.ndarray]) -> np.ndarray:
    """Equal to the float64 mean rounded once, for E raw bf16 tensors of one shape.

    A sum of E bf16 values is exact in float32 while their exponents lie within 24 - 8 - log2(E) of one another. Its
    quotient by E is then a tie of bf16 or at least ulp / E away from one, which is more than float32 rounds it by: it is
    never taken for a tie that it is not, and rounding it to bf16 is as if that were the only rounding. The few elements
    with exponents further apart are done again in float64; so is a block whose sums float32 might not hold.
    """
    experts, count = len(raws), len(raws[0])
    headroom = (experts - 1).bit_length()  # a sum of E is at most so many powers of two larger
    total = np.left_shift(raws[0], 16, dtype=np.uint32).view(np.float32)
    largest = raws[0] & np.uint16(0x7FFF)
    smallest = largest.copy()
    shifted, magnitude = np.empty(count, np.uint32), np.empty(count, np.uint16)
    for raw in raws[1:]:
        np.left_shift(raw, 16, out=shifted, dtype=np.uint32, casting="unsafe")
        with np.errstate(over="ignore", invalid="ignore"):
            np.add(total, shifted.view(np.float32), out=total)
        np.bitwise_and(raw, 0x7FFF, out=magnitude)
        np.maximum(largest, magnitude, out=largest)
        np.minimum(smallest, magnitude, out=smallest)
    if largest.max(initial=0) >= (255 - headroom) << 7:
        return from_float(sum(to_float64(raw, "BF16") for raw in raws) / experts, "BF16")
    np.divide(total, np.float32(experts), out=total)
    bits = total.view(np.uint32)
    np.subtract(largest, smallest, out=largest)
    mean = bf16_from_bits(bits)
    again = np.flatnonzero(largest >= (24 - 8 - headroom) << 7)
    if len(again):
        mean[again] = from_float(sum(to_float64(raw[again], "BF16") for raw in raws) / experts, "BF16")
    return mean
