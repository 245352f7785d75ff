"""Scores of n predictions in per cent: a function per task, from predictions and references to `{metric: Score}`."""

import re
import string
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

Texts = Sequence[str]
Lists = Sequence[Sequence[str]]
Rows = Sequence[Mapping]
Model = str | None


class Score(NamedTuple):
    """A metric of n rows."""

    rows: np.ndarray  # (n,) or (n, m), what is averaged over rows; a single value for a metric of all rows together
    facts: str  # what computed it: a package with its version, and its settings
    of_means: Callable[[np.ndarray], np.ndarray] = np.asarray  # means over rows, (...) or (..., m) -> the score (...)

    @property
    def value(self) -> float:
        """The score of all rows."""
        return float(self.of_means(self.rows.mean(axis=0)))


Scores = dict[str, Score]


def f1_of_means(means: np.ndarray) -> np.ndarray:
    """F1 of mean precision and mean recall, of `(..., 2)`."""
    return 2 * means.prod(axis=-1) / np.maximum(means.sum(axis=-1), 1e-9)


def score_keyphrases(
    predictions: Lists, references: Lists, sources: Rows, convention: str = "seke", language: str | None = "english"
) -> Scores:
    """F1@5 and F1@10 of keyphrases that occur in the text, as SEKE counts them; or as ExHiRD does, F1@5 and F1@M of present and of
    absent ones. `sources` are documents with `text` and perhaps `title`, texts or lists of words; for the options see
    `keyphrase_tools.metrics.keyphrase_f1`.
    """
    from keyphrase_tools.evaluation import gold_phrases
    from keyphrase_tools.metrics import check_gold, keyphrase_f1_by_document
    from keyphrase_tools.rows import full_text
    from lexperts_lite.words import normalise
    from modeling_exhird.data_exhird import clean_keyphrases, join_words, phrase_words
    from modeling_exhird.tokenization_exhird import split_document

    options: dict = {"convention": convention, "language": language, "k": (5, "M" if convention == "exhird" else 10)}
    if convention == "exhird":
        # phrases with <unk> do not count, whatever their other words
        found = [[p if "<unk>" in p else " ".join(phrase_words(p)) for p in phrases] for phrases in predictions]
        gold = [[" ".join(words) for words in clean_keyphrases(phrases, max_words=None)] for phrases in references]
        check_gold(gold)
        words = [split_document(*(join_words(row.get(name)) for name in ("text", "title"))) for row in sources]
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
    return scores


def score_summaries(predictions: Texts, references: Texts, sources: Rows = (), bertscore_model: Model = None) -> Scores:
    """F1 of Google's rouge_score, stemmed: rougeL of whole summaries, rougeLsum sentence by sentence (Lin 2004, Sect. 3.2). With a
    model also BERTScore.
    """
    from rouge_score.rouge_scorer import RougeScorer

    from modeling_moesumm.sentences_moesumm import sentence_spans

    def split(text: str) -> str:  # one sentence per line
        return "\n".join(" ".join(text[start:end].split()) for start, end in sentence_spans(text))

    rouge = RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"], use_stemmer=True)
    rows = [rouge.score(split(gold), split(found)) for found, gold in zip(predictions, references, strict=True)]
    facts = f"rouge-score {version('rouge-score')}, F1, stemmed"
    f1 = {name: 100 * np.array([row[name].fmeasure for row in rows]) for name in rouge.rouge_types}
    scores = {name.replace("rouge", "ROUGE-"): Score(f1[name], facts) for name in f1}
    if bertscore_model:
        from .models import bertscore

        scores["BERTScore"] = Score(*bertscore(bertscore_model, predictions, [[gold] for gold in references]))
    return scores


def score_definitions(
    predictions: Texts, references: Texts, sources: Rows, bertscore_model: Model = None, mauve_model: Model = None
) -> Scores:
    """Sentence BLEU, ROUGE-L, METEOR and with models BERTScore and MAUVE of definitions without full stops, except those before a digit.

    A row's score is the best over its references: all definitions of the same term and context, but for case and white space.
    METEOR (Lavie and Agarwal 2007) compares equal words, equal stems, and if WordNet is installed synonyms. MAUVE compares all
    predictions with all references. `sources` are rows with `term` and `context`.
    """
    from nltk.corpus import wordnet
    from nltk.tokenize import NLTKWordTokenizer
    from nltk.translate.meteor_score import single_meteor_score
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics import BLEU

    stop = re.compile(r"\.(?!\d)")
    found, gold = ([" ".join(stop.sub("", text).split()) for text in texts] for texts in (predictions, references))
    keys = [tuple(" ".join(row[name].casefold().split()) for name in ("term", "context")) for row in sources]
    groups = defaultdict(list)
    for key, reference in zip(keys, gold, strict=True):
        groups[key].append(reference)
    lists = [groups[key] for key in keys]

    def best(package: str, settings: str, metric: Callable[[str, str], float]) -> Score:
        rows = [max(metric(text, one) for one in own) for text, own in zip(found, lists, strict=True)]
        return Score(np.array(rows), f"{package} {version(package)}, {settings}")

    bleu, rouge, split = BLEU(effective_order=True), RougeScorer(["rougeL"]), NLTKWordTokenizer().tokenize
    stages, synonyms = "exact, stem and WordNet stages", wordnet
    try:
        wordnet.ensure_loaded()
    except LookupError:
        stages = "exact and stem stages; without the WordNet stage (to install it: python -m nltk.downloader wordnet)"
        synonyms = SimpleNamespace(synsets=lambda word: [])
    scores = {
        "BLEU": best("sacrebleu", "eff:yes|tok:13a|smooth:exp", lambda x, y: bleu.sentence_score(x, [y]).score),
        "ROUGE-L": best("rouge-score", "F1, not stemmed", lambda x, y: 100 * rouge.score(y, x)["rougeL"].fmeasure),
        "METEOR": best("nltk", stages, lambda x, y: 100 * single_meteor_score(split(y), split(x), wordnet=synonyms)),
    }
    if bertscore_model or mauve_model:
        from .models import bertscore, mauve
    if bertscore_model:
        scores["BERTScore"] = Score(*bertscore(bertscore_model, found, lists))
    if mauve_model:
        scores["MAUVE"] = Score(*mauve(mauve_model, found, gold))
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


def score_answers(predictions: Texts, references: Lists, sources: Rows = ()) -> Scores:
    """Exact match and F1 as in SQuAD's scripts (Rajpurkar et al. 2016, 2018), against the best gold answer; "" for no answer. With
    unanswerable questions also `NoAns`, and `HasAns` if there are others. Gold answers that are empty once normalised are ignored.
    """
    rows = []
    for prediction, answers in zip(predictions, references, strict=True):
        found, gold = normalise_answer(prediction), [one for one in map(normalise_answer, answers) if one] or [""]
        rows.append([found in gold, max(answer_f1(found, one) for one in gold), gold != [""]])
    exact, f1, has_answer = np.array(rows, dtype=float).T
    parts = {"": has_answer >= 0}
    if not has_answer.all():
        parts |= {"HasAns ": has_answer == 1, "NoAns ": has_answer == 0}
    return {
        f"{part}{title}": Score(100 * values[chosen], "SQuAD's normalisation")
        for part, chosen in parts.items()
        if chosen.any()
        for title, values in (("exact", exact), ("F1", f1))
    }
