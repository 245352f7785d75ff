"""Sparse relative attention: masks against their definitions, both formulations against Eq. 9 as a loop."""

import math

import pytest
import torch
from torch.testing import assert_close

from modeling_exhird import attention_exhird
from modeling_exhird.attention_exhird import (
    RELATIVE,
    SparsePattern,
    SparseRelativeAttention,
    lead_mask,
    segment_mask,
    sinusoids,
    top_k_mask,
    window_mask,
)

H, HEADS, D = 8, 2, 4
FULL = {"use_lead": False, "use_window": False, "use_top_k": False}
NO_TOP_K = {"use_top_k": False}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Short texts then have several blocks."""
    monkeypatch.setattr(attention_exhird, "BLOCK", 4)


def make(pattern: dict, relative="shared", implementation="dense", dtype=torch.float64, **options):
    torch.manual_seed(0)
    layer = SparseRelativeAttention(
        H, HEADS, SparsePattern(**pattern), relative=relative, implementation=implementation, **options
    ).to(dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def batch(length: int, padding: list[tuple[int, int]], dtype=torch.float64):
    """padding: for each row, how many pads stand before and after its tokens."""
    torch.manual_seed(length)
    x = torch.randn(len(padding), length, H, dtype=dtype, requires_grad=True)
    mask = torch.ones(len(padding), length, dtype=torch.bool)
    for row, (before, after) in zip(mask, padding, strict=True):
        row[:before] = False
        row[length - after :] = False
    return x, mask


def results(layer, x, mask, read=None):
    """The output, and the gradients of x and all parameters."""
    y = layer(x, mask) if read is None else read(layer, x, mask)
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


@pytest.mark.parametrize("n", [1, 2, 7, 12])
def test_properties_of_the_masks(n):
    for size in (0, 1, 2, 3, 5):
        lead, window = lead_mask(n, size), window_mask(n, size)
        assert torch.equal(lead, lead.T) and torch.equal(window, window.T)
        assert lead.sum() == n * n - max(0, n - size) ** 2
        assert window.diagonal().all() and window.sum(1).max() <= 2 * (size // 2) + 1
        assert n < 6 or window.sum(1).max() == 2 * (size // 2) + 1
    assert torch.equal(window_mask(n, 2), window_mask(n, 3))
    assert torch.equal(window_mask(n, 1), torch.eye(n, dtype=torch.bool))
    assert lead_mask(n, n).all() and window_mask(n, 2 * (n - 1)).all() and segment_mask(n, n).all()
    assert n == 1 or not window_mask(n, 2 * (n - 1) - 1).all()
    assert SparsePattern(**FULL).mask(n).all()


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


@pytest.mark.parametrize("relative", RELATIVE)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_both_formulations_are_eq_9_in_values_and_all_gradients(pattern, relative):
    x, mask = batch(8, [(0, 0), (2, 1)])
    layer = make(pattern, relative)
    expected = results(layer, x, mask, loop)
    for layer.implementation in ("dense",) if layer.pattern.use_top_k else ("dense", "block"):
        for a, b in zip(results(layer, x, mask), expected, strict=True):
            assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("relative", ["shared", "separate", "none"])
def test_the_query_is_offset_from_the_key_and_not_the_key_from_the_query(relative):
    layer, (x, mask) = make(FULL, relative), batch(6, [(0, 0)])
    y = layer(x, mask)
    assert_close(y, loop(layer, x, mask), rtol=1e-10, atol=1e-10)
    assert (y - loop(layer, x, mask, sign=-1)).abs().amax() > 1e-2
