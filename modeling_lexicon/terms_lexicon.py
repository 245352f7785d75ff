# SPDX-License-Identifier: Apache-2.0
"""A term in its context: where it is, also in another form, and the part of a long context around it."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from unicodedata import normalize

import regex

# A word ends at what is not a letter of a script with spaces.
SPACELESS = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
LETTER = rf"[[\p{{L}}\p{{M}}\p{{N}}]--[{SPACELESS}]]"
GAP = r"[^\p{L}\p{M}\p{N}]+"
ENDINGS = "s|es|ies|ed|ied|ing|er|est"
LEADING = {"a", "an", "the", "to"}  # before a term, which its context may have without them
# irregular forms of other words begin with the same letter
SUPPLETIVE = {"bad", "badly", "be", "eat", "go", "good", "ill", "little", "many", "much", "well"}


def inflected(word: str) -> str:
    """A pattern of a word and its possible forms: days, primaries, advancing, stopped. What lemminflect knows has few: cars, but not cares."""
    stems = [word, word + word[-1], word[:-1] if word[-1] in "ey" else word]
    is_known = (lemmas := find_lemmas()) and word[-1] not in "ey" and lemmas(word)
    return f"(?:{word}|(?:{'|'.join(stems)})(?:{'s' if is_known else ENDINGS}))"


def fold(text: str) -> str:
    """A text without case, accents and subscripts."""
    return text.lower() if text.isascii() else regex.sub("[\u0300-\u036f]", "", normalize("NFKD", text).casefold())


def find_term(term: str, text: str) -> tuple[int, int] | None:
    """Start and end of a term in a text: as written, or else with other signs between its words, or else as one word or several (e-mail),
    or else inflected, or else, with lemminflect, in an irregular form. The "to" of a verb and articles need not be there.
    """
    folded = "".join(map(fold, text))
    origins = [i for i, char in enumerate(text) for _ in fold(char)]  # some letters become several
    words = fold(term).split()
    forms = [words, words[1:]] if len(words) > 1 and words[0] in LEADING else [words]
    bare = [list(filter(None, regex.split(GAP, " ".join(form)))) for form in forms]
    patterns = [r"\s+".join(map(regex.escape, form)) for form in forms] + [GAP.join(form) for form in bare if form]
    patterns += [r"[-.\s]{0,2}".join(word) + "s?" for word in map("".join, bare) if word.isalpha()]
    for pattern in chain(patterns, (GAP.join(map(inflected, form)) for form in bare if form)):
        if found := regex.search(f"(?<!{LETTER})(?:{pattern})(?!{LETTER})", folded, regex.V1):
            return origins[found.start()], origins[found.end() - 1] + 1
    if find_lemmas() is None:
        return None
    places, size = list(find_words(folded)), len(bare[-1])
    lemmas, wanted = ([lemmas_of(word) for word in each] for each in ([p.group() for p in places], bare[-1]))
    for i in range(len(places) - size + 1 if size else 0):
        if all(map(set.intersection, lemmas[i : i + size], wanted)):
            return origins[places[i].start()], origins[places[i + size - 1].end() - 1] + 1
    return None


@cache
def find_lemmas() -> Callable[[str], dict] | None:
    """lemminflect's function from a word to its lemmas by parts of speech; `None` where the extra `definitions` is not installed."""
    try:
        from lemminflect import getAllLemmas  # imports spaCy where that is installed, so only when it is needed
    except ImportError:
        return None
    return getAllLemmas


def lemmas_of(word: str) -> set[str]:
    """A word and what it can be a form of: broke, break."""
    return {word, *(lemma for of_kind in find_lemmas()(word).values() for lemma in of_kind)}


def find_words(text: str) -> Iterator[regex.Match]:
    """The words of a text in scripts with spaces."""
    return regex.finditer(f"{LETTER}+", text, regex.V1)


def may_occur(term: str, text: str) -> bool:
    """Whether a text has a term, or, without lemminflect, a word that could be an irregular form of each of its words."""
    if find_term(term, text) or find_lemmas():
        return find_term(term, text) is not None
    initials = {word.group()[0] for word in find_words(fold(text))}
    words = [word.group() for word in find_words(fold(term))]
    words = words[len(words) > 1 and words[0] in LEADING :]
    return bool(words) and all(word in SUPPLETIVE or word[0] in initials for word in words)


def says_nothing(definition: str, term: str) -> bool:
    """Whether a definition has words, and none but articles, "is", "the process of" and forms of its term."""
    own = "|".join(filter(None, regex.split(GAP, fold(term))))
    empty = rf"(?<!{LETTER})(?:an?|the|is|(?:act|process|state)\s+of|(?:{own})(?:{ENDINGS})?)(?!{LETTER})"
    rest, count = regex.subn(empty, "", fold(definition), flags=regex.V1)
    return count > 0 and not regex.search(r"\w", rest)


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
