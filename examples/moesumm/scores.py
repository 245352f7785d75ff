"""ROUGE and BERTScore of summaries, a document at a time, and whether a difference is more than chance.

ROUGE is that of Google's rouge_score: F1, words stemmed by Porter's rules, references and predictions in lower case and
without signs. rougeL takes a summary as one sequence, rougeLsum a sentence at a time (Lin 2004, Sect. 3.2).
"""

import numpy as np
from rouge_score.rouge_scorer import RougeScorer
from scipy import stats
from transformers import AutoConfig, AutoTokenizer, GPT2Tokenizer, RobertaTokenizer

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


def open_bertscore(model: str, layer: int):
    """bert-score's scorer; RoBERTa's first word gets the space that the package asks for by an argument transformers 5 ignores."""
    from bert_score import BERTScorer

    scorer = BERTScorer(model_type=model, num_layers=layer, batch_size=32)
    if isinstance(scorer._tokenizer, (GPT2Tokenizer, RobertaTokenizer)):
        limit = scorer._tokenizer.model_max_length
        scorer._tokenizer = AutoTokenizer.from_pretrained(model, add_prefix_space=True)
        scorer._tokenizer.model_max_length = limit
    return scorer


def bertscore(predictions: list[str], references: list[str], model: str, layer: int | None = None) -> np.ndarray:
    """(n,) F1 in per cent, of a layer of this model, its last by default (Zhang et al. 2020).

    Neither rescaled nor with weights of rare words.
    """
    scorer = open_bertscore(model, layer or AutoConfig.from_pretrained(model).num_hidden_layers)
    f1 = scorer.score([text or "." for text in predictions], references)[2].numpy()
    return 100 * np.where([bool(text.strip()) for text in predictions], f1, 0.0)


def interval(differences: list[np.ndarray]) -> tuple[float, float]:
    """Values of documents, data set by data set -> the 95 per cent interval of the mean of the data sets' means.

    By a bootstrap over the documents of each (percentiles); a single document, or equal values, have no spread.
    """
    if all(len(values) < 2 or np.ptp(values) == 0 for values in differences):
        mean = float(np.mean([values.mean() for values in differences]))
        return mean, mean

    def mean_of_means(*samples, axis=-1):
        return np.mean([sample.mean(axis=axis) for sample in samples], axis=0)

    found = stats.bootstrap(differences, mean_of_means, n_resamples=RESAMPLES, method="percentile", rng=0)
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def compare(ours: list[np.ndarray], baseline: list[np.ndarray]) -> dict[str, float]:
    """Scores of the same documents, data set by data set -> how the means of the data sets' means differ.

    Returns: `difference`; `low` and `high`, its 95 per cent interval; `p`, two-sided, of the paired t-test, which for
    several data sets takes the sum of their means' variances and the normal distribution.
    """
    differences = [one - other for one, other in zip(ours, baseline, strict=True)]
    low, high = interval(differences)
    mean = float(np.mean([values.mean() for values in differences]))
    if low == high:
        p = 1.0
    elif len(differences) == 1:
        p = float(stats.ttest_rel(ours[0], baseline[0]).pvalue)
    else:
        variance = sum(values.var(ddof=1) / len(values) for values in differences) / len(differences) ** 2
        p = float(2 * stats.norm.sf(abs(mean) / variance**0.5))
    return {"difference": mean, "low": low, "high": high, "p": p}
