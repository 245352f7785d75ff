"""Scores of single documents, kept in results as compact strings, and differences between two systems with their intervals."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lexperts.recipes.common.bootstrap import bootstrap_means, confidence_interval

CUTS = (5, 10)
COUNTS = (*(f"correct@{k}" for k in CUTS), "num_preds", "num_targets")


class Difference(NamedTuple):
    """The F1 of a system minus that of another on the same documents, with a 95% interval (paired bootstrap over documents)."""

    value: float
    low: float
    high: float
    documents: int


def encode(rows: Sequence[dict]) -> dict[str, str]:
    """The counts of `metrics.keyphrase_f1_by_document`, in the order of the documents: one string of numbers for each count."""
    return {count: " ".join(str(row[count]) for row in rows) for count in COUNTS}


def decode(encoded: dict[str, str]) -> dict[str, np.ndarray]:
    """The counts of `encode`, `(documents,)` each."""
    return {count: np.array(encoded[count].split(), dtype=int) for count in COUNTS}


def precision_and_recall(counts: dict[str, np.ndarray], k: int) -> np.ndarray:
    """Precision and recall at k, `(documents, 2)`, by the rules of SEKE; a ratio with denominator 0 is 0."""
    correct = counts[f"correct@{k}"]
    denominators = np.stack([np.minimum(counts["num_preds"], k), counts["num_targets"]])
    return np.divide(correct, denominators, out=np.zeros(denominators.shape), where=denominators > 0).T


def f1_of_means(means: np.ndarray) -> np.ndarray:
    """F1 of mean precision and mean recall, of `(..., 2)`."""
    total = means.sum(axis=-1)
    return np.divide(2 * means.prod(axis=-1), total, out=np.zeros_like(total), where=total > 0)


def difference(ours: dict[str, str], theirs: dict[str, str], k: int) -> Difference:
    """How much better F1@k the first of two systems has; of a system that read the first documents only, only these count.

    Raises:
        ValueError: if the systems were scored on other documents, or no document has gold keyphrases.
    """
    first, second = decode(ours), decode(theirs)
    number = min(len(first["num_targets"]), len(second["num_targets"]))
    gold = first["num_targets"][:number]
    if not np.array_equal(gold, second["num_targets"][:number]):
        raise ValueError(
            f"The first {number} documents of the two systems have other numbers of gold keyphrases, so they are not the same. "
            "Measure both again with the same --data."
        )
    if not gold.any():
        raise ValueError(f"None of the {number} documents has gold keyphrases. Measure more documents.")
    columns = [precision_and_recall(counts, k)[:number][gold > 0] for counts in (first, second)]
    values = np.concatenate(columns, axis=1)  # (n, 4)
    samples = bootstrap_means(values)

    def subtract(means: np.ndarray) -> np.ndarray:
        return f1_of_means(means[..., :2]) - f1_of_means(means[..., 2:])

    low, high = confidence_interval(subtract(samples))
    return Difference(float(subtract(values.mean(axis=0))), low, high, number)
