"""Scores of n predictions in per cent: a function per task, from predictions and references to `{metric: Score}`."""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

ROUGE = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L", "rougeLsum": "ROUGE-Lsum"}
PROTOCOLS = {"": ("term", "context"), ", any sense": ("term",)}  # rows that share their references


class Score(NamedTuple):
    """A metric.

    Attributes:
        rows: `(n,)` or `(n, m)`, what is averaged over rows; a single value for a metric of all rows together.
        facts: what computed it: a package with its version, and its settings.
        of_means: means over rows, `(...)` or `(..., m)` -> the score `(...)`.
    """

    rows: np.ndarray
    facts: str
    of_means: Callable[[np.ndarray], np.ndarray] = np.asarray

    @property
    def value(self) -> float:
        """The score of all rows."""
        return float(self.of_means(self.rows.mean(axis=0)))


def facts_of(package: str, settings: str) -> str:
    """What computed a metric."""
    return f"{package} {version(package)}, {settings}"


def f1_of_means(means: np.ndarray) -> np.ndarray:
    """F1 of mean precision and mean recall, of `(..., 2)`."""
    total = means.sum(axis=-1)
    return np.divide(2 * means.prod(axis=-1), total, out=np.zeros_like(total), where=total > 0)


def share_of_means(means: np.ndarray) -> np.ndarray:
    """The ratio of two means, of `(..., 2)`, in per cent."""
    return 100 * means[..., 0] / np.maximum(means[..., 1], 1e-9)


def score_keyphrases(
    predictions: Sequence[Sequence[str]],
    references: Sequence[Sequence[str]],
    sources: Sequence[Mapping],
    convention: str = "seke",
    language: str | None = "english",
) -> dict[str, Score]:
    """F1@5 and F1@10 of keyphrases that occur in the text, as SEKE counts them; or as ExHiRD does, F1@5 and F1@M of present and of
    absent ones. `phrases` is their number per document, `repeats` the share that has the stems of an earlier one.

    Args:
        predictions: phrases, best first.
        sources: documents with `text` and perhaps `title`, which may be lists of words.
        convention, language: as in `keyphrase_tools.metrics.keyphrase_f1`.
    """
    from keyphrase_tools.evaluation import gold_phrases
    from keyphrase_tools.metrics import check_gold, keyphrase_f1_by_document
    from keyphrase_tools.rows import full_text
    from keyphrase_tools.words import normalise, stem_phrase
    from modeling_exhird.data_exhird import clean_keyphrases, join_words, phrase_words
    from modeling_exhird.tokenization_exhird import split_document

    options: dict = {"convention": convention, "language": language, "k": (5, "M" if convention == "exhird" else 10)}
    if convention == "exhird":
        # phrases with <unk> do not count, whatever their other words
        found = [[p if "<unk>" in p else " ".join(phrase_words(p)) for p in phrases] for phrases in predictions]
        gold = [[" ".join(words) for words in clean_keyphrases(phrases, max_words=None)] for phrases in references]
        check_gold(gold)
        words = [split_document(*(join_words(row.get(name) or "") for name in ("text", "title"))) for row in sources]
        options["sources"] = [" ".join(word for word, _ in document) for document in words]
        documents = keyphrase_f1_by_document(found, gold, **options)
        parts = {"present ": documents["present"], "absent ": documents["absent"]}
    else:
        found = [[normalise(phrase) for phrase in phrases] for phrases in predictions]
        gold = gold_phrases([full_text(dict(row)) for row in sources], references, language=language)
        parts = {"": [row for row in keyphrase_f1_by_document(found, gold, **options) if row["num_targets"]]}
    scores, facts = {}, f"convention {convention}, F1 of mean precision and recall"
    for part, rows in parts.items():
        for k in options["k"]:
            ratios = np.array([[row[f"precision@{k}"], row[f"recall@{k}"]] for row in rows])
            scores[f"{part}F1@{k}"] = Score(100 * ratios, facts, f1_of_means)
    stems = [[stem_phrase(phrase, language) for phrase in phrases] for phrases in found]
    counts = np.array([[len(row) - len(set(row)), len(row)] for row in stems], dtype=float)
    scores["phrases"] = Score(counts[:, 1], "number per document")
    scores["repeats"] = Score(counts, "equal stems in a document", share_of_means)
    return scores


