"""Bootstrap confidence intervals of means over rows, for scores of documents or definitions."""

import numpy as np

SAMPLES = 2000
CHUNK = 100  # bootstrap samples that are in memory together


def bootstrap_means(
    values: np.ndarray, samples: int = SAMPLES, seed: int | np.random.Generator | None = 0
) -> np.ndarray:
    """Means over rows that are drawn with replacement, `(B,)` or `(B, m)`, for B samples of values `(n,)` or `(n, m)`.

    Every column gets the same rows, so that differences between columns are paired. Several calls can share a generator.
    """
    values = np.asarray(values)
    n, rng = len(values), np.random.default_rng(seed)
    means = []
    for start in range(0, samples, CHUNK):
        count = min(CHUNK, samples - start)
        weights = np.stack([np.bincount(rng.integers(0, n, n), minlength=n) for _ in range(count)])  # (count, n)
        means.append(weights @ values / n)
    return np.concatenate(means)


def confidence_interval(means: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """The percentile interval of bootstrap means (B,)."""
    outside = 50 * (1 - level)
    low, high = np.percentile(means, [round(outside, 10), round(100 - outside, 10)])
    return float(low), float(high)
