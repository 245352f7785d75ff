"""Sparse relative attention: masks against their definitions, and Eq. 9 as a loop."""

import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from modeling_exhird import attention_exhird
from modeling_exhird.attention_exhird import SparsePattern, SparseRelativeAttention, sinusoids, top_k_mask
from modeling_exhird.configuration_exhird import CHOICES

H, HEADS, D = 8, 2, 4
FULL = {"use_lead": False, "use_window": False, "use_top_k": False}


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


def test_top_k_takes_the_first_of_equal_scores_in_the_mask():
    scores = torch.tensor([[1.0, 2, 1, 1, 2, 1], [0, 0, 0, 0, 0, 0], [3, 1, 3, 1, 3, 1]])
    expected = torch.tensor([[1, 1, 0, 0, 1, 0], [1, 1, 1, 0, 0, 0], [1, 0, 1, 0, 1, 0]]).bool()
    everything = torch.ones(6, dtype=torch.bool)
    assert torch.equal(top_k_mask(scores, 3, everything), expected)
    expected = torch.tensor([[0, 1, 1, 0, 1, 0], [0, 1, 1, 1, 0, 0], [0, 1, 1, 0, 1, 0]]).bool()
    assert torch.equal(top_k_mask(scores, 3, torch.tensor([0, 1, 1, 1, 1, 1]).bool()), expected)
    assert not top_k_mask(scores, 3, ~everything).any()
    few = torch.tensor([1, 0, 0, 0, 0, 1]).bool()
    assert torch.equal(top_k_mask(scores, 99, few), few.expand(3, -1))
    assert not top_k_mask(scores.requires_grad_(), 2, everything).requires_grad


def test_sinusoids_are_computed_in_float32():
    assert sinusoids(torch.arange(300), 4, torch.bfloat16)[257, 0] == torch.tensor(257.0).sin().bfloat16()


PATTERNS = st.fixed_dictionaries(
    {
        "lead": st.integers(1, 3),
        "window": st.integers(0, 4),
        "top_k": st.integers(1, 9),
        **{name: st.booleans() for name in FULL},
    }
)


@settings(max_examples=40, deadline=None)
@given(PATTERNS, st.sampled_from(CHOICES["relative_attention"]), st.integers(1, 5))
def test_it_is_eq_9_in_values_and_all_gradients(pattern, relative, chunk):
    """Also where queries are read in chunks."""
    layer, (x, mask) = make(pattern, relative), batch(5, [0, 2, 5])
    with patch.object(attention_exhird, "MAX_SCORES", chunk * HEADS * 3 * 5):
        found = results(layer, x, mask)
    for a, b in zip(found, results(layer, x, mask, loop), strict=True):
        assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("relative", ["shared", "separate", "none"])
def test_the_query_is_offset_from_the_key_and_not_the_key_from_the_query(relative):
    layer, (x, mask) = make(FULL, relative), batch(6, [0])
    assert make(FULL).key.bias is None  # it would add the same to all scores
    assert layer.scale == 0.5  # of the four terms together
    assert (layer(x, mask) - loop(layer, x, mask, sign=-1)).abs().amax() > 1e-2
