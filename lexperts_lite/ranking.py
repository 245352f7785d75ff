# SPDX-License-Identifier: Apache-2.0
"""Ranks the phrases of a document: all that may be keyphrases by a ranker, those that are labelled, or the user's candidates; and
selects those that are returned.

`PhraseRanker` gives the probability that a phrase is a keyphrase, by a logistic function of some of `features.FEATURES`. Its weights are
few, are fitted on validation documents by `ranker_fit.fit_ranker`, and are saved in the configuration as `keyphrase_ranker`. Without a
ranker the score of a phrase is the mean probability of its words' labels.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import isfinite

import numpy as np

from .batches import Block
from .call_options import MIN_PHRASES
from .candidates import Spans
from .clean import clean_characters
from .decoding import (
    apply_temperature,
    begin_units,
    join_probabilities,
    join_tags,
    mention_scores,
    tag_spans,
    word_tags,
)  # fmt: skip
from .diversity import diversify, phrase_vectors
from .features import CLASSES, CLASSIFIER, FEATURES, NOUN_FEATURES, PhraseTable, Words, find_phrases
from .layout import continued_words, unit_numbers
from .words import APOSTROPHES, is_phrase, spelling_stem, split_phrase

POSSESSIVES = tuple(f"{apostrophe}s" for apostrophe in APOSTROPHES)


class PhraseRanker:
    """P(keyphrase) = sigmoid(bias + sum of weight x feature).

    Args:
        weights: for "bias" and some of FEATURES; and "gold", the number of gold keyphrases per expected one, which is above 1 since some
            are not among the candidates.

    Attributes:
        names: of the features.
        reads_classes: whether the ranker needs the classes of words.

    Raises:
        ValueError: if a weight is missing, unknown, or not a finite number.
    """

    def __init__(self, weights: Mapping[str, float]):
        again = "Fit it again with keyphrase_tools.ranker_fit.fit_ranker, or set model.config.keyphrase_ranker = None."
        self.names = tuple(name for name in weights if name in FEATURES)
        if wrong := sorted(set(weights) ^ {"bias", "gold", *self.names}):
            raise ValueError(
                f"keyphrase_ranker has other features than this version of lexperts: {', '.join(wrong)}. {again}"
            )
        for name, value in weights.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
                raise ValueError(f"keyphrase_ranker has {name}={value!r}, which is not a finite number. {again}")
        self.reads_classes = any(name in NOUN_FEATURES for name in self.names)
        self._bias, self._weights = weights["bias"], np.array([weights[name] for name in self.names])
        self._gold = weights["gold"]

    def probabilities(self, features: np.ndarray) -> np.ndarray:
        """P(keyphrase) of candidates with the features `(C, F)`."""
        # row by row: a matrix product may round a row differently in another batch
        return 1 / (1 + np.exp(-(self._bias + (features * self._weights).sum(1))))

    def best_number(self, scores: Sequence[float]) -> int:
        """The number n of phrases, best first, with the highest expected F1: 2 sum_{i <= n} P_i / (n + expected gold).

        >>> PhraseRanker({"bias": 0, "gold": 1}).best_number([0.9, 0.8, 0.1, 0.1])
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
        classes: Sequence[np.ndarray] | None = None,
    ) -> list["RankedPhrases"]:
        """Ranks the candidates of each document.

        Args:
            documents: texts, their W words as `split_words` returns them, and the words' probabilities `(W, 3)`.
            language: of the stems, see `words.stem`.
            temperature: of the scores, see `decoding.apply_temperature`; it changes neither their order nor the best number.
            classes: for each document those of its words, as in `find_phrases`; needed if `reads_classes`.
        """
        ranked, read = [], [(words, p) for _, words, p in documents]
        tables = find_phrases(read, language, classes if self.reads_classes else None, self.names)
        for (text, words, _), table in zip(documents, tables, strict=True):
            scores = self.probabilities(table.features).round(6)
            order = np.argsort(-scores, kind="stable")  # equal scores by their first mention
            scores = scores[order]
            best_number = self.best_number(scores.tolist())
            if temperature is not None:
                scores = apply_temperature(scores, temperature).round(6)
            ranked.append(RankedPhrases(text, words, table, order, scores.tolist(), best_number))
        return ranked


def read_rankers(config) -> dict[str | None, PhraseRanker]:
    """The rankers of a model's configuration: of each style in `style_rankers`, and under `None` `keyphrase_ranker`.

    Raises:
        ValueError: if a ranker's weights are wrong, its style is not one of the model's, or it needs word classes that the model
            does not have.
    """
    weights = {None: getattr(config, "keyphrase_ranker", None)} | (getattr(config, "style_rankers", None) or {})
    styles = getattr(config, "styles", None) or []
    if unknown := [style for style in weights if style is not None and style not in styles]:
        raise ValueError(f"style_rankers has {unknown[0]!r}, which is not one of the model's styles {styles}.")
    rankers = {style: PhraseRanker(values) for style, values in weights.items() if values is not None}
    if any(ranker.reads_classes for ranker in rankers.values()) and getattr(config, CLASSIFIER, None) is None:
        raise ValueError(f"keyphrase_ranker has weights of noun phrases, for which the model needs {CLASSIFIER}.")
    return rankers


