"""Means compared with exact arithmetic: the exact mean of E numbers, rounded once to the dtype."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from merge_tools import MergeError, averaging, slices
from merge_tools.averaging import from_float, mean_bf16, mean_equal, mean_float64, to_float32, to_float64
from merge_tools.checkpoints import open_source
from merge_tools.output_tensors import OutputTensor
from merge_tools.slices import Slice

# significant bits, exponent of the smallest normal number, first power of two that is too large
FORMATS = {"BF16": (8, -126, 128), "F16": (11, -14, 16), "F32": (24, -126, 128)}
KINDS = {"F16": np.float16, "F32": np.float32, "F64": np.float64}
COLUMNS = 300
each_count = pytest.mark.parametrize("experts", [2, 3, 4, 5, 8])


def nearest(x: Fraction, dtype: str) -> float:
    """Rounds x to the dtype, ties to even, with integer arithmetic only."""
    bits, smallest, limit = FORMATS[dtype]
    if x == 0:
        return 0.0
    exponent = abs(x).numerator.bit_length() - abs(x).denominator.bit_length()
    exponent -= Fraction(2) ** exponent > abs(x)
    ulp = Fraction(2) ** (max(exponent, smallest) - bits + 1)
    rounded = round(x / ulp) * ulp  # Python rounds fractions to even
    return float("inf") * (1 if x > 0 else -1) if abs(rounded) >= Fraction(2) ** limit else float(rounded)


def exact_mean(raws, dtypes, weights, out):
    """The exact mean of each column, rounded once."""
    columns = zip(*(to_float64(raw, dtype) for raw, dtype in zip(raws, dtypes, strict=True)), strict=True)
    shares = [Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    return [
        nearest(sum(Fraction(float(x)) * share for x, share in zip(column, shares, strict=True)), out)
        for column in columns
    ]


def raw_bf16(sign, exponent, mantissa):
    return (sign.astype(np.uint16) << 15) | (exponent.astype(np.uint16) << 7) | mantissa.astype(np.uint16)


def adversarial(family: str, experts: int) -> list[np.ndarray]:
    """Raw bf16 numbers for which naive means are wrong, (experts) x (COLUMNS)."""
    rng = np.random.default_rng([experts, *family.encode()])
    shape = (experts, COLUMNS)
    sign, mantissa = rng.integers(0, 2, shape), rng.integers(0, 128, shape)
    low, high = {
        "one exponent": (120, 121),  # sums that end in half a unit: every other mean of two is a tie
        "near": (118, 123),
        "at the edge of float32": (100, 120),
        "wide": (90, 125),
        "subnormal": (0, 3),
        "largest": (252, 255),
    }.get(family, (118, 123))
    raw = raw_bf16(sign, rng.integers(low, high, shape), mantissa)
    if family == "ties and a trace":  # equal parts, half a unit of the mean, and what decides on which side it lies
        unit = raw_bf16(np.zeros(COLUMNS, int), np.full(COLUMNS, 127), mantissa[0])
        raw = np.repeat(unit[None], experts, 0)
        raw[-1] += 1
        raw[0] = np.where(rng.integers(0, 2, COLUMNS), raw[0], raw_bf16(sign[0], np.full(COLUMNS, 95), mantissa[1]))
    if family == "cancelling":
        raw[1] = raw[0] ^ 0x8000
        raw[-1] = raw_bf16(sign[-1], rng.integers(95, 105, COLUMNS), mantissa[-1])
    if family == "zeros":
        raw = np.where(rng.random(shape) < 0.5, raw & 0x8000, raw)
    return list(raw.astype(np.uint16))


FAMILIES = (
    "one exponent", "near", "at the edge of float32", "wide", "subnormal", "largest", "ties and a trace",
    "cancelling", "zeros",
)  # fmt: skip


@each_count
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mean_in_bf16_is_the_exact_mean_rounded_once(family, experts):
    raws = adversarial(family, experts)
    expected = exact_mean(raws, ["BF16"] * experts, [1] * experts, "BF16")
    for mean in (mean_bf16(raws), mean_equal(raws, ["BF16"] * experts, "BF16")):
        assert to_float64(mean, "BF16").tolist() == expected


@pytest.mark.parametrize("experts", [3, 4, 5, 8])
def test_the_comparison_sees_a_running_sum_in_bf16(experts):
    """Negative control: a running sum in bf16, as in mergoo, is wrong for a large share of the elements."""
    raws = adversarial("near", experts)
    running = torch.from_numpy(np.stack(raws).view(np.int16)).view(torch.bfloat16)
    total = running[0].clone()
    for more in running[1:]:
        total += more
    naive = (total / experts).double().tolist()
    expected = exact_mean(raws, ["BF16"] * experts, [1] * experts, "BF16")
    off = sum(a != b for a, b in zip(naive, expected, strict=True)) / COLUMNS
    assert off > 0.15


def test_the_comparison_sees_a_float32_sum_that_is_rounded_again():
    """Negative control: a sum that is a tie of bf16 in float32, but not exactly."""
    one, half_unit, trace = (np.array([x], np.float32).view(np.uint32) >> 16 for x in (1.0, 2**-8, 2**-30))
    raws = [x.astype(np.uint16) for x in (one, half_unit, trace, one * 0)]
    expected = nearest((1 + Fraction(1, 2**8) + Fraction(1, 2**30)) / 4, "BF16")
    twice = np.array([1 + 2**-8 + 2**-30], np.float32) / 4
    assert to_float64(from_float(twice, "BF16"), "BF16")[0] != expected
    assert to_float64(mean_bf16(raws), "BF16")[0] == expected


def test_a_value_below_float32_precision_decides_a_tie():
    """Six numbers whose sum is a tie of bf16, and two that differ by less than the sum's last bit in float32."""
    large = [((141 << 7) | mantissa) for mantissa in (60, 60, 60, 60, 60, 72)]
    raws = [np.array([bits], np.uint16) for bits in (*large, (127 << 7) | 125, 0x8000 | (127 << 7) | 124)]
    expected = exact_mean(raws, ["BF16"] * 8, [1] * 8, "BF16")
    assert to_float64(mean_bf16(raws), "BF16").tolist() == expected
    total = np.zeros(1, np.float32)
    for raw in raws:  # negative control: the float32 sum, which stands on the tie
        total += to_float32(raw, "BF16")
    assert to_float64(from_float(total / 8, "BF16"), "BF16").tolist() != expected


