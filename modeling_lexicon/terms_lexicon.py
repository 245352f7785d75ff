# SPDX-License-Identifier: Apache-2.0
"""A term in its context: where it is, also in another form, and the part of a long context around it."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

ENDINGS = ("s", "es", "ies", "ed", "ied", "ing", "er", "est", "'s")


def is_form_of(word: str, term: str) -> bool:
    """Whether a word may be an inflected form of a term's word, or the word itself: days, primaries, advancing, stopped."""
    stems = (term, term + term[-1], term[:-1]) if term[-1] in "ey" else (term, term + term[-1])
    return word == term or any(word == stem + ending for stem in stems for ending in ENDINGS)


def find_term(term: str, words: Sequence[str]) -> range | None:
    """The first place of a term, or else of an inflected form of it, among the words of a context; the "to" of a verb need not be there."""
    normalised = [word.strip(".,;:!?\"'()").lower() for word in words]
    wanted = term.lower().split()
    forms = [wanted, wanted[1:]] if len(wanted) > 1 and wanted[0] == "to" else [wanted]
    for same in (str.__eq__, is_form_of):
        for form in forms:
            for i in range(len(words) - len(form) + 1):
                if all(map(same, normalised[i : i + len(form)], form)):
                    return range(i, i + len(form))
    return None


def is_in_context(term: str, context: str) -> bool:
    """Whether a context has a term, in any form."""
    return term.lower() in context.lower() or find_term(term, context.split()) is not None


def truncate_context_around(term: str, context: str, fits: Callable[[str], bool]) -> str | None:
    """The widest window of a context around its term that fits; `None` if not even the term fits."""
    words = context.split()
    place = find_term(term, words) or range(len(term.split()))

    def window(width: int) -> str:
        return " ".join(words[max(0, place.start - width) : place.stop + width])

    too_wide = bisect_left(range(len(words) + 1), True, key=lambda width: not fits(window(width)))
    return window(too_wide - 1) if too_wide else None
