"""Ranks the phrases of a document by all its evidence: the probability that a phrase is a keyphrase, by logistic regression.

`PhraseRanker` weighs the features of `phrase_features.find_candidates`. Its weights are few, are fitted on validation documents by
`fit_ranker`, and are saved in the configuration as `keyphrase_ranker`.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import isfinite

import numpy as np

from .decoding import apply_temperature, show_mentions
from .phrase_features import NAMES, Candidates, Words, find_candidates
from .stemming import check_language, stem


class PhraseRanker:
    """P(keyphrase) = sigmoid(bias + sum of weight x feature).

    Args:
        weights: for "bias" and each of NAMES; and "gold", the number of gold keyphrases per expected one, which is above 1 since
            some are not among the candidates.

    Raises:
        ValueError: if a weight is missing, unknown, or not a finite number.
    """

    def __init__(self, weights: Mapping[str, float]):
        if set(weights) != {"bias", "gold", *NAMES}:
            wrong = sorted(set(weights) ^ {"bias", "gold", *NAMES})
            raise ValueError(
                f"keyphrase_ranker has other features than this version of lexperts: {', '.join(wrong)}. Fit it again with "
                "keyphrase_tools.ranking.fit_ranker, or set model.config.keyphrase_ranker = None."
            )
        for name, value in weights.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
                raise ValueError(
                    f"keyphrase_ranker has {name}={value!r}, which is not a finite number. Fit it again with "
                    "keyphrase_tools.ranking.fit_ranker, or set model.config.keyphrase_ranker = None."
                )
        self._bias, self._weights = weights["bias"], np.array([weights[name] for name in NAMES])
        self._gold = weights["gold"]

    def probabilities(self, features: np.ndarray) -> np.ndarray:
        """P(keyphrase) of candidates with the features `(C, F)`."""
        # row by row: a matrix product may round a row differently in another batch
        return 1 / (1 + np.exp(-(self._bias + (features * self._weights).sum(1))))

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
        self,
        documents: Sequence[tuple[str, Words, np.ndarray]],
        language: str | None = "english",
        temperature: float | None = None,
    ) -> list["RankedPhrases"]:
        """Ranks the candidates of each document.

        Args:
            documents: texts, their W words as `split_words` returns them, and the words' probabilities `(W, 3)`.
            language: of the stems, see `stemming.stem`.
            temperature: of the scores, see `decoding.apply_temperature`; it changes neither their order nor the best number.
        """
        found = find_candidates([(words, p) for _, words, p in documents], language)
        return [
            RankedPhrases(text, words, candidates, self, temperature)
            for (text, words, _), candidates in zip(documents, found, strict=True)
        ]


def read_rankers(config) -> dict[str | None, PhraseRanker]:
    """The rankers of a model's configuration: of each style in `style_rankers`, and under `None` `keyphrase_ranker`.

    Raises:
        ValueError: if a ranker's weights are wrong, or its style is not one of the model's.
    """
    weights = {None: getattr(config, "keyphrase_ranker", None)} | (getattr(config, "style_rankers", None) or {})
    styles = getattr(config, "styles", None) or []
    if unknown := [style for style in weights if style is not None and style not in styles]:
        known = f"its styles are {', '.join(map(repr, styles))}" if styles else "it has no styles"
        raise ValueError(f"style_rankers has {unknown[0]!r}, which the model does not have: {known}. Leave it out.")
    return {style: PhraseRanker(values) for style, values in weights.items() if values is not None}


class RankedPhrases:
    """The candidates of a document, best first.

    Attributes:
        scores: P(keyphrase) of each, at the temperature, to six digits.
        best_number: of `PhraseRanker.best_number`.
    """

    def __init__(
        self, text: str, words: Words, candidates: Candidates, ranker: PhraseRanker, temperature: float | None = None
    ):
        self._text, self._words, self._candidates = text, words, candidates
        scores = ranker.probabilities(candidates.features).round(6)
        self._order = np.argsort(-scores, kind="stable")  # equal scores by their first mention
        scores = scores[self._order]
        self.best_number = ranker.best_number(scores.tolist())
        self.scores = (scores if temperature is None else apply_temperature(scores, temperature).round(6)).tolist()

    def select(self, top_k: int | None, min_score: float | None) -> list[dict]:
        """The phrases that are worth returning, best first.

        Args:
            top_k: at most this many, `None` for any number.
            min_score: all that reach it; `None` for the best number.
        """
        number = self.best_number if min_score is None else sum(score >= min_score for score in self.scores)
        return self.phrases(number if top_k is None else min(number, top_k))

    def phrases(self, number: int | None = None) -> list[dict]:
        """The first phrases in the form of `decoding.rank_phrases`; a mention's score is the mean probability of its labels."""
        return [self._phrase(c, score) for c, score in zip(self._order[:number], self.scores, strict=False)]

    def _phrase(self, c: int, score: float) -> dict:
        inside = self._candidates.mentions(c)
        spans, scores = self._candidates.spans[inside].tolist(), self._candidates.scores[inside].tolist()
        mentions = [
            {"start": self._words[a][1], "end": self._words[b - 1][2], "score": round(of_labels, 6)}
            for (a, b), of_labels in zip(spans, scores, strict=True)
        ]
        return show_mentions(self._text, mentions, score)


