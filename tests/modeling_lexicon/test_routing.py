"""Gates, experts and decisions by themselves: formulas, fast paths against loops, the balance loss."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from modeling_lexicon import LexiconConfig
from modeling_lexicon.experts_lexicon import LexiconExperts, LinearExperts, RoutingDecision, loop_over_experts
from modeling_lexicon.generation_lexicon import nearest_centroids
from modeling_lexicon.layers_lexicon import RoutedModule
from modeling_lexicon.routing_lexicon import load_balancing_loss, resolve_prompt_mask, top_k_routing

# tokens (or rows x length), experts, k, d, I: odd ones, one of each, and one that fits the grouped kernel
SHAPES = [(1, 4, 2, 5, 7), (7, 3, 1, 6, 9), (33, 5, 5, 8, 4), (64, 4, 2, 16, 24), (10, 1, 1, 3, 2)]


def make_experts(kind, E, d, inner, implementation="grouped_mm"):
    torch.manual_seed(0)
    sizes = {"hidden_size": d, "intermediate_size": inner, "num_attention_heads": 1, "head_dim": 2}
    config = LexiconConfig(**sizes, num_local_experts=E, num_experts_per_tok=1)
    config._experts_implementation = implementation
    experts = LexiconExperts(config) if kind == "mlp" else LinearExperts(config, d, inner, kind == "linear with bias")
    for p in experts.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return experts


def value_and_gradients(experts, compute, *inputs):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    experts.zero_grad()
    y = compute(*inputs)
    y.square().sum().backward()
    return [y, *(x.grad for x in inputs), *(p.grad.clone() for p in experts.parameters())]


each_kind = pytest.mark.parametrize("kind", ["mlp", "linear", "linear with bias"])
each_shape = pytest.mark.parametrize("N, E, k, d, inner", SHAPES)
each_implementation = pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])


@each_kind
@each_shape
@each_implementation
def test_tokens_equal_the_loop_with_all_gradients(implementation, kind, N, E, k, d, inner):
    experts = make_experts(kind, E, d, inner, implementation)
    x = torch.randn(N, d)
    weights, index = top_k_routing(torch.randn(N, E), k)
    fast = value_and_gradients(experts, lambda x, w: experts(x, index, w), x, weights)
    slow = value_and_gradients(experts, lambda x, w: loop_over_experts(experts, x, index, w), x, weights)
    for a, b in zip(fast, slow, strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-5 * max(1, b.abs().max().item()))
    if k < E:  # negative control: other experts give another answer
        assert not torch.allclose(fast[0], loop_over_experts(experts, x, (index + 1) % E, weights), atol=1e-3)


@each_kind
@each_shape
@each_implementation
@pytest.mark.parametrize("soft", [False, True])
def test_rows_equal_the_loop_with_all_gradients(soft, implementation, kind, N, E, k, d, inner):
    experts, T = make_experts(kind, E, d, inner, implementation), 3
    x, index = torch.randn(N, T, d), torch.randint(E, (N,))
    weights = torch.randn(N, E).softmax(-1) if soft else torch.ones(N)

    def loop(x, w):
        of_tokens = torch.arange(E).expand(N * T, E) if soft else index.repeat_interleave(T)[:, None]
        shares = w.repeat_interleave(T, dim=0) if soft else w.repeat_interleave(T)[:, None]
        return loop_over_experts(experts, x.flatten(0, 1), of_tokens, shares).view(N, T, -1)

    fast = value_and_gradients(experts, lambda x, w: experts(x, RoutingDecision(index, w)), x, weights)
    slow = value_and_gradients(experts, loop, x, weights)
    for a, b in zip(fast, slow, strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-5 * max(1, b.abs().max().item()))
    if E > 1:
        other = RoutingDecision((index + 1) % E, weights.roll(1, 1) if soft else weights)
        assert not torch.allclose(fast[0], experts(x, other), atol=1e-3)


@each_kind
@each_shape
@each_implementation
def test_the_compiled_formulation_of_rows_is_the_same(implementation, kind, N, E, k, d, inner):
    experts = make_experts(kind, E, d, inner, implementation)
    x, index = torch.randn(N, 3, d), torch.randint(E, (N,))
    assert_close(experts.compiled_rows(x, index), experts(x, RoutingDecision(index)), rtol=1e-4, atol=1e-5)


class Operations(TorchDispatchMode):
    """The names of torch's operations that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


