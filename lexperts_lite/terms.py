# SPDX-License-Identifier: Apache-2.0
"""Technical terms of several words, such as "SARS-CoV-2", "k-means" and "TCP/IP": a keyphrase contains all of a term or nothing of it.

Hyphens and slashes separate words (see `words`). Two words with one hyphen and nothing else between them belong to one term if
- the second begins with a digit, or the first is a number: "COVID-19", "GPT-3.5", "2,4-D", "3D-printed";
- one of them is a single Latin or Greek letter: "k-means", "5-HT", "α-synuclein";
- both are acronyms: up to four capitals, or capitals inside the word: "RT-PCR", "MERS-CoV", "CRISPR-Cas9".
A slash joins capitals and digits if one side has at most two of them: "TCP/IP", "I/O", "9/11", "HTTP/1.1". Other compounds are not
terms, since their parts may be keyphrases ("semi-supervised learning", "CPU/GPU").

Decoding, the ranker and labels ask `continued_words`; where a model labels only a part of a term, `join_probabilities` and `join_tags`
spread the label over all of it.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from .decoding import B, I, O
from .layout import unit_numbers
from .words import Words

LONGEST = 60  # characters of two words; longer ones are no term, and would take quadratic time
_HYPHENS = "\\-\u2010\u2011\u2012\u2013"
_SIGN = re.compile(rf"(?<=[\w+])[{_HYPHENS}/](?=\w)")
_LETTER = "[A-Za-z\u0370-\u03ff]"
_SHORT, _LONG = "[A-Z]{2,4}", "[A-Z]{5,}"  # acronyms; a line in capitals has longer words too
_MIXED = "(?:[A-Za-z]*[a-z][A-Z][A-Za-z]*|[A-Z]{2,}[a-z]+|[A-Z][A-Za-z]*[0-9]+)"  # MiniLM, GANs, Cas9
_BY_HYPHEN = re.compile(
    rf".+ [0-9].*|(?:[0-9][0-9.,]*|[1-9]D) .+|{_LETTER} .+|.+ {_LETTER}"
    rf"|(?:{_SHORT}|{_MIXED}) (?:{_SHORT}|{_MIXED})|{_LONG} {_MIXED}|{_MIXED} {_LONG}"
)
_BY_SLASH = re.compile(r"[A-Z0-9.]{1,2} [A-Z0-9.]+|[A-Z0-9.]+ (?:[A-Z0-9.]{1,2}|[0-9][0-9.]*)")


def continued_words(words: Sequence) -> np.ndarray:
    """Whether each word continues the term of the word before it, `(W,)`.

    Args:
        words: of `split_words`; others, which come without their text, continue none.

    >>> from lexperts_lite.words import split_words
    >>> continued_words(split_words("a SARS-CoV-2 test")).tolist()
    [False, False, True, True, False]
    """
    if not isinstance(words, Words):
        return np.zeros(len(words), dtype=bool)
    if words.continued is None:
        words.continued = _find_continued(words)
    return words.continued


def _find_continued(words: Words) -> np.ndarray:
    continued, starts = np.zeros(len(words), dtype=bool), None
    for sign in _SIGN.finditer(words.text):
        starts = [start for _, start, _ in words] if starts is None else starts
        after = bisect_left(starts, sign.end())
        if not 0 < after < len(words) or starts[after] != sign.end() or words[after - 1][2] != sign.start():
            continue
        pair, rule = f"{words[after - 1][0]} {words[after][0]}", _BY_SLASH if sign[0] == "/" else _BY_HYPHEN
        continued[after] = len(pair) <= LONGEST and rule.fullmatch(pair) is not None
    if continued.any():
        units = unit_numbers(words)
        continued[1:] &= (units[1:] == units[:-1]) & (units[1:] >= 0)
    return continued


def is_whole(continued: np.ndarray, start: int, end: int) -> bool:
    """Whether words from `start` to `end - 1` contain no part of a term without the rest of it."""
    return not continued[start] and not (end < len(continued) and continued[end])


def join_tags(tags: Sequence[int], continued: np.ndarray) -> Sequence[int]:
    """Labels in which all words of a term are labelled if one of them is.

    Args:
        tags (`(W,)`): the labels.
        continued (`(W,)`): see `continued_words`.

    >>> join_tags([0, 0, 2, 1], np.array([False, False, True, False])).tolist()
    [0, 1, 2, 1]
    """
    if not continued.any():
        return tags
    tags = np.array(tags)
    terms = np.cumsum(~continued) - 1  # (W,)
    labelled = np.bincount(terms, tags != O)[terms] > 0
    tags[continued] = np.where(labelled[continued], I, O)
    tags[labelled & (tags == O)] = B
    return tags


def join_probabilities(p: np.ndarray, continued: np.ndarray) -> np.ndarray:
    """Probabilities `(W, 3)` in which each word of a term has the mean p(O) of its words, and only the first word may begin a phrase.

    Args:
        p (`(W, 3)`): of O, B and I for each word.
        continued (`(W,)`): see `continued_words`.
    """
    if not continued.any():
        return p
    terms = np.cumsum(~continued) - 1  # (W,)
    size = np.bincount(terms)
    outside, p = (np.bincount(terms, p[:, O]) / size)[terms], p.copy()
    first = (size[terms] > 1) & ~continued
    begins = (p[first, B] + 1e-9) / (p[first, B] + p[first, I] + 1e-9)  # B, of B and I
    for words, share in ((first, begins), (continued, 0.0)):
        p[words, O], p[words, B] = outside[words], share * (1 - outside[words])
        p[words, I] = (1 - share) * (1 - outside[words])
    return p
