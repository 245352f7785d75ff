# SPDX-License-Identifier: Apache-2.0
"""Cleans texts from PDFs and web pages: HTML entities, characters that are invisible or look like others, runs of punctuation,
words that are hyphenated at a line end.

Cleaning comes before `split_words` in training, prediction and scoring. It keeps track of offsets: a span of the cleaned text
maps back to a span of the source. A text with nothing to clean is returned unchanged.
"""

import re
import unicodedata
from bisect import bisect_right
from html import unescape
from html.entities import html5

import regex

LINE_BREAKS = frozenset("\n\r\x0b\x0c\x85\u2028\u2029")
SUSPENDED = frozenset(("and", "or", "nor", "to", "und", "oder", "et", "ou"))  # "pre-" / "and post-processing"

# "&amp;nbsp;" was escaped twice
_ENTITY = re.compile(
    r"&(?:amp;|#38;|#[xX]26;)*(#[0-9]{1,7};|#[xX][0-9a-fA-F]{1,6};|[A-Za-z][A-Za-z0-9]{1,31};)"
    r"|&(nbsp|amp|lt|gt|quot)(?![A-Za-z0-9;=])"
)
# invisible characters: controls but for white space, zero-width ones, directions; those that look like others: ligatures, subscripts,
# full width, letters of formulas, half-width kana, radicals, Arabic presentation forms
_CHARACTERS = re.compile(
    "[\0-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\u00b4\u02bc\u200b-\u200f\u2018\u202a-\u202e\u2060-\u206f\u2080-\u2089\u2090-\u209c\u2f00-\u2fd5"
    "\uf900-\ufdff\ufe70-\ufefc\ufeff\uff01-\uff9f\ufff9-\ufffb\U0001d400-\U0001d7ff][\uff9e\uff9f]?"
)
_ASCII_INVISIBLE = re.compile(r"[\0-\x08\x0e-\x1b\x7f]")
_LIKE_APOSTROPHES = frozenset("\u2018\u00b4\u02bc\uff07")
_SOFT_HYPHENS = re.compile("\u00ad+(\\s*+)")
_LINE_END = regex.compile(r"(?<=[\p{L}\p{N}\p{M}])[-\u2010](\s++)(?=[\p{L}\p{N}])")
_COMPOUND = regex.compile(r"(?<![\p{L}\p{M}])([\p{L}\p{M}]++)[-\u2010](?=([\p{L}\p{M}]++))")
_LETTERS = regex.compile(r"[\p{L}\p{M}]++")
_WORD_BEFORE = regex.compile(r"(?r)[\p{L}\p{M}\p{N}]{1,40}+")  # from its end

# from the beginning of the run only, and without backtracking, which would take quadratic time
_LEADERS = regex.compile(
    r"([.\u00b7\u2026])(?<!\1[ \t]?\1)(?:[ \t]?\1){4,}+(?=[ \t]*(?:[0-9]+|[ivxlc]+)[ \t]*(?:[\n\r\f]|$))"
)

# a run of twelve punctuation marks or more, of which three stay: a model reads each as a sub-token
_MARK = (
    r"[!-/:-@\[-`{-~\u00a1-\u00a9\u00ab\u00ac\u00ae-\u00b4\u00b6-\u00b9\u00bb-\u00bf\u00d7\u00f7\u2010-\u2027\u2030-\u205e\u20a0-\u20cf\u2190-\u2bff"
    r"\u3001-\u3003\u3008-\u3020\u30fb\ufe30-\ufe6b\uff01-\uff0f\uff1a-\uff20\U0001f300-\U0001faff]"
)
_MARKS = re.compile(r"\s*+".join([_MARK] * 5))  # before patterns that take longer
_RULER = re.compile(rf"((?:{_MARK}\s*+){{2}}{_MARK})((?:\s*+{_MARK}){{9,}}+)")

Edit = tuple[int, int, str]  # start, end, replacement


class CleanText:
    """A cleaned text, whose spans `source_span` maps back to the source.

    Args:
        source: any text.
        end: only `source[:end]` is cleaned.

    Attributes:
        text: the cleaned text.

    >>> clean = CleanText("a lithium-ion bat-\\nteries &amp; cells")
    >>> clean.text
    'a lithium-ion batteries & cells'
    >>> clean.source_span(2, 23)
    (2, 25)
    """

    def __init__(self, source: str, end: int | None = None):
        head, tail = (source, "") if end is None else (source[:end], source[end:])
        self._steps = []
        for find_edits in (entities, characters, punctuation, hyphens):
            if edits := find_edits(head):
                head, step = apply(head, edits)
                self._steps.append(step)
        self.text = head + tail

    def source_span(self, start: int, end: int) -> tuple[int, int]:
        """The span of the source from which a (non-empty) span of `text` comes."""
        for step in reversed(self._steps):
            start, end = step.before(start)[0], step.before(end - 1)[1]
        return start, end