PRODUCTS = {"_grouped_mm", "bmm", "mm", "addmm"}


@each_kind
@pytest.mark.parametrize(
    "implementation, own", [("eager", {"mm"}), ("batched_mm", {"bmm"}), ("grouped_mm", {"_grouped_mm"})]
)
def test_each_implementation_runs_its_own_products(kind, implementation, own):
    experts, (weights, index) = make_experts(kind, 4, 8, 12, implementation), top_k_routing(torch.randn(9, 4), 2)
    with Operations() as ran:
        experts(torch.randn(9, 8), index, weights)
    assert ran.names & PRODUCTS == ({"addmm"} if (kind, implementation) == ("linear with bias", "eager") else own)
    with Operations() as ran:
        experts(torch.randn(3, 2, 8), RoutingDecision(torch.tensor([2, 0, 2])))
    assert ("bmm" in ran.names) == (implementation == "batched_mm")


@each_kind
@pytest.mark.parametrize("d, inner, dtype", [(5, 12, torch.float32), (8, 7, torch.float32), (8, 12, torch.float64)])
def test_what_the_grouped_product_does_not_take_is_computed_by_the_loop(kind, d, inner, dtype):
    """Rows of no multiple of 16 bytes, and float64."""
    x, (weights, index) = torch.randn(9, d, dtype=dtype), top_k_routing(torch.randn(9, 4, dtype=dtype), 2)
    experts, loop = (make_experts(kind, 4, d, inner, name).to(dtype) for name in ("grouped_mm", "eager"))
    with Operations() as ran:
        y = experts(x, index, weights)
    assert "_grouped_mm" not in ran.names and y.dtype == dtype
    assert torch.equal(y, loop(x, index, weights))


def test_an_implementation_for_whole_mlps_alone_is_refused_for_linear_layers():
    experts, (weights, index) = make_experts("linear", 4, 8, 12, "sonicmoe"), top_k_routing(torch.randn(9, 4), 2)
    with pytest.raises(ValueError, match="experts_implementation='sonicmoe'"):
        experts(torch.randn(9, 8), index, weights)


@each_kind
def test_only_experts_that_some_row_chose_run_and_each_row_once(kind, monkeypatch):
    experts = make_experts(kind, 4, 6, 5)
    ran, run = [], type(experts).expert_forward
    monkeypatch.setattr(type(experts), "expert_forward", lambda self, x, w: ran.append(len(x)) or run(self, x, w))
    x = torch.randn(5, 2, 6)
    experts(x, RoutingDecision(torch.tensor([3, 1, 3, 3, 1])))
    assert ran == [3, 2]
    ran.clear()
    experts(x, RoutingDecision(torch.full((5,), 2)))
    assert ran == [5]


# --- gates ----------------------------------------------------------------------------------------------------------


def test_the_kept_logits_softmax_is_the_renormalised_full_softmax():
    logits = torch.randn(50, 6)
    weights, index = top_k_routing(logits, 3)
    p, order = logits.softmax(-1).topk(3)
    assert torch.equal(index, order) and weights.dtype == torch.float32
    assert_close(weights, p / p.sum(-1, keepdim=True))
    assert top_k_routing(logits.bfloat16(), 3)[0].dtype == torch.float32


def test_one_expert_a_token_weighs_exactly_one_with_the_gradient_of_the_full_softmax():
    logits = torch.randn(50, 6, requires_grad=True)
    weights, index = top_k_routing(logits, 1)
    assert (weights == 1).all() and torch.equal(index[:, 0], logits.argmax(-1))
    (got,) = torch.autograd.grad(weights.sum(), logits)
    (expected,) = torch.autograd.grad(logits.softmax(-1).max(-1).values.sum(), logits)
    assert_close(got, expected)
    assert got.abs().max() > 0.01


