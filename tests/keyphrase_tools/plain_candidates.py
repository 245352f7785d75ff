"""The plain version of `phrase_features.find_phrases`: one document, one phrase and one mention after the other."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from lexperts_lite.decoding import B, I, O, is_phrase, mention_scores, tag_spans, word_tags
from lexperts_lite.layout import begin_units, in_one_unit, unit_numbers
from lexperts_lite.phrase_features import FUNCTION_WORDS, INTERACTIONS, LABEL_THRESHOLD, MAX_WORDS, MIN_PROBABILITY
from lexperts_lite.terms import continued_words, is_whole, join_probabilities
from lexperts_lite.words import stem


def find_phrases(
    words: Sequence[tuple[str, int, int]], p: np.ndarray, language: str | None = "english"
) -> list[tuple[list[tuple[int, int]], dict[str, float]]]:
    """(spans, features) of each candidate, in the order of their first mentions."""
    units, continued = unit_numbers(words), continued_words(words)
    p = join_probabilities(begin_units(p, units), continued)
    allowed = np.array([is_phrase([word]) for word, _, _ in words], dtype=bool) & (units >= 0)
    if not allowed.any():
        return []
    stems = [stem(word, language) for word, _, _ in words]
    positions = defaultdict(list)
    for w in np.flatnonzero(allowed):
        positions[stems[w]].append(int(w))
    labelled = set(tag_spans(word_tags(p, LABEL_THRESHOLD), units))
    about = document_features(p[allowed], len(words))
    functional = [language == "english" and is_function_word(words, i, units) for i in range(len(words))]
    ends = np.append(units[1:] != units[:-1], True)
    after = np.where(ends, 0.0, np.append(p[1:, I], 0.0))
    candidates = []
    for key in probable_phrases(stems, allowed, units, after, p, continued, functional):
        n = len(key)
        spans = [(w, w + n) for w in positions[key[0]] if tuple(stems[w : w + n]) == key]
        spans = [span for span in spans if in_one_unit(units, *span) and is_whole(continued, *span)]
        features = (
            phrase_features(spans, p, after, continued, len(words), any(span in labelled for span in spans)) | about
        )
        features["function_word"] = float(any(functional[a] or functional[b - 1] for a, b in spans))
        features |= {f"{a} x {b}": features[a] * features[b] for a, b in INTERACTIONS}
        candidates.append((spans, features))
    return sorted(candidates, key=lambda candidate: candidate[0][0])


def is_function_word(words: Sequence[tuple[str, int, int]], i: int, units: np.ndarray) -> bool:
    """Whether a word is an article, a preposition, a pronoun or the like, and not an acronym such as "IT"."""
    word = words[i][0]
    beside = [words[j][0] for j in (i - 1, i + 1) if 0 <= j < len(words) and units[j] == units[i]]
    beside = [other for other in beside if is_phrase([other])]
    acronym = word.isupper() and len(word) > 1 and not (beside and all(other.isupper() for other in beside))
    return word.lower() in FUNCTION_WORDS and not acronym


def probable_phrases(
    stems: Sequence[str],
    allowed: np.ndarray,
    units: np.ndarray,
    after: np.ndarray,
    p: np.ndarray,
    continued: np.ndarray,
    functional: Sequence[bool],
) -> list[tuple[str, ...]]:
    """The stems of all phrases with a mention of probability MIN_PROBABILITY or more: p(B) of the first word, p(I) of the others, and not
    p(I) of the word after them; but for mentions of function words only."""
    found: dict[tuple[str, ...], None] = {}
    for start in np.flatnonzero(allowed & (p[:, B] >= MIN_PROBABILITY)):
        probability = p[start, B]
        for end in range(start, min(start + MAX_WORDS, len(stems))):
            if end > start:
                probability *= 1 if continued[end] else p[end, I]
            if not in_one_unit(units, start, end + 1) or not allowed[end] or probability < MIN_PROBABILITY:
                break
            probable = probability * (1 - after[end]) >= MIN_PROBABILITY and not all(functional[start : end + 1])
            if probable and is_whole(continued, start, end + 1):
                found[tuple(stems[start : end + 1])] = None
    return list(found)


def phrase_features(
    spans: Sequence[tuple[int, int]],
    p: np.ndarray,
    after: np.ndarray,
    continued: np.ndarray,
    num_words: int,
    labelled: bool,
) -> dict[str, float]:
    """What the mentions of a phrase say about it."""
    continues = np.where(continued, 1, p[:, I])  # a term is labelled at once
    span = np.array([p[a, B] * continues[a + 1 : b].prod() * (1 - after[b - 1]) for a, b in spans])  # (M,)
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
    return np.log((probability + 1e-3) / (1 - probability + 1e-3))
