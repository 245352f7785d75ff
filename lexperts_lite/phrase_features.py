# SPDX-License-Identifier: Apache-2.0
"""Phrases of documents, and what their mentions say about them, as the ranker reads it.

Phrases are the spans of up to MAX_WORDS words that the model may have labelled, whether or not they were its first choice.
Each is described by its mentions (how probable, how many, where), its length, and the document (how long, how densely labelled).
The documents of a batch are read together: spans of one length after the other, as arrays.

Letters: W words, p(O), p(B), p(I) the word probabilities, C phrases, M mentions, n words of a phrase, F features.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from .decoding import B, I, O, is_phrase
from .layout import begin_units, unit_numbers
from .phrase_shape import SHAPE, noun_phrase_ends, shape_features
from .terms import continued_words, join_probabilities
from .words import stem

MAX_WORDS = 5  # per phrase
MIN_PROBABILITY = 0.02  # of a phrase's best mention
LABEL_THRESHOLD = 0.15  # of the labels that the feature "labelled" looks at
FEATURES = (
    "span", "labels", "inside", "expected_mentions", "mentions", "first", "relative_first", "document", "one_word", "two_words",
    "three_words", "more_words", "labelled", "function_word", "density", "begins",
)  # fmt: skip
INTERACTIONS = (
    ("density", "span"), ("density", "labels"), ("density", "mentions"), ("density", "first"), ("density", "one_word"),
    ("document", "mentions"), ("document", "first"),
)  # fmt: skip
NAMES = (*FEATURES, *(f"{a} x {b}" for a, b in INTERACTIONS))
# of a model with word classes
SHAPE_INTERACTIONS = tuple(("document", name) for name in SHAPE)
NAMES_WITH_SHAPE = (*NAMES, *SHAPE, *(f"{a} x {b}" for a, b in SHAPE_INTERACTIONS))
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


class PhraseTable(NamedTuple):
    """The phrases of one document, in the order of their first mentions.

    Attributes:
        features (`(C, F)`): by NAMES, or with word classes by NAMES_WITH_SHAPE.
        bounds (`(C + 1,)`): phrase c has the mentions from `bounds[c]` to `bounds[c + 1]`.
        spans (`(M, 2)`): the words of each mention, from the first to the one after the last.
        scores (`(M,)`): the mean probability of each mention's labels, as `decoding.mention_scores`.
    """

    features: np.ndarray
    bounds: np.ndarray
    spans: np.ndarray
    scores: np.ndarray


class Spans(NamedTuple):
    """Spans of n words that may be phrases, or grow to one; an array of each.

    Attributes:
        start: the first word.
        code: a number for the stems of the words, in their document.
        probability: p(B) of the first word times p(I) of the others.
        labels: the sum of these.
        outside: the largest p(O) of a word.
        seed: whether a phrase can begin so: `probability` is high enough, and all words are allowed.
        labelled: whether the words are labelled as the beginning of a phrase, with LABEL_THRESHOLD.
    """

    start: np.ndarray
    code: np.ndarray
    probability: np.ndarray
    labels: np.ndarray
    outside: np.ndarray
    seed: np.ndarray
    labelled: np.ndarray


class Mentions(NamedTuple):
    """Mentions of phrases; an array of each.

    Attributes:
        phrase: the number of the phrase.
        start, length: the first word, and the number of words.
        span: the probability that exactly these words are labelled as a phrase.
        labels: the mean probability of the labels.
        inside: the least p(B) + p(I) of a word.
        labelled: whether the words are labelled as a phrase.
        function_word: whether one is at an edge.
    """

    phrase: np.ndarray
    start: np.ndarray
    length: np.ndarray
    span: np.ndarray
    labels: np.ndarray
    inside: np.ndarray
    labelled: np.ndarray
    function_word: np.ndarray


class WordArrays:
    """The words of several documents one after the other, as arrays of length W.

    Attributes:
        units: the unit of layout of each word, which are different numbers in different documents; see `layout.unit_numbers`.
        may_begin, may_end: whether a phrase may begin or end with the word; it may do neither inside a term, see `terms`.
    """

    def __init__(self, documents: Sequence[tuple[Words, np.ndarray]], language: str | None):
        self.lengths = np.array([len(words) for words, _ in documents], dtype=np.intp)
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
        self.functional = (kinds & FUNCTIONAL) > 0
        if (kinds & ACRONYM).any():
            self.functional &= ~acronyms(kinds, begins_unit, ends_unit)
        self.document = np.repeat(np.arange(len(documents)), self.lengths)
        terms = [continued_words(words) for words, _ in documents]
        by_document = zip(documents, units_of, terms, strict=True)
        self.p = np.concatenate([join_probabilities(begin_units(p, u), t) for (_, p), u, t in by_document])  # (W, 3)
        self.may_begin = ~np.concatenate(terms)
        self.may_end = np.append(self.may_begin[1:], True)[: len(facts)]
        labelled = 1 - self.p[:, O] >= LABEL_THRESHOLD
        self.continues = labelled & (self.p[:, I] > self.p[:, B])
        before = np.append(False, labelled[:-1])[: len(facts)] & ~begins_unit
        self.begins = labelled & (~self.continues | ~before)
        # of the word after each: p(I), and whether it continues a label
        self.after = np.where(ends_unit, 0.0, np.append(self.p[1:, I], 0.0)[: len(facts)])
        self.continued = np.where(ends_unit, False, np.append(self.continues[1:], False)[: len(facts)])


def find_phrases(
    documents: Sequence[tuple[Words, np.ndarray]],
    language: str | None = "english",
    classes: Sequence[np.ndarray] | None = None,
) -> list[PhraseTable]:
    """The phrases of each document.

    Args:
        documents: the W words of each, and their probabilities `(W, 3)` of O, B and I.
        language: of the stems by which phrases are compared, see `words.stem`.
        classes: for each document the probabilities `(W, 3)` of its words' classes, see `word_classes`.
    """
    if not documents:
        return []
    words = WordArrays(documents, language)
    of_words = None if classes is None else np.concatenate(classes)
    ends = None if of_words is None else noun_phrase_ends(words.units, words.allowed, of_words)
    found, lengths = find_mentions(words, ends)
    if not lengths.size:
        none, size = np.zeros((0, 2), dtype=np.int64), len(NAMES if classes is None else NAMES_WITH_SHAPE)
        return [PhraseTable(np.zeros((0, size)), np.zeros(1, dtype=np.int64), none, np.zeros(0))] * len(documents)
    # phrases by first mention, the shorter first; mentions by phrase
    first = np.full(len(lengths), len(words.p))
    np.minimum.at(first, found.phrase, found.start)
    order = np.lexsort((lengths, first))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    phrase = place[found.phrase]
    by_phrase = np.lexsort((found.start, phrase))
    found = Mentions(*(column[by_phrase] for column in found))
    bounds = np.append(np.searchsorted(phrase[by_phrase], np.arange(len(lengths))), len(phrase))
    first, lengths = first[order], lengths[order]
    features = phrase_features(found, bounds[:-1], first, lengths, words, of_words)
    cuts = np.searchsorted(first, words.starts)
    tables = []
    for document, (a, b) in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
        own = slice(bounds[a], bounds[b])
        start = found.start[own] - words.starts[document]
        spans = np.stack([start, start + found.length[own]], axis=1)
        tables.append(PhraseTable(features[a:b], bounds[a : b + 1] - bounds[a], spans, found.labels[own]))
    return tables


def find_mentions(words: WordArrays, noun_phrase_end: np.ndarray | None = None) -> tuple[Mentions, np.ndarray]:
    """All mentions of probable phrases, and the number of words of each phrase.

    A phrase is probable if one of its mentions is: p(B) of the first word, p(I) of the others, and not p(I) of the word after
    them, together MIN_PROBABILITY or more; or if one is a noun phrase. A span of function words only is not a phrase. Phrases are compared by
    the stems of their words.

    Args:
        noun_phrase_end (`(W,)`): the word after the noun phrase that begins with each word, or the word itself.
    """
    end = np.arange(len(words.p)) if noun_phrase_end is None else noun_phrase_end
    num_stems = int(words.stems.max(initial=0)) + 1
    start = np.flatnonzero(words.allowed & words.may_begin)
    p, code = words.p[start], words.document[start] * num_stems + words.stems[start]
    spans = Spans(start, code, p[:, B], p[:, B], p[:, O], p[:, B] >= MIN_PROBABILITY, words.begins[start])
    functional = np.append(0, words.functional.cumsum())
    found, lengths = [], []
    for n in range(1, MAX_WORDS + 1):
        if n > 1:
            spans = extend(spans, n, words, num_stems)
        if n > 1 and not (spans.seed | (end[spans.start] >= spans.start + n)).any():
            break
        last = spans.start + n - 1
        _, code = np.unique(spans.code, return_inverse=True)
        probability = spans.probability * (1 - words.after[last])
        numbers = np.full(code.max(initial=-1) + 1, -1)
        is_whole = words.may_end[last]
        chosen = (spans.seed & (probability >= MIN_PROBABILITY)) | (end[spans.start] == spans.start + n)
        chosen &= functional[last + 1] - functional[spans.start] < n
        probable = np.unique(code[is_whole & chosen])
        numbers[probable] = len(lengths) + np.arange(len(probable))
        phrase = np.where(is_whole, numbers[code], -1)
        function_word = words.functional[spans.start] | words.functional[last]
        mentions = Mentions(
            phrase, spans.start, np.full(len(code), n), probability, spans.labels / n, 1 - spans.outside,
            spans.labelled & ~words.continued[last], function_word,
        )  # fmt: skip
        found.append(Mentions(*(column[phrase >= 0] for column in mentions)))
        lengths += [n] * len(probable)
        may_grow = np.zeros(len(numbers), dtype=bool)
        may_grow[code[spans.seed | (end[spans.start] > spans.start + n)]] = True
        spans = Spans(*(column[may_grow[code]] for column in spans._replace(code=code)))
    return Mentions(*map(np.concatenate, zip(*found, strict=True))), np.array(lengths, dtype=np.int64)


def extend(spans: Spans, n: int, words: WordArrays, num_stems: int) -> Spans:
    """The spans with one more word, the n-th, where the unit of layout has one."""
    last = np.minimum(spans.start + n - 1, len(words.units) - 1)
    inside = (words.units[last] == words.units[spans.start]) & (spans.start + n <= len(words.units))
    spans = Spans(*(column[inside] for column in spans))
    last = spans.start + n - 1
    probability = spans.probability * np.where(words.may_begin[last], words.p[last, I], 1)  # a term is labelled at once
    return Spans(
        start=spans.start,
        code=spans.code * num_stems + words.stems[last],
        probability=probability,
        labels=spans.labels + words.p[last, I],
        outside=np.maximum(spans.outside, words.p[last, O]),
        seed=spans.seed & words.allowed[last] & (probability >= MIN_PROBABILITY),
        labelled=spans.labelled & words.continues[last],
    )


def phrase_features(
    found: Mentions,
    bounds: np.ndarray,
    first: np.ndarray,
    lengths: np.ndarray,
    words: WordArrays,
    classes: np.ndarray | None = None,
) -> np.ndarray:
    """The features `(C, F)` of phrases.

    Args:
        found: the mentions, phrase by phrase.
        bounds, first, lengths (`(C,)`): the index of each phrase's first mention, the first word of it, and the number of words.
        classes (`(W, 3)`): of the words, if they are known.
    """
    shape = {} if classes is None else shape_features(found, bounds, first, lengths, words, classes)
    best = {name: np.maximum.reduceat(getattr(found, name), bounds) for name in ("span", "labels", "inside")}
    document = words.document[first]
    first, num_words = first - words.starts[document], words.lengths[document]
    values = {name: np.log((p + 1e-3) / (1 - p + 1e-3)) for name, p in best.items()}  # log-odds, bounded
    values |= {
        "expected_mentions": np.log1p(np.add.reduceat(found.span, bounds)),
        "mentions": np.log(np.diff(np.append(bounds, len(found.span)))),
        "first": np.log1p(first),
        "relative_first": first / num_words,
        "one_word": lengths == 1,
        "two_words": lengths == 2,
        "three_words": lengths == 3,
        "more_words": lengths > 3,
        "labelled": np.logical_or.reduceat(found.labelled, bounds),
        "function_word": np.logical_or.reduceat(found.function_word, bounds),
    }
    # of the documents, without their punctuation
    p, of_word, size = words.p[words.allowed], words.document[words.allowed], len(words.lengths)
    count = np.bincount(of_word, minlength=size).clip(min=1)
    density = np.bincount(of_word, 1 - p[:, O], minlength=size) / count
    values |= {
        "document": np.log(words.lengths.clip(min=1))[document],
        "density": np.log(density + 1e-3)[document],
        "begins": np.log1p(np.bincount(of_word, p[:, B], minlength=size))[document],
    }
    columns = [values[name] for name in FEATURES] + [values[a] * values[b] for a, b in INTERACTIONS]
    columns += [*shape.values(), *(values["document"] * value for value in shape.values())]
    return np.stack([np.asarray(column, dtype=np.float64) for column in columns], axis=1)


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


def acronyms(kinds: np.ndarray, begins_unit: np.ndarray, ends_unit: np.ndarray) -> np.ndarray:
    """Which words have the letters of a function word but are acronyms, such as IT, `(W,)`.

    One in capitals is an acronym ("the IT department") if no neighbour is in capitals, or if a neighbour is not ("IBM IT services");
    otherwise it is part of a line in capitals ("STATE OF THE ART"). Neighbours are words of the same unit, without punctuation.

    Args:
        kinds (`(W,)`): of the words, see `WordFacts`.
        begins_unit, ends_unit (`(W,)`): whether a unit of layout begins or ends with the word.
    """
    capitals = (kinds & CAPITALS) > 0
    small = ((kinds & IN_PHRASE) > 0) & ~capitals

    def beside(of_words):
        """Whether the word before or the one after is such."""
        return (np.r_[False, of_words[:-1]] & ~begins_unit) | (np.r_[of_words[1:], False] & ~ends_unit)

    return ((kinds & ACRONYM) > 0) & (~beside(capitals) | beside(small))