def routed_mlp(policy, **options):
    torch.manual_seed(0)
    config = LexiconConfig(hidden_size=8, intermediate_size=4, num_attention_heads=1, routing_policy=policy, **options)
    module = RoutedModule(config, 0, config.hidden_size, LexiconExperts(config))
    for p in module.parameters():
        torch.nn.init.normal_(p)
    return module


@pytest.mark.parametrize("policy, k", [("token", 1), ("token", 2), ("sequence_soft", 2), ("sequence_hard", 2)])
def test_float64_stays_float64(policy, k):
    """A float32 step in between would be seen: 1e-8 is far below its precision."""
    module, x = routed_mlp(policy, num_experts_per_tok=k).double(), torch.randn(2, 5, 8, dtype=torch.float64)
    logits = module.gate(x) if policy == "token" else module.prompt_logits(x, torch.ones(2, 5, dtype=torch.bool))
    expected = logits.softmax(-1)
    if policy == "token":
        weights, index = top_k_routing(logits, k)
        expected = torch.ones_like(weights) if k == 1 else expected.gather(-1, index)
        assert_close(weights, expected / expected.sum(-1, keepdim=True), rtol=0, atol=1e-14)
        balance = load_balancing_loss((logits,), (index,))
        chosen = F.one_hot(index, 4).sum(2).double().mean((0, 1))
        assert_close(balance, 4 * (chosen * logits.softmax(-1).mean((0, 1))).sum(), rtol=0, atol=1e-14)
    else:
        assert_close(logits, module.gate(x).mean(1), rtol=0, atol=1e-14)
        found = module.decide(x, torch.ones(2, 5, dtype=torch.bool))
        assert found.weights.dtype == torch.float64
        if policy == "sequence_soft":
            assert_close(found.weights, expected, rtol=0, atol=1e-14)


def test_the_gate_reads_the_mean_over_the_prompt_alone():
    module, x = routed_mlp("sequence_soft"), torch.randn(2, 5, 8)
    prompt = torch.tensor([[0, 1, 1, 0, 0], [1, 1, 1, 1, 0]]).bool()
    expected = torch.stack([module.gate(x[0, 1:3]).mean(0), module.gate(x[1, :4]).mean(0)])
    assert_close(module.prompt_logits(x, prompt), expected)
    x[0, 0] = x[0, 3:] = x[1, 4] = torch.nan  # what is not read may be anything
    assert_close(module.prompt_logits(x, prompt), expected)
    assert not torch.allclose(module.prompt_logits(torch.randn(2, 5, 8), prompt), expected, atol=1e-2)


def test_soft_weighs_all_hard_takes_the_best_straight_through():
    x, prompt = torch.randn(3, 5, 8), torch.ones(3, 5, dtype=torch.bool)
    soft = routed_mlp("sequence_soft").decide(x, prompt)
    hard = routed_mlp("sequence_hard").decide(x, prompt)
    assert_close(soft.weights, soft.logits.softmax(-1))
    assert torch.equal(soft.index, hard.index) and torch.equal(hard.index, hard.logits.argmax(-1))
    assert (hard.weights == 1).all() and hard.weights.requires_grad


def test_a_routed_module_outside_of_its_layer_says_so():
    with pytest.raises(RuntimeError, match="RoutedModule was called without routing"):
        routed_mlp("token")(torch.randn(1, 2, 8))


# --- the prompt -----------------------------------------------------------------------------------------------------


def test_the_prompt_is_what_is_real_and_masked_and_never_empty():
    attention = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1], [1, 1, 1, 1]])
    masked = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]])
    everything = resolve_prompt_mask((3, 4), attention, None, "cpu")
    assert torch.equal(everything, attention.bool())
    prompt = resolve_prompt_mask((3, 4), attention, masked, "cpu")
    # row 1 has no real token in its mask, row 2 no token at all: their first real one
    assert prompt.int().tolist() == [[1, 1, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0]]
    assert resolve_prompt_mask((3, 4), None, None, "cpu").all()


