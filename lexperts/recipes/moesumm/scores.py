"""ROUGE and BERTScore of each summary, and tests of the differences between systems.

ROUGE is that of Google's rouge_score: F1 of lower-case words without punctuation, stemmed by Porter's rules. rougeL compares
whole summaries, rougeLsum compares sentence by sentence (Lin 2004, Sect. 3.2).
"""

import numpy as np
from rouge_score.rouge_scorer import RougeScorer
from scipy import stats

from modeling_moesumm.sentences_moesumm import sentence_spans
from run_tools.loading import open_config

from ..common.bertscore import BertScore
from ..common.bootstrap import bootstrap_means, confidence_interval

ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")


def rouge(predictions: list[str], references: list[str], stemming: bool = True) -> dict[str, np.ndarray]:
    """F1 in per cent `(n,)` by metric, for n predictions and references."""
    scorer = RougeScorer(ROUGE, use_stemmer=stemming)
    pairs = zip(predictions, references, strict=True)
    rows = [scorer.score(one_sentence_per_line(r), one_sentence_per_line(p)) for p, r in pairs]
    return {name: np.array([100 * row[name].fmeasure for row in rows]) for name in ROUGE}


def one_sentence_per_line(text: str) -> str:
    """The format that rougeLsum expects."""
    return "\n".join(" ".join(text[start:end].split()) for start, end in sentence_spans(text))


def bertscore(predictions: list[str], references: list[str], model: str, layer: int | None = None) -> np.ndarray:
    """F1 in per cent `(n,)` of a layer, by default the last; see `BertScore`."""
    score = BertScore(model, open_config(model).num_hidden_layers if layer is None else layer)
    return score(list(zip(predictions, references, strict=True)))


def interval(differences: list[np.ndarray]) -> tuple[float, float]:
    """The 95 per cent interval of the mean over data sets of their documents' mean differences, by a bootstrap over
    documents; of length 0 for a single document, or equal values.
    """
    if all(len(values) < 2 or np.ptp(values) == 0 for values in differences):
        mean = float(np.mean([values.mean() for values in differences]))
        return mean, mean
    rng = np.random.default_rng(0)
    return confidence_interval(np.mean([bootstrap_means(values, seed=rng) for values in differences], axis=0))


def compare(ours: list[np.ndarray], baseline: list[np.ndarray]) -> dict[str, float | None]:
    """Compares the mean over data sets of mean scores of the same documents: `difference`; `low` and `high`, its 95 per
    cent interval; `p`, two-sided, of the paired t-test, or for several data sets of a z-test with the sum of their means'
    variances; `None` if a data set has a single document, whose variance is unknown.
    """
    differences = [one - other for one, other in zip(ours, baseline, strict=True)]
    low, high = interval(differences)
    mean = float(np.mean([values.mean() for values in differences]))
    p: float | None
    if any(len(values) < 2 for values in differences):
        p = None
    elif low == high:
        p = 1.0
    elif len(differences) == 1:
        p = float(stats.ttest_rel(ours[0], baseline[0]).pvalue)
    else:
        variance = sum(values.var(ddof=1) / len(values) for values in differences) / len(differences) ** 2
        p = float(2 * stats.norm.sf(abs(mean) / variance**0.5))
    return {"difference": mean, "low": low, "high": high, "p": p}