def fit_ranker(
    documents: Sequence[tuple[Words, np.ndarray]],
    gold: Sequence[Sequence[str]],
    groups: Sequence | None = None,
    shares: Mapping | None = None,
    language: str | None = "english",
) -> dict[str, float]:
    """The weights of a `PhraseRanker`, by logistic regression on documents that the model was not trained on.

    Args:
        documents: for each document, its words and their probabilities `(W, 3)`.
        gold: for each document, the gold phrases, as `labels.present` returns them.
        groups: for each document, the group (such as the data set) that it belongs to.
        shares: for each group, the weight of all its candidates together; the same for each by default.
        language: of the stems by which phrases are compared, as in `labels.present`; save it as `config.keyphrase_language`.

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
    groups = [0] * len(documents) if groups is None else groups
    found = find_candidates(documents, check_language(language))
    for (words, _), candidates, phrases, group in zip(documents, found, gold, groups, strict=True):
        keys = {tuple(stem(word, language) for word in phrase.split()) for phrase in phrases}
        num_gold[group] += len(keys)
        for start, end in candidates.spans[candidates.bounds[:-1]]:
            right.append(tuple(stem(word, language) for word, _, _ in words[start:end]) in keys)
        rows.append(candidates.features)
        group_of_row += [group] * len(candidates.features)
    rows = np.concatenate(rows)
    if len(set(right)) < 2:
        raise ValueError(
            f"{sum(right)} of {len(right)} candidates are gold keyphrases: a ranker cannot be fitted. Train the model longer, or "
            "use more documents."
        )
    sizes = {group: group_of_row.count(group) for group in num_gold}
    shares = {group: 1.0 if shares is None else shares[group] for group in num_gold}
    per_row = {group: len(rows) * shares[group] / sum(shares.values()) / max(sizes[group], 1) for group in num_gold}
    weight = np.array([per_row[group] for group in group_of_row])
    scaler = StandardScaler().fit(rows)
    regression = LogisticRegression(C=0.3, max_iter=2000)
    regression.fit(scaler.transform(rows), right, sample_weight=weight)
    weights = regression.coef_[0] / scaler.scale_
    bias = regression.intercept_[0] - (weights * scaler.mean_).sum()
    # with an intercept, the expected number of keyphrases is the number of right candidates
    gold = sum(num_gold[group] * per_row[group] for group in num_gold) / (weight @ np.array(right))
    values = {"bias": bias, "gold": max(gold, 1.0), **dict(zip(NAMES, weights, strict=True))}
    return {name: round(float(value), 6) for name, value in values.items()}