def score_summaries(
    predictions: Sequence[str],
    references: Sequence[str],
    sources: Sequence[Mapping] = (),
    bertscore_model: str | None = None,
    bertscore_layer: int | None = None,
) -> dict[str, Score]:
    """F1 of Google's rouge_score, stemmed: rougeL of whole summaries, rougeLsum sentence by sentence (Lin 2004, Sect. 3.2). Mean R is
    the mean of ROUGE-1, -2 and -L. With a model also BERTScore.
    """
    from rouge_score.rouge_scorer import RougeScorer

    from modeling_moesumm.sentences_moesumm import sentence_spans

    def one_sentence_per_line(text: str) -> str:
        return "\n".join(" ".join(text[start:end].split()) for start, end in sentence_spans(text))

    scorer, facts = RougeScorer(list(ROUGE), use_stemmer=True), facts_of("rouge-score", "F1, stemmed")
    pairs = list(zip(predictions, references, strict=True))
    rows = [scorer.score(one_sentence_per_line(gold), one_sentence_per_line(found)) for found, gold in pairs]
    scores = {
        title: Score(100 * np.array([row[name].fmeasure for row in rows]), facts) for name, title in ROUGE.items()
    }
    mean = np.mean([scores[ROUGE[name]].rows for name in ("rouge1", "rouge2", "rougeL")], axis=0)
    scores["mean R"] = Score(mean, "of ROUGE-1, -2 and -L")
    if bertscore_model:
        from .models import open_bertscore

        metric, settings = open_bertscore(bertscore_model, bertscore_layer)
        scores["BERTScore"] = Score(metric(pairs), facts_of("bert-score", settings))
    return scores


def without_full_stops(text: str) -> str:
    """A text without full stops, except those before a digit (Huang et al. 2021), and with single spaces."""
    return " ".join(re.sub(r"\.(?!\d)", "", text).split())


def lexical_metrics() -> dict[str, tuple[Callable[[str, str], float], str]]:
    """Scores of a definition and a reference. METEOR (Lavie and Agarwal 2007) compares equal words, equal stems, and if WordNet is
    installed synonyms, which nltk looks up by stems.
    """
    from nltk.corpus import wordnet
    from nltk.stem.porter import PorterStemmer
    from nltk.tokenize import NLTKWordTokenizer
    from nltk.translate.meteor_score import single_meteor_score
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics import BLEU

    bleu, rouge = BLEU(effective_order=True), RougeScorer(["rougeL"])
    words, stemmer = cache(NLTKWordTokenizer().tokenize), SimpleNamespace(stem=cache(PorterStemmer().stem))
    try:
        wordnet.ensure_loaded()
        stages, synsets = "exact, stem and WordNet stages", cache(wordnet.synsets)
    except LookupError:
        stages = "exact and stem stages; without the WordNet stage (to install it: python -m nltk.downloader wordnet)"
        synsets = lambda word: []  # noqa: E731
    options = {"stemmer": stemmer, "wordnet": SimpleNamespace(synsets=synsets)}
    settings = f"sentence BLEU, nrefs:1|case:mixed|eff:yes|tok:13a|smooth:{bleu.smooth_method}"
    return {
        "BLEU": (lambda text, gold: bleu.sentence_score(text, [gold]).score, facts_of("sacrebleu", settings)),
        "ROUGE-L": (
            lambda text, gold: 100 * rouge.score(gold, text)["rougeL"].fmeasure,
            facts_of("rouge-score", "F1 of rougeL, not stemmed"),
        ),
        "METEOR": (
            lambda text, gold: 100 * single_meteor_score(words(gold), words(text), **options),
            facts_of("nltk", stages),
        ),
    }