finite_bf16 = st.integers(0, 0xFFFF).filter(lambda bits: bits & 0x7F80 != 0x7F80)


@settings(max_examples=200, deadline=None)
@given(st.lists(finite_bf16, min_size=2, max_size=9))
def test_any_finite_bf16_values_have_the_float64_mean(column):
    raws = [np.array([bits], np.uint16) for bits in column]
    total = to_float64(raws[0], "BF16")
    for raw in raws[1:]:
        total = total + to_float64(raw, "BF16")
    assert to_float64(mean_bf16(raws), "BF16")[0] == nearest(Fraction(float(total[0] / len(column))), "BF16")


@pytest.mark.parametrize("dtype", ["F16", "F32"])
@each_count
def test_a_mean_in_other_dtypes_is_the_exact_mean_rounded_once(dtype, experts):
    rng = np.random.default_rng(experts)
    values = rng.integers(-(2**11), 2**11, (experts, COLUMNS)) * 2.0 ** rng.integers(-8, 1, (experts, COLUMNS))
    raws = [row.astype(KINDS[dtype]).view(f"u{KINDS[dtype]().itemsize}") for row in values]
    expected = exact_mean(raws, [dtype] * experts, [1] * experts, dtype)
    assert to_float64(mean_equal(raws, [dtype] * experts, dtype), dtype).tolist() == expected
    naive = raws[0].view(KINDS[dtype]).copy()
    for raw in raws[1:]:
        naive = naive + raw.view(KINDS[dtype])
    if dtype == "F16" and experts > 2:  # negative control: a running sum in the dtype itself
        assert (naive / KINDS[dtype](experts)).tolist() != expected


