# SPDX-License-Identifier: Apache-2.0
"""Phrases of documents, and what their mentions say about them, as the ranker reads it.

Phrases are the spans of up to MAX_WORDS words that the model may have labelled, whether or not they were its first choice, and noun
phrases. FEATURES has a function for each thing that the ranker knows about them. The documents of a batch are read together: spans of one
length after the other, as arrays.

Letters: W words, p(O), p(B), p(I) the word probabilities, C phrases, M mentions, n words of a phrase, F features.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from math import log
from typing import NamedTuple
from unicodedata import combining, normalize

import numpy as np

from .clean import known_words
from .decoding import B, I, O, begin_units, join_probabilities
from .layout import continued_words, unit_numbers
from .position_rank import position_ranks
from .words import FUNCTION_WORDS, is_phrase_word, spelling_stem

MAX_WORDS = 5  # per phrase
MIN_PROBABILITY = 0.02  # of a phrase's best mention
LABEL_THRESHOLD = 0.15  # of the labels that the feature "labelled" looks at
CLASSES = ("other", "modifier", "noun")  # of words
OTHER, MODIFIER, NOUN = range(3)
CLASSIFIER = (
    "keyphrase_word_classes"  # in a configuration: for each class the weights of the backbone's last hidden states
)
IN_PHRASE, FUNCTIONAL, CAPITALS, ACRONYM = (
    1,
    2,
    4,
    8,
)  # of words; ACRONYM: a function word that may be one, such as "IT"

Words = Sequence[tuple[str, int, int]]  # of a text, as `split_words` returns them


class PhraseTable(NamedTuple):
    """The phrases of one document, in the order of their first mentions.

    Attributes:
        features (`(C, F)`): by the names that were asked for.
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
        may_begin, may_end: whether a phrase may begin or end with the word; it may do neither inside a term.
        classes (`(W, 3)`): the probabilities of CLASSES, or `None`.
    """

    def __init__(
        self,
        documents: Sequence[tuple[Words, np.ndarray]],
        language: str | None,
        classes: Sequence[np.ndarray] | None = None,
    ):
        self.lengths = np.array([len(words) for words, _ in documents], dtype=np.intp)
        self.starts = np.append(0, self.lengths.cumsum())
        self.document = np.repeat(np.arange(len(documents)), self.lengths)
        self.classes = None if classes is None else np.concatenate(classes)
        self.forms = [word for words, _ in documents for word, _, _ in words]
        facts = [word_facts(word, language) for word in self.forms]
        numbers: dict[str, int] = {}
        self.stems = np.array([numbers.setdefault(stem, len(numbers)) for stem, _ in facts], dtype=np.int64)
        kinds = np.array([kinds for _, kinds in facts], dtype=np.int64)
        units_of = [unit_numbers(words) for words, _ in documents]
        shifts = np.cumsum([0, *(int(units.max(initial=-1)) + 1 for units in units_of[:-1])])
        units = np.concatenate(units_of)
        self.units = np.where(units < 0, -1, units + np.repeat(shifts, self.lengths))
        self.allowed = ((kinds & IN_PHRASE) > 0) & (units >= 0)
        begins_unit = np.append(True, self.units[1:] != self.units[:-1])[: len(facts)]
        ends_unit = np.append(begins_unit[1:], True)[: len(facts)]
        self.functional = ((kinds & FUNCTIONAL) > 0) & ~acronyms(kinds, begins_unit, ends_unit)
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

    @cached_property
    def rarity(self) -> np.ndarray:
        """log of each word's rank by frequency over the number of known words `(W,)`; 0 for others."""
        return np.array([word_rarity(word) for word in self.forms])

    def total(self, values: np.ndarray) -> np.ndarray:
        """The sum in each document of values of the allowed words."""
        return np.bincount(self.document[self.allowed], values[self.allowed], minlength=len(self.lengths))

    def mean(self, values: np.ndarray) -> np.ndarray:
        """Their mean."""
        return self.total(values) / self.total(np.ones(len(values))).clip(min=1)


