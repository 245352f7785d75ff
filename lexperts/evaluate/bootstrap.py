"""Bootstrap confidence intervals of means over rows, for scores of documents or definitions."""

import numpy as np


def bootstrap_means(values: np.ndarray, samples: int = 2000, seed: int = 0) -> np.ndarray:
    """Means over rows that are drawn with replacement, `(B,)` or `(B, m)`, for B samples of values `(n,)` or `(n, m)`.

    The same rows are drawn for every column and every call, so that differences are paired.
    """
    n, rng = len(values), np.random.default_rng(seed)
    return np.stack([values[rng.integers(0, n, n)].mean(axis=0) for _ in range(samples)])


def confidence_interval(means: np.ndarray) -> tuple[float, float]:
    """The 95% percentile interval of bootstrap means (B,)."""
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)