class _Step:
    """The positions of some edits."""

    def __init__(self):
        self._starts, self._ends, self._sources = [], [], []

    def add(self, start: int, end: int, source: tuple[int, int]) -> None:
        self._starts.append(start)
        self._ends.append(end)
        self._sources.append(source)

    def before(self, index: int) -> tuple[int, int]:
        """The span before the edits from which a character of the edited text comes."""
        i = bisect_right(self._starts, index) - 1
        if i < 0:
            return index, index + 1
        if index < self._ends[i]:
            return self._sources[i]
        start = index - self._ends[i] + self._sources[i][1]
        return start, start + 1


def clean(text: str) -> str:
    """The cleaned text; see `CleanText`."""
    return CleanText(text).text


def clean_characters(text: str, invisible_only: bool = False) -> str:
    """A text without invisible characters and, unless `invisible_only`, with one form of characters that look alike."""
    edits = characters(text)
    if invisible_only:
        edits = [edit for edit in edits if not edit[2]]
    return apply(text, edits)[0] if edits else text


def apply(text: str, edits: list[Edit]) -> tuple[str, _Step]:
    """Applies sorted edits that do not overlap; returns the edited text and the positions of the edits."""
    parts, step, position, length = [], _Step(), 0, 0
    for start, end, new in edits:
        parts += text[position:start], new
        length += start - position
        step.add(length, length + len(new), (start, end))
        length, position = length + len(new), end
    return "".join([*parts, text[position:]]), step


def entities(text: str) -> list[Edit]:
    """Replaces HTML entities (`&nbsp;`, `&eacute;`, `&#8211;`) by their characters; `R&D` and unknown names stay."""
    if "&" not in text:
        return []
    edits = []
    for match in _ENTITY.finditer(text):
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
        before, after = text[start - 1 : start] if start else "", text[end : end + 1]
        alike = _alike(match[0], before, after)
        if alike != match[0]:
            edits.append((start, end, alike))
    return edits


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


def punctuation(text: str) -> list[Edit]:
    """Shortens punctuation, each mark of which would count as a word.

    The dots before a page number at the end of a line ("2.1 Tides . . . . . . 14") become one; of other runs of twelve marks or more
    ("----------", "* * * * * * * *") the first three stay.
    """
    if not _MARKS.search(text):
        return []
    edits, position = [], 0
    for leaders in [*_LEADERS.finditer(text), None]:
        end = leaders.start() if leaders else len(text)
        edits += [(*match.span(2), "") for match in _RULER.finditer(text, position, end)]
        if leaders:
            edits.append((*leaders.span(), leaders[1]))
            position = leaders.end()
    return edits


def hyphens(text: str) -> list[Edit]:
    """Removes soft hyphens, and hyphens at a line end that are most likely due to the line break, with that break.

    "bat-" / "teries" is joined. The hyphen stays and only the line break is removed after an abbreviation, a digit or a single
    letter ("LSTM-" / "based"), before a capital or a digit ("Navier-" / "Stokes"), and if the text contains the same compound
    within a line. "pre-" / "and post-processing" stays unchanged.
    """
    edits = [
        (match.start(), match.end() if _continues(text, match) else match.start(1), "")
        for match in (_SOFT_HYPHENS.finditer(text) if "\u00ad" in text else ())
    ]
    ends = [match for match in _LINE_END.finditer(text) if not LINE_BREAKS.isdisjoint(match[1])]
    if not ends:
        return edits
    compounds = {(first.lower(), second.lower()) for first, second in _COMPOUND.findall(text)}
    for match in ends:
        before, after = _last_letters(text, match.start()), _LETTERS.match(text, match.end())
        after = after[0] if after else ""
        if after.lower() in SUSPENDED:
            continue
        joined = min(len(before), len(after)) > 1 and before[-1].islower() and after[0].islower()
        joined = joined and (before.lower(), after.lower()) not in compounds
        edits.append((match.start() if joined else match.start(1), match.end(), ""))
    return sorted(edits)


def _continues(text: str, soft_hyphens: re.Match) -> bool:
    """Whether a word continues in the line after soft hyphens."""
    return not LINE_BREAKS.isdisjoint(soft_hyphens[1]) and text[soft_hyphens.end() : soft_hyphens.end() + 1].isalnum()


def _last_letters(text: str, end: int) -> str:
    """The letters right before `end`; empty if a digit is among them."""
    word = _WORD_BEFORE.match(text, 0, end)
    return word[0] if word and _LETTERS.fullmatch(word[0]) else ""
