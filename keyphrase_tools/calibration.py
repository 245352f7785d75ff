"""Calibration: whether scores are probabilities, and the temperature that makes them so (Guo et al. 2017)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from lexperts_lite.call_options import UNSET
from lexperts_lite.decoding import apply_temperature
from lexperts_lite.words import normalise, stem_phrase

from .evaluation import gold_phrases

TEMPERATURE_RANGE = (0.05, 20.0)  # the range that is searched
CONFIDENT = 0.7  # scores above it are counted


def reliability(scores: ArrayLike, right: ArrayLike, bins: int = 10) -> list[dict]:
    """`score` (mean), `share` (of correct phrases) and `phrases` (count) of each bin of equal width that is not empty.

    Raises:
        ValueError: if a score is not in [0, 1].
    """
    p, right = np.asarray(scores, dtype=float), np.asarray(right, dtype=float)
    if wrong := p[~((p >= 0) & (p <= 1))].tolist():
        raise ValueError(f"score={wrong[0]} is not a probability.")
    bin_of = np.minimum((p * bins).astype(int), bins - 1)
    members = [bin_of == b for b in np.unique(bin_of)]
    return [
        {"score": float(p[own].mean()), "share": float(right[own].mean()), "phrases": int(own.sum())} for own in members
    ]


def expected_calibration_error(scores: ArrayLike, right: ArrayLike, bins: int = 10) -> float:
    """ECE = sum over bins b of n_b / n |mean score - accuracy|, with bins of equal width   (Guo et al. 2017, Eq. 3)

    >>> round(expected_calibration_error([0.9, 0.9, 0.1, 0.1], [True, True, False, False]), 2)
    0.1

    Raises:
        ValueError: if there are no scores, or one is not in [0, 1].
    """
    rows = reliability(scores, right, bins)
    if not rows:
        raise ValueError("There are no scores: no phrase was extracted.")
    return sum(row["phrases"] * abs(row["score"] - row["share"]) for row in rows) / sum(row["phrases"] for row in rows)


def describe_scores(scores: ArrayLike, right: ArrayLike) -> dict[str, float | int | None]:
    """Whether scores mean what they say.

    Returns:
        `phrases`, the number of scores; `mean_score`, and `right`, the share of phrases that is right; `calibration_error`;
        `confident`, the number of scores above 0.7, and `confident_right`, the share of these that is right. Without a score, or
        without a confident one, what has no value is `None`.

    >>> describe_scores([0.9, 0.8, 0.1, 0.2], [True, False, False, False])["confident_right"]
    0.5
    """
    scores, right = np.asarray(scores, dtype=float), np.asarray(right, dtype=float)
    confident = scores > CONFIDENT
    row: dict[str, float | int | None] = {"phrases": len(scores), "confident": int(confident.sum())}
    row |= dict.fromkeys(("mean_score", "right", "calibration_error", "confident_right"))
    if len(scores):
        row["calibration_error"] = expected_calibration_error(scores, right)
        row |= {"mean_score": float(scores.mean()), "right": float(right.mean())}
    return row | ({"confident_right": float(right[confident].mean())} if confident.any() else {})


def fit_temperature(scores: ArrayLike, right: ArrayLike, steps: int = 100) -> float:
    """The T > 0 for which `apply_temperature(scores, T)` has the greatest likelihood.

    The log-likelihood is concave in 1/T. Bisection finds the zero of its derivative, the sum of logit (right - p), in
    `TEMPERATURE_RANGE`.

    Raises:
        ValueError: if there are no scores, if the phrases are all correct or all wrong, or if the likelihood still rises
            at the end of the range.
    """
    scores, right = np.asarray(scores, dtype=float), np.asarray(right, dtype=float)
    expected_calibration_error(scores, right)  # checks the scores
    p = np.clip(scores, 1e-7, 1 - 1e-7)
    logit, low, high = np.log(p / (1 - p)), 1 / TEMPERATURE_RANGE[1], 1 / TEMPERATURE_RANGE[0]
    for _ in range(steps):
        middle = (low * high) ** 0.5
        rising = (logit * (right - apply_temperature(p, 1 / middle))).sum() > 0
        low, high = (middle, high) if rising else (low, middle)
    temperature = 1 / (low * high) ** 0.5
    lowest, highest = TEMPERATURE_RANGE
    if int(right.sum()) in (0, len(right)) or not lowest * 1.01 < temperature < highest / 1.01:  # an end of the range
        raise ValueError(
            f"temperature={temperature:.3g}: no temperature fits the scores; {int(right.sum())} of {len(right)} extracted "
            "phrases are gold keyphrases. Train the model longer, or use more documents."
        )
    return temperature


def match_to_gold(
    phrases: Sequence[Sequence[dict]], gold: Sequence[Sequence[str]], language: str | None = "english"
) -> tuple[list[float], list[bool]]:
    """The scores of extracted phrases, and whether each has the stems of a gold phrase.

    Args:
        phrases: for each document, the pipeline's results. Candidates that do not occur have no score and are left out.
        gold: for each document, the gold phrases, as `labels.present_keyphrases` returns them.
        language: of the stems.
    """
    scores, right = [], []
    for extracted, phrases_of_document in zip(phrases, gold, strict=True):
        stems = {stem_phrase(normalise(phrase), language) for phrase in phrases_of_document}
        for phrase in extracted:
            if phrase["score"] is not None:
                scores.append(phrase["score"])
                right.append(stem_phrase(normalise(phrase["keyphrase"]), language) in stems)
    return scores, right


def calibrate(
    extract, texts: Sequence[str], keyphrases: Sequence[Sequence[str]], *, rules: str = "lexperts", **options
):
    """Fits the temperature on validation documents and sets `extract.model.config.keyphrase_temperature`.

    The temperature is that of the scores which the model gives by itself: its ranker's, or if it has none, its labels'.

    Args:
        extract: a keyphrase-extraction pipeline.
        texts, keyphrases: documents that the model was not trained on.
        rules: how gold phrases are matched to the text, as in `evaluation.ExtractionMetrics`.
        options: arguments of the pipeline, such as `batch_size`, `style` and `language`.

    Returns:
        The temperature. `calibration_error` measures its effect on other documents.

    Raises:
        ValueError: if no temperature fits (see `fit_temperature`); the configuration then has none. Also if no gold phrase
            occurs in its text, or if the options ask for scores to which the model's temperature is not applied.
    """
    if not extract.has_temperature(**options):
        raise ValueError("These options ask for scores of labels, but the temperature is that of the model's ranker.")
    config = extract.model.config
    config.keyphrase_temperature = None
    config.keyphrase_temperature = fit_temperature(*_read_scores(extract, texts, keyphrases, rules, options))
    return config.keyphrase_temperature


def calibration_error(
    extract, texts: Sequence[str], keyphrases: Sequence[Sequence[str]], *, rules: str = "lexperts", **options
):
    """`expected_calibration_error` of a pipeline on documents, without its temperature (`before`) and with it (`after`).

    Each is measured on what the pipeline returns, so with a temperature the documents are read twice.

    Returns:
        `before`, `before_bins` and `phrases` (count); if the model has a temperature, also `after`, `after_bins` and
        `temperature`. The bins are those of `reliability`.

    Raises:
        ValueError: if no gold phrase occurs in its text, or no phrase is extracted.
    """
    config = extract.model.config
    temperature = getattr(config, "keyphrase_temperature", None)
    errors: dict[str, Any] = {} if temperature is None else {"temperature": temperature}
    try:
        for name, value in (("before", None), ("after", temperature)):
            if name == "before" or value is not None:
                config.keyphrase_temperature = value
                scores, right = _read_scores(extract, texts, keyphrases, rules, options)
                errors |= {name: expected_calibration_error(scores, right), f"{name}_bins": reliability(scores, right)}
                errors.setdefault("phrases", len(right))
    finally:
        config.keyphrase_temperature = temperature
    return errors


def _read_scores(extract, texts, keyphrases, rules: str, options: dict) -> tuple[list[float], list[bool]]:
    """The scores of what a pipeline extracts, and whether each phrase is a gold phrase."""
    language = options.get("language", UNSET)
    language = extract.language if language is UNSET else language
    gold = gold_phrases(texts, keyphrases, rules, language)
    return match_to_gold(extract(list(texts), **options), gold, language)
