"""Decodes labels into keyphrases: B begins a phrase, I continues it, and an I without a phrase before it begins one.

Phrases end where the text is divided (see `layout`). Phrases with punctuation are dropped. Repeated phrases, compared by their
Porter stems, are dropped except for the first.
"""

import unicodedata
from collections.abc import Sequence

import numpy as np

from .layout import unit_numbers
from .stemming import stem_phrase
from .words import APOSTROPHES, JOINERS, is_term, show_phrase

O, B, I = range(3)
POSSESSIVES = tuple(f"{apostrophe}s" for apostrophe in APOSTROPHES)
SEKE_PUNCTUATION = frozenset("!#$%&'()*+,.:;<=>?@[\\]^_`{|}~")


def word_tags(probabilities: np.ndarray, threshold: float | None = None) -> np.ndarray:
    """Chooses a label for each word.

    Without a threshold this is the most likely label. With one, a word is B or I, whichever is more likely, if the sum of
    their probabilities reaches the threshold: a model that is unsure where a phrase begins splits the probability between
    B and I, and O would win.

    Args:
        probabilities (`(W, 3)`): of O, B and I for each word.
        threshold: between 0 and 1.

    Returns:
        Labels `(W,)`: 0 (O), 1 (B) or 2 (I).
    """
    if threshold is None:
        return probabilities.argmax(-1)
    inside = np.where(probabilities[:, I] > probabilities[:, B], I, B)
    return np.where(1 - probabilities[:, O] >= threshold, inside, O)


def tag_spans(tags: Sequence[int], units: Sequence[int] | np.ndarray | None = None) -> list[tuple[int, int]]:
    """The phrases as spans of words `(start, end)`, in text order, from one label per word (0 O, 1 B, 2 I).

    Args:
        tags (`(W,)`): the labels.
        units (`(W,)`): of layout, see `layout.unit_numbers`; a phrase ends with its unit.

    >>> tag_spans([1, 2, 0, 2, 1])
    [(0, 2), (3, 4), (4, 5)]
    >>> tag_spans([1, 2, 2], [0, 0, 1])
    [(0, 2), (2, 3)]
    """
    spans, start = [], None
    for i, label in enumerate([*tags, O]):
        if start is not None and (label != I or (units is not None and units[i] != units[i - 1])):
            spans.append((start, i))
            start = None
        if label == B or (label == I and start is None):
            start = i
    return spans


def is_phrase(words: Sequence[str]) -> bool:
    """Whether words can form a keyphrase: no punctuation or symbols except in terms such as "C++", apostrophes inside words and
    points between digits."""
    return bool(words) and not any(_is_mark(word) for word in words)


def _is_mark(word: str) -> bool:
    inner = word.strip(APOSTROPHES + JOINERS)
    if inner != word or not inner:
        return True
    if word.isalnum() or is_term(word):
        return False
    for i, c in enumerate(word):
        between_digits = word[max(i - 1, 0) : i].isdigit() and word[i + 1 : i + 2].isdigit()
        allowed = c in APOSTROPHES + JOINERS or (c in ".," and between_digits)
        if not allowed and (c in SEKE_PUNCTUATION or unicodedata.category(c)[0] in "PS"):
            return True
    return False


def begin_units(probabilities: np.ndarray, units: np.ndarray) -> np.ndarray:
    """Probabilities `(W, 3)` in which no label continues over a unit of layout: I of its first word counts as B.

    Args:
        probabilities (`(W, 3)`): of O, B and I for each word.
        units (`(W,)`): see `layout.unit_numbers`.
    """
    first = np.flatnonzero(units[1:] != units[:-1]) + 1
    if not first.size:
        return probabilities
    p = probabilities.copy()
    p[first, B] += p[first, I]
    p[first, I] = 0
    return p


def mention_scores(probabilities: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """The score of each span: the mean probability of its labels, B for the first word and I for the others.

    Args:
        probabilities (`(W, 3)`): of O, B and I for each word.
        spans: `(start, end)` of M spans.

    Returns:
        Scores `(M,)`.
    """
    begins = np.array([probabilities[start, B] for start, _ in spans])
    inside = np.array([probabilities[start + 1 : end, I].sum() for start, end in spans])
    return (begins + inside) / np.array([end - start for start, end in spans])


def apply_temperature(p: np.ndarray, temperature: float) -> np.ndarray:
    """Divides the log-odds of probabilities by a temperature. Above 1 it lowers the confidence; the order never changes."""
    p = np.clip(p, 1e-7, 1 - 1e-7)
    return 1 / (1 + np.exp(-np.log(p / (1 - p)) / temperature))


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
        language: of the stems, see `stemming.stem`.

    Returns:
        A list, best first, of the results of `show_mentions`. Mentions with equal stems are one keyphrase. It has the score of the
        best one; of equal scores the earlier phrase comes first.
    """
    tags = word_tags(probabilities, threshold) if tags is None else tags
    units = unit_numbers(words)
    probabilities = begin_units(probabilities, units)
    spans = [
        (start, end)
        for start, end in tag_spans(tags, units)
        if units[start] >= 0 and is_phrase([word for word, _, _ in words[start:end]])
    ]
    if not spans:
        return []
    grouped, scores = {}, mention_scores(probabilities, spans)
    if temperature is not None:
        scores = apply_temperature(scores, temperature)
    for (start, end), score in zip(spans, scores, strict=True):
        stems = stem_phrase(" ".join(words[i][0] for i in range(start, end)), language)
        mention = {"start": words[start][1], "end": words[end - 1][2], "score": round(float(score), 6)}
        grouped.setdefault(stems, []).append(mention)
    phrases = [
        show_mentions(text, mentions, max(mention["score"] for mention in mentions)) for mentions in grouped.values()
    ]
    return sorted(phrases, key=lambda phrase: (-phrase["score"], phrase["start"]))


def show_mentions(text: str, mentions: Sequence[dict], score: float) -> dict:
    """A keyphrase as `{"keyphrase", "score", "start", "end", "mentions": [{"start", "end", "score"}]}`.

    It has the form (with single blanks) and the offsets of the first mention, or of the first one without a possessive 's.
    """
    first = next((m for m in mentions if text[m["end"] - 2 : m["end"]] not in POSSESSIVES), mentions[0])
    start, end = first["start"], first["end"]
    keyphrase = show_phrase(text, start, end)
    return {"keyphrase": keyphrase, "score": score, "start": start, "end": end, "mentions": list(mentions)}
