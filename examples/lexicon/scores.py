"""BLEU, ROUGE-L and METEOR of definitions, and what chance has to do with their differences.

Scores are those of the reference implementations, in per cent; what ROUGE and METEOR do for each pair anew, tokens and stems, is
done once for each text. A score here is that of one prediction and one reference: a row's is the best over its references.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.metadata import version

import nltk
import numpy as np
from corpora import key

BLEU_KINDS = ("sacrebleu", "nltk", "moses")
ORDER = 4
RESAMPLES = 2000
AT_ONCE = 100  # resamples that are held in memory together

Pair = tuple[str, str]  # a prediction and a reference
Metric = tuple[Callable[[str, str], float], dict[str, str]]  # a pair's score, and what computed it


def without_full_stops(text: str) -> str:
    """A text without full stops, except those before a digit (Huang et al. 2021), and with single spaces."""
    return " ".join(re.sub(r"\.(?!\d)", "", text).split())


def references_of(rows: list[dict], more: Sequence[dict] = ()) -> dict[str, list[list[str]]]:
    """Rows, and others whose definitions count too -> protocol -> of each row, its references, without full stops."""
    parts = {"context": ("term", "context"), "term": ("term",)}
    found = {}
    for protocol, fields in parts.items():
        groups: dict[tuple, dict[str, None]] = {}
        for row in [*rows, *more]:
            group = groups.setdefault(tuple(key(row[name]) for name in fields), {})
            group[without_full_stops(row["definition"])] = None
        lists = {place: list(group) for place, group in groups.items()}
        found[protocol] = [lists[tuple(key(row[name]) for name in fields)] for row in rows]
    return found


def score_pairs(metric: Callable[[str, str], float], pairs: Sequence[Pair]) -> np.ndarray:
    """(n,) scores of n pairs."""
    return np.fromiter((metric(*pair) for pair in pairs), dtype=float, count=len(pairs))


def count_ngrams(tokens: Sequence[str]) -> tuple[int, list[Counter]]:
    """Tokens -> how many they are, and their n-grams of each order."""
    orders = range(1, ORDER + 1)
    return len(tokens), [Counter(zip(*(tokens[i:] for i in range(n)), strict=False)) for n in orders]


def matches(ours: list[Counter], theirs: list[Counter]) -> tuple[list[int], list[int]]:
    """n-grams of a prediction and a reference -> of each order, how many agree and how many the prediction has."""
    agree = [
        sum(min(count, other[gram]) for gram, count in own.items()) for own, other in zip(ours, theirs, strict=True)
    ]
    return agree, [own.total() for own in ours]


def bleu(kind: str = "sacrebleu") -> Metric:
    """Sentence BLEU of one reference.

    `sacrebleu`: its tokens (13a) and its smoothing (exp: the k-th order without a match counts as 1 / 2^k of one), over as many
    orders as the prediction has. `nltk`: words as they are spaced, one added to matches and totals of orders 2 to 4 (method2),
    weights over as many orders as the prediction has words. `moses`: sentence-bleu of Moses, which the code of Ishiwatari et
    al. 2019 and of LM-Lexicon calls: one is added to matches and totals of all orders, of which there are always four, so that
    short predictions get much for nothing: three wrong words for three have 45 per cent.

    Raises:
        ValueError: for another kind.
    """
    if kind == "sacrebleu":
        return sacre_bleu()
    if kind == "nltk":
        return nltk_bleu()
    if kind == "moses":
        return moses_bleu()
    raise ValueError(f"--bleu {kind!r} is not known. Use one of {', '.join(BLEU_KINDS)}.")


def sacre_bleu() -> Metric:
    from sacrebleu.metrics import BLEU

    scorer = BLEU(effective_order=True)

    def score(prediction: str, reference: str) -> float:
        return scorer.sentence_score(prediction, [reference]).score

    settings = f"sentence BLEU, nrefs:1|case:mixed|eff:yes|tok:13a|smooth:{scorer.smooth_method}"
    return score, {"package": "sacrebleu", "version": version("sacrebleu"), "settings": settings}


def nltk_bleu() -> Metric:
    from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu

    smoothing = SmoothingFunction().method2

    def score(prediction: str, reference: str) -> float:
        words = prediction.split()
        if not words:
            return 0.0
        return 100 * float(sentence_bleu([reference.split()], words, smoothing_function=smoothing, auto_reweigh=True))

    settings = "sentence_bleu, words by white space, smoothing method2, auto_reweigh"
    return score, {"package": "nltk", "version": version("nltk"), "settings": settings}


def moses_bleu() -> Metric:
    ngrams = lru_cache(maxsize=None)(lambda text: count_ngrams(text.split()))

    def score(prediction: str, reference: str) -> float:
        (sys_len, ours), (ref_len, theirs) = ngrams(prediction), ngrams(reference)
        if not sys_len:
            return 0.0
        logs = (math.log(c + 1) - math.log(t + 1) for c, t in zip(*matches(ours, theirs), strict=True))
        return 100 * math.exp(sum(logs) / ORDER + min(0.0, 1 - ref_len / sys_len))

    settings = "the formula of Moses' sentence-bleu: add one to all orders; words by white space"
    return score, {"package": "this script", "version": "-", "settings": settings}


def lcs_length(a: Sequence[str], b: Sequence[str]) -> int:
    """The length of the longest common subsequence, all of `a` at once in the bits of an integer (Hyyrö 2004)."""
    places: dict[str, int] = {}
    for i, token in enumerate(a):
        places[token] = places.get(token, 0) | 1 << i
    whole = (1 << len(a)) - 1
    open_ = whole  # a bit is cleared where the subsequence grows
    for token in b:
        hit = open_ & places.get(token, 0)
        open_ = (open_ + hit | open_ - hit) & whole
    return len(a) - open_.bit_count()


def rouge_l() -> Metric:
    """F1 of the longest common subsequence (Lin 2004), of rouge_score's tokens: lower case, letters and digits, not stemmed."""
    from rouge_score.tokenizers import DefaultTokenizer

    tokens = lru_cache(maxsize=None)(DefaultTokenizer(use_stemmer=False).tokenize)

    def score(prediction: str, reference: str) -> float:
        ours, theirs = tokens(prediction), tokens(reference)
        common = lcs_length(ours, theirs)
        return 200 * common / (len(ours) + len(theirs)) if common else 0.0

    settings = "F1 of rougeL, tokens of rouge_score, not stemmed"
    return score, {"package": "rouge-score", "version": version("rouge-score"), "settings": settings}


