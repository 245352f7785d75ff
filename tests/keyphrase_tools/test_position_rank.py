"""PositionRank against a plain solution of its equation."""

import numpy as np
import pytest

from lexperts_lite.position_rank import DAMPING, FLOOR, STEPS, WINDOW, position_ranks


def plain(numbers, counted, steps=None):
    """log(n r) of the words of one document, by matrices; the solution of the equation, or after steps of the power iteration."""
    chosen = [i for i, is_counted in enumerate(counted) if is_counted]
    names = sorted({numbers[i] for i in chosen})
    index, n = {name: i for i, name in enumerate(names)}, len(names)
    weights, start = np.zeros((n, n)), np.zeros(n)
    for i in chosen:
        start[index[numbers[i]]] += 1 / (1 + i)
        for j in chosen:
            if 0 < j - i < WINDOW and numbers[i] != numbers[j]:
                a, b = index[numbers[i]], index[numbers[j]]
                weights[a, b] += 1
                weights[b, a] += 1
    start /= start.sum()
    moves = weights / np.maximum(weights.sum(0), 1)
    r = np.full(n, 1 / n) if steps else np.linalg.solve(np.eye(n) - DAMPING * moves, (1 - DAMPING) * start)
    for _ in range(steps or 0):
        r = (1 - DAMPING) * start + DAMPING * moves @ r
    return np.array([np.log(n * r[index[numbers[i]]] + FLOOR) if counted[i] else 0 for i in range(len(numbers))])


@pytest.mark.parametrize("lengths", [[30], [40, 7, 25], [1, 60]], ids=str)
def test_ranks_solve_the_equation_in_each_document(lengths):
    random = np.random.default_rng(0)
    documents = [(random.integers(0, 12, length), random.random(length) < 0.7) for length in lengths]
    for _, counted in documents:
        counted[0] = True
    found = position_ranks(
        np.concatenate([numbers for numbers, _ in documents]),
        np.repeat(np.arange(len(lengths)), lengths),
        np.concatenate([np.arange(length) for length in lengths]),
        np.concatenate([counted for _, counted in documents]),
    )
    iterated = np.concatenate([plain(numbers.tolist(), counted.tolist(), STEPS) for numbers, counted in documents])
    np.testing.assert_allclose(found, iterated, atol=1e-9)
    expected = np.concatenate([plain(numbers.tolist(), counted.tolist()) for numbers, counted in documents])
    np.testing.assert_allclose(found, expected, atol=0.15)  # the iteration stops early
    np.testing.assert_array_equal(np.argsort(found[: lengths[0]])[-3:], np.argsort(expected[: lengths[0]])[-3:])


@pytest.mark.parametrize("counted", [[], [False, False]])
def test_no_word_is_counted(counted):
    zeros = np.zeros(len(counted), dtype=int)
    assert not position_ranks(zeros, zeros, zeros, np.array(counted, dtype=bool)).any()