class Phrases:
    """The C phrases of several documents, in text order, with their mentions, phrase by phrase.

    Attributes:
        words: of the documents.
        mentions: of all phrases.
        bounds, first, lengths, document (`(C,)`): the index of each phrase's first mention, the first word of it, the number of words,
            and the document.
    """

    def __init__(self, words: WordArrays, mentions: Mentions, lengths: np.ndarray):
        first = np.full(len(lengths), len(words.p))
        np.minimum.at(first, mentions.phrase, mentions.start)
        order = np.lexsort((lengths, first))  # the shorter first
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        phrase = place[mentions.phrase]
        by_phrase = np.lexsort((mentions.start, phrase))
        self.words, self.mentions = words, Mentions(*(column[by_phrase] for column in mentions))
        self.bounds = np.searchsorted(phrase[by_phrase], np.arange(len(lengths)))
        self.first, self.lengths = first[order], lengths[order]
        self.document = words.document[self.first]

    def best(self, values: np.ndarray) -> np.ndarray:
        """The largest value of a phrase's mentions."""
        return np.maximum.reduceat(values, self.bounds)

    def total(self, values: np.ndarray) -> np.ndarray:
        """The sum over a phrase's mentions."""
        return np.add.reduceat(values, self.bounds)

    def count(self) -> np.ndarray:
        """The number of mentions."""
        return np.diff(np.append(self.bounds, len(self.mentions.start)))

    def central(self) -> np.ndarray:
        """The sum of the ranks of the first mention's words, see `position_rank`."""
        words, counted = self.words, self.words.allowed & ~self.words.functional
        position = np.arange(len(words.p)) - words.starts[words.document]
        ranks = position_ranks(words.stems, words.document, position, counted)
        central = ranks[self.first]
        for step in range(1, MAX_WORDS):
            longer = self.lengths > step
            central[longer] += ranks[self.first[longer] + step]
        return central

    def rarity(self, reduce: np.ufunc) -> np.ndarray:
        """The largest or least rarity of the first mention's words."""
        rarity, of_words = self.words.rarity[self.first], self.words.rarity
        for step in range(1, MAX_WORDS):
            longer = self.lengths > step
            rarity[longer] = reduce(rarity[longer], of_words[self.first[longer] + step])
        return rarity

    def noun_phrases(self) -> np.ndarray:
        """The probability `(M,)` that a mention w_1 .. w_n is a noun phrase that goes on neither to its left nor to its right:

        min_i (1 - p(other | w_i)) p(noun | w_n) p(other | word before) (1 - p(noun | word after))
        """
        words, (start, length) = self.words, (self.mentions.start, self.mentions.length)
        other = np.append(np.where(words.allowed, words.classes[:, OTHER], 1.0), 1.0)
        noun = np.append(np.where(words.allowed, words.classes[:, NOUN], 0.0), 0.0)
        end, unit = start + length, np.append(words.units, -2)
        within = 1 - other[start]
        for step in range(1, int(length.max(initial=1))):
            longer = length > step
            within[longer] = np.minimum(within[longer], 1 - other[start[longer] + step])
        before = np.where((start > 0) & (unit[start - 1] == unit[start]), other[start - 1], 1.0)
        after = np.where(unit[end] == unit[start], noun[end], 0.0)
        return within * noun[end - 1] * before * (1 - after)


def log_odds(p: np.ndarray) -> np.ndarray:
    """log p / (1 - p), bounded for 0 and 1."""
    return np.log((p + 1e-3) / (1 - p + 1e-3))


# what a ranker knows about phrases: name -> its values (C,)
FEATURES: dict[str, Callable[[Phrases], np.ndarray]] = {
    "span": lambda of: log_odds(of.best(of.mentions.span)),
    "labels": lambda of: log_odds(of.best(of.mentions.labels)),
    "inside": lambda of: log_odds(of.best(of.mentions.inside)),
    "expected_mentions": lambda of: np.log1p(of.total(of.mentions.span)),
    "mentions": lambda of: np.log(of.count()),
    "first": lambda of: np.log1p(of.first - of.words.starts[of.document]),
    "relative_first": lambda of: (of.first - of.words.starts[of.document]) / of.words.lengths[of.document],
    "one_word": lambda of: of.lengths == 1,
    "two_words": lambda of: of.lengths == 2,
    "three_words": lambda of: of.lengths == 3,
    "more_words": lambda of: of.lengths > 3,
    "labelled": lambda of: of.best(of.mentions.labelled),
    "function_word": lambda of: of.best(of.mentions.function_word),
    "central": lambda of: of.central(),
    "rare_word": lambda of: np.where(of.lengths == 1, of.words.rarity[of.first], 0.0),
    "rarest": lambda of: of.rarity(np.maximum),
    "most_frequent": lambda of: of.rarity(np.minimum),
    "document": lambda of: np.log(of.words.lengths[of.document]),
    "density": lambda of: np.log(of.words.mean(1 - of.words.p[:, O]) + 1e-3)[of.document],
    "begins": lambda of: np.log1p(of.words.total(of.words.p[:, B]))[of.document],
    "noun_phrase": lambda of: of.total(of.noun_phrases()) / of.count(),
    "best_noun_phrase": lambda of: of.best(of.noun_phrases()),
    "noun_phrases": lambda of: np.log1p(of.total(of.noun_phrases())),
}

