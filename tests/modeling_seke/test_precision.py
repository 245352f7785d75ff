"""float64 stays float64 through SEKE's head and losses; half precisions are summed in float32."""

import copy

import pytest
import torch
from torch.testing import assert_close

from modeling_seke.head_seke import NoisyTopKRouter, load_balancing_loss, router_z_loss

D = 12


@pytest.mark.parametrize("k", [1, 2])
def test_routing_weights_have_the_precision_of_float64(k):
    torch.manual_seed(0)
    router, x = NoisyTopKRouter(D, 5, k).double().eval(), torch.randn(9, D, dtype=torch.float64)
    logits, weights, index = router(x)
    top = logits.gather(1, index)
    expected = torch.ones_like(top) if k == 1 else top.exp() / top.exp().sum(-1, keepdim=True)
    assert weights.dtype == torch.float64
    assert_close(weights, expected, rtol=1e-14, atol=0)
    (gradient,) = torch.autograd.grad((weights * torch.randn_like(weights)).sum(), router.gate.weight)
    assert gradient.dtype == torch.float64 and gradient.abs().max() > 0


def test_the_routers_losses_have_the_precision_of_float64():
    logits = torch.randn(9, 4, dtype=torch.float64)
    index = logits.topk(2).indices
    p = logits.exp() / logits.exp().sum(-1, keepdim=True)
    exact = torch.bincount(index.flatten(), minlength=4).double() / 9
    assert_close(load_balancing_loss(logits, index), 4 * (exact * p.mean(0)).sum(), rtol=1e-14, atol=0)
    assert_close(router_z_loss(logits), logits.exp().sum(-1).log().square().mean(), rtol=1e-14, atol=0)
    for loss in (load_balancing_loss(logits.bfloat16(), index), router_z_loss(logits.bfloat16())):
        assert loss.dtype == torch.float32


def test_a_model_in_float64_has_its_loss_in_float64(tiny_seke, tiny_tokenizer):
    exact = tiny_seke(router_aux_loss_coef=0.1, router_z_loss_coef=0.1).double()
    batch = tiny_tokenizer(["graph cuts in the network", "learning"], padding=True, return_tensors="pt")
    labels = batch["attention_mask"] - 100 * (1 - batch["attention_mask"])
    outputs = exact(**batch, labels=labels)
    assert outputs.loss.dtype == outputs.logits.dtype == torch.float64
    half = copy.deepcopy(exact).bfloat16()(**batch, labels=labels)
    assert half.loss.dtype == torch.float32 and half.logits.dtype == torch.bfloat16
    # the loss is smooth: halving a step halves its change, which float32 would drown in rounding
    weight, step = exact.classifier.weight, torch.zeros_like(exact.classifier.weight)
    step[0, 0] = 1e-9
    (gradient,) = torch.autograd.grad(outputs.loss, weight)
    with torch.no_grad():
        weight += step
        moved = exact(**batch, labels=labels).loss - outputs.loss
    assert_close(moved / 1e-9, gradient[0, 0], rtol=1e-4, atol=1e-7)
