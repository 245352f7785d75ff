"""The CRF against its formulas: sums over all paths, and a loop over positions with all gradients."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from modeling_hypernet.crf_hypernet import LinearChainCrf

ROWS = "1111100 0011111 0101101 0000000 0000100 1000001"  # padding on the right, on the left; holes; empty ...
MASK = torch.tensor([[int(digit) for digit in row] for row in ROWS.split()])


def make_crf(num_tags: int, dtype=torch.float64) -> LinearChainCrf:
    torch.manual_seed(num_tags)
    crf = LinearChainCrf(num_tags).to(dtype)
    for parameter in crf.parameters():
        torch.nn.init.normal_(parameter)
    return crf


def make_batch(num_tags: int, mask=MASK, dtype=torch.float64) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(num_tags)
    emissions = 2 * torch.randn(*mask.shape, num_tags, dtype=dtype)
    return emissions.requires_grad_(), torch.randint(num_tags, mask.shape), mask


def path_scores(crf, emissions, paths) -> torch.Tensor:
    """The class's formula without log Z: emissions (n, C), paths (P, n) -> (P,)."""
    at = emissions[torch.arange(paths.shape[1]), paths].sum(1)
    between = crf.transitions[paths[:, :-1], paths[:, 1:]].sum(1)
    return crf.start[paths[:, 0]] + at + between + crf.end[paths[:, -1]]


def all_paths(crf, emissions) -> tuple[torch.Tensor, torch.Tensor]:
    """emissions (n, C) -> all paths (C^n, n) and their scores (C^n,)."""
    paths = torch.tensor(list(itertools.product(range(crf.num_tags), repeat=len(emissions))))
    return paths, path_scores(crf, emissions, paths)


def loop(crf, emissions, tags, mask) -> tuple[torch.Tensor, torch.Tensor]:
    """The formulas as a loop over positions: the log-likelihood and log-marginals that the tree of products must equal."""
    likelihoods, marginals = [], torch.zeros_like(emissions)
    for b, inside in enumerate(mask != 0):
        e, y = emissions[b, inside], tags[b, inside]
        alpha, beta = [crf.start + e[0]], [crf.end]
        for t in range(1, len(e)):
            alpha.append((alpha[-1].unsqueeze(1) + crf.transitions).logsumexp(0) + e[t])
            beta.insert(0, (crf.transitions + e[-t] + beta[0]).logsumexp(1))
        log_z = (alpha[-1] + crf.end).logsumexp(0)
        likelihoods.append(path_scores(crf, e, y.unsqueeze(0))[0] - log_z)
        marginals[b, inside] = torch.stack(alpha) + torch.stack(beta) - log_z
    return torch.stack(likelihoods), marginals


