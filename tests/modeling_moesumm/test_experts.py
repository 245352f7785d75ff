"""Deputies: each implementation is the formula, with all gradients; sizes are the paper's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close
from transformers import BartConfig

from modeling_moesumm import MoeSummConfig, MoeSummForConditionalGeneration
from modeling_moesumm.experts_moesumm import DeputyExperts, DeputyFeedForward
from modeling_moesumm.routing_moesumm import RoutingContext
from tests.modeling_moesumm.conftest import tiny_moesumm

M = 2**20  # the paper's million
WAYS = ("batched_mm", "grouped_mm", "eager")


def make_experts(deputies, inner, d=6, dtype=torch.float64, act=None, dropout=0.0):
    torch.manual_seed(0)
    experts = DeputyExperts(deputies, d, inner, act or nn.GELU(), dropout).to(dtype)
    for p in experts.parameters():
        nn.init.normal_(p)
    return experts


def run(experts, x, index, gate, way):
    """Values, and the gradients of all parameters, of the input and of the gates."""
    experts.zero_grad()
    x, gate = x.clone().requires_grad_(), gate.clone().requires_grad_()
    y = getattr(experts, way)(x, index, gate)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    return [y.detach(), x.grad, gate.grad, *(p.grad.clone() for p in experts.parameters())]


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 40), deputies=st.integers(1, 6), inner=st.integers(1, 8), used=st.integers(1, 6),
    way=st.sampled_from(WAYS[:2]),
)  # fmt: skip
def test_every_implementation_is_eager_with_all_gradients(tokens, deputies, inner, used, way):
    experts, used = make_experts(deputies, inner), min(used, deputies)  # the last deputies have no tokens
    x, gate = torch.randn(tokens, 6, dtype=torch.float64), torch.rand(tokens, dtype=torch.float64)
    index = torch.randint(used, (tokens,))
    found, expected = (run(experts, x, index, gate, kind) for kind in (way, "eager"))
    assert_close(found, expected)
    for gradient in found[3:]:
        assert (gradient[used:] == 0).all()
    if deputies > 1 and tokens:  # negative control: another routing gives another answer
        assert not torch.allclose(found[0], run(experts, x, (index + 1) % deputies, gate, "eager")[0])


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("inner", [16, 5])
def test_grouped_products_are_eager_in_every_type_and_size(inner, dtype, tolerance):
    """torch's kernel takes rows of 16 bytes, 16 numbers here and not 5; the other way is transformers' loop."""
    experts = make_experts(5, inner, d=8, dtype=dtype)
    x, gate, index = torch.randn(33, 8, dtype=dtype), torch.rand(33), torch.randint(4, (33,))  # no token uses the last
    found, expected = (run(experts, x, index, gate, way) for way in ("grouped_mm", "eager"))
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, rtol=tolerance, atol=tolerance * b.abs().max().item())  # of the same type


def test_a_gate_of_zero_adds_exactly_nothing_and_dropout_is_that_of_training():
    x, index = torch.randn(9, 6).double(), torch.randint(3, (9,))
    dropping, exact = make_experts(3, 400, dropout=0.5), make_experts(3, 4, act=nn.SiLU())
    for way in WAYS:
        assert (getattr(exact, way)(x, index, torch.zeros(9).double()) == 0).all()
        trained, written = (
            [getattr(dropping.train(mode), way)(x, index, torch.ones(9).double()) for _ in "ab"]
            for mode in (True, False)
        )
        assert not torch.equal(*trained) and torch.equal(*written)
    layer = tiny_moesumm(changes={"activation_dropout": 0.25}).backbone.model.encoder.layers[0]
    assert layer.deputies.experts.dropout == 0.25


def test_the_way_is_chosen_by_device_and_size():
    choose = make_experts(3, 512, d=4).choose_implementation
    assert choose(1, "cpu") == choose(10_000, "cpu") == choose(10_000, "cuda") == "grouped_mm"
    assert choose(16, "cuda") == "batched_mm"


def test_parameters_at_bart_large_are_those_of_the_formula():
    """MoeSumm, Table 8, in units of 2^20: 24 layers, d = 1024, d_h = 512, N = 3."""
    with torch.device("meta"):
        three, four = (MoeSummForConditionalGeneration(MoeSummConfig(datasets=[*names])) for names in ("abc", "abcd"))
    deputies = sum(p.numel() for each in three.deputies() for p in each.experts.parameters())
    selectors = sum(p.numel() for each in three.deputies() for p in each.selectors.parameters())
    total = sum(p.numel() for p in three.parameters())
    assert type(three.config.text_config) is BartConfig and len(three.deputies()) == 24
    assert abs((total - deputies - selectors) / M - 387.46) < 0.01  # the paper's last digit is cut, not rounded
    assert deputies == 3 * 24 * (1024 * 512 + 512 + 512 * 1024) and round(deputies / 3 / M, 2) == 24.01
    assert round(selectors / M, 2) == 0.21 and round((deputies / 3 + selectors) / M, 2) == 24.22
    assert sum(p.numel() for p in four.parameters()) - total == 24 * 1024 * 3 == round(0.0703125 * M)


@pytest.mark.parametrize("rows", [None, torch.tensor([0, 2])])
def test_a_layer_on_another_device_than_the_ids_routes_there(rows):
    """As the layers of a model with a device_map are; "meta" is the other device."""
    config = MoeSummConfig(text_config=BartConfig(d_model=6), datasets=["news", "mail"])
    config._experts_implementation = "batched_mm"
    layer = DeputyFeedForward(config, 6, 5, nn.GELU(), 0.0).to("meta")
    routing = RoutingContext(True, torch.tensor([1, -1, 0]), rows, recording=True)
    x = torch.empty(3, 4, 6, device="meta")
    found, _ = layer(x, x, routing, 7)
    assert found.device.type == "meta" and found.shape == x.shape
    assert all(one.device.type == "meta" for one in routing.recorded[7])  # in the record of all layers
    assert routing.dataset_ids.device.type == "cpu"
