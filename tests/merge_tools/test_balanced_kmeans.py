"""Balanced clusters: sizes, costs compared with an exact solver, and k-means."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from merge_tools.clustering.balanced_kmeans import balanced_assignment, balanced_kmeans


def least_cost(c):
    """An exact solver: each cluster has q columns that must be filled, and one that may be."""
    n, K = c.shape
    q = n // K
    columns = np.concatenate([np.repeat(c, q, axis=1), c if n % K else c[:, :0]], 1)
    spare = np.full((columns.shape[1] - n, columns.shape[1]), 1e6)  # rows that take the places which stay free
    spare[:, K * q :] = 0
    full = np.concatenate([columns, spare])
    rows, chosen = linear_sum_assignment(full)
    return full[rows, chosen].sum()


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 6), st.integers(0, 30), st.integers(0, 10_000), st.sampled_from(["plain", "ties", "one cheap"]))
def test_the_assignment_has_the_least_cost(K, more, seed, kind):
    generator, n = np.random.default_rng(seed), K + more
    c = generator.random((n, K))
    if kind == "ties":
        c = np.round(c * 3)
    if kind == "one cheap":  # all want the same
        c[:, 0] -= 5
    labels, _ = balanced_assignment(c, np.zeros(K))
    sizes = np.bincount(labels, minlength=K)
    assert sizes.max() - sizes.min() <= 1 and sizes.sum() == n
    assert c[np.arange(n), labels].sum() == pytest.approx(least_cost(c), abs=1e-9)


def test_a_large_assignment_is_balanced_and_optimal_by_duality():
    generator = np.random.default_rng(0)
    x = np.concatenate([generator.normal(m, 1, (n, 8)) for m, n in ((0, 3000), (2, 500), (-3, 207))])
    c = ((x[:, None] - x[[0, 3100, 3600, 5]]) ** 2).sum(-1)
    labels, _ = balanced_assignment(c, np.zeros(4))
    assert sorted(np.bincount(labels)) == [926, 927, 927, 927]
    for a in range(4):  # no two rows would rather change places
        for b in range(a):
            to_b = (c[labels == a, b] - c[labels == a, a]).min()
            to_a = (c[labels == b, a] - c[labels == b, b]).min()
            assert to_a + to_b >= -1e-9


def test_k_means_finds_clusters_of_equal_size_and_their_means():
    generator = np.random.default_rng(0)
    truth = np.repeat(np.arange(4), 50)
    x = (np.eye(4)[truth] * 10 + generator.normal(size=(200, 4))).astype(np.float32)
    order = generator.permutation(200)
    labels, centroids = balanced_kmeans(x[order], 4)
    assert all(len(set(labels[truth[order] == k])) == 1 for k in range(4))
    for k in range(4):
        assert np.allclose(centroids[k], x[order][labels == k].mean(0), atol=1e-5)
    again, _ = balanced_kmeans(x[order], 4)
    assert (again == labels).all()
    assert (balanced_kmeans(x[order], 1)[0] == 0).all()