def read_word_classes(config) -> tuple[np.ndarray, np.ndarray] | None:
    """The weights `(3, d)` and biases `(3,)` of a model's classifier of words, float32; `None` if it has none.

    Raises:
        ValueError: if they are not one list of d + 1 finite numbers, the bias first, for each of `features.CLASSES`.
    """
    found = getattr(config, CLASSIFIER, None)
    if found is None:
        return None
    try:
        rows = np.array([found[name] for name in CLASSES], dtype=np.float64)
    except (TypeError, ValueError, KeyError):
        rows = np.zeros(0)
    size = getattr(config, "hidden_size", rows.shape[-1] - 1)
    if rows.shape != (len(CLASSES), size + 1) or not np.isfinite(rows).all():
        raise ValueError(
            f"{CLASSIFIER} is not one list of {size + 1} finite numbers for each of {', '.join(CLASSES)}. Fit it again with "
            f"keyphrase_tools.ranker_fit.fit_word_classes, or set model.config.{CLASSIFIER} = None."
        )
    return rows[:, 1:].astype(np.float32), rows[:, 0].astype(np.float32)


@dataclass
class RankedPhrases:
    """The phrases of a document, best first.

    Attributes:
        text, words: of the document.
        table: the phrases in the order of the text.
        order: their rows in the table.
        scores: P(keyphrase) of each, at the temperature, to six digits.
        best_number: of `PhraseRanker.best_number`.
    """

    text: str
    words: Words
    table: PhraseTable
    order: np.ndarray
    scores: list[float]
    best_number: int

    def __iter__(self) -> Iterator[dict]:
        """The phrases, as `show_mentions` returns them; a mention's score is the mean probability of its labels."""
        table = self.table
        for row, score in zip(self.order, self.scores, strict=True):
            mentions = slice(table.bounds[row], table.bounds[row + 1])
            spans, scores = table.spans[mentions].tolist(), table.scores[mentions].tolist()
            yield show_mentions(self.text, self.words, spans, scores, score)

    def phrases(self, number: int | None = None) -> list[dict]:
        """The first phrases."""
        return list(islice(self, number))


def rank_phrases(
    text: str,
    words: Sequence[tuple[str, int, int]],
    probabilities: np.ndarray,
    threshold: float | None = None,
    tags: Sequence[int] | None = None,
    temperature: float | None = None,
    language: str | None = "english",
) -> list[dict]:
    """Ranks the keyphrases of a document by its word probabilities.

    Args:
        text: the document.
        words: the W words of the text, as `split_words` returns them, and thus with its layout.
        probabilities (`(W, 3)`): of O, B and I for each word.
        threshold: as in `word_tags`.
        tags (`(W,)`): labels of the words, if they were not chosen by `word_tags` but, for example, by a CRF. Then the
            probabilities only determine the scores, and the threshold is not used.
        temperature: of the scores, see `apply_temperature`; fitted by `calibration.fit_temperature`.
        language: of the stems, see `words.stem`.

    Returns:
        The results of `show_mentions`, best first; of equal scores the earlier phrase comes first. Mentions with equal stems are one
        keyphrase, with the score of the best one. Phrases with punctuation are left out.
    """
    units, continued = unit_numbers(words), continued_words(words)
    tags = join_tags(word_tags(probabilities, threshold) if tags is None else tags, continued)
    probabilities = join_probabilities(begin_units(probabilities, units), continued)
    spans = [
        (start, end)
        for start, end in tag_spans(tags, units)
        if units[start] >= 0 and is_phrase([word for word, _, _ in words[start:end]])
    ]
    if not spans:
        return []
    scores, grouped = mention_scores(probabilities, spans, temperature), defaultdict(list)
    for (start, end), score in zip(spans, scores.tolist(), strict=True):
        stems = tuple(spelling_stem(word, language) for word, _, _ in words[start:end])
        grouped[stems].append(((start, end), score))
    phrases = [show_mentions(text, words, *zip(*mentions, strict=True)) for mentions in grouped.values()]
    return sorted(phrases, key=lambda phrase: (-phrase["score"], phrase["start"]))


def rank_candidates(
    phrases: Sequence[str],
    found: Mapping[str, Spans],
    document,
    probabilities: np.ndarray,
    temperature: float | None = None,
) -> tuple[list[dict], list[dict]]:
    """Scores candidates by the probabilities of a document's words.

    Args:
        phrases: the candidates.
        found: the spans of their mentions, from `Candidates.find`.
        document: an `input_documents.InputDocument` with W words.
        probabilities (`(W, 3)`): of O, B and I for each word.
        temperature: of the scores, see `decoding.apply_temperature`.

    Returns:
        The candidates with mentions, best first, in the form of `rank_phrases`, and those without, in their order:
        `{"keyphrase", "score": None, "start": None, "end": None, "mentions": []}`.
    """
    present, absent = [], []
    probabilities = begin_units(probabilities, unit_numbers(document.words))
    for name in phrases:
        spans = [(start, end) for start, end in found.get(name, ()) if document.in_one_field(start, end)]
        if spans:
            scores = mention_scores(probabilities, spans, temperature).tolist()
            present.append(show_mentions(document.text, document.words, spans, scores, name=name))
        else:
            absent.append({"keyphrase": name, "score": None, **document.no_place(), "mentions": []})
    return sorted(present, key=lambda phrase: (-phrase["score"], phrase["start"])), absent


