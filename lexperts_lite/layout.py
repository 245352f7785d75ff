# SPDX-License-Identifier: Apache-2.0
"""Where a text is divided, so that no phrase continues, and which words no phrase may have.

A text is divided by blank lines, headings, list markers, table cells, speaker labels, the lines of a form ("Name: ...") and of code
between fences, and dashes or slashes between blanks. A line break within a paragraph does not divide it, since texts from PDFs and e-mails have lines of a fixed width. Words of URLs, e-mail
addresses and HTML tags are not read by people, and are in no phrase, and so are those of a speaker's label that begins several lines and
of an e-mail's header and signature. Decoding, candidates, the ranker and labels ask `unit_numbers`.
"""

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import itemgetter

import numpy as np

from .decoding import B, I
from .words import JOINERS, Words

NARROW = 40  # characters: whether a shorter line was cut short is unknown
CUT_SHORT = 0.75  # of the usual length of a line, if the next word is added

_LINE_BREAK = re.compile("[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
_J = re.escape(JOINERS)
_DASHES = re.compile(rf"[{_J}\t]+")
_BLANKS = re.compile(r"[ \u00a0\u2000-\u200a]{3,}+(?=\S)")
_NAME = r"[A-Z][\w.'\u2019-]*"
_SPEAKER = rf"{_NAME}(?: (?:{_NAME}|[0-9]{{1,3}})){{0,3}}(?: \([^()\n]{{1,20}}\))?:(?=\s|$)"
_SPEAKER_LINE = re.compile(rf"^[ \t]*+(?:\[?[0-9]{{1,2}}(?::[0-9]{{2}}){{1,2}}\]?\s++)?+({_SPEAKER})", re.MULTILINE)
_SIGNATURE = re.compile(r"^-- ?+\r?\n(?:[^\S\n]*+\S.*+\n?){1,8}", re.MULTILINE)  # of an e-mail, to the next blank line
_FIELD = r"^([A-Z][A-Za-z-]*+):[^\n]*+(?:\n[ \t]++\S[^\n]*+)*+(?:\n|\Z)"  # of an e-mail's header, with lines that continue it
_FIELDS, _HEADER = re.compile(_FIELD, re.MULTILINE), re.compile(f"(?:{_FIELD}){{2,}}+", re.MULTILINE)
_MARKER = re.compile(
    r"\s*(?:"
    rf"(?:[{_J}*+\u2022\u25e6\u25aa\u25cf\u25cb\u25a0\u25a1\u25ba\u2023\u2713\u2714\u00b7\u2043\u2014\u2015]+|#{{1,6}})\s+"  # bullets, # headings
    r"|(?:\(?(?:[0-9]{1,3}|[A-Za-z]|[ivxIVX]{1,5})[.)]|[0-9]{1,2}(?:\.[0-9]{1,2})+\.?)\s+"  # 1. a) (iv) 2.1
    r"|\[?[0-9]{4}-[0-9]{2}-[0-9]{2}|\[?[0-9]{1,2}:[0-9]{2}"  # times of logs and transcripts
    rf"|{_SPEAKER}"
    r")"
)
_MARKER_BEGINS = frozenset(
    f"{JOINERS}*+\u2022\u25e6\u25aa\u25cf\u25cb\u25a0\u25a1\u25ba\u2023\u2713\u2714\u00b7\u2043\u2014\u2015#([0123456789"
)
_LABEL = re.compile(r"[A-Z][\w'-]*+(?: [\w'-]++){0,3}+:\s")  # of a form: "Clinical history: ..."
_FENCE = re.compile(r"```|~~~")
_HASH = re.compile(r"\s*#{1,6}\s")
_ATTRIBUTE = r"\s++[\w:.@-]++\s*+=\s*+(?:\"[^\"]*+\"|'[^']*+'|[^\s\"'<>=`]++)"
_TLD = r"(?:com|org|net|edu|gov|io|ai|co|dev|app|eu|uk|de|fr)"
_REST = r"[^\s<>\"\u3000-\u9fff\uff00-\uffef]"  # of an address
_SIGN = re.compile(rf"@|://|www\.|\.{_TLD}(?![\w-])|10\.[0-9]{{4,9}}/", re.IGNORECASE)
_ADDRESS = re.compile(
    rf"(?<![a-z0-9+])[a-z][a-z0-9+]{{1,15}}+://{_REST}++"
    rf"|\bwww\.{_REST}++"
    r"|(?<![\w.+-])[\w.+-]{1,64}+@[\w-]++(?:\.[\w-]++)++(?::[\w~][\w./~-]*+)?+"  # also git@github.com:owner/name.git
    rf"|(?<![\w.@-])(?:[\w-]{{1,63}}+\.){{1,5}}+(?<=\.){_TLD}/{_REST}*+"
    # a host alone, unless it may be a name, such as Amazon.com
    rf"|(?<![\w.@-])(?=\w++-|[\w-]++\.[\w-]++\.)(?:[\w-]{{2,63}}+\.){{1,5}}(?-i:{_TLD})(?![\w-])"
    rf"|(?:\bdoi:\s?)?(?<![\w./])10\.[0-9]{{4,9}}/{_REST}++",
    re.IGNORECASE,
)
_TAG = re.compile(
    rf"</?[A-Za-z][\w:.-]*+(?:{_ATTRIBUTE}|\s++(?:hidden|disabled|checked|async|defer|controls|selected|required|readonly)(?=[\s/>]))*+\s*+/?>"
    r"|<[!?][A-Za-z][^<>]*+>"
)
_ELEMENT = re.compile(r"<(?:(!--)|(script|style)\b[^<>]*+>)", re.IGNORECASE)  # hidden with what it contains
_TAG_OR_ELEMENT = re.compile(f"(?P<element>(?i:{_ELEMENT.pattern}))|{_TAG.pattern}")


def unit_numbers(words: Sequence) -> np.ndarray:
    """The number of the unit of layout that each word belongs to, `(W,)`, in ascending order; -1 for a word of no phrase.

    A phrase from word a to word b - 1 is possible if the numbers of these words are equal and not -1.

    Args:
        words: of `split_words`; others, which come without their text, are one unit.
    """
    if not isinstance(words, Words):
        return np.zeros(len(words), dtype=np.int64)
    if words.units is not None:
        return words.units
    text, size = words.text, len(words)
    cuts, hidden = [*divisions(text)], [*hidden_spans(text), *label_spans(text)]
    units = np.zeros(size, dtype=np.int64)
    if size and (cuts or hidden):
        starts, begins = [start for _, start, _ in words], [0] * (size + 1)
        for cut in cuts:
            begins[bisect_left(starts, cut)] = 1
        inside = [(bisect_right(words, start, key=itemgetter(2)), bisect_left(starts, end)) for start, end in hidden]
        for first, last in inside:
            begins[first] = begins[last] = 1
        units = np.array(begins[:-1], dtype=np.int64).cumsum()
        for first, last in inside:
            units[first:last] = -1
    words.units = units
    return units


def in_one_unit(units: np.ndarray, start: int, end: int) -> bool:
    """Whether words from `start` to `end - 1` may be a phrase."""
    return units[start] >= 0 and bool((units[start:end] == units[start]).all())


def begin_units(probabilities: np.ndarray, units: np.ndarray) -> np.ndarray:
    """Probabilities `(W, 3)` in which no label continues over a unit of layout: I of its first word counts as B.

    Args:
        probabilities (`(W, 3)`): of O, B and I for each word.
        units (`(W,)`): see `unit_numbers`.
    """
    first = np.flatnonzero(units[1:] != units[:-1]) + 1
    if not first.size:
        return probabilities
    p = probabilities.copy()
    p[first, B] += p[first, I]
    p[first, I] = 0
    return p


def divisions(text: str) -> Iterator[int]:
    """The places in a text between whose sides no phrase continues."""
    for match in _DASHES.finditer(text):
        start, end = match.span()
        before, after = text[start - 1 : start] or "\n", text[end : end + 1] or "\n"
        if "\t" in match[0]:
            if before != "\n" and after != "\n":
                yield end
        elif end - start > 1 or (before.isspace() and after.isspace()):
            yield end
    if "   " in text or not text.isascii():
        for match in _BLANKS.finditer(text):
            if not (text[match.start() - 1 : match.start()] or " ").isspace():  # not an indented line
                yield match.end()
    if _LINE_BREAK.search(text.strip()):
        yield from line_divisions(text)
    elif marker := _match_marker(text):
        yield marker.end()


def line_divisions(text: str) -> Iterator[int]:
    """The beginnings of lines that do not continue the line before them, and the ends of list markers."""
    lines, start = [], 0
    for raw in text.splitlines(keepends=True):
        lines.append((start, raw, raw.strip()))
        start += len(raw)
    lengths = sorted(len(content) for _, _, content in lines if content)
    usual = lengths[len(lengths) // 2] if lengths else 0
    before, was_capitals, in_code = None, False, False
    for start, raw, content in lines:
        if not content:
            before = None
            continue
        fence = _FENCE.match(content)
        in_code ^= fence is not None
        marker, capitals = _match_marker(raw), _is_capitals(content)
        begins = before is None or marker or in_code or fence or capitals != was_capitals or _LABEL.match(content)
        if begins or not _continues(before, content, usual):
            yield start
        if marker:
            yield start + marker.end()
        before, was_capitals = content, capitals
        if raw[-1] == "\u2029" or fence or (marker and _HASH.match(raw)):
            before = None


def _match_marker(line: str) -> re.Match | None:
    """The list marker, time or speaker at the beginning of a line."""
    content = line.lstrip()
    if content[:1] in _MARKER_BEGINS or ":" in content[:90] or content[1:6].find(")") >= 0 or "." in content[1:6]:
        return _MARKER.match(line)
    return None


def _continues(before: str, line: str, usual: int) -> bool:
    """Whether a line was not cut short before its margin: the first word of the next line would not have fitted."""
    length = len(before) + 1
    return usual < NARROW or length > CUT_SHORT * usual or length + len(line.split(maxsplit=1)[0]) > CUT_SHORT * usual


def _is_capitals(line: str) -> bool:
    """Whether a line has four letters or more, all capitals."""
    return line.isupper() and sum(map(str.isalpha, line)) >= 4


def hidden_spans(text: str) -> list[tuple[int, int]]:
    """The spans of URLs, e-mail addresses and HTML tags, in order; none overlap."""
    spans = [*tag_spans(text)] if "<" in text and ">" in text else []
    tags, position = [start for start, _ in spans], 0
    for sign in _SIGN.finditer(text):
        if sign.start() < position:
            continue
        match = _ADDRESS.search(text, max(position, sign.start() - 100))
        if match is None:
            break
        position = match.end()
        before = bisect_right(tags, match.start()) - 1
        if before < 0 or spans[before][1] <= match.start():
            spans.append(match.span())
    return sorted(spans)


def label_spans(text: str) -> Iterator[tuple[int, int]]:
    """The spans of speakers' labels that begin two lines or more, and of the headers, but for their subjects, and signatures of e-mails."""
    if "From:" in text:
        for header in _HEADER.finditer(text):
            fields = [*_FIELDS.finditer(text, *header.span())]
            if any(field[1] == "From" for field in fields):
                yield from (field.span() for field in fields if field[1] != "Subject")
    lines = [*_SPEAKER_LINE.finditer(text)] if ":" in text else []
    turns = Counter(line[1] for line in lines)
    yield from (line.span(1) for line in lines if turns[line[1]] > 1)
    if "--" in text:
        yield from (signature.span() for signature in _SIGNATURE.finditer(text))


def tag_spans(text: str) -> Iterator[tuple[int, int]]:
    """The spans of HTML tags, of comments, and of scripts and styles with their contents, in order."""
    position, unclosed = 0, set()  # a missing end is looked for once: otherwise many beginnings take quadratic time
    while match := _TAG_OR_ELEMENT.search(text, position):
        start, position = match.span()
        if match["element"]:
            name = (_ELEMENT.match(text, start) or match)[2]
            end = "--" if name is None else rf"</{name}\s*+"
            close = None if end.lower() in unclosed else re.compile(f"{end}>", re.IGNORECASE).search(text, position)
            if close is None:
                unclosed.add(end.lower())
                match = _TAG.match(text, start)
            position = close.end() if close else match.end() if match else position
        if match:
            yield start, position
