"""Clusters of equal size: k-means whose assignment is solved exactly, so that sizes differ by at most one.

Letters: n rows, d their size, K clusters, c (n, K) costs, s a cluster's size, q = floor(n / K).

Where each row goes where c_ik + p_k is least, the assignment is one of least cost for its own sizes, whatever the prices p. They
are set so that the sizes are nearly equal; what is left is moved one row at a time along the cheapest chain of clusters, which
keeps the assignment one of least cost (successive shortest paths, as in any minimum-cost flow).
"""

import numpy as np

from .errors import MergeError


def balanced_assignment(c: np.ndarray) -> np.ndarray:
    """Costs (n, K) -> labels (n,) of least total cost among those whose sizes are all q or q + 1.

    Raises:
        MergeError: for more clusters than rows, or costs that are no numbers.
    """
    n, K = c.shape
    if n < K:
        raise MergeError(f"{n} rows cannot fill {K} clusters. Use at most as many clusters as rows.")
    if not np.isfinite(c).all():
        raise MergeError(f"The costs of row {int((~np.isfinite(c)).any(1).argmax())} are no finite numbers.")
    return assign(c.astype(np.float64), np.zeros(K))[0]


def assign(c: np.ndarray, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Costs (n, K) in float64, prices to start from (K,) -> balanced labels (n,), and their prices."""
    p = balancing_prices(c, p)
    return even_out(c, (c + p).argmin(1)), p


def balancing_prices(c: np.ndarray, p: np.ndarray) -> np.ndarray:
    """p (K,) under which the rows' choices have nearly equal sizes.

    Rows choose softly, P_ik = softmax_k(-(c_ik + p_k) / e), and Newton's method makes the sums of P equal, sharper and sharper.
    Prices to start from are good where the costs have changed little, and else it begins anew.
    """
    K = c.shape[1]
    if K == 1:
        return p
    best, second = np.partition(c, 1, axis=1)[:, :2].T
    spread = max(float(np.mean(second - best)), 1e-12)
    found, off = equal_sums(c, p, spread / 100)
    if off > 1:
        found = np.zeros(K)
        for e in (spread, spread / 3, spread / 10, spread / 30, spread / 100):
            found, _ = equal_sums(c, found, e)
    return equal_sums(c, found, spread / 1000)[0]


def equal_sums(c: np.ndarray, p: np.ndarray, e: float, rounds: int = 20) -> tuple[np.ndarray, float]:
    """Newton's method for sum_i P_ik = n / K -> p (K,), and by how many rows the sums are off.

    d sum_i P_ik / d p_l = -(diag(s) - P^T P)_kl / e,  s the sums
    """
    n, K = c.shape
    P = soft_choices(c, p, e)
    for _ in range(rounds):
        s = P.sum(0)
        off = np.abs(s - n / K).max()
        if off <= 0.5:
            break
        H = (np.diag(s) - P.T @ P) / e + np.eye(K) * 1e-9 * n / e
        step = np.linalg.solve(H, s - n / K)
        step -= step.mean()  # all prices together change nothing
        for _ in range(8):  # as far as it helps
            P = soft_choices(c, p + step, e)
            if np.abs(P.sum(0) - n / K).max() < off:
                break
            step /= 2
        else:
            return p, float(off)
        p = p + step
    return p, float(np.abs(P.sum(0) - n / K).max())


def soft_choices(c: np.ndarray, p: np.ndarray, e: float) -> np.ndarray:
    """softmax of -(c + p) / e, (n, K)."""
    u = -(c + p) / e
    u = np.exp(u - u.max(1, keepdims=True))
    return u / u.sum(1, keepdims=True)


def even_out(c: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Labels of least cost for their sizes -> labels of least cost with sizes q and q + 1."""
    n, K = c.shape
    q, labels = n // K, labels.copy()
    sizes = np.bincount(labels, minlength=K)
    step, row = np.full((K, K), np.inf), np.zeros((K, K), dtype=int)
    changed = range(K)
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
            return labels  # no other cluster would rather be one of those with q + 1
        for a, b in zip(path, path[1:], strict=False):
            labels[row[a, b]] = b
        sizes[path[0]] -= 1
        sizes[path[-1]] += 1
        changed = path


def cheapest_moves(c: np.ndarray, labels: np.ndarray, a: int) -> tuple[np.ndarray, np.ndarray]:
    """-> (K,) what it costs at least to move one row from a to each other cluster, and which rows these are."""
    own = np.flatnonzero(labels == a)
    if not len(own):
        return np.full(c.shape[1], np.inf), np.zeros(c.shape[1], dtype=int)
    more = c[own] - c[own, a][:, None]
    best = more.argmin(0)
    step = more[best, np.arange(c.shape[1])]
    step[a] = np.inf
    return step, own[best]


def shortest_path(step: np.ndarray, sources: np.ndarray, sinks: np.ndarray) -> tuple[float, list[int]]:
    """The cheapest way from a source to a sink, and its cost; steps may be negative, rounds of them are not (Bellman-Ford)."""
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
    return float(cost[end]), path


def balanced_kmeans(
    x: np.ndarray, K: int, *, seed: int = 42, iterations: int = 1000, tolerance: float = 1e-8
) -> tuple[np.ndarray, np.ndarray]:
    """x (n, d) in float32 -> labels (n,) and centroids (K, d): k-means++, then exact balanced assignment and means in turn.

    Ends where the centroids move by no more than `tolerance` (the sum of squares), or after `iterations`.

    Raises:
        MergeError: for more clusters than rows.
    """
    from sklearn.cluster import kmeans_plusplus

    if len(x) < K:
        raise MergeError(f"{len(x)} rows cannot fill {K} clusters. Use at most as many clusters as rows.")
    centroids, _ = kmeans_plusplus(x, K, random_state=seed)
    p = np.zeros(K)
    for _ in range(iterations):
        # |x - m|^2 without |x|^2, which is the same for all clusters
        c = (centroids**2).sum(1) - 2 * (x @ centroids.T).astype(np.float64)
        labels, p = assign(c, p)
        members = np.zeros((K, len(x)), dtype=x.dtype)
        members[labels, np.arange(len(x))] = 1
        moved = members @ x / members.sum(1, keepdims=True)
        shift = float(((moved - centroids) ** 2).sum())
        centroids = moved
        if shift <= tolerance:
            break
    return labels, centroids
