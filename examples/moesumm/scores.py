"""ROUGE and BERTScore of summaries, a document at a time, and whether a difference is more than chance.

ROUGE is that of Google's rouge_score: F1, words stemmed by Porter's rules, references and predictions in lower case and
without signs. rougeL takes a summary as one sequence, rougeLsum a sentence at a time (Lin 2004, Sect. 3.2).
"""

import numpy as np
from rouge_score.rouge_scorer import RougeScorer
from scipy import stats
from transformers import AutoConfig

from modeling_moesumm.texts_moesumm import sentence_spans

ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
RESAMPLES = 2000


def rouge(predictions: list[str], references: list[str], stemming: bool = True) -> dict[str, np.ndarray]:
    """n predictions and references -> metric -> (n,) F1 in per cent."""
    scorer = RougeScorer(ROUGE, use_stemmer=stemming)
    found = [scorer.score(lines(r), lines(p)) for p, r in zip(predictions, references, strict=True)]
    return {name: np.array([100 * scores[name].fmeasure for scores in found]) for name in ROUGE}


def lines(text: str) -> str:
    """A sentence a line, as rougeLsum reads it."""
    return "\n".join(" ".join(text[start:end].split()) for start, end in sentence_spans(text))


def bertscore(predictions: list[str], references: list[str], model: str, layer: int | None = None) -> np.ndarray:
    """(n,) F1 in per cent, of a layer of this model, its last by default (Zhang et al. 2020).

    Neither rescaled nor with weights of rare words.
    """
    from bert_score import BERTScorer

    layer = layer or AutoConfig.from_pretrained(model).num_hidden_layers
    scorer = BERTScorer(model_type=model, num_layers=layer, batch_size=32)
    f1 = scorer.score([text or "." for text in predictions], references)[2].numpy()
    return 100 * np.where([bool(text.strip()) for text in predictions], f1, 0.0)


def interval(values: np.ndarray) -> tuple[float, float]:
    """(n,) -> the 95 per cent interval of their mean, by a bootstrap over the documents."""
    if len(values) < 2 or np.ptp(values) == 0:
        return float(values.mean()), float(values.mean())
    found = stats.bootstrap((values,), np.mean, n_resamples=RESAMPLES, method="percentile", rng=0).confidence_interval
    return float(found.low), float(found.high)


def compare(ours: np.ndarray, baseline: np.ndarray) -> dict[str, float]:
    """Scores of the same n documents -> the mean difference, its 95 per cent interval, and p of the paired t-test."""
    difference = ours - baseline
    low, high = interval(difference)
    p = 1.0 if len(difference) < 2 or np.ptp(difference) == 0 else float(stats.ttest_rel(ours, baseline).pvalue)
    return {"difference": float(difference.mean()), "low": low, "high": high, "p": p}