NOUN_FEATURES = frozenset(("noun_phrase", "best_noun_phrase", "noun_phrases"))  # those that need classes of words


def find_phrases(
    documents: Sequence[tuple[Words, np.ndarray]],
    language: str | None = "english",
    classes: Sequence[np.ndarray] | None = None,
    names: Sequence[str] | None = None,
) -> list[PhraseTable]:
    """The phrases of each document.

    Args:
        documents: the W words of each, and their probabilities `(W, 3)` of O, B and I.
        language: of the stems by which phrases are compared, see `words.stem`.
        classes: for each document the probabilities `(W, 3)` of its words' CLASSES.
        names: of the features; by default all, those of noun phrases only with classes.
    """
    if not documents:
        return []
    if names is None:
        names = [name for name in FEATURES if classes is not None or name not in NOUN_FEATURES]
    words = WordArrays(documents, language, classes)
    found, lengths = find_mentions(words, None if classes is None else noun_phrase_ends(words))
    phrases = Phrases(words, found, lengths)
    features = np.zeros((0, len(names)))
    if lengths.size:
        features = np.stack([FEATURES[name](phrases).astype(np.float64) for name in names], axis=1)
    cuts, tables = np.searchsorted(phrases.first, words.starts), []
    bounds, found = np.append(phrases.bounds, len(phrases.mentions.start)), phrases.mentions
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


def noun_phrase_ends(words: WordArrays) -> np.ndarray:
    """For each word the word after the longest noun phrase that begins with it, or the word itself if none does, `(W,)`.

    A noun phrase consists of neighbours whose most probable class is noun or modifier, up to the last noun.
    """
    ends, kind = np.arange(len(words.units)), words.classes.argmax(1)
    inside = words.allowed & (kind != OTHER)
    begins = inside.copy()
    begins[1:] &= ~(inside[:-1] & (words.units[1:] == words.units[:-1]))
    first, run = np.flatnonzero(begins), np.cumsum(begins) - 1
    nouns = np.flatnonzero(inside & (kind == NOUN))
    after = first.copy()
    np.maximum.at(after, run[nouns], nouns + 1)
    ends[first] = after
    return ends


@lru_cache(maxsize=1 << 18)
def word_facts(word: str, language: str | None) -> tuple[str, int]:
    """A word's stem, and the sum of what it is, of IN_PHRASE and the like; cached, since a corpus has few distinct words."""
    kinds = IN_PHRASE if is_phrase_word(word) else 0
    if language == "english" and word.lower() in FUNCTION_WORDS:
        kinds |= FUNCTIONAL
    if word.isupper():
        kinds |= CAPITALS | (ACRONYM if kinds & FUNCTIONAL and len(word) > 1 else 0)
    return spelling_stem(word, language), kinds


@lru_cache(maxsize=1 << 18)
def word_rarity(word: str) -> float:
    """That of `WordArrays.rarity`; the vocabulary has no accents."""
    known, letters = known_words(), normalize("NFD", word.lower())
    rank = known.get("".join(letter for letter in letters if not combining(letter)), len(known))
    return log((rank + 1) / (len(known) + 1))


def acronyms(kinds: np.ndarray, begins_unit: np.ndarray, ends_unit: np.ndarray) -> np.ndarray:
    """Which words have the letters of a function word but are acronyms, such as IT, `(W,)`.

    One in capitals is an acronym ("the IT department") if no neighbour is in capitals, or if a neighbour is not ("IBM IT services");
    otherwise it is part of a line in capitals ("STATE OF THE ART"). Neighbours are words of the same unit, without punctuation.

    Args:
        kinds (`(W,)`): of the words, see `word_facts`.
        begins_unit, ends_unit (`(W,)`): whether a unit of layout begins or ends with the word.
    """
    capitals = (kinds & CAPITALS) > 0
    small = ((kinds & IN_PHRASE) > 0) & ~capitals

    def beside(of_words):
        """Whether the word before or the one after is such."""
        return (np.r_[False, of_words[:-1]] & ~begins_unit) | (np.r_[of_words[1:], False] & ~ends_unit)

    return ((kinds & ACRONYM) > 0) & (~beside(capitals) | beside(small))
