# SPDX-License-Identifier: Apache-2.0
"""A term in its context: where it is, also in another form, and the part of a long context around it."""

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from unicodedata import category

ENDINGS = ("s", "es", "ies", "ed", "ied", "ing", "er", "est", "'s")


def is_form_of(word: str, term: str) -> bool:
    """Whether a word may be an inflected form of a term's word, or the word itself: days, primaries, advancing, stopped."""
    stems = (term, term + term[-1], term[:-1]) if term[-1] in "ey" else (term, term + term[-1])
    return word == term or any(word == stem + ending for stem in stems for ending in ENDINGS)


def strip_word(word: str) -> str:
    """A word without what is before its first and after its last letter, mark of a letter, or digit; unchanged if it has none."""
    kept = [i for i, char in enumerate(word) if char.isalnum() or category(char)[0] == "M"]
    return word[kept[0] : kept[-1] + 1] if kept else word


# A word and a term's word, each as written and stripped: the same in both, in the second, or in another form.
WAYS = (
    lambda word, own: own[0] in word[0] and word[1] == own[1],  # C++ before C
    lambda word, own: word[1] == own[1],
    lambda word, own: is_form_of(word[1], own[1]),
)


def find_term(term: str, words: Sequence[str]) -> range | None:
    """The first place of a term, or else of an inflected form of it, among the words of a context; the "to" of a verb need not be there."""
    given, wanted = ([(word, strip_word(word)) for word in map(str.casefold, own)] for own in (words, term.split()))
    forms = [wanted, wanted[1:]] if len(wanted) > 1 and wanted[0][0] == "to" else [wanted]
    for same in WAYS:
        for form in forms:
            for i in range(len(words) - len(form) + 1):
                if all(map(same, given[i : i + len(form)], form)):
                    return range(i, i + len(form))
    return None


def is_in_context(term: str, context: str) -> bool:
    """Whether a context has a term, in any form."""
    folded, wanted = (" ".join(text.split()).casefold() for text in (context, term))
    return wanted in folded or find_term(term, context.split()) is not None


def find_characters(term: str, words: Sequence[str]) -> tuple[int, int] | None:
    """Where a term starts and stops in the text of words, joined by spaces: as `find_term`, or else inside of words."""
    place, text = find_term(term, words), " ".join(words)
    if place is not None:
        part = " ".join(words[place.start : place.stop])
        own = strip_word(part)
        start = len(" ".join([*words[: place.start], ""])) + part.index(own)
        return start, start + len(own)
    folded, wanted = text.casefold(), re.escape(" ".join(term.split()).casefold())
    found = re.search(rf"(?<![^\W_]){wanted}(?![^\W_])", folded) or re.search(wanted, folded)
    if found is None:
        return None
    origins = [i for i, char in enumerate(text) for _ in char.casefold()]  # some letters become several
    return origins[found.start()], origins[found.end() - 1] + 1


def truncate_context_around(term: str, context: str, fits: Callable[[str], bool]) -> str | None:
    """The widest window of a context around its term that fits, or around its start if it lacks the term: whole words, or
    characters if the term's own words do not fit. `None` if not even the term fits."""
    words = context.split()
    text = " ".join(words)
    start, stop = find_characters(term, words) or (0, len(term))
    first, last = text.count(" ", 0, start), text.count(" ", 0, stop)

    def of_words(width: int) -> str:
        return " ".join(words[max(0, first - width) : last + 1 + width])

    def of_characters(width: int) -> str:
        return text[max(0, start - width) : stop + width]

    for window, widths in ((of_words, len(words)), (of_characters, len(text))):
        too_wide = bisect_left(range(widths + 1), True, key=lambda width, window=window: not fits(window(width)))
        if too_wide:
            return window(too_wide - 1)
    return None


def describe_dropped(term: str, context: str, window: str) -> str:
    """What a window of `truncate_context_around` lacks, for a warning."""
    text = " ".join(context.split())
    unit, size = ("words", lambda part: len(part.split())) if f" {window} " in f" {text} " else ("characters", len)
    origin = "term" if is_in_context(term, context) else "start"
    return f"the {size(text) - size(window):,} of its {size(text):,} {unit} that are furthest from the {origin} are dropped"