class CachedStemmer:
    """Porter's stems, each word's once."""

    def __init__(self):
        from nltk.stem.porter import PorterStemmer

        self.stem = lru_cache(maxsize=None)(PorterStemmer().stem)


class NoSynonyms:
    """What stands for WordNet where it is not installed."""

    def synsets(self, word: str) -> list:
        return []


class CachedSynonyms:
    """WordNet's synsets, each word's looked up once."""

    def __init__(self, wordnet):
        self.synsets = lru_cache(maxsize=None)(wordnet.synsets)


def open_wordnet():
    """nltk's WordNet, or None where its corpus is not installed."""
    try:
        nltk.corpus.wordnet.ensure_loaded()
    except LookupError:
        return None
    return nltk.corpus.wordnet


def meteor() -> Metric:
    """METEOR (Lavie and Agarwal 2007) as nltk has it: words that are the same, then stems, then, if installed, synonyms.

    WordNet is asked for what the stem stage has left, which are stems: nltk finds no synonym of a word that is not its own.
    """
    from nltk.tokenize import NLTKWordTokenizer
    from nltk.translate.meteor_score import single_meteor_score

    wordnet = open_wordnet()
    stemmer, synonyms = CachedStemmer(), NoSynonyms() if wordnet is None else CachedSynonyms(wordnet)
    tokens = lru_cache(maxsize=None)(NLTKWordTokenizer().tokenize)

    def score(prediction: str, reference: str) -> float:
        found = single_meteor_score(tokens(reference), tokens(prediction), stemmer=stemmer, wordnet=synonyms)
        return 100 * found

    stages = "exact, stem and WordNet stages"
    if wordnet is None:
        stages = "exact and stem stages; not the WordNet stage, whose corpus is not installed (python -m nltk.downloader wordnet)"
    return score, {"package": "nltk", "version": version("nltk"), "settings": stages}


def resampled_means(values: np.ndarray, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """values (n, m) of n rows -> (resamples, m), their means over rows drawn with repetition, the same rows for all m."""
    n, rng = len(values), np.random.default_rng(seed)
    means = []
    for start in range(0, resamples, AT_ONCE):
        count = min(AT_ONCE, resamples - start)
        drawn = np.stack([np.bincount(rng.integers(0, n, n), minlength=n) for _ in range(count)])  # (count, n)
        means.append(drawn @ values / n)
    return np.concatenate(means)


def interval(means: np.ndarray) -> tuple[float, float]:
    """Means of resamples -> the 95 per cent interval (percentiles)."""
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def paired_p(ours: np.ndarray, theirs: np.ndarray) -> float | None:
    """p, two-sided, of the paired t-test over rows; None for a single row."""
    from scipy import stats

    if len(ours) < 2:
        return None
    differences = ours - theirs
    if np.ptp(differences) == 0:  # no spread to test against
        return 1.0 if differences[0] == 0 else 0.0
    return float(stats.ttest_rel(ours, theirs).pvalue)
