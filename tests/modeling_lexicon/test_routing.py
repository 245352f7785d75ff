"""Gates, experts and decisions by themselves: formulas, fast paths against loops, the balance loss."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from modeling_lexicon import LexiconConfig
from modeling_lexicon.experts_lexicon import LexiconExperts, RoutingDecision
from modeling_lexicon.layers_lexicon import RoutedModule
from modeling_lexicon.low_rank_lexicon import LowRankExperts
from modeling_lexicon.routing_lexicon import load_balancing_loss, resolve_prompt_mask, top_k_routing
from tests.modeling_lexicon.conftest import E, each_implementation

KINDS = {None: LexiconExperts, 4: LowRankExperts}  # by rank
each_kind = pytest.mark.parametrize("rank", KINDS)


def make_experts(rank, num_experts, d, inner, implementation="grouped_mm"):
    torch.manual_seed(0)
    sizes = {"hidden_size": d, "intermediate_size": inner, "num_attention_heads": 1, "head_dim": 2, "expert_rank": rank}
    config = LexiconConfig(**sizes, num_local_experts=num_experts, num_experts_per_tok=1)
    config._experts_implementation = implementation
    experts = KINDS[rank](config)
    for p in experts.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return experts


def loop_over_experts(experts, x, index, weights):
    """y_n = sum_j w_nj E_{i_nj}(x_n), the reference for values and gradients: x (N, d), index (N, k), weights (N, k)."""
    y = 0
    for e, expert in enumerate(experts._unbind_experts()):
        share = ((index == e) * weights).sum(1, keepdim=True)  # (N, 1)
        y = y + share * experts.expert_forward(x, expert)
    return y


def value_and_gradients(experts, compute, *inputs):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    experts.zero_grad()
    y = compute(*inputs)
    y.square().sum().backward()
    return [y, *(x.grad for x in inputs), *(p.grad.clone() for p in experts.parameters())]


def assert_same(fast, slow):
    for a, b in zip(fast, slow, strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-5 * max(1, b.abs().max().item()))


@st.composite
def shapes(draw):
    """Tokens (or rows), experts, k, d, I, dtype; some do not fit the grouped kernel: sizes of no multiple of 16 bytes, and float64."""
    num_experts, unit = draw(st.integers(1, 5)), draw(st.sampled_from([1, 8]))
    d, inner = (unit * draw(st.integers(4, 7)) for _ in "ab")
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    return draw(st.integers(1, 40)), num_experts, draw(st.integers(1, num_experts)), d, inner, dtype


@each_kind
@each_implementation
@given(shapes())
@settings(max_examples=20, deadline=None)
def test_tokens_equal_the_loop_with_all_gradients(implementation, rank, shape):
    N, num_experts, k, d, inner, dtype = shape
    experts = make_experts(rank, num_experts, d, inner, implementation).to(dtype)
    x = torch.randn(N, d, dtype=dtype)
    weights, index = top_k_routing(torch.randn(N, num_experts, dtype=dtype), k)
    fast = value_and_gradients(experts, lambda x, w: experts(x, index, w), x, weights)
    assert_same(fast, value_and_gradients(experts, lambda x, w: loop_over_experts(experts, x, index, w), x, weights))
    if k < num_experts:  # negative control: other experts give another answer
        assert not torch.allclose(fast[0], loop_over_experts(experts, x, (index + 1) % num_experts, weights), atol=1e-5)


@each_kind
@each_implementation
@pytest.mark.parametrize("soft", [False, True])
@given(shapes())
@settings(max_examples=20, deadline=None)
def test_rows_equal_the_loop_with_all_gradients(soft, implementation, rank, shape):
    (N, num_experts, _, d, inner, dtype), T = shape, 3
    experts = make_experts(rank, num_experts, d, inner, implementation).to(dtype)
    x, index = torch.randn(N, T, d, dtype=dtype), torch.randint(num_experts, (N,))
    weights = torch.randn(N, num_experts, dtype=dtype).softmax(-1) if soft else torch.ones(N, dtype=dtype)

    def loop(x, w):
        of_tokens = torch.arange(num_experts).expand(N * T, -1) if soft else index.repeat_interleave(T)[:, None]
        shares = w.repeat_interleave(T, dim=0) if soft else w.repeat_interleave(T)[:, None]
        return loop_over_experts(experts, x.flatten(0, 1), of_tokens, shares).view(N, T, -1)

    fast = value_and_gradients(experts, lambda x, w: experts(x, RoutingDecision(index, w)), x, weights)
    assert_same(fast, value_and_gradients(experts, loop, x, weights))
    if not soft:  # the formulation for torch.compile
        assert_same([experts._batched_rows(x, index)], [fast[0]])
    if num_experts > 1:
        other = RoutingDecision((index + 1) % num_experts, weights.roll(1, 1) if soft else weights)
        assert not torch.allclose(fast[0], experts(x, other), atol=1e-5)


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


PRODUCTS = {"_grouped_mm", "bmm", "mm"}


@each_kind
@pytest.mark.parametrize(
    "implementation, own", [("eager", {"mm"}), ("batched_mm", {"bmm"}), ("grouped_mm", {"_grouped_mm"})]
)
def test_each_implementation_runs_its_own_products(rank, implementation, own):
    experts, (weights, index) = make_experts(rank, 4, 8, 12, implementation), top_k_routing(torch.randn(9, 4), 2)
    with Operations() as ran:
        experts(torch.randn(9, 8), index, weights)
    assert ran.names & PRODUCTS == (own | {"mm"} if rank else own)  # the shared MLP's
    with Operations() as ran:
        experts(torch.randn(3, 2, 8), RoutingDecision(torch.tensor([2, 0, 2])))
    assert ("bmm" in ran.names) == (implementation == "batched_mm")


@each_kind
def test_only_experts_that_some_row_chose_run_and_each_row_once(rank, monkeypatch):
    experts = make_experts(rank, 4, 6, 5)
    ran, run = [], type(experts).expert_forward
    monkeypatch.setattr(type(experts), "expert_forward", lambda self, x, w: ran.append(len(x)) or run(self, x, w))
    x = torch.randn(5, 2, 6)
    experts(x, RoutingDecision(torch.tensor([3, 1, 3, 3, 1])))
    assert sorted(ran) == [2, 3]
    ran.clear()
    experts(x, RoutingDecision(torch.full((5,), 2)))
    assert ran == [5]


def test_one_expert_a_token_weighs_exactly_one_with_the_gradient_of_the_full_softmax():
    logits = torch.randn(50, 6, requires_grad=True)
    weights, index = top_k_routing(logits, 1)
    assert (weights == 1).all() and torch.equal(index[:, 0], logits.argmax(-1))
    (got,) = torch.autograd.grad(weights.sum(), logits)
    (expected,) = torch.autograd.grad(logits.softmax(-1).max(-1).values.sum(), logits)
    assert_close(got, expected)
    assert got.abs().max() > 0.01 and top_k_routing(logits.bfloat16(), 3)[0].dtype == torch.float32


def routed_mlp(policy, **options):
    torch.manual_seed(0)
    config = LexiconConfig(hidden_size=8, intermediate_size=4, num_attention_heads=1, routing_policy=policy, **options)
    module = RoutedModule(config, 0).double()
    for p in module.parameters():
        torch.nn.init.normal_(p)
    return module


@pytest.mark.parametrize("policy", ["token", "sequence_soft", "sequence_hard"])
def test_weights_are_those_of_the_policy_in_float64(policy):
    """A float32 step in between would be seen: 1e-8 is far below its precision."""
    module, x, exact = routed_mlp(policy), torch.randn(2, 5, 8, dtype=torch.float64), {"rtol": 0, "atol": 1e-14}
    if policy == "token":
        logits = module.gate(x)
        weights, index = top_k_routing(logits, 2)
        p, order = logits.softmax(-1).topk(2)
        assert torch.equal(index, order)
        assert_close(weights, p / p.sum(-1, keepdim=True), **exact)
        return
    prompt = torch.tensor([[0, 1, 1, 0, 0], [1, 1, 1, 1, 0]]).bool()
    logits = torch.stack([module.gate(x[0, 1:3]).mean(0), module.gate(x[1, :4]).mean(0)])
    other = module.prompt_logits(torch.randn(2, 5, 8).double(), prompt)
    x[0, 0] = x[0, 3:] = x[1, 4] = torch.nan  # what is not read may be anything
    found = module.decide_by_gate(x, prompt)
    assert_close(found.logits, logits, **exact)
    assert not torch.allclose(other, logits, atol=1e-2) and torch.equal(found.index, logits.argmax(-1))
    expected = logits.softmax(-1) if policy == "sequence_soft" else torch.ones(2).double()
    assert_close(found.weights, expected, **exact)
    assert found.weights.requires_grad


def test_the_prompt_is_what_is_real_and_masked_and_never_empty():
    attention = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1], [1, 1, 1, 1]])
    masked = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]])
    assert torch.equal(resolve_prompt_mask((3, 4), attention, None, "cpu"), attention.bool())
    prompt = resolve_prompt_mask((3, 4), attention, masked, "cpu")
    # row 1 has no real token in its mask, row 2 no token at all: their first real one
    assert prompt.int().tolist() == [[1, 1, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0]]
    assert resolve_prompt_mask((3, 4), None, None, "cpu").all()


def balance(logits, policy="token", k=2, mask=None):
    return load_balancing_loss(LexiconConfig(routing_policy=policy, num_experts_per_tok=k), logits, mask)


def test_the_balance_is_mixtrals_of_tokens_or_rows_and_padding_does_not_count():
    torch.manual_seed(0)
    layers, mask = [torch.randn(2, 7, E) for _ in range(3)], torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    expected = load_balancing_loss_func(tuple(logits.flatten(0, 1) for logits in layers), E, 2, mask)
    longer = torch.cat([torch.ones(2, 5), mask], 1)  # with a cache the mask covers earlier tokens, too
    assert_close(balance(tuple(layers), mask=longer), expected)
    layers[1][1, 4:] = 100 * torch.randn(3, E)
    assert_close(balance(tuple(layers), mask=mask), expected)
    assert not torch.isclose(balance(tuple(layers)), expected, atol=1e-3)
    even, collapsed = 50.0 * torch.eye(4).repeat(3, 1), torch.tensor([[50.0, 0, 0, 0]] * 12)
    assert_close(balance((even,), "sequence_hard", mask=mask), torch.tensor(1.0))
    assert_close(balance((collapsed,), "domain", mask=mask), torch.tensor(4.0))
