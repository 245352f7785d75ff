"""Where a text is divided, so that no phrase continues, and which words no phrase may have.

A text is divided by blank lines, headings, list markers, table cells, speaker labels, and dashes or slashes between blanks. A line
break within a paragraph does not divide it, since texts from PDFs and e-mails have lines of a fixed width. Words of URLs, e-mail
addresses and HTML tags are not read by people, and are in no phrase. Decoding, candidates, the ranker and labels ask `unit_numbers`.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

from .words import JOINERS, Words

NARROW = 40  # characters: whether a shorter line was cut short is unknown
CUT_SHORT = 0.75  # of the usual length of a line, if the next word is added

_LINE_BREAK = re.compile("[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
_J = re.escape(JOINERS)
_IN_LINE = re.compile(rf"[{_J}]{{2,}}|(?:(?<=\s)|^)[{_J}](?=\s|$)|(?<=\S)(?: *\t[ \t]*| {{3,}})(?=\S)")
_MAY_BE_IN_LINE = tuple(f" {joiner} " for joiner in JOINERS) + ("--", "\t", "   ")
_NAME = r"[A-Z][\w.'\u2019-]*"
_MARKER = re.compile(
    r"\s*(?:"
    rf"(?:[{_J}*+\u2022\u25e6\u25aa\u25cf\u25cb\u25a0\u25a1\u25ba\u2023\u2713\u2714\u00b7\u2043\u2014\u2015]+|#{{1,6}})\s+"  # bullets, # headings
    r"|(?:\(?(?:[0-9]{1,3}|[A-Za-z]|[ivxIVX]{1,5})[.)]|[0-9]{1,2}(?:\.[0-9]{1,2})+\.?)\s+"  # 1. a) (iv) 2.1
    r"|\[?[0-9]{4}-[0-9]{2}-[0-9]{2}|\[?[0-9]{1,2}:[0-9]{2}"  # times of logs and transcripts
    rf"|{_NAME}(?: {_NAME}){{0,3}}(?: \([^()\n]{{1,20}}\))?:(?=\s|$)"  # speakers
    r")"
)
_HASH = re.compile(r"\s*#{1,6}\s")
_ATTRIBUTE = r"\s++[\w:.@-]++\s*+=\s*+(?:\"[^\"]*+\"|'[^']*+'|[^\s\"'<>=`]++)"
_ADDRESS = re.compile(
    r"(?:https?|ftp|file)://[^\s<>\"\u3000-\u9fff\uff00-\uffef]++"
    r"|\bwww\.[^\s<>\"\u3000-\u9fff\uff00-\uffef]++"
    r"|(?<![\w.+-])[\w.+-]{1,64}+@[\w-]++(?:\.[\w-]++)++"
    r"|(?<![\w.@-])(?:[\w-]{1,63}+\.){1,5}+(?<=\.)(?:com|org|net|edu|gov|io|ai|co|dev|app|eu|uk|de|fr)/[^\s<>\"\u3000-\u9fff]*+"
)
_TAG = re.compile(
    r"<!--.*?-->|<(script|style)\b[^<>]*+>.*?</\1\s*>"
    rf"|</?[A-Za-z][\w:.-]*+(?:{_ATTRIBUTE}|\s++(?:hidden|disabled|checked|async|defer|controls|selected|required|readonly)(?=[\s/>]))*+\s*+/?>"
    r"|<[!?][A-Za-z][^<>]*+>",
    re.DOTALL | re.IGNORECASE,
)


def unit_numbers(words: Sequence) -> np.ndarray:
    """The number of the unit of layout that each word belongs to, `(W,)`, in ascending order; -1 for a word of no phrase.

    A phrase from word a to word b - 1 is possible if the numbers of these words are equal and not -1.

    Args:
        words: of `split_words`; others, which come without their text, are one unit.
    """
    if not isinstance(words, Words):
        return np.zeros(len(words), dtype=np.int64)
    if words.units is None:
        words.units = _read_units(words)
    return words.units


def in_one_unit(units: np.ndarray, start: int, end: int) -> bool:
    """Whether words from `start` to `end - 1` may be a phrase."""
    return units[start] >= 0 and bool((units[start:end] == units[start]).all())


def _read_units(words: Words) -> np.ndarray:
    text, size = words.text, len(words)
    cuts, hidden = sorted(divisions(text)), hidden_spans(text)
    units = np.zeros(size, dtype=np.int64)
    if not size or not (cuts or hidden):
        return units
    starts, ends = [start for _, start, _ in words], [end for _, _, end in words]
    begins = np.zeros(size + 1, dtype=np.int64)
    for cut in cuts:
        begins[bisect_left(starts, cut)] = 1
    inside = [(bisect_right(ends, start), bisect_left(starts, end)) for start, end in hidden]
    for first, last in inside:
        begins[[first, last]] = 1
    units = begins[:-1].cumsum()
    for first, last in inside:
        units[first:last] = -1
    return units


def divisions(text: str) -> Iterator[int]:
    """The places in a text between whose sides no phrase continues."""
    if any(part in text for part in _MAY_BE_IN_LINE) or not text.isascii():
        yield from (match.end() for match in _IN_LINE.finditer(text))
    if _LINE_BREAK.search(text):
        yield from line_divisions(text)
    elif marker := _MARKER.match(text):
        yield marker.end()


def line_divisions(text: str) -> Iterator[int]:
    """The beginnings of lines that do not continue the line before them, and the ends of list markers."""
    lines, start = [], 0
    for raw in text.splitlines(keepends=True):
        lines.append((start, raw, raw.strip()))
        start += len(raw)
    lengths = sorted(len(content) for _, _, content in lines if content)
    usual = lengths[len(lengths) // 2] if lengths else 0
    before = None
    for start, raw, content in lines:
        if not content:
            before = None
            continue
        marker = _MARKER.match(raw)
        if before is None or marker or not _continues(before, content, usual):
            yield start
        if marker:
            yield start + marker.end()
        before = None if _HASH.match(raw) or raw.endswith("\u2029") else content


def _continues(before: str, line: str, usual: int) -> bool:
    """Whether a line continues the one before it: neither is a heading, nor was the first cut short before its margin."""
    if _is_capitals(before) != _is_capitals(line):
        return False
    return usual < NARROW or len(before) + 1 + len(line.split(maxsplit=1)[0]) > CUT_SHORT * usual


def _is_capitals(line: str) -> bool:
    return line.isupper() and sum(map(str.isalpha, line)) >= 4


def hidden_spans(text: str) -> list[tuple[int, int]]:
    """The spans of URLs, e-mail addresses and HTML tags, in order; none overlap."""
    spans = [match.span() for match in _TAG.finditer(text)] if "<" in text and ">" in text else []
    if "@" in text or "/" in text or "www." in text:
        tags = [start for start, _ in spans]
        for match in _ADDRESS.finditer(text):
            before = bisect_right(tags, match.start()) - 1
            if before < 0 or spans[before][1] <= match.start():
                spans.append(match.span())
    return sorted(spans)
