"""Sparse relative attention: masks against their definitions, and Eq. 9 as a loop."""

import math

import pytest
import torch
from torch.testing import assert_close

from modeling_exhird import attention_exhird
from modeling_exhird.attention_exhird import SparsePattern, SparseRelativeAttention, sinusoids, top_k_mask
from modeling_exhird.configuration_exhird import CHOICES

H, HEADS, D = 8, 2, 4
FULL = {"use_lead": False, "use_window": False, "use_top_k": False}
NO_TOP_K = {"use_top_k": False}


def make(pattern: dict, relative="shared"):
    torch.manual_seed(0)
    layer = SparseRelativeAttention(H, HEADS, SparsePattern(**pattern), relative).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def batch(length: int, padding: list[int]):
    """padding: for each row, number of pads after its tokens."""
    torch.manual_seed(length)
    x = torch.randn(len(padding), length, H, dtype=torch.float64, requires_grad=True)
    return x, torch.arange(length) < length - torch.tensor(padding)[:, None]


def results(layer, x, mask, read=None):
    """The output, and the gradients of x and all parameters."""
    y = layer(x, mask) if read is None else read(layer, x, mask)
    upstream = torch.arange(y.numel(), dtype=torch.float64).sin().view_as(y)
    return [y.detach(), *torch.autograd.grad((y * upstream).sum(), [x, *layer.parameters()])]


def loop(layer, x, mask, sign=1):
    """Eq. 9 and Sect. 2.1 pair by pair, with the paper's 1-based i and j."""
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


def test_the_worked_example():
    mask = SparsePattern(lead=1, window=2, use_top_k=False).mask(6)
    rows = ["".join(str(int(seen)) for seen in row) for row in mask]
    assert rows == ["111111", "111000", "111100", "101110", "100111", "100011"]


def test_segments_are_blocks_and_the_last_is_shorter():
    mask = SparsePattern(segment=3).same_segment(7)
    assert torch.equal(mask, torch.block_diag(torch.ones(3, 3), torch.ones(3, 3), torch.ones(1, 1)).bool())
    assert SparsePattern().same_segment(7).all()


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
    assert_close(table[1], torch.tensor([math.sin(-3), math.sin(-0.03), math.cos(-3), math.cos(-0.03)]).double())
    rows = sinusoids(torch.arange(400), 64)
    assert rows.dtype == torch.float32
    assert_close(rows[7] @ rows[4], rows[390] @ rows[387])  # the offset alone
    assert sinusoids(torch.arange(300), 4, torch.bfloat16)[257, 0] == torch.tensor(257.0).sin().bfloat16()


PATTERNS = [
    FULL,
    {**FULL, "segment": 4},
    {"lead": 2, "window": 3, "top_k": 2},
    {"lead": 2, "window": 3, "top_k": 2, "segment": 5},
    {**FULL, "use_top_k": True, "top_k": 3},
    {"lead": 2, "window": 4, "segment": 5, **NO_TOP_K},
    {"lead": 3, **NO_TOP_K, "use_window": False, "segment": 4},  # later segments see nothing
]


@pytest.mark.parametrize("relative", CHOICES["relative_attention"])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_it_is_eq_9_in_values_and_all_gradients(pattern, relative, monkeypatch):
    """Also where queries are read in chunks."""
    x, mask = batch(8, [0, 3, 8])
    layer = make(pattern, relative)
    expected = results(layer, x, mask, loop)
    for rows in (8, 3, 1):
        monkeypatch.setattr(attention_exhird, "MAX_SCORES", rows * HEADS * 3 * 8)
        for a, b in zip(results(layer, x, mask), expected, strict=True):
            assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("relative", ["shared", "separate", "none"])
def test_the_query_is_offset_from_the_key_and_not_the_key_from_the_query(relative):
    layer, (x, mask) = make(FULL, relative), batch(6, [0])
    assert layer.scale == 0.5  # of the four terms together
    assert (layer(x, mask) - loop(layer, x, mask, sign=-1)).abs().amax() > 1e-2


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -1e38])
def test_values_at_padding_change_nothing(garbage):
    layer = make({"lead": 2, "window": 3, "top_k": 2})
    x, mask = batch(9, [0, 4, 9])
    spoiled = x.detach().masked_fill(~mask[..., None], garbage).requires_grad_()
    for clean, found in zip(results(layer, x, mask), results(layer, spoiled, mask), strict=True):
        assert torch.equal(clean, found) and clean.isfinite().all()
    y, gradient, *_ = results(layer, x, mask)
    for each in (y, gradient):
        assert (each[~mask] == 0).all() and (each[mask] != 0).all()


def test_a_token_without_a_visible_key_gets_zero():
    layer = make({"lead": 2, "use_window": False, "segment": 4, **NO_TOP_K})
    y = layer(*batch(10, [0]))
    assert_close(y[0, 4:], layer.output.bias.expand(6, -1))
    assert (y[0, :4] - layer.output.bias).abs().amin() > 1e-6


def test_no_gradient_passes_through_the_choice():
    scores = torch.randn(3, 6, 6, requires_grad=True)
    assert not top_k_mask(scores, 2, torch.ones(6, dtype=torch.bool)).requires_grad
    layer = make({**FULL, "use_top_k": True, "top_k": 2})
    x, mask = batch(5, [0, 1])
    inputs = (x, *layer.parameters())
    assert torch.autograd.gradcheck(lambda x, *_: layer(x, mask), inputs, fast_mode=True)


def test_top_k_goes_by_the_scores_with_their_relative_terms():
    x, mask = batch(8, [0])
    top = {**FULL, "use_top_k": True, "top_k": 1}
    layer = make(top)
    near = layer(x, mask)
    with torch.no_grad():
        layer.position_bias.mul_(-9)
    assert (near - layer(x, mask)).abs().amax(-1).gt(1e-3).any()  # one key each, by v alone another one
    assert torch.equal(make({**top, "top_k": 99})(x, mask), make(FULL)(x, mask))


def test_low_precision_is_nearby_with_a_softmax_in_float32(monkeypatch):
    kinds, softmax = [], torch.Tensor.softmax
    monkeypatch.setattr(
        torch.Tensor, "softmax", lambda x, dim, dtype: kinds.append((x.dtype, dtype)) or softmax(x, dim, dtype=dtype)
    )
    layer, (x, mask) = make({"lead": 1, "window": 2, "top_k": 2}), batch(9, [0, 3])
    exact = layer(x, mask)
    low, *gradients = results(layer.bfloat16(), x.detach().bfloat16().requires_grad_(), mask)
    assert low.dtype == torch.bfloat16 and all(gradient.isfinite().all() for gradient in gradients)
    assert set(kinds) == {(torch.bfloat16, torch.float32), (torch.float64, torch.float64)}
    assert_close(low.double(), exact, rtol=0.1, atol=0.1)


def test_checkpoints_hold_projections_and_biases_alone():
    both = {f"{name}.{part}" for name in ("query", "value", "output") for part in ("weight", "bias")}
    biases = {"content_bias", "position_bias"}
    expected = {
        "shared": both | biases | {"key.weight"},
        "separate": both | biases | {"key.weight", "key.bias", "position.weight"},
        "none": both | biases,
        None: both | {"key.weight", "key.bias"},
    }
    assert {relative: set(make(FULL, relative).state_dict()) for relative in expected} == expected
