# SPDX-License-Identifier: Apache-2.0
"""Cleans texts from PDFs, web pages and chats before they are split into words, in training, prediction and scoring.

HTML entities become characters, those that are invisible go, those that look like others become these, a symbol becomes a separator
that no model reads, a word that is hyphenated at a line end is joined, and long runs of punctuation are shortened. A span of the cleaned
text maps back to a span of the source. A text with nothing to clean is returned unchanged.
"""

import json
import re
import unicodedata
from bisect import bisect_right
from functools import cache, partial
from html import unescape
from html.entities import html5
from pkgutil import get_data

import regex

SEPARATOR = "\x1f"  # ASCII's unit separator: tokenizers drop it, and no phrase crosses it
LINE_BREAKS = "\n\r\x0b\x0c\x85\u2028\u2029"
# what makes an adjective of the word before it, after a hyphen: no part of a phrase without it
ADJECTIVES = (
    "(?:free|like|related|specific|dependent|induced|mediated|driven|aware|oriented|associated|resistant|positive|negative|deficient"
    "|soluble|preventable)"
)
_OWN_HYPHEN = re.compile(rf"{ADJECTIVES}|based|centric|grained|trained|inspired")
_PREFIX = re.compile("mis|over|sub|out|under|hyper|un|de|en|pre|fore|(?:bi|electr|hydr|micr|nan|neur|phot|therm)o")
_SUFFIX = re.compile("(?:ing|age|tion|ment|tor|er|ist|ism|ive|ability)s?|ness(?:es)?|ity|ally|tics?|fulness")
SUSPENDED = frozenset(("and", "or", "nor", "to", "und", "oder", "et", "ou"))  # "pre-" / "and post-processing"

Edit = tuple[int, int, str]  # start, end, replacement

# "&amp;nbsp;" was escaped twice
_ENTITY = re.compile(
    r"&(?:amp;|#38;|#[xX]26;)*(#[0-9]{1,7};|#[xX][0-9a-fA-F]{1,6};|[A-Za-z][A-Za-z0-9]{1,31};)"
    r"|&(nbsp|amp|lt|gt|quot)(?![A-Za-z0-9;=])"
)
# invisible characters: controls but for white space, zero-width ones, directions; those that look like others: ligatures, subscripts,
# Roman numerals, full width, letters of formulas, half-width kana, radicals, Arabic presentation forms
_CHARACTERS = re.compile(
    "[\0-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\u00b4\u02bc\u200b-\u200f\u2018\u202a-\u202e\u2060-\u206f\u2080-\u2089\u2090-\u209c\u2160-\u217f"
    "\u2f00-\u2fd5\uf900-\ufdff\ufe70-\ufefc\ufeff\uff01-\uff9f\ufff9-\ufffb\U0001d400-\U0001d7ff][\uff9e\uff9f]?"
)
_ASCII_INVISIBLE = re.compile(r"[\0-\x08\x0e-\x1b\x7f]")
_LIKE_APOSTROPHES = frozenset("\u2018\u00b4\u02bc\uff07")
# emoji, arrows, bullets of Word, lone surrogates: all but ASCII's symbols and currencies
_SYMBOLS = regex.compile(r"(?:(?:[^\x00-\x7f\p{Sc}\P{S}]|[\p{Co}\p{Cs}\u2460-\u24ff\u2776-\u2793])[\p{M}\u200d]*+)++")
_MINUS = re.compile(r"(?<=\w)\u2212(?=\w)")  # the hyphen of many PDFs
# charges of ions; marks of footnotes
_RAISED = re.compile(r"(?<=\w)[\u00b2\u00b3\u2074]?\u207a|(?<=[a-z]{3})[\u00b2\u00b3\u00b9\u2070\u2074-\u2079]+")
_EMPHASIS = re.compile(r"(?<!\w)(_{1,2})(?=[^\W_])([^\n_]{1,80}?)(?<=[^\W_])\1(?!\w)")  # Markdown's
_MARKS = re.compile(  # a run of twelve or more, of which three stay: a model reads each as a sub-token
    r"(M\s*+M\s*+M)((?:\s*+M){9,}+)".replace(
        "M",
        r"[!-/:-@\[-`{-~\u00a1-\u00a9\u00ab\u00ac\u00ae-\u00b4\u00b6-\u00b9\u00bb-\u00bf\u00d7\u00f7\u2010-\u2027\u2030-\u205e\u20a0-\u20cf"
        r"\u3001-\u3003\u3008-\u3020\u30fb\ufe30-\ufe6b\uff01-\uff0f\uff1a-\uff20]",
    )
)
_AT_END = re.compile(rf"[-\u2010]\s*[{LINE_BREAKS}]")
_SOFT_HYPHENS = re.compile("\u00ad+(\\s*+)")
_BROKEN = regex.compile(
    r"(?<![\p{L}\p{M}\p{N}])([\p{L}\p{M}\p{N}]++)[-\u2010](\s++)(?=([\p{L}\p{N}][\p{L}\p{M}\p{N}]*+))"
)
_BOTH_HALVES = regex.compile(_BROKEN.pattern + r"[\p{L}\p{M}\p{N}]++")
_COMPOUND = regex.compile(r"(?<![\p{L}\p{M}])([\p{L}\p{M}]++)[-\u2010](?=([\p{L}\p{M}]++))")
_DASH_OF_NAMES = regex.compile(r"(?<!-)--(?=\p{Lu}\p{L})(?<=\b\p{Lu}[\p{L}\p{M}]+--)")  # LaTeX: Navier--Stokes
_TITLE_BREAK = re.compile(rf"(?<![-\u2010\u00ad\s])\s*[{LINE_BREAKS}]\s*")