def references_of(references: Sequence[str], sources: Sequence[Mapping], fields: tuple[str, ...]) -> list[list[str]]:
    """The references of all rows that have the same fields, but for case and white space."""
    keys = [tuple(" ".join(row[name].casefold().split()) for name in fields) for row in sources]
    groups: dict[tuple, dict[str, None]] = {}
    for key, reference in zip(keys, references, strict=True):
        groups.setdefault(key, {})[reference] = None
    return [list(groups[key]) for key in keys]


def score_definitions(
    predictions: Sequence[str],
    references: Sequence[str],
    sources: Sequence[Mapping],
    bertscore_model: str | None = None,
    bertscore_layer: int | None = None,
    mauve_model: str | None = None,
) -> dict[str, Score]:
    """BLEU, ROUGE-L, METEOR and with models BERTScore and MAUVE of definitions without full stops. A row's score is the best over its
    references: all definitions of the same term and context, or of the term in any sense (Huang et al. 2021). MAUVE compares all
    predictions with all references. `sources` are rows with `term` and `context`.
    """
    found, gold = ([without_full_stops(text) for text in texts] for texts in (predictions, references))
    lists = {suffix: references_of(gold, sources, fields) for suffix, fields in PROTOCOLS.items()}
    pairs = list({(text, one): None for text, own in zip(found, lists[", any sense"], strict=True) for one in own})
    values, facts, scores = {}, {}, {}
    for title, (metric, facts[title]) in lexical_metrics().items():
        values[title] = {pair: metric(*pair) for pair in pairs}
    if bertscore_model:
        from .models import open_bertscore

        of_pairs, settings = open_bertscore(bertscore_model, bertscore_layer)
        facts["BERTScore"] = facts_of("bert-score", settings)
        values["BERTScore"] = dict(zip(pairs, of_pairs(pairs), strict=True))
    for suffix, own in lists.items():
        for title, of_pair in values.items():
            best = [max(of_pair[text, one] for one in ones) for text, ones in zip(found, own, strict=True)]
            scores[title + suffix] = Score(np.array(best), facts[title])
    if mauve_model:
        from .models import mauve

        scores["MAUVE"] = Score(np.array([mauve(mauve_model, found, gold)]), facts_of("mauve-text", mauve_model))
    return scores


def normalise_answer(answer: str) -> str:
    """Lower case, without punctuation, articles and extra spaces."""
    text = "".join(c for c in answer.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def answer_f1(found: str, gold: str) -> float:
    """F1 of the words of normalised answers; if one of them is empty, 1 if both are and otherwise 0."""
    if not found or not gold:
        return float(found == gold)
    ours, theirs = found.split(), gold.split()
    return 2 * (Counter(ours) & Counter(theirs)).total() / (len(ours) + len(theirs))


def score_answers(
    predictions: Sequence[str], references: Sequence[Sequence[str]], sources: Sequence[Mapping] = ()
) -> dict[str, Score]:
    """Exact match and F1 as in SQuAD's scripts (Rajpurkar et al. 2016, 2018), against the best gold answer; "" for no answer. With
    unanswerable questions also `NoAns`, and `HasAns` if there are others. Gold answers that are empty once normalised are ignored.
    """
    rows, has_answer = [], []
    for prediction, answers in zip(predictions, references, strict=True):
        found, gold = normalise_answer(prediction), [one for one in map(normalise_answer, answers) if one]
        has_answer.append(bool(gold))
        rows.append([float(found in (gold or [""])), max(answer_f1(found, one) for one in gold or [""])])
    parts = {"": np.full(len(rows), True), "HasAns ": np.array(has_answer), "NoAns ": ~np.array(has_answer)}
    return {
        f"{part}{title}": Score(100 * np.array(rows)[chosen, i], "SQuAD's normalisation")
        for part, chosen in parts.items()
        if chosen.any() and (not part or not all(has_answer))
        for i, title in enumerate(("exact", "F1"))
    }
