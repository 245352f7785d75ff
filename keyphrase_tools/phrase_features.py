"""Candidate phrases of documents, and what their mentions say about them, as the ranker reads it.

Candidates are the spans of up to MAX_WORDS words that the model may have labelled, whether or not they were its first choice.
Each is described by its mentions (how probable, how many, where), its length, and the document (how long, how densely labelled).
The documents of a batch are read together: spans of one length after the other, as arrays.

Letters: W words, p(O), p(B), p(I) the word probabilities, C candidates, M mentions, n words of a phrase, F features.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from .decoding import B, I, O, begin_units, is_phrase, word_tags
from .layout import unit_numbers
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
IN_PHRASE, FUNCTIONAL, CAPITALS, ACRONYM = (
    1,
    2,
    4,
    8,
)  # of words; ACRONYM: a function word that may be one, such as "IT"
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

Words = Sequence[tuple[str, int, int]]  # of a text, as `split_words` returns them


class Candidates(NamedTuple):
    """The candidates of one document, in the order of their first mentions.

    Attributes:
        features (`(C, F)`): by NAMES.
        bounds (`(C + 1,)`): candidate c has the mentions from `bounds[c]` to `bounds[c + 1]`.
        spans (`(M, 2)`): the words of each mention, from the first to the one after the last.
        scores (`(M,)`): the mean probability of each mention's labels, as `decoding.mention_scores`.
    """

    features: np.ndarray
    bounds: np.ndarray
    spans: np.ndarray
    scores: np.ndarray

    def mentions(self, c: int) -> slice:
        """The mentions of a candidate, in text order."""
        return slice(self.bounds[c], self.bounds[c + 1])


class WordArrays:
    """The words of several documents one after the other, as arrays of length W.

    Attributes:
        units: the unit of layout of each word, which are different numbers in different documents; see `layout.unit_numbers`.
    """

    def __init__(self, documents: Sequence[tuple[Words, np.ndarray]], language: str | None):
        self.lengths = np.array([len(words) for words, _ in documents], dtype=np.int64)
        self.starts = np.append(0, self.lengths.cumsum())
        facts = [word_facts(word, language) for words, _ in documents for word, _, _ in words]
        numbers: dict[str, int] = {}
        self.stems = np.array([numbers.setdefault(fact.stem, len(numbers)) for fact in facts], dtype=np.int64)
        units_of = [unit_numbers(words) for words, _ in documents]
        sizes = [int(of_document.max(initial=-1)) + 1 for of_document in units_of]
        shifts = np.repeat(np.cumsum([0, *sizes[:-1]]), self.lengths)
        units = np.concatenate(units_of)
        self.units = np.where(units < 0, -1, units + shifts)
        kinds = np.array([fact.kinds for fact in facts], dtype=np.int64)
        self.allowed = ((kinds & IN_PHRASE) > 0) & (units >= 0)
        begins_unit = np.append(True, self.units[1:] != self.units[:-1])[: len(facts)]
        ends_unit = np.append(begins_unit[1:], True)[: len(facts)]
        self.functional = function_words(kinds, begins_unit, ends_unit)
        self.document = np.repeat(np.arange(len(documents)), self.lengths)
        by_document = zip(documents, units_of, strict=True)
        self.p = np.concatenate([begin_units(p, of_document) for (_, p), of_document in by_document])  # (W, 3)
        tags = word_tags(self.p, LABELLED)
        self.continues = tags == I
        before = np.append(O, tags[:-1])[: len(facts)]
        before[begins_unit] = O
        self.begins = (tags == B) | (self.continues & (before == O))
        # of the word after each: p(I), and whether it continues a label
        self.after = np.where(ends_unit, 0.0, np.append(self.p[1:, I], 0.0)[: len(facts)])
        self.continued = np.where(ends_unit, False, np.append(self.continues[1:], False)[: len(facts)])


def find_candidates(
    documents: Sequence[tuple[Words, np.ndarray]], language: str | None = "english"
) -> list[Candidates]:
    """The candidates of each document.

    Args:
        documents: the W words of each, and their probabilities `(W, 3)` of O, B and I.
        language: of the stems by which phrases are compared, see `stemming.stem`.
    """
    if not documents:
        return []
    words = WordArrays(documents, language)
    m, lengths = find_mentions(words)
    if not lengths.size:
        none = np.zeros((0, 2), dtype=np.int64)
        return [Candidates(np.zeros((0, len(NAMES))), np.zeros(1, dtype=np.int64), none, np.zeros(0))] * len(documents)
    # candidates by first mention, the shorter first; mentions by candidate
    first = np.full(len(lengths), len(words.p))
    np.minimum.at(first, m["phrase"], m["start"])
    order = np.lexsort((lengths, first))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    phrase = place[m["phrase"]]
    by_phrase = np.lexsort((m["start"], phrase))
    m = {name: values[by_phrase] for name, values in m.items()}
    bounds = np.append(np.searchsorted(phrase[by_phrase], np.arange(len(lengths))), len(phrase))
    first, lengths = first[order], lengths[order]
    features = phrase_features(m, bounds[:-1], first, lengths, words)
    cuts = np.searchsorted(first, words.starts)
    found = []
    for document, (a, b) in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
        inside = slice(bounds[a], bounds[b])
        start = m["start"][inside] - words.starts[document]
        spans = np.stack([start, start + m["length"][inside]], axis=1)
        found.append(Candidates(features[a:b], bounds[a : b + 1] - bounds[a], spans, m["labels"][inside]))
    return found


def find_mentions(words: WordArrays) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """All mentions of probable phrases.

    A phrase is probable if one of its mentions is: p(B) of the first word, p(I) of the others, and not p(I) of the word after
    them, together FLOOR or more. Phrases are compared by the stems of their words.

    Returns:
        For each mention its `phrase`, `start`, `length` in words, probability (`span`), mean probability of `labels`, least
        p(B) + p(I) of a word (`inside`), whether it is `labelled` and has a `function_word` at an edge; and the number of words
        of each phrase.
    """
    p, num_stems = words.p, int(words.stems.max(initial=0)) + 1
    start = np.flatnonzero(words.allowed)
    code = words.document[start] * num_stems + words.stems[start]
    s = {"start": start, "code": code, "probability": p[start, B], "labels": p[start, B], "outside": p[start, O]}
    s |= {"seed": p[start, B] >= FLOOR, "labelled": words.begins[start]}
    found, lengths = [], []
    for n in range(1, MAX_WORDS + 1):
        if n > 1:
            s = extend(s, n, words, num_stems)
        if not s["seed"].any():
            break
        last = s["start"] + n - 1
        _, code = np.unique(s["code"], return_inverse=True)
        span = s["probability"] * (1 - words.after[last])
        numbers = np.full(code.max() + 1, -1)
        probable = np.unique(code[s["seed"] & (span >= FLOOR)])
        numbers[probable] = len(lengths) + np.arange(len(probable))
        phrase = numbers[code]
        mention = phrase >= 0
        values = {
            "phrase": phrase, "start": s["start"], "length": np.full(len(code), n), "span": span, "labels": s["labels"] / n,
            "inside": 1 - s["outside"], "labelled": s["labelled"] & ~words.continued[last],
            "function_word": words.functional[s["start"]] | words.functional[last],
        }  # fmt: skip
        found.append({name: value[mention] for name, value in values.items()})
        lengths += [n] * len(probable)
        may_grow = np.zeros(len(numbers), dtype=bool)
        may_grow[code[s["seed"]]] = True
        s = {name: value[may_grow[code]] for name, value in (s | {"code": code}).items()}
    merged = {name: np.concatenate([part[name] for part in found]) for name in found[0]} if found else {}
    return merged, np.array(lengths, dtype=np.int64)


def extend(s: dict[str, np.ndarray], n: int, words: WordArrays, num_stems: int) -> dict[str, np.ndarray]:
    """The spans with one more word, the n-th, where the unit of layout has one."""
    last = np.minimum(s["start"] + n - 1, len(words.units) - 1)
    inside = (words.units[last] == words.units[s["start"]]) & (s["start"] + n <= len(words.units))
    s = {name: values[inside] for name, values in s.items()}
    last = s["start"] + n - 1
    probability = s["probability"] * words.p[last, I]
    return {
        "start": s["start"],
        "code": s["code"] * num_stems + words.stems[last],
        "probability": probability,
        "labels": s["labels"] + words.p[last, I],
        "outside": np.maximum(s["outside"], words.p[last, O]),
        "seed": s["seed"] & words.allowed[last] & (probability >= FLOOR),
        "labelled": s["labelled"] & words.continues[last],
    }


def phrase_features(
    m: Mapping[str, np.ndarray], bounds: np.ndarray, first: np.ndarray, lengths: np.ndarray, words: WordArrays
) -> np.ndarray:
    """The features `(C, F)` of phrases.

    Args:
        m: the mentions of `find_mentions`, phrase by phrase.
        bounds, first, lengths (`(C,)`): the index of each phrase's first mention, the first word of it, and the number of words.
    """
    best = {name: np.maximum.reduceat(m[name], bounds) for name in ("span", "labels", "inside")}
    document = words.document[first]
    first, num_words = first - words.starts[document], words.lengths[document]
    values = {name: log_odds(probability) for name, probability in best.items()}
    values |= {
        "expected_mentions": np.log1p(np.add.reduceat(m["span"], bounds)),
        "mentions": np.log(np.diff(np.append(bounds, len(m["span"])))),
        "first": np.log1p(first),
        "relative_first": first / num_words,
        "one_word": lengths == 1,
        "two_words": lengths == 2,
        "three_words": lengths == 3,
        "more_words": lengths > 3,
        "labelled": np.logical_or.reduceat(m["labelled"], bounds),
        "function_word": np.logical_or.reduceat(m["function_word"], bounds),
    }
    values |= {name: of_document[document] for name, of_document in document_features(words).items()}
    columns = [values[name] for name in FEATURES] + [values[a] * values[b] for a, b in INTERACTIONS]
    return np.stack([np.asarray(column, dtype=np.float64) for column in columns], axis=1)


def document_features(words: WordArrays) -> dict[str, np.ndarray]:
    """What documents say about their phrases, without their punctuation."""
    document, p, size = words.document[words.allowed], words.p[words.allowed], len(words.lengths)
    count = np.bincount(document, minlength=size).clip(min=1)
    density = np.bincount(document, 1 - p[:, O], minlength=size) / count
    return {
        "document": np.log(words.lengths.clip(min=1)),
        "density": np.log(density + 1e-3),
        "begins": np.log1p(np.bincount(document, p[:, B], minlength=size)),
    }


class WordFacts(NamedTuple):
    """What does not depend on the document: a word's stem, and the sum of what it is, of IN_PHRASE and the like."""

    stem: str
    kinds: int


