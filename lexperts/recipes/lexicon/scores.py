"""BLEU, ROUGE-L and METEOR of definitions, and the paired t-test.

Scores are those of the reference implementations, in per cent; tokens and stems, which these compute for each pair, are
cached per text. A score here is that of one prediction and one reference; a row's is the best over its references.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace

import nltk
import numpy as np

from run_tools.errors import UserError
from run_tools.option_values import Limits, find_problem
from run_tools.versions import package_version

from .arguments import BLEU_KINDS
from .data import normalise_key

ORDER = 4

Pair = tuple[str, str]  # a prediction and a reference
Metric = tuple[Callable[[str, str], float], dict[str, str]]  # a pair's score, and what computed it


def without_full_stops(text: str) -> str:
    """A text without full stops, except those before a digit (Huang et al. 2021), and with single spaces."""
    return " ".join(re.sub(r"\.(?!\d)", "", text).split())


def references_of(rows: list[dict], more: Sequence[dict] = ()) -> dict[str, list[list[str]]]:
    """The references of each row, without full stops, by protocol ("context", "term"), with those of `more` rows."""
    parts = {"context": ("term", "context"), "term": ("term",)}
    references = {}
    for protocol, fields in parts.items():
        groups: dict[tuple, dict[str, None]] = {}
        for row in [*rows, *more]:
            group = groups.setdefault(tuple(normalise_key(row[name]) for name in fields), {})
            group[without_full_stops(row["definition"])] = None
        lists = {key: list(group) for key, group in groups.items()}
        references[protocol] = [lists[tuple(normalise_key(row[name]) for name in fields)] for row in rows]
    return references


def score_pairs(metric: Callable[[str, str], float], pairs: Sequence[Pair]) -> np.ndarray:
    """(n,) scores of n pairs."""
    return np.fromiter((metric(*pair) for pair in pairs), dtype=float, count=len(pairs))


def facts_of(package: str, settings: str) -> dict[str, str]:
    """What computed a metric."""
    return {"package": package, "version": package_version(package), "settings": settings}


def bleu(kind: str = "sacrebleu") -> Metric:
    """Sentence BLEU with one reference. Raises a `ValueError` for another kind.

    `sacrebleu`: its tokens (13a) and smoothing (exp: the k-th order without a match counts as 1 / 2^k), over as many orders as
    the prediction has. `nltk`: words separated by white space, add-one smoothing of orders 2 to 4 (method2), weights over as
    many orders as the prediction has words. `moses`: sentence-bleu of Moses, which the code of Ishiwatari et al. 2019 and of
    LM-Lexicon calls: add-one smoothing of all four orders, whatever the length, which favours short predictions: three
    wrong words for three score 45 per cent.
    """
    if problem := find_problem(kind, Limits(choices=BLEU_KINDS)):
        raise UserError(f"bleu={kind!r} {problem}")
    return {"sacrebleu": sacre_bleu, "nltk": nltk_bleu, "moses": moses_bleu}[kind]()


def sacre_bleu() -> Metric:
    """See `bleu`."""
    from sacrebleu.metrics import BLEU

    scorer = BLEU(effective_order=True)
    settings = f"sentence BLEU, nrefs:1|case:mixed|eff:yes|tok:13a|smooth:{scorer.smooth_method}"
    return lambda text, reference: scorer.sentence_score(text, [reference]).score, facts_of("sacrebleu", settings)


def nltk_bleu() -> Metric:
    """See `bleu`."""
    from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu

    options = {"smoothing_function": SmoothingFunction().method2, "auto_reweigh": True}

    def score(prediction: str, reference: str) -> float:
        words = prediction.split()
        return 100 * float(sentence_bleu([reference.split()], words, **options)) if words else 0.0

    return score, facts_of("nltk", "sentence_bleu, words by white space, smoothing method2, auto_reweigh")


def moses_bleu() -> Metric:
    """See `bleu`."""

    @cache
    def ngrams(text: str) -> tuple[int, list[Counter]]:
        words = text.split()
        orders = range(1, ORDER + 1)
        return len(words), [Counter(zip(*(words[i:] for i in range(n)), strict=False)) for n in orders]

    def score(prediction: str, reference: str) -> float:
        (sys_len, ours), (ref_len, theirs) = ngrams(prediction), ngrams(reference)
        if not sys_len:
            return 0.0
        pairs = list(zip(ours, theirs, strict=True))  # `&` has the matches of an order
        logs = (math.log((own & other).total() + 1) - math.log(own.total() + 1) for own, other in pairs)
        return 100 * math.exp(sum(logs) / ORDER + min(0.0, 1 - ref_len / sys_len))

    settings = "the formula of Moses' sentence-bleu: add one to all orders; words by white space"
    return score, {"package": "this script", "version": "-", "settings": settings}


def rouge_l() -> Metric:
    """F1 of the longest common subsequence (Lin 2004) by rouge_score: lower case, letters and digits, not stemmed."""
    from rouge_score.rouge_scorer import RougeScorer
    from rouge_score.tokenizers import DefaultTokenizer

    tokenize = cache(DefaultTokenizer(use_stemmer=False).tokenize)
    scorer = RougeScorer(["rougeL"], tokenizer=SimpleNamespace(tokenize=tokenize))
    facts = facts_of("rouge-score", "F1 of rougeL, not stemmed")
    return lambda text, reference: 100 * scorer.score(reference, text)["rougeL"].fmeasure, facts


def load_wordnet():
    """nltk's WordNet, or None if its corpus is not installed."""
    try:
        nltk.corpus.wordnet.ensure_loaded()
    except LookupError:
        return None
    return nltk.corpus.wordnet


def meteor() -> Metric:
    """METEOR (Lavie and Agarwal 2007) by nltk: equal words, then equal stems, then, if WordNet is installed, synonyms.

    nltk looks up the stems that the stem stage has left, and so finds no synonyms of words that differ from their stems.
    """
    from nltk.stem.porter import PorterStemmer
    from nltk.tokenize import NLTKWordTokenizer
    from nltk.translate.meteor_score import single_meteor_score

    wordnet = load_wordnet()
    options = {
        "stemmer": SimpleNamespace(stem=cache(PorterStemmer().stem)),
        "wordnet": SimpleNamespace(synsets=cache(wordnet.synsets) if wordnet else lambda word: []),
    }
    tokens = cache(NLTKWordTokenizer().tokenize)

    def score(prediction: str, reference: str) -> float:
        return 100 * single_meteor_score(tokens(reference), tokens(prediction), **options)

    stages = "exact, stem and WordNet stages"
    if wordnet is None:
        stages = "exact and stem stages; without the WordNet stage (to install it: python -m nltk.downloader wordnet)"
    return score, facts_of("nltk", stages)


def paired_p(ours: np.ndarray, theirs: np.ndarray) -> float | None:
    """The two-sided p-value of the paired t-test over rows; None for a single row."""
    from scipy import stats

    if len(ours) < 2:
        return None
    differences = ours - theirs
    if np.ptp(differences) == 0:  # no variance
        return 1.0 if differences[0] == 0 else 0.0
    return float(stats.ttest_rel(ours, theirs).pvalue)
