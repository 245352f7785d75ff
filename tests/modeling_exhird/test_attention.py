"""Sparse relative attention: masks against their definitions, both formulations against Eq. 9 as a loop."""

import math

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from modeling_exhird import attention_exhird
from modeling_exhird.attention_exhird import (
    SparseRelativeAttention,
    choose_implementation,
    left_padding_lengths,
    roll_rows,
    sinusoids,
)
from modeling_exhird.configuration_exhird import RELATIVE_ATTENTIONS
from modeling_exhird.patterns_exhird import SparsePattern, segment_mask, top_k_mask

H, HEADS, D = 8, 2, 4
FULL = {"use_lead": False, "use_window": False, "use_top_k": False}
NO_TOP_K = {"use_top_k": False}
each_relative = pytest.mark.parametrize("relative", RELATIVE_ATTENTIONS)
each_implementation = pytest.mark.parametrize("implementation", ["dense", "block"])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Short texts then have several blocks."""
    monkeypatch.setattr(attention_exhird, "BLOCK_SIZE", 4)


def make(pattern: dict, relative="shared", implementation="dense", dtype=torch.float64):
    torch.manual_seed(0)
    pattern = SparsePattern(**pattern)
    layer = SparseRelativeAttention(H, HEADS, pattern, relative=relative, implementation=implementation).to(dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def attend(layer, x, mask):
    """The layer's output for rows with padding on either side, rolled as the encoder rolls them."""
    shift = left_padding_lengths(mask)
    if shift is None:
        return layer(x, mask)[0]
    return roll_rows(layer(roll_rows(x, shift), roll_rows(mask, shift))[0], -shift)


def batch(length: int, padding: list[tuple[int, int]], dtype=torch.float64):
    """padding: for each row, number of pads before and after its tokens."""
    torch.manual_seed(length)
    x = torch.randn(len(padding), length, H, dtype=dtype, requires_grad=True)
    mask = torch.ones(len(padding), length, dtype=torch.bool)
    for row, (before, after) in zip(mask, padding, strict=True):
        row[:before] = False
        row[length - after :] = False
    return x, mask


def results(layer, x, mask, read=attend):
    """The output, and the gradients of x and all parameters."""
    y = read(layer, x, mask)
    upstream = torch.arange(y.numel(), dtype=torch.float64).sin().view_as(y).to(y.dtype)
    return [y.detach(), *torch.autograd.grad((y * upstream).sum(), [x, *layer.parameters()])]


