"""Counts of single documents, kept in results as compact strings: F1, and differences between two systems with their intervals.

Precision at k is over the phrases that are returned, at most k, as in SEKE; with `always` over k, also where fewer are returned.
"""

from collections.abc import Sequence

import numpy as np

from lexperts.evaluate.bootstrap import bootstrap_means, confidence_interval

CUTS = (5, 10)
COUNTS = (*(f"correct@{k}" for k in CUTS), "num_preds", "num_targets")


def encode(rows: Sequence[dict]) -> dict[str, str]:
    """The counts of `metrics.keyphrase_f1_by_document`, in the order of the documents: one string of numbers for each count."""
    return {count: " ".join(str(row[count]) for row in rows) for count in COUNTS}


def precision_and_recall(encoded: dict[str, str], k: int, always: bool = False) -> np.ndarray:
    """Precision and recall at k, `(documents, 2)`, by the rules of SEKE: 0 / 0 = 0, and nan for documents without gold keyphrases."""
    counts = {count: np.array(encoded[count].split(), dtype=float) for count in COUNTS}
    ratios = np.zeros((2, len(counts["num_targets"])))
    returned = np.full_like(counts["num_preds"], k) if always else np.minimum(counts["num_preds"], k)
    for ratio, denominator in zip(ratios, (returned, counts["num_targets"]), strict=True):
        np.divide(counts[f"correct@{k}"], denominator, out=ratio, where=denominator > 0)
    ratios[:, counts["num_targets"] == 0] = np.nan
    return ratios.T


def f1_of_means(means: np.ndarray) -> np.ndarray:
    """F1 of mean precision and mean recall, of `(..., 2)`."""
    total = means.sum(axis=-1)
    return np.divide(2 * means.prod(axis=-1), total, out=np.zeros_like(total), where=total > 0)


def f1(encoded: dict[str, str], k: int, documents: int | None = None, always: bool = False) -> float:
    """F1@k of the first documents, by default of all."""
    return float(f1_of_means(np.nanmean(precision_and_recall(encoded, k, always)[:documents], axis=0)))


def difference(ours: dict[str, str], theirs: dict[str, str], k: int, always=False) -> tuple[float, float, float]:
    """F1@k minus that of another system on the first documents, which both have read, with a 95% interval (paired bootstrap).

    Raises:
        ValueError: if the two were scored on other documents.
    """
    first, second = (precision_and_recall(counts, k, always) for counts in (ours, theirs))
    number = min(len(first), len(second))
    values = np.concatenate([first[:number], second[:number]], axis=1)  # (n, 4)
    if ours["num_targets"].split()[:number] != theirs["num_targets"].split()[:number]:
        raise ValueError(f"The first {number} documents of the two systems have other numbers of gold keyphrases.")
    values = values[~np.isnan(values).any(axis=1)]

    def subtract(means: np.ndarray) -> np.ndarray:
        return f1_of_means(means[..., :2]) - f1_of_means(means[..., 2:])

    return float(subtract(values.mean(axis=0))), *confidence_interval(subtract(bootstrap_means(values)))
