"""Balanced k-means: clusters whose sizes differ by at most one, with an exactly optimal assignment step.

Notation: n rows of size d, K clusters, costs c `(n, K)`, cluster sizes s, q = floor(n / K).

If each row i is assigned to the cluster k with the smallest c_ik + p_k, the assignment has the least cost for its own
cluster sizes, whatever the prices p are. The prices are chosen so that the sizes are nearly equal. The remaining rows are
moved one at a time along the cheapest chain of clusters, which keeps the assignment optimal for its sizes (successive
shortest paths, as in minimum-cost flow).
"""

from itertools import pairwise

import numpy as np

ITERATIONS = 1000  # at most
TOLERANCE = 1e-8  # the sum of squared movements of centroids that ends the iterations


def balanced_assignment(c: np.ndarray, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The assignment of least total cost among those whose cluster sizes are q or q + 1.

    Costs c `(n, K)`, float64, and initial prices p `(K,)` -> labels `(n,)` and their prices `(K,)`.
    """
    p = balancing_prices(c, p)
    return rebalance(c, (c + p).argmin(1)), p


def balancing_prices(c: np.ndarray, p: np.ndarray) -> np.ndarray:
    """Prices p `(K,)` with which the cluster sizes are nearly equal.

    Rows are assigned softly, P_ik = softmax_k(-(c_ik + p_k) / e), and Newton's method equalises the column sums of P while
    the temperature e decreases. If the initial prices are far off, the search starts again from zero.
    """
    K = c.shape[1]
    if K == 1:
        return p
    best, second = np.partition(c, 1, axis=1)[:, :2].T
    spread = max(float(np.mean(second - best)), 1e-12)
    prices, off = equal_sums(c, p, spread / 100)
    if off > 1:
        prices = np.zeros(K)
        for e in (spread, spread / 3, spread / 10, spread / 30, spread / 100):
            prices, _ = equal_sums(c, prices, e)
    return equal_sums(c, prices, spread / 1000)[0]


def equal_sums(c: np.ndarray, p: np.ndarray, e: float, rounds: int = 20) -> tuple[np.ndarray, float]:
    """Newton's method for sum_i P_ik = n / K. Returns p `(K,)` and the largest deviation of a sum, in rows.

    d sum_i P_ik / d p_l = -(diag(s) - P^T P)_kl / e,  where s are the sums
    """
    n, K = c.shape
    P = soft_choices(c, p, e)
    for _ in range(rounds):
        s = P.sum(0)
        off = np.abs(s - n / K).max()
        if off <= 0.5:
            break
        step = np.linalg.solve((np.diag(s) - P.T @ P) / e + np.eye(K) * 1e-9 * n / e, s - n / K)
        step -= step.mean()  # a constant added to all prices has no effect
        for _ in range(8):  # line search
            P = soft_choices(c, p + step, e)
            if np.abs(P.sum(0) - n / K).max() < off:
                break
            step /= 2
        else:
            return p, float(off)
        p = p + step
    return p, float(np.abs(P.sum(0) - n / K).max())


def soft_choices(c: np.ndarray, p: np.ndarray, e: float) -> np.ndarray:
    """softmax_k(-(c + p) / e), `(n, K)`."""
    u = -(c + p) / e
    u = np.exp(u - u.max(1, keepdims=True))
    return u / u.sum(1, keepdims=True)


def rebalance(c: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Turns labels that are optimal for their sizes into optimal labels with sizes q and q + 1."""
    n, K = c.shape
    q, labels = n // K, labels.copy()
    sizes = np.bincount(labels, minlength=K)
    step, row = np.full((K, K), np.inf), np.zeros((K, K), dtype=int)
    changed = list(range(K))
    while True:
        for a in changed:
            step[a], row[a] = cheapest_moves(c, labels, a)
        too_big, too_small = sizes > q + 1, sizes < q
        sources = too_big if too_big.any() else sizes > q
        sinks = too_small if too_small.any() else sizes <= q
        if not (sources.any() and sinks.any()):
            return labels
        cost, path = shortest_path(step, sources, sinks)
        if not (too_big.any() or too_small.any()) and cost >= -1e-12:
            return labels  # no other choice of the clusters with q + 1 rows costs less
        for a, b in pairwise(path):
            labels[row[a, b]] = b
        sizes[path[0]] -= 1
        sizes[path[-1]] += 1
        changed = path


def cheapest_moves(c: np.ndarray, labels: np.ndarray, a: int) -> tuple[np.ndarray, np.ndarray]:
    """The least cost `(K,)` of moving one row from cluster a to each other cluster, and these rows `(K,)`."""
    members = np.flatnonzero(labels == a)
    if not len(members):
        return np.full(c.shape[1], np.inf), np.zeros(c.shape[1], dtype=int)
    more = c[members] - c[members, a][:, None]
    best = more.argmin(0)
    step = more[best, np.arange(c.shape[1])]
    step[a] = np.inf
    return step, members[best]


def shortest_path(step: np.ndarray, sources: np.ndarray, sinks: np.ndarray) -> tuple[float, list[int]]:
    """The cheapest path from a source to a sink and its cost (Bellman-Ford: steps may be negative, cycles are not)."""
    K = len(step)
    cost, previous = np.where(sources, 0.0, np.inf), np.full(K, -1)
    for _ in range(K):
        through = cost[:, None] + step
        best, a = through.min(0), through.argmin(0)
        better = best < cost - 1e-12
        if not better.any():
            break
        cost[better], previous[better] = best[better], a[better]
    end = int(np.where(sinks & ~sources, cost, np.inf).argmin())
    path = [end]
    while previous[path[0]] >= 0:
        path.insert(0, int(previous[path[0]]))
    return float(cost[end]), path


def balanced_kmeans(x: np.ndarray, K: int, *, seed: int = 42) -> tuple[np.ndarray, np.ndarray]:
    """k-means++ initialisation, then alternating exact balanced assignments and means.

    Rows x `(n, d)`, float32, K at most n -> labels `(n,)` and centroids `(K, d)`.
    """
    from sklearn.cluster import kmeans_plusplus

    centroids, _ = kmeans_plusplus(x, K, random_state=seed)
    p = np.zeros(K)
    for _ in range(ITERATIONS):
        # |x - m|^2 without |x|^2, which does not depend on the cluster
        c = (centroids**2).sum(1) - 2 * (x @ centroids.T).astype(np.float64)
        labels, p = balanced_assignment(c, p)
        members = np.zeros((K, len(x)), dtype=x.dtype)
        members[labels, np.arange(len(x))] = 1
        moved = members @ x / members.sum(1, keepdims=True)
        centroids, previous = moved, centroids
        if ((centroids - previous) ** 2).sum() <= TOLERANCE:
            break
    return labels, centroids