def loop(layer, x, mask, sign=1):
    """Eq. 9 and Sect. 2.1 pair by pair, with the paper's 1-based i and j: what both formulations must equal."""
    p, per_head = layer.pattern, layer.relative == "none"
    rows = []
    for tokens, inside in zip(x, mask, strict=True):
        h, y = tokens[inside], torch.zeros_like(tokens)
        n, contexts = len(h), []
        Q, V = layer.query(h), layer.value(h)
        for a in range(HEADS):
            part = slice(a * D, (a + 1) * D)
            q, v = Q[:, part], V[:, part]
            k = h[:, part] if per_head else layer.key(h)[:, part]
            for i in range(1, n + 1):
                scores = {}
                for j in range(1, n + 1):
                    if p.segment and (i - 1) // p.segment != (j - 1) // p.segment:
                        continue
                    scores[j] = q[i - 1] @ k[j - 1]
                    if layer.relative:
                        width = D if per_head else H
                        angles = [sign * (i - j) / 10000 ** (2 * m / width) for m in range(width // 2)]
                        R = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=x.dtype)
                        W_r = {"shared": layer.key, "separate": layer.position}.get(layer.relative)
                        r = R if per_head else (W_r.weight @ R)[part]
                        u, w = layer.content_bias[a], layer.position_bias[a]
                        scores[j] = scores[j] + q[i - 1] @ r + u @ k[j - 1] + w @ r
                    scores[j] = scores[j] * layer.scale
                best = sorted(scores, key=lambda j: (-scores[j].item(), j))[: p.top_k]
                seen = [
                    j
                    for j in scores
                    if not (p.use_lead or p.use_window or p.use_top_k)
                    or (p.use_lead and (i <= p.lead or j <= p.lead))
                    or (p.use_window and abs(i - j) <= p.window // 2)
                    or (p.use_top_k and j in best)
                ]
                context = torch.zeros(D, dtype=x.dtype)
                if seen:
                    weights = torch.stack([scores[j] for j in seen]).softmax(0)
                    context = sum(weight * v[j - 1] for weight, j in zip(weights, seen, strict=True))
                contexts.append(context)
        if n:
            y[inside] = layer.output(torch.stack(contexts).view(HEADS, n, D).transpose(0, 1).flatten(1))
        rows.append(y)
    return torch.stack(rows)


# Masks


def test_the_worked_example():
    mask = SparsePattern(lead=1, window=2, use_top_k=False).mask(6)
    rows = ["".join(str(int(seen)) for seen in row) for row in mask]
    assert rows == ["111111", "111000", "111100", "101110", "100111", "100011"]


def test_segments_are_blocks_and_the_last_is_shorter():
    mask = segment_mask(7, 3)
    assert torch.equal(mask, torch.block_diag(torch.ones(3, 3), torch.ones(3, 3), torch.ones(1, 1)).bool())


@pytest.mark.parametrize("k", [1, 3, 7, 20])
def test_top_k_takes_the_largest_of_what_may_be_seen(k):
    torch.manual_seed(0)
    scores, mask = torch.randn(5, 2, 7, 7), torch.ones(2, 1, 7, dtype=torch.bool)
    mask[1, :, 2:5] = False
    chosen = top_k_mask(scores, k, mask)
    assert torch.equal(chosen.sum(-1), torch.stack([torch.full((5, 7), min(k, n)) for n in (7, 4)], 1))
    assert not (chosen & ~mask).any()
    worst = scores.masked_fill(~chosen, math.inf).amin(-1)
    left = scores.masked_fill(chosen | ~mask, -math.inf).amax(-1)
    assert (worst > left).all()
    assert chosen.all() if k >= 7 and mask.all() else not torch.equal(chosen, chosen.mT)


def test_top_k_takes_the_first_of_equal_scores():
    scores = torch.tensor([[1.0, 2, 1, 1, 2, 1], [0, 0, 0, 0, 0, 0], [3, 1, 3, 1, 3, 1]])
    expected = torch.tensor([[1, 1, 0, 0, 1, 0], [1, 1, 1, 0, 0, 0], [1, 0, 1, 0, 1, 0]]).bool()
    assert torch.equal(top_k_mask(scores, 3, torch.ones(6, dtype=torch.bool)), expected)
    without_first = torch.tensor([0, 1, 1, 1, 1, 1]).bool()
    expected = torch.tensor([[0, 1, 1, 0, 1, 0], [0, 1, 1, 1, 0, 0], [0, 1, 1, 0, 1, 0]]).bool()
    assert torch.equal(top_k_mask(scores, 3, without_first), expected)
    assert not top_k_mask(scores, 3, torch.zeros(6, dtype=torch.bool)).any()


def test_sinusoids_are_sines_then_cosines():
    table = sinusoids(torch.tensor([[0.0], [-3.0]]), 4, torch.float64)[:, 0]
    assert_close(table[0], torch.tensor([0.0, 0, 1, 1]).double())
    expected = [math.sin(-3), math.sin(-0.03), math.cos(-3), math.cos(-0.03)]
    assert_close(table[1], torch.tensor(expected).double())
    rows = sinusoids(torch.arange(400), 64)
    assert rows.dtype == torch.float32
    assert_close(rows[7] @ rows[4], rows[390] @ rows[387])  # the offset alone
    assert sinusoids(torch.arange(300), 4, torch.bfloat16)[257, 0] == torch.tensor(257.0).sin().bfloat16()


# Eq. 9

PATTERNS = [
    FULL,
    {**FULL, "segment": 4},
    {"lead": 2, "window": 3, "top_k": 2},
    {"lead": 2, "window": 3, "top_k": 2, "segment": 5},
    {**FULL, "use_top_k": True, "top_k": 3},
    {"lead": 2, "window": 3, **NO_TOP_K},
    {"lead": 2, "window": 4, "segment": 5, **NO_TOP_K},
    {"lead": 3, **NO_TOP_K, "use_window": False},
]


@each_relative
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_both_formulations_are_eq_9_in_values_and_all_gradients(pattern, relative):
    x, mask = batch(8, [(0, 0), (2, 1)])
    layer = make(pattern, relative)
    expected = results(layer, x, mask, loop)
    for implementation in ("dense",) if layer.pattern.use_top_k else ("dense", "block"):
        layer.implementation = implementation
        for a, b in zip(results(layer, x, mask), expected, strict=True):
            assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("relative", ["shared", "separate", "none"])
def test_the_query_is_offset_from_the_key_and_not_the_key_from_the_query(relative):
    layer, (x, mask) = make(FULL, relative), batch(6, [(0, 0)])
    y = attend(layer, x, mask)
    assert layer.scale == 0.5  # of the four terms together
    assert (y - loop(layer, x, mask, sign=-1)).abs().amax() > 1e-2


# Blocks

LENGTHS = [1, 2, 5, 8, 19]
SPARSE = [
    {"lead": 2, "window": 4},
    {"lead": 3, "window": 7},
    {"lead": 0, "window": 0},
    {"lead": 6, "window": 30},  # blocks of 15
    {"lead": 40, "window": 2},
    {"lead": 2, "use_window": False},
    {"lead": 11, "use_window": False, "segment": 4},
    {"use_lead": False, "window": 1},
    {"use_lead": False, "window": 6, "segment": 5},
    {"use_lead": False, "window": 6, "segment": 4},  # the window holds the segment
    {"lead": 2, "window": 4, "segment": 6},
    {"lead": 7, "window": 5, "segment": 3},
    {"use_lead": False, "use_window": False, "segment": 1},
    {"use_lead": False, "use_window": False, "segment": 6},
    {"use_lead": False, "use_window": False},
]


@each_relative
@pytest.mark.parametrize("pattern", SPARSE, ids=str)
def test_blocks_equal_all_pairs_in_values_and_all_gradients(pattern, relative):
    for length in LENGTHS:
        n = length - 1
        padding = [(0, 0), (0, n), (n, 0), (length // 3, length // 4), (0, length)]
        for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
            x, mask = batch(length, padding, dtype)
            layer = make({**NO_TOP_K, **pattern}, relative, dtype=dtype)
            slow = results(layer, x, mask)
            layer.implementation = "block"
            for a, b in zip(results(layer, x, mask), slow, strict=True):
                assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_long_texts_are_warned_of(monkeypatch):
    warnings = []
    monkeypatch.setattr(attention_exhird, "WARN_LENGTH", 7)
    monkeypatch.setattr(attention_exhird.logger, "warning_once", warnings.append)
    x, mask = batch(8, [(0, 0)])
    attend(make({"lead": 2, "window": 3, **NO_TOP_K}, implementation="block"), x, mask)
    assert warnings == []
    attend(make({"lead": 2, "window": 3, "top_k": 2}), x, mask)
    assert len(warnings) == 1 and "8 tokens" in warnings[0]


@each_relative
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_chunks_of_queries_change_nothing(pattern, relative, monkeypatch):
    x, mask = batch(11, [(0, 0), (3, 2)])
    layer = make(pattern, relative)
    together = results(layer, x, mask)
    for rows in (1, 4, 11):
        monkeypatch.setattr(attention_exhird, "MAX_SCORES", rows * HEADS * 2 * 11)
        for a, b in zip(results(layer, x, mask), together, strict=True):
            assert_close(a, b, rtol=1e-10, atol=1e-10)


class LargestTensor(TorchDispatchMode):
    """Remembers the largest number of elements that any operation gave."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        y = function(*args, **(kwargs or {}))
        for tensor in y if isinstance(y, tuple | list) else [y]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return y


@pytest.mark.parametrize(
    "pattern", [{"lead": 2, "window": 6}, {"lead": 2, "window": 6, "segment": 9}, {**FULL, "segment": 16}], ids=str
)
def test_blocks_need_memory_that_grows_with_the_length_alone(pattern):
    def largest(implementation, length):
        x, mask = batch(length, [(0, 0)], torch.float32)
        with LargestTensor() as watched:
            results(make({**NO_TOP_K, **pattern}, implementation=implementation, dtype=torch.float32), x, mask)
        return watched.elements

    sizes = [largest("block", length) for length in (256, 512, 1024)]
    assert sizes[2] < 2.1 * sizes[1] and sizes[1] < 2.1 * sizes[0] < 2.1 * 256 * HEADS * 40
    assert largest("dense", 512) > 3.9 * largest("dense", 256)


def test_auto_takes_blocks_where_they_pay(monkeypatch):
    monkeypatch.setattr(attention_exhird, "BLOCK_SIZE", 64)
    sparse, segments = SparsePattern(**NO_TOP_K), SparsePattern(**FULL, segment=50)
    chosen = [choose_implementation(sparse, length) for length in (100, 200, 300, 8192)]
    assert chosen == ["dense", "dense", "block", "block"]
    assert [choose_implementation(segments, length) for length in (50, 100, 101)] == ["dense", "dense", "block"]
    assert choose_implementation(SparsePattern(), 8192) == choose_implementation(SparsePattern(**FULL), 8192) == "dense"
    assert choose_implementation(SparsePattern(window=1000, **NO_TOP_K), 1000) == "dense"
    called = []
    for name in ("dense_attention", "block_sparse_attention"):
        monkeypatch.setattr(attention_exhird, name, lambda q, *_, name=name: called.append(name) or q)
    for length in (40, 400):
        attend(make({**NO_TOP_K}, implementation="auto"), *batch(length, [(0, 0)]))
    assert called == ["dense_attention", "block_sparse_attention"]


# Padding

BOTH = [({"lead": 2, "window": 4, "segment": 7, **NO_TOP_K}, "block"), ({"lead": 2, "window": 3, "top_k": 2}, "dense")]


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -1e38])
@pytest.mark.parametrize("pattern, implementation", BOTH)
def test_values_at_padding_change_nothing(pattern, implementation, garbage):
    layer = make(pattern, implementation=implementation)
    x, mask = batch(9, [(0, 0), (0, 4), (5, 1), (0, 9)])
    spoiled = x.detach().masked_fill(~mask[..., None], garbage).requires_grad_()
    for clean, found in zip(results(layer, x, mask), results(layer, spoiled, mask), strict=True):
        assert torch.equal(clean, found) and clean.isfinite().all()
    y, gradient, *_ = results(layer, x, mask)
    for each in (y, gradient):
        assert (each[~mask] == 0).all() and (each[mask] != 0).all()


def test_a_token_without_a_visible_key_gets_zero():
    """Lead tokens alone, and segments: those after the lead's segment."""
    for implementation in ("dense", "block"):
        layer = make({"lead": 2, "use_window": False, "segment": 4, **NO_TOP_K}, implementation=implementation)
        y = attend(layer, *batch(10, [(0, 0)]))
        assert_close(y[0, 4:], layer.output.bias.expand(6, -1))
        assert (y[0, :4] - layer.output.bias).abs().amin() > 1e-6


# Top-k


def test_no_gradient_passes_through_the_choice():
    scores = torch.randn(3, 6, 6, requires_grad=True)
    assert not top_k_mask(scores, 2, torch.ones(6, dtype=torch.bool)).requires_grad
    layer = make({**FULL, "use_top_k": True, "top_k": 2})
    x, mask = batch(5, [(0, 0), (1, 1)])
    inputs = (x, *layer.parameters())
    assert torch.autograd.gradcheck(
        lambda x, *_: attend(layer, x, mask), inputs, fast_mode=True
    )  # the choice is constant


def test_top_k_goes_by_the_scores_with_their_relative_terms():
    x, mask = batch(8, [(0, 0)])
    top = {**FULL, "use_top_k": True, "top_k": 1}
    layer = make(top)
    near = attend(layer, x, mask)
    with torch.no_grad():
        layer.position_bias.mul_(-9)
    assert (near - attend(layer, x, mask)).abs().amax(-1).gt(1e-3).any()  # one key each, by v alone another one
    # with k as large as the text, all keys are selected
    assert torch.equal(attend(make({**top, "top_k": 99}), x, mask), attend(make(FULL), x, mask))


# Precision, checkpoints


@each_implementation
def test_low_precision_is_nearby_with_a_softmax_in_float32(implementation, monkeypatch):
    kinds, softmax = [], torch.Tensor.softmax
    monkeypatch.setattr(
        torch.Tensor, "softmax", lambda x, dim, dtype: kinds.append((x.dtype, dtype)) or softmax(x, dim, dtype=dtype)
    )
    layer, (x, mask) = (
        make({"lead": 1, "window": 2, **NO_TOP_K}, implementation=implementation),
        batch(9, [(0, 0), (2, 1)]),
    )
    exact = attend(layer, x, mask)
    low, *gradients = results(layer.bfloat16(), x.detach().bfloat16().requires_grad_(), mask)
    assert low.dtype == torch.bfloat16 and all(gradient.isfinite().all() for gradient in gradients)
    assert set(kinds) == {(torch.bfloat16, torch.float32), (torch.float64, torch.float64)}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = attend(layer.float(), x.float(), mask)
    for y in (low, mixed):
        assert_close(y.double(), exact, rtol=0.1, atol=0.1)


def test_checkpoints_hold_projections_and_biases_alone():
    both = {f"{name}.{part}" for name in ("query", "value", "output") for part in ("weight", "bias")}
    biases = {"content_bias", "position_bias"}
    expected = {
        "shared": both | biases | {"key.weight"},
        "separate": both | biases | {"key.weight", "key.bias", "position.weight"},
        "none": both | biases,
        None: both | {"key.weight", "key.bias"},
    }
    for relative, names in expected.items():
        layer = make(FULL, relative)
        attend(layer, *batch(5, [(0, 0)]))
        assert set(layer.state_dict()) == names
    assert layer.content_bias is None and make(FULL).content_bias.shape == (HEADS, D)


def test_a_compiled_layer_equals_the_eager_one():
    layer, (x, mask) = make({"lead": 2, "window": 3, "top_k": 2}), batch(9, [(0, 0), (0, 3)])
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    both = (results(each, x, mask, lambda layer, *inputs: layer(*inputs)[0]) for each in (layer, compiled))
    for a, b in zip(*both, strict=True):
        assert_close(a, b)
