"""The layers against their formulas: experts against the loop, recurrent passes against one document at a time."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from modeling_seke import SekeConfig
from modeling_seke.layers_seke import (
    EXPERTS_IMPLEMENTATIONS,
    NoisyTopKRouter,
    PackedTokens,
    SekeExperts,
    SekeRnn,
    load_balancing_loss,
    router_z_loss,
)

D = 12
each_implementation = pytest.mark.parametrize("implementation", EXPERTS_IMPLEMENTATIONS)


def make_experts(num_experts: int, dtype=torch.float64, d=D, width=20) -> SekeExperts:
    torch.manual_seed(num_experts)
    experts = SekeExperts(num_experts, d, width, dropout=0.1).to(dtype).eval()
    for p in experts.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return experts


def reference_experts(experts, x, index, weights):
    """The formula as a loop over experts, which all implementations must equal in values and in all gradients."""
    y = torch.zeros_like(x)
    for e, expert_weights in enumerate(experts.unbind_experts()):
        token, slot = (index == e).nonzero(as_tuple=True)
        y = y.index_add(0, token, experts.expert_forward(x[token], expert_weights) * weights[token, slot, None])
    return y


def values_and_gradients(run, experts, x, index, weights):
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    experts.zero_grad()
    y = run(x, index, weights)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    return [y, x.grad, weights.grad, *(p.grad.clone() for p in experts.parameters())]


@each_implementation
@pytest.mark.parametrize("tokens, num_experts, k", [(1, 4, 2), (64, 3, 1), (33, 8, 8), (5, 1, 1), (2, 16, 2)])
def test_experts_equal_the_loop_in_values_and_all_gradients(tokens, num_experts, k, implementation):
    experts = make_experts(num_experts)
    x = torch.randn(tokens, D, dtype=torch.float64)
    top, index = torch.randn(tokens, num_experts, dtype=torch.float64).topk(k)
    weights = top.softmax(-1)
    fast = values_and_gradients(lambda *args: experts(*args, implementation), experts, x, index, weights)
    slow = values_and_gradients(lambda *args: reference_experts(experts, *args), experts, x, index, weights)
    for a, b in zip(fast, slow, strict=True):
        assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert experts(x[:0], index[:0], weights[:0], implementation).shape == (0, D)
    if k < num_experts:  # negative control: another routing gives another answer
        assert not torch.allclose(fast[0], experts(x, (index + 1) % num_experts, weights, implementation))


KERNELS = [(torch.float32, 20, 3), (torch.float32, 18, 1), (torch.bfloat16, 16, 3)]


@pytest.mark.parametrize("dtype, width, calls", KERNELS)
def test_grouped_products_run_in_their_kernel_where_there_is_one(dtype, width, calls, monkeypatch):
    ran, product = [], F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda *args, **more: ran.append(1) or product(*args, **more))
    experts = make_experts(4, dtype, 16, width)
    x, index = torch.randn(30, 16, dtype=dtype), torch.randn(30, 3).topk(2).indices  # no token chooses the last expert
    weights = torch.full((30, 2), 0.5, dtype=dtype)
    fast = values_and_gradients(lambda *args: experts(*args, "grouped_mm"), experts, x, index, weights)
    slow = values_and_gradients(lambda *args: reference_experts(experts, *args), experts, x, index, weights)
    assert len(ran) == calls
    if dtype == torch.bfloat16:  # its rounding decides which units are on, so that gradients of some differ
        fast, slow = fast[:1], slow[:1]
    for a, b in zip(fast, slow, strict=True):
        assert_close(a, b, rtol=1e-4, atol=5e-2 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("dtype, close", [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_routing_weights_are_the_softmax_over_the_k_largest_scores_in_the_states_precision(dtype, close):
    torch.manual_seed(0)
    router, x = NoisyTopKRouter(D, 5, 2).to(dtype).eval(), torch.randn(9, D, dtype=dtype)
    logits, weights, index = router(x)
    assert_close(logits, x @ router.gate.weight.T + router.gate.bias)
    masked = logits.masked_fill(torch.ones_like(logits).scatter(1, index, 0).bool(), float("-inf"))
    expected = masked.exp() / masked.exp().sum(-1, keepdim=True)
    assert_close(weights, expected.gather(1, index), rtol=close, atol=close)
    assert (weights[:, 0] >= weights[:, 1]).all()
    (gradient,) = torch.autograd.grad((weights * torch.randn_like(weights)).sum(), router.gate.weight)
    assert gradient.dtype == dtype and gradient.abs().max() > 0


def test_noise_moves_the_choice_in_training_only():
    torch.manual_seed(0)
    router, x = NoisyTopKRouter(D, 8, 2), torch.randn(200, D)
    assert not torch.equal(router(x)[2], router(x)[2])
    assert_close(router(x)[0], router(x)[0], rtol=0, atol=0)  # the clean scores stay
    router.eval()
    assert torch.equal(router(x)[2], router(x)[2])


def test_with_one_expert_per_token_the_weight_is_one_and_the_gate_still_learns():
    torch.manual_seed(0)
    router = NoisyTopKRouter(D, 4, 1).double().eval()
    _, weights, _ = router(torch.randn(9, D, dtype=torch.float64))
    assert torch.equal(weights, torch.ones(9, 1, dtype=torch.float64))
    (weights * torch.randn(9, 1)).sum().backward()
    assert router.gate.weight.grad.abs().max() > 0


MASKS = {
    "right padding": [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]],
    "left padding": [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 1]],
    "holes": [[1, 0, 1, 0, 1], [0, 1, 1, 1, 1], [1, 1, 0, 0, 1]],
    "an empty document, shortest first": [[1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 0]],
}
each_mask = pytest.mark.parametrize("mask", [*map(torch.tensor, MASKS.values())], ids=MASKS)


@each_mask
def test_packed_tokens_gather_the_real_tokens_and_scatter_them_back(mask):
    x = torch.randn(*mask.shape, D)
    tokens = PackedTokens(mask)
    assert_close(tokens.scatter(tokens.gather(x)), x * mask.unsqueeze(-1))
    assert tokens.lengths.tolist() == sorted((n for n in mask.sum(1).tolist() if n), reverse=True)


def make_rnn(rnn_type="lstm", layers=2) -> SekeRnn:
    torch.manual_seed(0)
    text = {"model_type": "bert", "hidden_size": D, "num_attention_heads": 2}
    return SekeRnn(SekeConfig(text_config=text, rnn_type=rnn_type, rnn_num_layers=layers)).eval()


@each_mask
@pytest.mark.parametrize("layers", [1, 3])
def test_the_padded_pass_equals_the_packed_one_and_each_document_alone(layers, mask):
    """In values and all gradients."""
    rnn, tokens, results = make_rnn(layers=layers), PackedTokens(mask), []
    x = tokens.gather(torch.randn(*mask.shape, D))
    for run in (rnn._rnn_packed, rnn._lstm_padded):
        rnn.zero_grad()
        leaf = x.clone().requires_grad_()
        out = run(leaf, tokens)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        results.append([out, leaf.grad, *(p.grad.clone() for p in rnn.parameters())])
    for packed, padded in zip(*results, strict=True):
        assert_close(padded, packed, rtol=1e-4, atol=1e-5)
    shuffled = rnn._lstm_padded(x.flip(0), tokens)  # negative control: the order of words matters
    assert not torch.allclose(shuffled.flip(0), results[1][0], atol=1e-3)
    together, states = tokens.scatter(results[0][0]), tokens.scatter(x)
    for row, real in enumerate(mask.bool()):
        if real.any():
            alone = rnn.recurrent(states[row, real].unsqueeze(1))[0].squeeze(1)
            assert_close(together[row, real], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rnn_type", ["lstm", "gru"])
def test_the_recurrent_encoder_adds_both_directions_to_its_input(rnn_type):
    rnn, mask = make_rnn(rnn_type), torch.ones(1, 6, dtype=torch.long)
    x = torch.randn(6, D)
    states = rnn.recurrent(x.unsqueeze(1))[0].squeeze(1)
    assert_close(rnn(x, PackedTokens(mask)), x + states[:, :D] + states[:, D:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_experts, k", [(4, 2), (8, 1)])
def test_the_balance_loss_is_k_for_uniform_and_E_for_collapsed_routing_which_it_counters(num_experts, k):
    tokens = 12 * num_experts
    uniform = (torch.arange(tokens)[:, None] + torch.arange(k)) % num_experts
    assert_close(load_balancing_loss(torch.zeros(tokens, num_experts), uniform), torch.tensor(float(k)))
    logits = torch.zeros(tokens, num_experts)
    logits[:, :k] = 20.0
    collapsed = torch.arange(k).expand(tokens, k)
    assert_close(load_balancing_loss(logits, collapsed), torch.tensor(float(num_experts)))
    logits = torch.zeros(tokens, num_experts, requires_grad=True)
    load_balancing_loss(logits, collapsed).backward()
    assert (logits.grad[:, :k] > 0).all() and (logits.grad[:, k:] < 0).all()


def test_the_routers_losses_are_their_formulas_in_float64_or_float32():
    logits = torch.randn(9, 4, dtype=torch.float64)
    index = logits.topk(2).indices
    p = logits.exp() / logits.exp().sum(-1, keepdim=True)
    exact = torch.bincount(index.flatten(), minlength=4).double() / 9
    assert_close(load_balancing_loss(logits, index), 4 * (exact * p.mean(0)).sum(), rtol=1e-14, atol=0)
    assert_close(router_z_loss(logits), logits.exp().sum(-1).log().square().mean(), rtol=1e-14, atol=0)
    for loss in (load_balancing_loss(logits.bfloat16(), index), router_z_loss(logits.bfloat16())):
        assert loss.dtype == torch.float32


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["batched_mm", "grouped_mm"])
def test_without_synchronisation_the_experts_compile_into_one_graph(name, tiny_seke):
    moe, x = tiny_seke().moe, torch.randn(40, 32)
    torch._dynamo.reset()
    compiled = torch.compile(moe, backend="aot_eager", fullgraph=True)
    assert_close(compiled(x, name)[0], moe(x)[0], rtol=0, atol=1e-5)
