# SPDX-License-Identifier: Apache-2.0
"""Features of phrases that need more than labels: whether a phrase is a whole noun phrase, and how central its words are.

With p(other), p(noun) of `word_classes`, a mention w_1 .. w_n is a noun phrase that goes on neither to its left nor to its right with

    min_i (1 - p(other | w_i)) p(noun | w_n) p(other | word before) (1 - p(noun | word after))
"""

import numpy as np

from .position_rank import position_ranks
from .word_classes import NOUN, OTHER

SHAPE = ("noun_phrase", "best_noun_phrase", "noun_phrases", "central")


def shape_features(
    found, bounds: np.ndarray, first: np.ndarray, lengths: np.ndarray, words, classes: np.ndarray
) -> dict[str, np.ndarray]:
    """The features SHAPE of C phrases: the mean, the largest and the sum over their mentions of the probability of a noun phrase, and
    the sum of the ranks of the first mention's words, see `position_rank`.

    Args:
        found, bounds, first, lengths, words: as for `phrase_features.phrase_features`.
        classes (`(W, 3)`): of the words, see `word_classes.CLASSES`.
    """
    p = noun_phrases(found.start, found.length, words.units, words.allowed, classes)
    total = np.add.reduceat(p, bounds)
    counted = words.allowed & ~words.functional
    position = np.arange(len(words.p)) - words.starts[words.document]
    ranks = position_ranks(words.stems, words.document, position, counted)
    central = ranks[first]
    for step in range(1, int(lengths.max(initial=1))):
        longer = lengths > step
        central[longer] += ranks[first[longer] + step]
    return {
        "noun_phrase": total / np.diff(np.append(bounds, len(p))),
        "best_noun_phrase": np.maximum.reduceat(p, bounds),
        "noun_phrases": np.log1p(total),
        "central": central,
    }


def noun_phrase_ends(units: np.ndarray, allowed: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """For each word the word after the longest noun phrase that begins with it, or the word itself if none does, `(W,)`.

    A noun phrase consists of neighbours whose most probable class is noun or modifier, up to the last noun.

    Args:
        units, allowed, classes: as for `noun_phrases`.
    """
    ends, kind = np.arange(len(units)), classes.argmax(1)
    inside = allowed & (kind != OTHER)
    begins = inside.copy()
    begins[1:] &= ~(inside[:-1] & (units[1:] == units[:-1]))
    first, run = np.flatnonzero(begins), np.cumsum(begins) - 1
    nouns = np.flatnonzero(inside & (kind == NOUN))
    after = first.copy()
    np.maximum.at(after, run[nouns], nouns + 1)
    ends[first] = after
    return ends


def noun_phrases(
    start: np.ndarray, length: np.ndarray, units: np.ndarray, allowed: np.ndarray, classes: np.ndarray
) -> np.ndarray:
    """The probability that each of M mentions is a whole noun phrase, `(M,)`.

    Args:
        start, length (`(M,)`): the first word and the number of words of each mention.
        units, allowed (`(W,)`): the unit of layout of each word, and whether it can be part of a phrase.
        classes (`(W, 3)`): of the words.
    """
    other = np.append(np.where(allowed, classes[:, OTHER], 1.0), 1.0)
    noun = np.append(np.where(allowed, classes[:, NOUN], 0.0), 0.0)
    end = start + length
    within = 1 - other[start]
    for step in range(1, int(length.max(initial=1))):
        longer = length > step
        within[longer] = np.minimum(within[longer], 1 - other[start[longer] + step])
    unit = np.append(units, -2)
    before = np.where((start > 0) & (unit[start - 1] == unit[start]), other[start - 1], 1.0)
    after = np.where(unit[end] == unit[start], noun[end], 0.0)
    return within * noun[end - 1] * before * (1 - after)
