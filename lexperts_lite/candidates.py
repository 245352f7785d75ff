# SPDX-License-Identifier: Apache-2.0
"""Candidates: phrases that the user gives and the model scores, also those that it would not extract.

A candidate occurs wherever its words, stemmed, are adjacent (see `words.stem`) and in one unit of layout (see `layout`), but not
inside a longer candidate. A single letter or number is not found inside a term (see `terms`): "R" does not occur in "R-CNN". The score
of a mention is that of an extracted keyphrase: the mean probability of its words' labels, B for the first one and I for the others.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import shorten

import numpy as np

from .clean_text import clean_characters
from .layout import in_one_unit, unit_numbers
from .terms import continued_words, is_whole
from .words import APOSTROPHES, normalise, split_words, stem
from .words import Words as SplitText

Words = Sequence[tuple[str, int, int]]  # (word, start, end)
Spans = Sequence[tuple[int, int]]  # of words, (start, end)
EXAMPLE = "candidates=['graph cut', 'energy'], or with synonyms candidates={'graph cut': ['minimum cut'], 'energy': []}"
MATCH_CASE = ("auto", True, False)
ACRONYM = 4  # letters; a candidate of up to this many capitals matches by case
PIECE_BYTES = 4  # of one character, of which a byte-level tokenizer makes at most as many sub-tokens


class CandidateSet:
    """The candidates of a document.

    Args:
        candidates: a list of phrases, or a mapping from names to lists of synonyms.
        where: how error messages call it.

    Attributes:
        synonyms: for each name the phrases that count as its mentions, the first of which is the name itself.

    Raises:
        TypeError: for other types.
        ValueError: for a phrase without words, and for a phrase that occurs twice (upper and lower case are equal, but for
            acronyms; see `find`).
    """

    def __init__(self, candidates: Sequence[str] | Mapping[str, Sequence[str]], where: str = "candidates"):
        if not isinstance(candidates, Mapping):
            _check_phrases(candidates, where)
            named = [(name, ()) for name in candidates]
        else:
            named = [(name, () if others is None else others) for name, others in candidates.items()]
            _check_phrases([name for name, _ in named], where)
        self.synonyms, seen = {}, {}
        for name, others in named:
            _check_phrases(others, f"{where}[{name!r}]")
            phrases, own = list(dict.fromkeys((name, *others))), {}
            for phrase in phrases:  # also those that differ by case alone: `match_case` may tell them apart
                words = normalise(phrase), phrase if _is_acronym(phrase) else None
                if not words[0]:
                    raise ValueError(
                        f"{where} has the empty phrase {phrase!r}. Leave it out, or pass a phrase with words."
                    )
                if words in seen:
                    raise ValueError(
                        f"{where} has {phrase!r} twice: for {seen[words]!r} and for {name!r}. Leave one of them out; phrases "
                        "that mean the same can be synonyms of one name: {'graph cut': ['minimum cut']}."
                    )
                own[words] = name
            seen |= own
            self.synonyms[name] = phrases
        self._indices = {}

    def __len__(self) -> int:
        return len(self.synonyms)

    def find(self, words: Words, language: str | None = "english", match_case: bool | str = "auto") -> dict[str, Spans]:
        """The spans of words where each name or one of its synonyms occurs, in text order.

        A mention inside a longer one, also of another name, does not count. Where mentions of one name overlap otherwise, the
        longest is kept, then the leftmost. A word of the document that has several parts ("b-i" in a list of words) matches as a
        whole only. Words that `layout` hides match only phrases that are hidden themselves, such as a URL.

        Args:
            words: of the document, as `split_words` returns them.
            language: of the stems.
            match_case: whether upper and lower case differ; with `"auto"` for phrases of up to four letters that are all capitals,
                so that "IT" does not match "it".

        Returns:
            The spans by name, without the names that do not occur.
        """
        index = self._index(language)
        stems, parts_of, first, last = [], [], {}, {}  # first and last: part -> the word that begins or ends with it
        whole = isinstance(words, SplitText)
        for number, (word, _, _) in enumerate(words):
            parts = [word] if whole else [part for part, _, _ in split_words(clean_characters(word))]
            if parts and not _is_possessive_mark(words, number):
                first[len(stems)] = number
                stems += [stem(part, language) for part in parts]
                parts_of += parts
                last[len(stems)] = number + 1
        units, continued, found = unit_numbers(words), continued_words(words), defaultdict(list)
        for start, number in first.items():
            lengths, named = index.get(stems[start], ((), {}))
            matches = []
            for end in [start + length for length in lengths if start + length in last]:
                parts, whole = parts_of[start:end], is_whole(continued, number, last[end])
                for rank, phrase in named.get(tuple(stems[start:end]), ()):
                    if phrase.is_sign and not whole:
                        continue
                    if phrase.matches(parts, units[number : last[end]], match_case):
                        matches.append((rank, phrase.name, last[end]))
            for _, name, end in sorted(matches):
                found[name].append((number, end))
        kept = {name: _without_overlaps(list(dict.fromkeys(spans))) for name, spans in found.items()}
        outer = _outermost({span for spans in kept.values() for span in spans})
        kept = {name: [span for span in spans if span in outer] for name, spans in kept.items()}
        return {name: spans for name, spans in kept.items() if spans}

    def _index(self, language: str | None) -> dict[str, tuple[set[int], dict[tuple, list[tuple[int, "_Phrase"]]]]]:
        """First stem -> the lengths of all phrases that begin with it, and for the stems of each its number and phrase."""
        if language not in self._indices:
            index: dict = {}
            rank = 0
            for name, phrases in self.synonyms.items():
                own: set = set()
                for phrase in (_Phrase(name, phrase) for phrase in phrases):
                    stems = tuple(stem(word, language) for word in phrase.words)
                    if (stems, phrase.words) in own:
                        continue
                    own.add((stems, phrase.words))
                    lengths, named = index.setdefault(stems[0], (set(), {}))
                    lengths.add(len(stems))
                    named.setdefault(stems, []).append((rank, phrase))
                    rank += 1
            self._indices[language] = index
        return self._indices[language]


class _Phrase:
    """A name or synonym of a set."""

    def __init__(self, name: str, phrase: str):
        words = split_words(clean_characters(phrase))
        kept = [word for number, (word, _, _) in enumerate(words) if not _is_possessive_mark(words, number)]
        self.name, self.words = name, tuple(kept)
        self.is_acronym = _is_acronym(phrase)
        self.is_hidden = bool((unit_numbers(words) < 0).any())
        self.is_sign = len(kept) == 1 and (len(kept[0]) == 1 or kept[0].isdigit())

    def matches(self, words: Sequence[str], units: np.ndarray, match_case: bool | str) -> bool:
        """Whether words with the same stems, of these units of layout, are a mention."""
        if not (in_one_unit(units, 0, len(units)) or (self.is_hidden and (units < 0).any())):
            return False
        if not (self.is_acronym if match_case == "auto" else match_case):
            return True
        return all(map(_same_case, self.words, words))


class Candidates:
    """The argument `candidates`: one set for all documents, or one per document.

    Args:
        candidates: a list of phrases, a mapping from names to lists of synonyms, or a list of such lists or mappings, one
            per document.

    Attributes:
        per_document: whether there is one set per document.

    Raises:
        TypeError, ValueError: as in `CandidateSet`.
    """

    def __init__(self, candidates):
        if isinstance(candidates, str) or not isinstance(candidates, (list, tuple, Mapping)):
            raise TypeError(
                f"candidates must be a list or a mapping, got a {type(candidates).__name__}. Pass {EXAMPLE}."
            )
        self.per_document = not isinstance(candidates, Mapping) and not any(isinstance(c, str) for c in candidates)
        if self.per_document:
            self._sets = [CandidateSet(own, f"candidates[{i}]") for i, own in enumerate(candidates)]
        else:
            self._sets = [CandidateSet(candidates)]
            if not candidates:
                raise ValueError(f"candidates is empty. Leave it out to extract keyphrases, or pass {EXAMPLE}.")
        self._checked = set()

    def of(self, document: int) -> CandidateSet:
        """The set of the document with this index."""
        if not self.per_document:
            return self._sets[0]
        if document >= len(self._sets):
            raise ValueError(
                f"candidates has {len(self._sets)} lists, but none for document {document}. "
                "Pass one per document, or one list of phrases for all."
            )
        return self._sets[document]

    def check_number(self, documents: int | None) -> None:
        """Raises a `ValueError` if the number of sets is not that of the documents; `None` is one document by itself."""
        if not self.per_document or documents == len(self._sets):
            return
        if documents is None:
            given = f"candidates has {len(self._sets)} lists" if self._sets else "candidates is empty"
            raise ValueError(f"{given}, but there is one document. Pass one list of phrases: {EXAMPLE}.")
        raise ValueError(
            f"candidates has {len(self._sets)} lists for {documents} documents. Pass one per document, or one list of phrases "
            "for all."
        )

    def check_lengths(self, tokenizer, block) -> None:
        """Raises a `ValueError` for a phrase that does not fit into a window of the block."""
        max_length, documents = block.max_length, range(block.first, block.first + len(block.documents))
        room = max_length - tokenizer.num_special_tokens_to_add()
        for own in {id(own): own for own in map(self.of, documents)}.values():
            if (id(own), room) in self._checked:
                continue
            for phrases in own.synonyms.values():
                for phrase in phrases:
                    # the tokenizer is slow for large sets
                    length = 0 if PIECE_BYTES * len(phrase) <= room else len(_tokenize(tokenizer, phrase))
                    if length > room:
                        raise ValueError(
                            f"The candidate {shorten(phrase, 60)!r} has {length} sub-tokens, but a window of max_length={max_length} has "
                            f"room for {room}. Pass a shorter phrase."
                        )
            self._checked.add((id(own), room))

    def find(self, block, language: str | None, match_case: bool | str = "auto") -> list[dict[str, Spans]]:
        """For each document of a block the result of `CandidateSet.find`."""
        return [
            self.of(number).find(document.words, language, match_case)
            for number, document in enumerate(block.documents, start=block.first)
        ]

    def fingerprint(self) -> str:
        """The number of names and a hash of all phrases in their order, for the settings of a run."""
        content = json.dumps([list(v.synonyms.items()) for v in self._sets]).encode()
        return f"{sum(map(len, self._sets))} candidates, sha256 {hashlib.sha256(content).hexdigest()[:16]}"


def parse_candidates(candidates) -> Candidates | None:
    """The argument `candidates` as an object; `None` for no candidates."""
    return candidates if candidates is None or isinstance(candidates, Candidates) else Candidates(candidates)


def read_candidates(path: str | Path) -> dict[str, list[str]]:
    """Reads a file with one candidate per line and its synonyms, if any, after tabs; blank lines are skipped.

    Raises:
        ValueError: for a name with two lines, and for a file without candidates.
    """
    synonyms = {}
    for line in Path(path).read_text(encoding="utf-8-sig").splitlines():
        name, *others = [phrase.strip() for phrase in line.split("\t")]
        if name in synonyms:
            raise ValueError(f"{path} has two lines for {name!r}. Put its synonyms in one line, separated by tabs.")
        if name or any(others):
            synonyms[name] = [phrase for phrase in others if phrase]
    if not synonyms:
        raise ValueError(f"{path} has no candidates. Write one per line, with synonyms after tabs.")
    CandidateSet(synonyms, str(path))
    return synonyms


def _check_phrases(phrases, where: str) -> None:
    """Raises a `TypeError` if it is not a list of strings."""
    if isinstance(phrases, str) or not isinstance(phrases, (list, tuple)):
        raise TypeError(f"{where} must be a list of phrases, got a {type(phrases).__name__}: {phrases!r:.60}.")
    for phrase in phrases:
        if not isinstance(phrase, str):
            raise TypeError(f"{where} must be a list of strings, got a {type(phrase).__name__} in it: {phrase!r:.60}.")


def _is_acronym(phrase: str) -> bool:
    """Whether a phrase has one to four letters, which are all capitals."""
    letters = [c for c in phrase if c.isalpha()]
    return len(letters) <= ACRONYM and phrase.isupper()


def _is_possessive_mark(words: Words, number: int) -> bool:
    """Whether a word is the apostrophe after a plural ("students' results"), which does not count."""
    word, start, _ = words[number]
    before, _, end = words[number - 1] if number else ("", 0, -1)
    return word in APOSTROPHES and end == start and before[-1:] in "sS"


def _same_case(word: str, other: str) -> bool:
    """Whether words of one stem have capitals at the same places; an ending that only one of them has does not count."""
    return all(a.isupper() == b.isupper() for a, b in zip(word, other, strict=False))


def _outermost(spans: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
    """The spans that are not inside another one."""
    kept, farthest = set(), -1
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        if end > farthest:
            kept.add((start, end))
            farthest = end
    return kept


def _without_overlaps(spans: Spans) -> Spans:
    """The spans in text order, of overlapping ones the longest, then the leftmost."""
    kept, used = [], set()
    for start, end in sorted(spans, key=lambda span: (span[0] - span[1], span[0])):
        if used.isdisjoint(range(start, end)):
            used.update(range(start, end))
            kept.append((start, end))
    return sorted(kept)


def _tokenize(tokenizer, phrase: str) -> list[int]:
    return tokenizer(phrase, add_special_tokens=False, verbose=False)["input_ids"]