def show_mentions(
    text: str,
    words: Words,
    spans: Sequence[tuple[int, int]],
    scores: Sequence[float],
    score: float | None = None,
    name: str | None = None,
) -> dict:
    """A keyphrase as `{"keyphrase", "score", "start", "end", "mentions": [{"start", "end", "score"}]}`.

    It has the form of its first mention, with single blanks and without invisible characters; its mentions end before a possessive 's.

    Args:
        text, words: of the document.
        spans, scores: of the mentions, in text order.
        score: of the keyphrase; by default that of the best mention.
        name: of a candidate, which is shown by its name.
    """
    mentions = []
    for (first, after), of_mention in zip(spans, scores, strict=True):
        start, end = words[first][1], words[after - 1][2]
        if name is None and text[end - 2 : end].lower() in POSSESSIVES:
            end -= 2
        mentions.append({"start": start, "end": end, "score": round(of_mention, 6)})
    start, end = mentions[0]["start"], mentions[0]["end"]
    if name is None:
        name = " ".join(text[start:end].split())
        if not name.isprintable():
            name = clean_characters(name, invisible_only=True).replace("\u00ad", "")
    score = max(mention["score"] for mention in mentions) if score is None else score
    return {"keyphrase": name, "score": score, "start": start, "end": end, "mentions": mentions}


def select_phrases(
    block: Block,
    number: int,
    p: np.ndarray,
    ranked: RankedPhrases | None,
    *,
    language: str | None,
    temperature: float | None,
    threshold: float | None,
    top_k: int | None = 10,
    min_phrases: int = MIN_PHRASES,
    min_score: float | None = None,
    candidates=None,
    diversity: float = 0.0,
    nested: bool = True,
) -> list[dict]:
    """The keyphrases of a document, best first, with offsets in the user's own strings.

    Args:
        block: documents whose windows have been read.
        number: the document's index in the block.
        p (`(W, 3)`): probabilities of O, B and I for each word.
        ranked: the phrases of a model with a ranker.
        language, temperature: of the stems and of the scores.
        threshold: of labels, without a ranker.
        top_k, min_phrases, min_score, candidates, diversity, nested: as in a call of the pipeline.
    """
    document, absent = block.documents[number], []
    if candidates is not None:
        given = candidates.phrases(language)
        phrases, absent = rank_candidates(given, block.mentions[number], document, p, temperature)
    elif ranked is not None:
        among = ranked.best_number if min_score is None else sum(score >= min_score for score in ranked.scores)
        if top_k is not None and nested and not diversity:  # otherwise more than will be returned, to choose from
            among = min(among, top_k)
        phrases = ranked.phrases(among)
        kept = phrases if nested else without_nested(phrases, language)
        if min_score is None and len(kept) < min_phrases:
            apart = without_nested(ranked, language, len(kept) + min_phrases)
            more = [phrase for phrase in apart if phrase not in kept]
            phrases = kept + more[: min_phrases - len(kept)]
    else:
        tags = block.probabilities.tags(number)  # only without a threshold
        phrases = rank_phrases(document.text, document.words, p, threshold, tags, temperature, language)
    phrases = [phrase for phrase in phrases if phrase["score"] >= (min_score or 0)]
    if not nested:
        phrases = without_nested(phrases, language)
    if block.states is not None:
        vectors = phrase_vectors(phrases, document.words, block.states.pop(number))
        phrases = diversify(phrases, vectors, diversity, top_k)
    phrases = [document.phrase_to_source(phrase) for phrase in phrases[:top_k]]
    return phrases if min_score else (phrases + absent)[:top_k]


def without_nested(phrases: Iterable[dict], language: str | None = "english", most: int | None = None) -> list[dict]:
    """The phrases that are not inside a better one and have no better one inside, in order.

    A phrase is inside another if its stems are, one after the other. Of two such phrases the better stays.

    Args:
        phrases: with "keyphrase", best first.
        language: of the stems, see `words.stem`.
        most: how many are wanted; the rest is not looked at.
    """
    kept, known, text = [], set(), "\n"  # text: the known stems, a line for each phrase
    for phrase in phrases:
        stems = [spelling_stem(word, language) for word in split_phrase(phrase["keyphrase"])]
        joined, n = f" {' '.join(stems)} ", len(stems)
        if joined not in text and not any(tuple(stems[i:j]) in known for i in range(n) for j in range(i + 1, n + 1)):
            kept.append(phrase)
            if len(kept) == most:
                break
            known.add(tuple(stems))
            text += f"{joined}\n"
    return kept
