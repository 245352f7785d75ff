# SPDX-License-Identifier: Apache-2.0
"""Candidates: phrases that the user gives and the model scores, also those that it would not extract.

A candidate occurs wherever its words, stemmed, are adjacent (see `words.spelling_stem`) and in one unit of layout (see `layout`), but not
inside a longer candidate. A single letter or number is not found inside a term (see `layout`): "R" does not occur in "R-CNN". A word of
up to four capitals occurs in capitals only: "IT" is not "it". The score of a mention is that of an extracted keyphrase: the mean
probability of its words' labels, B for the first one and I for the others.
"""

from collections import defaultdict
from collections.abc import Sequence

from .clean import clean_characters
from .layout import continued_words, is_whole, unit_numbers
from .words import APOSTROPHES, spelling_stem, split_words

Words = Sequence[tuple[str, int, int]]  # (word, start, end)
Spans = Sequence[tuple[int, int]]  # of words, (start, end)
ACRONYM = 4  # letters
LONGEST = 50  # words of a candidate, by which the time of a text grows


class Candidates:
    """The argument `candidates`: a list of phrases. Those with equal stems are one, for which the first stands.

    Raises:
        TypeError: for anything but a list of strings.
        ValueError: for an empty list, and for a phrase without words or with more than LONGEST.
    """

    def __init__(self, phrases: Sequence[str]):
        if not isinstance(phrases, (list, tuple)) or not all(isinstance(phrase, str) for phrase in phrases):
            raise TypeError(f"candidates={phrases!r:.60} is not a list of strings.")
        self._words = {phrase: counted_words(split_words(clean_characters(phrase))) for phrase in phrases}
        if not all(self._words.values()) or not phrases:
            raise ValueError(f"candidates={phrases!r:.60} has no phrase, or one without words.")
        if (longest := max(map(len, self._words.values()))) > LONGEST:
            raise ValueError(f"candidates has a phrase of {longest} words, more than {LONGEST}.")
        self._tries: dict[str | None, dict] = {}
        self._phrases: dict[str | None, list[str]] = {}

    def __len__(self) -> int:
        return len(self._words)

    def phrases(self, language: str | None = "english") -> list[str]:
        """The phrases in their order, of those with equal stems the first."""
        self._trie(language)
        return self._phrases[language]

    def _trie(self, language: str | None) -> dict:
        """A tree of stems. At the end of a phrase it has the phrase and its first word under `None`."""
        if language not in self._tries:
            trie, first = {}, []
            for phrase, words in self._words.items():
                node = trie
                for _, word in words:
                    node = node.setdefault(spelling_stem(word, language), {})
                if None not in node:
                    node[None] = phrase, words[0][1]
                    first.append(phrase)
            self._tries[language], self._phrases[language] = trie, first
        return self._tries[language]

    def find(self, words: Words, language: str | None = "english") -> dict[str, Spans]:
        """The spans of words where each phrase occurs, in text order, without the phrases that do not occur.

        The time is that of the text's words times those of the longest phrase. Mentions of one phrase do not overlap: the first is kept.

        Args:
            words: of the document, as `split_words` returns them.
            language: of the stems.
        """
        trie, read = self._trie(language), counted_words(words)
        stems = [spelling_stem(word, language) for _, word in read]
        units, continued, found, farthest = unit_numbers(words).tolist(), continued_words(words), defaultdict(list), 0
        for place, (start, word) in enumerate(read):
            node, at, longest = trie, place, None
            while at < len(read) and stems[at] in node and units[read[at][0]] == units[start] >= 0:
                node, at = node[stems[at]], at + 1
                longest = (*node[None], read[at - 1][0] + 1) if None in node else longest
            if longest is None or longest[2] <= farthest:  # inside a longer one
                continue
            phrase, first, end = longest
            spans, is_word = found[phrase], end == start + 1
            is_sign = is_word and (len(first) == 1 or first.isdigit()) and not is_whole(continued, start, end)
            if is_sign or (is_word and not same_case(first, word)) or (spans and start < spans[-1][1]):
                continue
            spans.append((start, end))
            farthest = end
        return {phrase: spans for phrase, spans in found.items() if spans}


def counted_words(words: Words) -> list[tuple[int, str]]:
    """The number and the form of each word, without the apostrophe after a plural ("students' results")."""
    counted = []
    for number, (word, start, _) in enumerate(words):
        before, _, end = words[number - 1] if number else ("", 0, -1)
        if not (word in APOSTROPHES and end == start and before[-1:] in "sS"):
            counted.append((number, word))
    return counted


def same_case(acronym: str, word: str) -> bool:
    """Whether a word of the text may be this candidate: one of a few capitals must have capitals at the same places."""
    if not acronym.isupper() or sum(map(str.isalpha, acronym)) > ACRONYM:
        return True
    return all(a.isupper() == b.isupper() for a, b in zip(acronym, word, strict=False))