@pytest.mark.parametrize("out", ["BF16", "F16", "F32"])
def test_a_mean_over_mixed_dtypes_is_rounded_once(out):
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((3, COLUMNS))
    dtypes = ["BF16", "F16", "F32"]
    raws = [from_float(row, dtype) for row, dtype in zip(rows, dtypes, strict=True)]
    expected = exact_mean(raws, dtypes, [1, 1, 1], out)
    assert to_float64(mean_equal(raws, dtypes, out), out).tolist() == expected


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("weights", [[0.5, 0.25, 0.25], [0.75, 0.0, 0.25], [0.625, 0.125, 0.25]])
def test_a_weighted_mean_is_the_exact_one_rounded_once(weights, dtype):
    rng = np.random.default_rng(7)
    raws = [from_float(row, dtype) for row in rng.standard_normal((3, COLUMNS))]
    mean = to_float64(mean_float64(raws, [dtype] * 3, weights, dtype), dtype).tolist()
    assert mean == exact_mean(raws, [dtype] * 3, weights, dtype)
    assert mean != exact_mean(raws, [dtype] * 3, [1, 1, 1], dtype)  # negative control


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_float64_is_rounded_once_next_to_a_tie(dtype):
    """Ties of the dtype and their float64 neighbours, which become ties if rounded to float32 first."""
    bits, smallest, _ = FORMATS[dtype]
    rng = np.random.default_rng(1)
    exponents = rng.integers(smallest - 4, 10, COLUMNS)
    ulps = 2.0 ** (np.maximum(exponents, smallest) - bits + 1)
    ties = (rng.integers(0, 2**bits, COLUMNS) + 0.5) * ulps * rng.choice([-1, 1], COLUMNS)
    for values in (ties, np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf)):
        expected = [nearest(Fraction(float(value)), dtype) for value in values]
        assert to_float64(from_float(values, dtype), dtype).tolist() == expected
    if dtype == "BF16":  # negative control: the detour
        twice = from_float(values.astype(np.float32), dtype)
        assert to_float64(twice, dtype).tolist() != expected


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_conversions_agree_with_torch_for_all_values(dtype):
    raw = np.arange(1 << 16, dtype=np.uint16)
    theirs = torch.from_numpy(raw.view(np.int16)).view({"BF16": torch.bfloat16, "F16": torch.float16}[dtype])
    assert np.array_equal(to_float32(raw, dtype), theirs.float().numpy(), equal_nan=True)
    finite = np.isfinite(theirs.float().numpy())
    assert np.array_equal(from_float(theirs.float().numpy()[finite], dtype), raw[finite])
    other = {"BF16": torch.float16, "F16": torch.bfloat16}[dtype]
    code = {"BF16": "F16", "F16": "BF16"}[dtype]
    expected = theirs.to(other).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(averaging.convert(raw[finite], dtype, code), expected[finite])


def test_minus_zero_is_kept_and_cancellation_gives_plus_zero():
    minus, plus, one = (np.array([bits], np.uint16) for bits in (0x8000, 0x0000, 0x3F80))
    assert mean_bf16([minus, minus])[0] == 0x8000
    assert mean_bf16([minus, plus])[0] == 0x0000
    assert mean_bf16([one, one | np.uint16(0x8000)])[0] == 0x0000


def test_integer_dtypes_are_rejected():
    whole = np.arange(4, dtype=np.uint8)
    with pytest.raises(MergeError, match="dtype U8"):
        mean_equal([whole, whole], ["U8", "U8"], "BF16")


@pytest.mark.parametrize("chunk", [7, 64, 500])
def test_blocks_of_any_size_make_the_same_tensor(experts, chunk, monkeypatch):
    """Three sources are read in parallel, slice by slice, for any block size."""
    sources = [open_source(folder.name, str(folder)) for folder in experts(3, dtype="bfloat16")]
    name = "model.embed_tokens.weight"
    rows, width = sources[0].entry(name).shape
    middle = 10 * width
    parts = (
        Slice(name, tuple(sources), (1 / 3, 1 / 3, 1 / 3), 0, middle),
        Slice(name, tuple(sources[:2]), (0.75, 0.25), middle, rows * width),
    )
    tensor = OutputTensor(name, "BF16", (rows, width), parts)
    whole = np.concatenate(list(tensor.blocks()))
    monkeypatch.setattr(slices, "CHUNK", chunk)
    blocks = list(tensor.blocks())
    assert len(blocks) > 3 and max(map(len, blocks)) <= chunk
    assert np.array_equal(np.concatenate(blocks), whole)
