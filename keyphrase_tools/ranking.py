"""Ranks the phrases of a document by all its evidence: the probability that a phrase is a keyphrase, by logistic regression.

Candidates are the spans of up to MAX_WORDS words that the model may have labelled, whether or not they were its first choice.
Each candidate is described by its mentions (how probable, how many, where), its length, and the document (how long, how densely
labelled); `PhraseRanker` weighs this. The weights are few, are fitted on validation documents by `fit_ranker`, and are saved in
the configuration as `keyphrase_ranker`.

Letters: W words, p(O), p(B), p(I) the word probabilities, M mentions of a phrase, n words of a phrase.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .decoding import B, I, O, is_phrase, mention_scores, tag_spans, word_tags
from .stemming import stem

MAX_WORDS = 5  # per candidate
FLOOR = 0.02  # probability of a candidate's best mention
LABELLED = 0.15  # threshold of the labels that the feature "labelled" looks at
FEATURES = (
    "span", "labels", "inside", "expected_mentions", "mentions", "first", "relative_first", "document", "one_word", "two_words",
    "three_words", "more_words", "labelled", "function_word", "density", "begins",
)  # fmt: skip
INTERACTIONS = (
    ("density", "span"), ("density", "labels"), ("density", "mentions"), ("density", "first"), ("density", "one_word"),
    ("document", "mentions"), ("document", "first"),
)  # fmt: skip
NAMES = (*FEATURES, *(f"{a} x {b}" for a, b in INTERACTIONS))
_ENGLISH = """
    a about above across after again against all along also although always am among an and another any are around as at away
    be because been before being below between both but by can cannot could did do does doing down during each either enough
    even ever every few for from further had has have having he her here hers him his how however i if in into is it its just
    less many may me might more most much must my neither never no nor not of off often on once only onto or other our out over
    own per rather same several shall she should since so some such than that the their them then there these they this those
    though through thus to too toward towards under until up upon us very was we were what when where whether which while who
    whom whose why will with within without would yet you your