def test_masks_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"attention_mask=\(2, 1, 4, 4\)"):
        resolve_prompt_mask((2, 4), torch.ones(2, 1, 4, 4), None, "cpu")
    with pytest.raises(ValueError, match=r"prompt_mask has the shape \(2, 9\).*\(2, 4\).*prefill_chunk_size=None"):
        resolve_prompt_mask((2, 4), None, torch.ones(2, 9), "cpu")


# --- load balance ---------------------------------------------------------------------------------------------------


def logits_for(choices, E=4, strength=50.0):
    """Logits (1, T, E) that choose these experts and no others, and the index (1, T, k)."""
    index = torch.tensor(choices)
    return torch.zeros(1, len(index), E).scatter(2, index[None], strength), index[None]


EVEN = [[0, 1], [2, 3], [1, 2], [3, 0]]


def test_uniform_routing_costs_k_and_a_collapsed_layer_e():
    for k in (1, 2, 3):
        logits = torch.zeros(1, 12, 4)
        index = torch.arange(12 * k).remainder(4).view(1, 12, k)
        assert_close(load_balancing_loss((logits,), (index,)), torch.tensor(float(k)))
    even, collapsed = logits_for(EVEN), logits_for([[0, 1]] * 4)
    assert_close(load_balancing_loss((even[0],), (even[1],)), torch.tensor(2.0))
    assert_close(load_balancing_loss((collapsed[0],), (collapsed[1],)), torch.tensor(4.0))
    # one of two layers raises the mean
    assert_close(load_balancing_loss((even[0], collapsed[0]), (even[1], collapsed[1])), torch.tensor(3.0))


def test_two_layers_that_collapse_on_different_experts_do_not_cancel():
    (a, i), (b, j) = logits_for([[0, 1]] * 4), logits_for([[2, 3]] * 4)
    assert_close(load_balancing_loss((a, b), (i, j)), torch.tensor(4.0))
    # the usual way, over all layers at once, sees nothing
    assert_close(load_balancing_loss_func((a[0], b[0]), 4, 2), torch.tensor(2.0))


def test_one_layer_equals_the_usual_loss_and_padding_does_not_count():
    torch.manual_seed(0)
    logits, mask = torch.randn(2, 7, 5), torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    index = logits.topk(2, dim=-1).indices
    expected = load_balancing_loss_func((logits.flatten(0, 1),), 5, 2, mask)
    assert_close(load_balancing_loss((logits,), (index,), mask), expected)
    logits[1, 4:] = 100 * torch.randn(3, 5)
    assert_close(load_balancing_loss((logits,), (index,), mask), expected)
    assert not torch.isclose(load_balancing_loss((logits,), (index,)), expected, atol=1e-3)


def test_rows_are_balanced_as_tokens_are():
    logits = torch.tensor([[50.0, 0], [0, 50.0]])
    assert_close(load_balancing_loss((logits,), (torch.tensor([0, 1]),)), torch.tensor(1.0))
    assert_close(load_balancing_loss((logits[[0, 0]],), (torch.tensor([0, 0]),)), torch.tensor(2.0))


# --- what is kept ---------------------------------------------------------------------------------------------------


def test_decisions_follow_their_rows():
    whole = RoutingDecision(torch.tensor([2, 0, 1]), torch.rand(3, 4), torch.rand(3, 4))
    whole.rows.groups  # noqa: B018  (read, so that the known experts are taken along)
    moved = whole.select([1, 1, 2, 0])
    assert moved.index.tolist() == [0, 0, 1, 2] == moved.rows.experts
    assert torch.equal(moved.weights, whole.weights[[1, 1, 2, 0]]) and moved.logits.shape == (4, 4)
    assert RoutingDecision(torch.tensor([2, 0, 1])).select([2, 0]).index.tolist() == [1, 2]


def test_the_nearest_centroid_is_found_after_normalising():
    centroids = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    ids, distances = nearest_centroids(torch.tensor([[9.0, 1.0], [0.01, 0.02]]), centroids)
    assert ids.tolist() == [0, 1] and ids.dtype == torch.int64 and distances.shape == (2, 2)
    # by the raw distance the second text would be as near to either
    assert_close(distances[1, 1], (torch.tensor([1.0, 2.0]) / 5**0.5 - centroids[1]).norm())