class CleanText:
    """A cleaned text, whose spans `source_span` maps back to the source.

    Args:
        source: any text.
        title: the number of characters at its beginning that are a title, whose lines are one.

    Attributes:
        text: the cleaned text.

    >>> clean = CleanText("a lithium-ion bat-\\nteries &amp; cells")
    >>> clean.text
    'a lithium-ion batteries & cells'
    >>> clean.source_span(2, 23)
    (2, 25)
    """

    def __init__(self, source: str, title: int = 0):
        self.text, self._steps = source, []
        for find_edits in (partial(title_lines, end=title), entities, characters, symbols, punctuation, hyphens):
            if edits := find_edits(self.text):
                self.text, *positions = _apply(self.text, edits)
                self._steps.append(positions)

    def source_span(self, start: int, end: int) -> tuple[int, int]:
        """The span of the source from which a (non-empty) span of `text` comes."""
        for positions in reversed(self._steps):
            start, end = _before(start, *positions)[0], _before(end - 1, *positions)[1]
        return start, end


def clean(text: str) -> str:
    """The cleaned text; see `CleanText`."""
    return CleanText(text).text


def clean_characters(text: str, invisible_only: bool = False) -> str:
    """A text without invisible characters and, unless `invisible_only`, with one form of characters that look alike."""
    edits = [edit for edit in characters(text) if not (invisible_only and edit[2])]
    return _apply(text, edits)[0] if edits else text


def _apply(text: str, edits: list[Edit]) -> tuple[str, list[int], list[Edit]]:
    """Applies sorted edits that do not overlap; returns the edited text, where each edit begins in it, and the edits."""
    parts, places, position, length = [], [], 0, 0
    for start, end, new in edits:
        length += start - position
        places.append(length)
        parts += text[position:start], new
        length, position = length + len(new), end
    return "".join([*parts, text[position:]]), places, edits


def _before(index: int, places: list[int], edits: list[Edit]) -> tuple[int, int]:
    """The span before some edits from which a character of the edited text comes."""
    if not (i := bisect_right(places, index)):
        return index, index + 1
    start, end, new = edits[i - 1]
    if index < places[i - 1] + len(new):
        return start, end
    index += end - places[i - 1] - len(new)
    return index, index + 1


def title_lines(text: str, end: int) -> list[Edit]:
    """Replaces the line breaks of a title, the first `end` characters, by blanks."""
    return [(*match.span(), " ") for match in _TITLE_BREAK.finditer(text, 0, end)] if end else []


def entities(text: str) -> list[Edit]:
    """Replaces HTML entities (`&nbsp;`, `&eacute;`, `&#8211;`) by their characters; `R&D` and unknown names stay."""
    edits = []
    for match in _ENTITY.finditer(text) if "&" in text else ():
        name = match[1] or f"{match[2]};"
        if name[0] == "#" or name in html5:
            edits.append((*match.span(), unescape(f"&{name}")))
    return edits


def characters(text: str) -> list[Edit]:
    """Removes invisible characters (NUL, zero width) and replaces those that look like others ("\ufb01", "\u2082", full width)."""
    if text.isascii():
        return [(*match.span(), "") for match in _ASCII_INVISIBLE.finditer(text)] if not text.isprintable() else []
    edits = []
    for match in _CHARACTERS.finditer(text):
        start, end = match.span()
        alike = _alike(match[0], text[max(start - 1, 0) : start], text[end : end + 1])
        if alike != match[0]:
            edits.append((start, end, alike))
    raised = ((m, unicodedata.normalize("NFKC", m[0]) if "\u207a" in m[0] else "") for m in _RAISED.finditer(text))
    return sorted(edits + [(*match.span(), new) for match, new in raised])