@lru_cache(maxsize=1 << 18)
def word_facts(word: str, language: str | None) -> WordFacts:
    """Facts about a word, cached: a corpus has few distinct words."""
    kinds = IN_PHRASE if is_phrase([word]) else 0
    if language == "english" and word.lower() in FUNCTION_WORDS:
        kinds |= FUNCTIONAL
    if word.isupper():
        kinds |= CAPITALS | (ACRONYM if kinds & FUNCTIONAL and len(word) > 1 else 0)
    return WordFacts(stem(word, language), kinds)


def function_words(kinds: np.ndarray, begins_unit: np.ndarray, ends_unit: np.ndarray) -> np.ndarray:
    """Which words are English articles, prepositions, pronouns or the like, `(W,)`.

    One in capitals is an acronym ("the IT department") if no neighbour is in capitals, or if a neighbour is not ("IBM IT services");
    otherwise it is part of a line in capitals ("STATE OF THE ART"). Neighbours are words of the same unit, without punctuation.

    Args:
        kinds (`(W,)`): of the words, see `WordFacts`.
        begins_unit, ends_unit (`(W,)`): whether a unit of layout begins or ends with the word.
    """
    functional, acronym = (kinds & FUNCTIONAL) > 0, (kinds & ACRONYM) > 0
    if not acronym.any():
        return functional
    capitals = (kinds & CAPITALS) > 0
    small = ((kinds & IN_PHRASE) > 0) & ~capitals

    def beside(of_words):
        """Whether the word before or the one after is such."""
        return (np.r_[False, of_words[:-1]] & ~begins_unit) | (np.r_[of_words[1:], False] & ~ends_unit)

    return functional & (~acronym | (beside(capitals) & ~beside(small)))


def log_odds(probability):
    """log p / (1 - p), bounded for 0 and 1; of a number or an array."""
    return np.log((probability + 1e-3) / (1 - probability + 1e-3))