@pytest.mark.parametrize("num_tags", [2, 3, 4])
def test_likelihood_marginals_and_best_path_equal_those_over_all_paths(num_tags):
    crf, (emissions, tags, mask) = make_crf(num_tags), make_batch(num_tags)
    likelihood = crf.log_likelihood(emissions, tags, mask)
    marginals = crf.log_marginals(emissions, mask)
    best, best_score = crf.viterbi(emissions, mask)
    assert (best[mask == 0] == -1).all() and (marginals[mask == 0] == 0).all()
    for b, inside in enumerate(mask != 0):
        if not inside.any():
            assert likelihood[b] == best_score[b] == 0
            continue
        paths, scores = all_paths(crf, emissions[b, inside])
        p = scores.softmax(0)
        gold = (paths == tags[b, inside]).all(1)
        one_hot = F.one_hot(paths, num_tags)  # (P, n, C)
        assert_close(likelihood[b], scores.log_softmax(0)[gold].squeeze(), rtol=1e-10, atol=1e-10)
        assert_close(marginals[b, inside].exp(), (p[:, None, None] * one_hot).sum(0), rtol=1e-10, atol=1e-10)
        assert torch.equal(best[b, inside], paths[scores.argmax()])
        assert_close(best_score[b], scores.max(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("length", [2, 31, 64, 65])
def test_the_tree_equals_the_loop_in_values_and_all_gradients(length):
    crf = make_crf(3)
    emissions, tags, mask = make_batch(3, (torch.rand(4, length + 5) < 0.8).long())
    mask[0], mask[1:, 0] = 1, 1
    inputs = [emissions, *crf.parameters()]
    weights = torch.randn_like(emissions)
    fast = crf.log_likelihood(emissions, tags, mask), crf.log_marginals(emissions, mask)
    slow = loop(crf, emissions, tags, mask)
    for a, b, w in zip(fast, slow, (weights[:, 0, 0], weights), strict=True):
        assert_close(a, b, rtol=1e-10, atol=1e-10)
        gradients = (torch.autograd.grad((y * w).sum(), inputs, retain_graph=True) for y in (a, b))
        for of_fast, of_slow in zip(*gradients, strict=True):
            assert_close(of_fast, of_slow, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -1e38])
def test_values_outside_the_mask_change_nothing(garbage):
    crf, (emissions, tags, mask) = make_crf(3, torch.float32), make_batch(3, dtype=torch.float32)
    spoiled = emissions.detach().masked_fill(mask.unsqueeze(2) == 0, garbage).requires_grad_()
    results = []
    for e, y in ((emissions, tags), (spoiled, tags.masked_fill(mask == 0, -100))):
        crf.zero_grad()
        likelihood, marginals = crf.log_likelihood(e, y, mask), crf.log_marginals(e, mask)
        (likelihood.sum() + (marginals * torch.arange(3)).sum()).backward()
        results.append([likelihood, marginals, *crf.viterbi(e, mask), e.grad, *(p.grad for p in crf.parameters())])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert (emissions.grad[mask == 0] == 0).all() and emissions.grad[mask == 1].any()


def test_low_precision_gives_float32_results_nearby():
    crf, (emissions, tags, mask) = make_crf(3, torch.float32).bfloat16(), make_batch(3, dtype=torch.float32)
    e = emissions.detach().bfloat16()

    def compute():
        return crf.log_likelihood(e, tags, mask), crf.log_marginals(e, mask), crf.viterbi(e, mask)[1]

    low = compute()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = compute()
    crf.double()
    for a, b, exact in zip(low, cast, compute(), strict=True):
        assert a.dtype == b.dtype == torch.float32 and exact.dtype == torch.float64 and torch.equal(a, b)
        assert_close(a.double(), exact, rtol=1e-5, atol=1e-5)


def test_extreme_emissions_stay_finite():
    crf = make_crf(3, torch.float32)
    emissions, tags, mask = make_batch(3, torch.ones(4, 150), dtype=torch.float32)
    emissions = (1e4 * emissions.detach().sign()).requires_grad_()
    likelihood, marginals = crf.log_likelihood(emissions, tags, mask), crf.log_marginals(emissions, mask)
    (likelihood.sum() + marginals.sum()).backward()
    for x in (likelihood, marginals, crf.viterbi(emissions, mask)[1], emissions.grad, crf.transitions.grad):
        assert x.isfinite().all()
    assert_close(marginals.exp().sum(2), mask)


def test_an_emission_of_minus_infinity_excludes_a_tag():
    crf, (emissions, tags, mask) = make_crf(3), make_batch(3)
    excluded, tags, without = emissions.detach().clone(), tags % 2, LinearChainCrf(2).double()
    excluded[..., 2] = float("-inf")
    for mine, theirs in zip(without.parameters(), crf.parameters(), strict=True):
        mine.data = theirs.data[(slice(2),) * theirs.dim()]
    likelihood = crf.log_likelihood(excluded.requires_grad_(), tags, mask)
    assert_close(likelihood, without.log_likelihood(emissions[..., :2], tags, mask))
    assert_close(crf.log_marginals(excluded, mask)[..., :2], without.log_marginals(emissions[..., :2], mask))
    likelihood.sum().backward()
    assert excluded.grad.isfinite().all() and not excluded.grad[..., 2].any()


def test_forbidden_transitions_are_never_taken():
    crf, (emissions, _, mask) = make_crf(3), make_batch(3)
    B, I, O = range(3)
    start, transitions = torch.ones(3, dtype=torch.bool), torch.ones(3, 3, dtype=torch.bool)
    start[I] = transitions[O, I] = False
    with torch.no_grad():  # forbidden transitions have the highest scores
        crf.start[I], crf.transitions[O, I] = 9, 9
    best, best_score = crf.viterbi(emissions, mask, (start, transitions))
    assert not torch.equal(crf.viterbi(emissions, mask)[0], best)
    for b, inside in enumerate(mask != 0):
        if inside.any():
            paths, scores = all_paths(crf, emissions[b, inside])
            forbidden = ~start[paths[:, 0]] | ~transitions[paths[:, :-1], paths[:, 1:]].all(1)
            scores = scores.masked_fill(forbidden, float("-inf"))
            assert torch.equal(best[b, inside], paths[scores.argmax()])
            assert_close(best_score[b], scores.max())
    impossible = crf.viterbi(emissions, mask, (torch.zeros(3), transitions))[1]
    assert (impossible[mask.any(1)] == float("-inf")).all()