def _alike(character: str, before: str, after: str) -> str:
    """What replaces a character, given those beside it."""
    if character in "\u200c\u200d":  # a part of Persian and Indic words and of emoji
        return "" if before.isalnum() and (before < "\u0530" or "\u1e00" <= before < "\u2000") else character
    if unicodedata.category(character[0])[0] == "C":
        return character[1:]
    if character in _LIKE_APOSTROPHES:
        return "'" if before.isalpha() and after.isalpha() else character
    alike = unicodedata.normalize("NFKC", character)
    is_word = all(c.isalnum() or c in "+#&" or unicodedata.combining(c) for c in alike)
    return alike if is_word else character


def symbols(text: str) -> list[Edit]:
    """Replaces symbols: a tokenizer makes one unknown piece of "storage\U0001f680", and hides the word; and a bullet or an emoji divides."""
    if text.isascii() or not _SYMBOLS.search("".join(set(text))):
        return []
    found = _SYMBOLS.finditer(text)
    return [(*match.span(), "-" if _MINUS.match(text, match.start()) else f" {SEPARATOR} ") for match in found]


def punctuation(text: str) -> list[Edit]:
    """Shortens runs of twelve marks or more ("----------", "* * * * * * * *", "Tides . . . . . . . . . . . . 14") to three, and
    removes the underscores of Markdown ("_semantic segmentation_", and not "__init__").
    """
    edits = [(*match.span(2), "") for match in _MARKS.finditer(text)]
    for match in _EMPHASIS.finditer(text) if "_" in text else ():
        if match[1] == "_" or " " in match[2]:
            edits += (*match.span(1), ""), (match.end(2), match.end(), "")
    return sorted(edits)


def hyphens(text: str) -> list[Edit]:
    """Removes soft hyphens, and hyphens at a line end that are most likely due to the line break, with that break.

    "bat-" / "teries" is joined. The hyphen stays and only the line break is removed after an abbreviation, a digit or a single
    letter ("LSTM-" / "based"), before a capital or a digit ("Navier-" / "Stokes"), if the text contains the same compound within a
    line, and if both halves are words and what they make is not ("blood-" / "feeding"). "pre-" / "and post-processing" stays unchanged.
    """
    edits = [(*match.span(), "-") for match in _DASH_OF_NAMES.finditer(text)] if "--" in text else []
    for match in _SOFT_HYPHENS.finditer(text) if "\u00ad" in text else ():
        goes_on = _has_break(match[1]) and text[match.end() : match.end() + 1].isalnum()
        edits.append((match.start(), match.end() if goes_on else match.start(1), ""))
    found = _BROKEN.finditer(text) if _AT_END.search(text) else ()
    joins = (m for m in found if m[3].lower() not in SUSPENDED or text.startswith("-", m.end(3)))  # end-to-end
    broken = [match for match in joins if _has_break(match[2])]
    if broken:
        lower = text.lower()
        compounds = set(_COMPOUND.findall(lower))
        words = set(regex.findall(r"\p{L}[\p{L}\p{M}]*+", _BOTH_HALVES.sub(" ", lower)))
        for match in broken:
            joined = _is_one_word(match[1], match[3], compounds, words)
            edits.append((match.end(1) if joined else match.start(2), match.end(), ""))
    return sorted(edits)


def _is_one_word(first: str, second: str, compounds: set[tuple[str, str]], words: set[str]) -> bool:
    """Whether the hyphen between two parts is due to a line break, given what else is in the text, in lower case."""
    both = first + second
    if min(len(first), len(second)) < 2 or any(map(str.isnumeric, both)) or not (first[-1] + second[0]).islower():
        return False
    both, parts = both.lower(), (first.lower(), second.lower())
    if parts in compounds or both in words:
        return parts not in compounds
    known = known_words()
    if both in known or _PREFIX.fullmatch(parts[0]) or _SUFFIX.fullmatch(parts[1]):
        return True
    return not _OWN_HYPHEN.fullmatch(parts[1]) and not all(part in words or part in known for part in parts)


@cache
def known_words() -> dict[str, int]:
    """English words with their ranks by frequency: the vocabulary of this package's tokenizer, which is nearly in that order."""
    try:
        data = get_data("lexperts_lite", "model/tokenizer.json")
    except OSError:  # installed without its model
        data = None
    return json.loads(data)["model"]["vocab"] if data else {}


def _has_break(blanks: str) -> bool:
    return any(c in LINE_BREAKS for c in blanks)
