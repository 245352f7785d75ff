"""float64 stays float64 through SEKE's head and losses; half precisions are summed in float32."""

import pytest
import torch
from torch.testing import assert_close

from modeling_seke.layers_seke import NoisyTopKRouter, load_balancing_loss, router_z_loss

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