"""
FUNCTION_WORDS = frozenset(_ENGLISH.split())


class Candidate(NamedTuple):
    """A phrase and all its mentions, as spans of words in text order."""

    spans: list[tuple[int, int]]
    features: np.ndarray  # (len(NAMES),)


def find_candidates(
    words: Sequence[tuple[str, int, int]], p: np.ndarray, language: str | None = "english"
) -> list[Candidate]:
    """The candidates of a document, in the order of their first mentions.

    Args:
        words: the W words of the text, as `split_words` returns them.
        p (`(W, 3)`): probabilities of O, B and I for each word.
        language: of the stems by which phrases are compared, see `stemming.stem`.
    """
    allowed = np.array([is_phrase([word]) for word, _, _ in words], dtype=bool)
    if not allowed.any():
        return []
    stems = [stem(word, language) for word, _, _ in words]
    positions = defaultdict(list)
    for w in np.flatnonzero(allowed):
        positions[stems[w]].append(int(w))
    labelled = set(tag_spans(word_tags(p, LABELLED)))
    about = document_features(p[allowed], len(words))
    functional = [language == "english" and is_function_word(word) for word, _, _ in words]
    candidates = []
    for key in probable_phrases(stems, allowed, p):
        n = len(key)
        spans = [(w, w + n) for w in positions[key[0]] if tuple(stems[w : w + n]) == key]
        features = phrase_features(spans, p, len(words), any(span in labelled for span in spans)) | about
        features["function_word"] = float(any(functional[a] or functional[b - 1] for a, b in spans))
        values = [features[name] for name in FEATURES] + [features[a] * features[b] for a, b in INTERACTIONS]
        candidates.append(Candidate(spans, np.array(values)))
    return sorted(candidates, key=lambda candidate: candidate.spans[0])


def is_function_word(word: str) -> bool:
    """Whether an English word is an article, a preposition, a pronoun or the like; "IT" and "US" are not."""
    return word.lower() in FUNCTION_WORDS and not (word.isupper() and len(word) > 1)


def probable_phrases(stems: Sequence[str], allowed: np.ndarray, p: np.ndarray) -> list[tuple[str, ...]]:
    """The stems of all phrases with a mention of probability FLOOR or more: p(B) of the first word, p(I) of the others, and not
    p(I) of the word after them."""
    found: dict[tuple[str, ...], None] = {}
    ends = 1 - np.append(p[1:, I], 0.0)  # (W,): a phrase may end with this word
    for start in np.flatnonzero(allowed & (p[:, B] >= FLOOR)):
        probability = p[start, B]
        for end in range(start, min(start + MAX_WORDS, len(stems))):
            if end > start:
                probability *= p[end, I]
            if not allowed[end] or probability < FLOOR:
                break
            if probability * ends[end] >= FLOOR:
                found[tuple(stems[start : end + 1])] = None
    return list(found)


def phrase_features(
    spans: Sequence[tuple[int, int]], p: np.ndarray, num_words: int, labelled: bool
) -> dict[str, float]:
    """What the mentions of a phrase say about it."""
    after = np.append(p[:, I], 0.0)
    span = np.array([p[a, B] * p[a + 1 : b, I].prod() * (1 - after[b]) for a, b in spans])  # (M,)
    inside = np.array([1 - p[a:b, O].max() for a, b in spans])
    first, n = spans[0][0], spans[0][1] - spans[0][0]
    return {
        "span": log_odds(span.max()),
        "labels": log_odds(mention_scores(p, spans).max()),
        "inside": log_odds(inside.max()),
        "expected_mentions": np.log1p(span.sum()),
        "mentions": np.log(len(spans)),
        "first": np.log1p(first),
        "relative_first": first / num_words,
        "one_word": float(n == 1),
        "two_words": float(n == 2),
        "three_words": float(n == 3),
        "more_words": float(n > 3),
        "labelled": float(labelled),
    }


def document_features(p: np.ndarray, num_words: int) -> dict[str, float]:
    """What the document says about its phrases; `p` of its words without punctuation."""
    return {
        "document": np.log(num_words),
        "density": np.log((1 - p[:, O]).mean() + 1e-3),
        "begins": np.log1p(p[:, B].sum()),
    }


def log_odds(probability: float) -> float:
    """log p / (1 - p), bounded for 0 and 1."""
    return float(np.log((probability + 1e-3) / (1 - probability + 1e-3)))


class PhraseRanker:
    """P(keyphrase) = sigmoid(bias + sum of weight x feature).

    Args:
        weights: for "bias" and each of NAMES; and "gold", the number of gold keyphrases per expected one, which is above 1 since
            some are not among the candidates.

    Raises:
        ValueError: if a weight is missing or unknown.
    """

    def __init__(self, weights: Mapping[str, float]):
        if set(weights) != {"bias", "gold", *NAMES}:
            wrong = sorted(set(weights) ^ {"bias", "gold", *NAMES})
            raise ValueError(
                f"keyphrase_ranker has other features than this version of lexperts: {', '.join(wrong)}. Fit it again with "
                "keyphrase_tools.ranking.fit_ranker, or set model.config.keyphrase_ranker = None."
            )
        self._bias, self._weights = weights["bias"], np.array([weights[name] for name in NAMES])
        self._gold = weights["gold"]

    def probabilities(self, candidates: Sequence[Candidate]) -> np.ndarray:
        """P(keyphrase) of each candidate."""
        features = np.array([candidate.features for candidate in candidates]).reshape(-1, len(NAMES))
        return 1 / (1 + np.exp(-(self._bias + features @ self._weights)))

    def best_number(self, scores: Sequence[float]) -> int:
        """The number n of phrases, best first, with the highest expected F1: 2 sum_{i <= n} P_i / (n + expected gold).

        >>> PhraseRanker({"bias": 0, "gold": 1, **dict.fromkeys(NAMES, 0)}).best_number([0.9, 0.8, 0.1, 0.1])
        2
        """
        if not len(scores):
            return 0
        p, n = np.asarray(scores), np.arange(1, len(scores) + 1)
        return int((2 * p.cumsum() / (n + self._gold * p.sum())).argmax()) + 1

    def rank(
        self, text: str, words: Sequence[tuple[str, int, int]], p: np.ndarray, language: str | None = "english"
    ) -> list[dict]:
        """The candidates of a document in the form of `decoding.rank_phrases`, best first.

        A phrase's score is P(keyphrase); a mention's is the mean probability of its labels.
        """
        candidates = find_candidates(words, p, language)
        phrases = []
        for (spans, _), probability in zip(candidates, self.probabilities(candidates), strict=True):
            scores = mention_scores(p, spans)
            mentions = [
                {"start": words[a][1], "end": words[b - 1][2], "score": round(float(score), 6)}
                for (a, b), score in zip(spans, scores, strict=True)
            ]
            start, end = mentions[0]["start"], mentions[0]["end"]
            keyphrase, score = " ".join(text[start:end].split()), round(float(probability), 6)
            phrases.append({"keyphrase": keyphrase, "score": score, "start": start, "end": end, "mentions": mentions})
        return sorted(phrases, key=lambda phrase: (-phrase["score"], phrase["start"], phrase["end"]))


def fit_ranker(
    documents: Sequence[tuple[Sequence[tuple[str, int, int]], np.ndarray]],
    gold: Sequence[Sequence[str]],
    groups: Sequence | None = None,
    shares: Mapping | None = None,
) -> dict[str, float]:
    """The weights of a `PhraseRanker`, by logistic regression on documents that the model was not trained on.

    Args:
        documents: for each document, its words and their probabilities `(W, 3)`.
        gold: for each document, the gold phrases, as `labels.present` returns them.
        groups: for each document, the group (such as the data set) that it belongs to.
        shares: for each group, the weight of all its candidates together; the same for each by default.

    Raises:
        ImportError: if scikit-learn is not installed.
        ValueError: if the candidates are all right or all wrong.
    """
    try:
        from sklearn.linear_model import LogisticRegression
        from sklearn.preprocessing import StandardScaler
    except ImportError as error:
        raise ImportError("fit_ranker needs scikit-learn. Install it with: pip install lexperts[train]") from error
    rows, right, group_of_row = [], [], []
    num_gold: dict = defaultdict(int)
    for number, ((words, p), phrases) in enumerate(zip(documents, gold, strict=True)):
        keys = {tuple(stem(word) for word in phrase.split()) for phrase in phrases}
        num_gold[0 if groups is None else groups[number]] += len(keys)
        for candidate in find_candidates(words, p):
            start, end = candidate.spans[0]
            rows.append(candidate.features)
            right.append(tuple(stem(word) for word, _, _ in words[start:end]) in keys)
            group_of_row.append(0 if groups is None else groups[number])
    if len(set(right)) < 2:
        raise ValueError(
            f"{sum(right)} of {len(right)} candidates are gold keyphrases: a ranker cannot be fitted. Train the model longer, or "
            "use more documents."
        )
    sizes = {group: group_of_row.count(group) for group in num_gold}
    shares = {group: 1.0 if shares is None else shares[group] for group in num_gold}
    per_row = {group: len(rows) * shares[group] / sum(shares.values()) / max(sizes[group], 1) for group in num_gold}
    weight = np.array([per_row[group] for group in group_of_row])
    scaler = StandardScaler().fit(np.array(rows))
    regression = LogisticRegression(C=0.3, max_iter=2000)
    regression.fit(scaler.transform(np.array(rows)), right, sample_weight=weight)
    weights = regression.coef_[0] / scaler.scale_
    bias = regression.intercept_[0] - (weights * scaler.mean_).sum()
    # with an intercept, the expected number of keyphrases is the number of right candidates
    gold = sum(num_gold[group] * per_row[group] for group in num_gold) / (weight @ np.array(right))
    values = {"bias": bias, "gold": max(gold, 1.0), **dict(zip(NAMES, weights, strict=True))}
    return {name: round(float(value), 6) for name, value in values.items()}
