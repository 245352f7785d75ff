"""Whether a keyphrase's score is the probability that it is one, and the temperature that makes it so (Guo et al. 2017)."""

from collections.abc import Sequence

import numpy as np

from .clean_text import clean
from .decoding import tempered
from .labels import present
from .stemming import stem_phrase
from .words import normalise, split_words

COLDEST_TO_HOTTEST = (0.05, 20.0)  # temperatures that are searched


def expected_calibration_error(scores: Sequence[float], right: Sequence[bool], bins: int = 10) -> float:
    """sum over bins of n_b / n |mean score - share of right ones|, bins of equal width   (Guo et al. 2017, Eq. 3)

    >>> round(expected_calibration_error([0.9, 0.9, 0.1, 0.1], [True, True, False, False]), 2)
    0.1

    Raises:
        ValueError: where there is nothing to measure, or a score is no probability.
    """
    scores, right = np.asarray(scores, dtype=float), np.asarray(right, dtype=float)
    check(scores)
    bin_of = np.minimum((scores * bins).astype(int), bins - 1)
    return sum(abs((scores - right)[bin_of == b].sum()) for b in range(bins)) / len(scores)


def reliability(scores: Sequence[float], right: Sequence[bool], bins: int = 10) -> list[dict]:
    """What the error is the sum of: for each bin that is not empty its `score`, `share` of right ones, and `phrases`."""
    scores, right = np.asarray(scores, dtype=float), np.asarray(right, dtype=float)
    bin_of = np.minimum((scores * bins).astype(int), bins - 1)
    inside = [bin_of == b for b in range(bins)]
    return [
        {"score": float(scores[own].mean()), "share": float(right[own].mean()), "phrases": int(own.sum())}
        for own in inside
        if own.any()
    ]


def fit_temperature(scores: Sequence[float], right: Sequence[bool], steps: int = 100) -> float:
    """The T > 0 of `tempered(scores, T)` with the greatest likelihood.

    The likelihood is concave in 1/T, whose derivative sum of logit (right - p) is brought to 0 by halving an interval of
    0.05 to 20.

    Raises:
        ValueError: where there is nothing to fit: no scores, phrases that are all right or all wrong, or a likelihood that
            still rises at the end of the interval.
    """
    scores, right = np.asarray(scores, dtype=float), np.asarray(right, dtype=float)
    check(scores)
    found = int(right.sum())
    if found in (0, len(right)):
        raise ValueError(
            f"{found} of {len(right)} extracted phrases are gold keyphrases: scores cannot be calibrated on phrases that "
            f"are all {'right' if found else 'wrong'}. Train the model longer, or take more documents."
        )
    p = np.clip(scores, 1e-7, 1 - 1e-7)
    logit, low, high = np.log(p / (1 - p)), 1 / COLDEST_TO_HOTTEST[1], 1 / COLDEST_TO_HOTTEST[0]
    for _ in range(steps):
        middle = (low * high) ** 0.5
        rising = (logit * (right - tempered(p, 1 / middle))).sum() > 0
        low, high = (middle, high) if rising else (low, middle)
    temperature = 1 / (low * high) ** 0.5
    if not is_inside(temperature):
        raise ValueError(
            f"temperature={temperature:.3g} is at the end of the range that was searched, {COLDEST_TO_HOTTEST[0]:g} to "
            f"{COLDEST_TO_HOTTEST[1]:g}: scores and correctness do not fit together ({found} of {len(right)} extracted "
            "phrases are gold keyphrases). Train the model longer, or take more documents."
        )
    return temperature


def is_inside(temperature: float) -> bool:
    """Whether a temperature is a fit, and not the end of the range that was searched."""
    coldest, hottest = COLDEST_TO_HOTTEST
    return coldest * 1.01 < temperature < hottest / 1.01


def check(scores: np.ndarray):
    if not len(scores):
        raise ValueError("There are no scores: nothing was extracted. Lower the threshold, or take more documents.")
    if not ((scores >= 0) & (scores <= 1)).all():
        worst = scores[(scores < 0) | (scores > 1) | np.isnan(scores)][0]
        raise ValueError(f"A score is {worst}, and no probability.")


def judged(phrases: Sequence[Sequence[dict]], gold: Sequence[Sequence[str]]) -> tuple[list[float], list[bool]]:
    """Results of the pipeline and gold phrases of `labels.present` -> scores, and whether each phrase is a gold one."""
    scores, right = [], []
    for found, wanted in zip(phrases, gold, strict=True):
        stems = {stem_phrase(normalise(phrase)) for phrase in wanted}
        for phrase in found:
            scores.append(phrase["score"])
            right.append(stem_phrase(normalise(phrase["keyphrase"])) in stems)
    return scores, right


def calibrate(
    extract, texts: Sequence[str], keyphrases: Sequence[Sequence[str]], *, rules: str = "lexperts", **options
):
    """Finds the temperature on validation documents and sets `extract.model.config.keyphrase_temperature`.

    Args:
        extract: a keyphrase-extraction pipeline.
        texts, keyphrases: documents that were not trained on.
        rules: by which gold is found in texts, as in `evaluation.ExtractionMetrics`.
        options: of the pipeline, such as `batch_size`.

    Returns: the temperature. `calibration_error` measures what it does on other documents.

    Raises:
        ValueError: where no temperature fits, see `fit_temperature`; the configuration then has none.
    """
    config = extract.model.config
    config.keyphrase_temperature = None
    gold = [
        present(split_words(clean(text)), phrases, rules=rules) for text, phrases in zip(texts, keyphrases, strict=True)
    ]
    config.keyphrase_temperature = fit_temperature(*judged(extract(list(texts), **options), gold))
    return config.keyphrase_temperature


def calibration_error(
    extract, texts: Sequence[str], keyphrases: Sequence[Sequence[str]], *, rules: str = "lexperts", **options
):
    """`expected_calibration_error` of a pipeline on documents, without its temperature (`before`) and with it (`after`).

    Both with their `reliability`, `before_bins` and `after_bins`.
    """
    config = extract.model.config
    temperature, config.keyphrase_temperature = getattr(config, "keyphrase_temperature", None), None
    try:
        gold = [
            present(split_words(clean(text)), phrases, rules=rules)
            for text, phrases in zip(texts, keyphrases, strict=True)
        ]
        scores, right = judged(extract(list(texts), **options), gold)
    finally:
        config.keyphrase_temperature = temperature
    found = {"before": expected_calibration_error(scores, right), "before_bins": reliability(scores, right)}
    if temperature is not None:
        scores = tempered(np.asarray(scores), temperature)
        found |= {"after": expected_calibration_error(scores, right), "after_bins": reliability(scores, right)}
        found["temperature"] = temperature
    return found | {"phrases": len(right)}
