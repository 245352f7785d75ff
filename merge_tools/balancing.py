"""Clusters of equal size: k-means whose assignment is solved exactly, so that sizes differ by at most one.

Letters: n rows, d their size, K clusters, c (n, K) costs, s a cluster's size, q = floor(n / K).

An assignment of least cost for its own sizes is found by prices: each row goes where c_ik + p_k is least. The prices are moved
until the sizes are nearly equal; what is left is moved one row at a time along the cheapest chain of clusters, which keeps
the assignment one of least cost (successive shortest paths, as in any minimum-cost flow).
"""

import numpy as np

from .errors import MergeError


def balanced_assignment(c: np.ndarray, rounds: int = 200) -> np.ndarray:
    """Costs (n, K) -> labels (n,) of least total cost among those whose sizes are all q or q + 1.

    Raises:
        MergeError: for more clusters than rows, or costs that are no numbers.
    """
    n, K = c.shape
    if n < K:
        raise MergeError(f"{n} rows cannot fill {K} clusters. Use at most as many clusters as rows.")
    if not np.isfinite(c).all():
        raise MergeError(f"The costs of row {int((~np.isfinite(c)).any(1).argmax())} are no finite numbers.")
    c = c.astype(np.float64)
    labels = (c + balancing_prices(c, rounds)).argmin(1)
    return even_out(c, labels)


def balancing_prices(c: np.ndarray, rounds: int) -> np.ndarray:
    """p (K,) under which the rows' choices have nearly equal sizes: the dual problem, by one price after the other.

    A price is set so that its cluster has n / K rows while the others' prices stand, over and over, until that changes nothing.
    """
    n, K = c.shape
    p, wanted = np.zeros(K), n / K
    for _ in range(rounds):
        sizes = np.bincount((c + p).argmin(1), minlength=K)
        if np.abs(sizes - wanted).max() <= 1:
            break
        for k in np.argsort(-np.abs(sizes - wanted)):
            others = np.delete(c + p, k, 1).min(1) if K > 1 else np.zeros(n)
            margins = np.sort(others - c[:, k])  # a row chooses k where p_k is below its margin
            place = n - round(wanted)
            low, high = margins[max(place - 1, 0)], margins[min(place, n - 1)]
            p[k] = (low + high) / 2
    return p


def even_out(c: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Labels of least cost for their sizes -> labels of least cost with sizes q and q + 1."""
    n, K = c.shape
    q, labels = n // K, labels.copy()
    sizes = np.bincount(labels, minlength=K)
    while True:
        too_big, too_small = sizes > q + 1, sizes < q
        if not (too_big.any() or too_small.any()):
            return labels
        sources = too_big if too_big.any() else sizes > q
        sinks = too_small if too_small.any() else sizes <= q
        step, row = cheapest_moves(c, labels)
        path = shortest_path(step, sources, sinks)
        moved = [(row[a, b], b) for a, b in zip(path, path[1:], strict=False)]
        for i, b in moved:
            labels[i] = b
        sizes[path[0]] -= 1
        sizes[path[-1]] += 1


def cheapest_moves(c: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """-> (K, K) what it costs at least to move one row from a to b, and which row that is."""
    K = c.shape[1]
    step, row = np.full((K, K), np.inf), np.zeros((K, K), dtype=int)
    for a in range(K):
        own = np.flatnonzero(labels == a)
        if len(own):
            more = c[own] - c[own, a][:, None]
            best = more.argmin(0)
            step[a], row[a] = more[best, np.arange(K)], own[best]
        step[a, a] = np.inf
    return step, row


def shortest_path(step: np.ndarray, sources: np.ndarray, sinks: np.ndarray) -> list[int]:
    """The cheapest way from any source to any sink; steps may be negative, rounds of them are not (Bellman and Ford)."""
    K = len(step)
    cost, before = np.where(sources, 0.0, np.inf), np.full(K, -1)
    for _ in range(K):
        through = cost[:, None] + step
        best, a = through.min(0), through.argmin(0)
        better = best < cost - 1e-12
        if not better.any():
            break
        cost[better], before[better] = best[better], a[better]
    end = int(np.where(sinks & ~sources, cost, np.inf).argmin())
    path = [end]
    while before[path[0]] >= 0:
        path.insert(0, int(before[path[0]]))
    return path


def distances(x: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """|x_i - m_k|^2 as (n, K), in float64."""
    cross = (x @ centroids.T).astype(np.float64)
    return np.maximum(
        (x.astype(np.float64) ** 2).sum(1)[:, None] - 2 * cross + (centroids.astype(np.float64) ** 2).sum(1), 0
    )


def balanced_kmeans(
    x: np.ndarray, K: int, *, seed: int = 42, iterations: int = 1000, tolerance: float = 1e-8
) -> tuple[np.ndarray, np.ndarray]:
    """x (n, d) -> labels (n,) and centroids (K, d): k-means++, then exact balanced assignment and means in turn.

    Ends where the centroids move by less than `tolerance` (the sum of squares), or after `iterations`.

    Raises:
        MergeError: for more clusters than rows, or rows that are no numbers.
    """
    from sklearn.cluster import kmeans_plusplus

    centroids, _ = kmeans_plusplus(x, K, random_state=seed)
    for _ in range(iterations):
        labels = balanced_assignment(distances(x, centroids))
        moved = np.stack([x[labels == k].mean(0) for k in range(K)]).astype(x.dtype)
        shift = float(((moved - centroids) ** 2).sum())
        centroids = moved
        if shift <= tolerance:
            break
    return labels, centroids
