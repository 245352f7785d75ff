# SPDX-License-Identifier: Apache-2.0
"""A term in its context: where it is, also in another form, and the part of a long context around it."""

from bisect import bisect_left
from collections.abc import Callable

import regex

# A word ends at what is not a letter of a script with spaces.
SPACELESS = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
LETTER = rf"[[\p{{L}}\p{{M}}\p{{N}}]--[{SPACELESS}]]"
GAP = r"[^\p{L}\p{M}\p{N}]+"
ENDINGS = "s|es|ies|ed|ied|ing|er|est"


def inflected(word: str) -> str:
    """A pattern of a word and its possible forms: days, primaries, advancing, stopped."""
    stems = [word, word + word[-1], word[:-1] if word[-1] in "ey" else word]
    return f"(?:{word}|(?:{'|'.join(stems)})(?:{ENDINGS}))"


def find_term(term: str, text: str) -> tuple[int, int] | None:
    """Start and end of a term in a text: as written, or else with other signs between its words, or else inflected. The "to" of
    a verb need not be there.
    """
    folded, words = text.casefold(), term.casefold().split()
    origins = [i for i, char in enumerate(text) for _ in char.casefold()]  # some letters become several
    forms = [words, words[1:]] if len(words) > 1 and words[0] == "to" else [words]
    bare = [list(filter(None, regex.split(GAP, " ".join(form)))) for form in forms]
    patterns = [r"\s+".join(map(regex.escape, form)) for form in forms]
    patterns += [GAP.join(form) for form in bare if form] + [GAP.join(map(inflected, form)) for form in bare if form]
    for pattern in patterns:
        if found := regex.search(f"(?<!{LETTER})(?:{pattern})(?!{LETTER})", folded, regex.V1):
            return origins[found.start()], origins[found.end() - 1] + 1
    return None


def truncate_context_around(term: str, context: str, fits: Callable[[str], bool]) -> str | None:
    """The widest window of a context around its term that fits, or at its start if it lacks the term: of whole words where there are
    spaces. `None` if not even the term fits.
    """
    text = " ".join(context.split())
    start, stop = find_term(term, text) or (0, 0)

    def window(width: int) -> str:
        before, after = text[max(0, start - width) : start], text[stop : stop + width]
        if start > width and text[start - width - 1] != " " and " " in before:
            before = before.partition(" ")[2]
        if stop + width < len(text) and text[stop + width] != " " and " " in after:
            after = after.rpartition(" ")[0]
        return (before + text[start:stop] + after).strip()

    too_wide = bisect_left(range(len(text) + 1), True, key=lambda width: not fits(window(width)))
    return window(too_wide - 1) if too_wide else None
