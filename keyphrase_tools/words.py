"""Splits texts into words with offsets, by the same rule for training, prediction and scoring.

A word is a run of letters, digits and marks; it includes apostrophes inside it, and points or commas between its digits
("Bayes's", "802.11"). Any other visible character is a word by itself; a composed emoji counts as one character. Hyphens and
slashes separate words and are not words themselves, as in SEKE's reference, but offsets keep the original form: a phrase over
"semi-supervised learning" is shown with its hyphen. In scripts without spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese)
each character is a word. Nothing is downloaded.
"""

import re

import regex

JOINERS = "-/\u2010\u2011\u2012\u2013\u2217"  # hyphens, slash, en dash, and the asterisk, which the reference treats in the same way
APOSTROPHES = "'\u2019"

_MARKS = (
    r"[\p{M}\u200c\u200d\u00ad]"  # combining marks, zero-width (non-)joiners, soft hyphens: never a word by themselves
)
_SPACELESS = r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]"
_LETTER = rf"(?!{_SPACELESS})[\p{{L}}\p{{N}}_]{_MARKS}*"
_INNER = rf"(?:[{APOSTROPHES}](?=[\p{{L}}\p{{N}}])|(?<=\p{{Nd}})[.,](?=\p{{Nd}}))(?!{_SPACELESS})"
_WORD = regex.compile(
    rf"(?:{_LETTER})(?:{_LETTER}|{_INNER})*"
    rf"|{_SPACELESS}{_MARKS}*"
    rf"|(?![\s\p{{C}}{JOINERS}]|{_MARKS})\X"
)
# the same rule for texts of ASCII characters, five times as fast
_ASCII_WORD = re.compile(
    r"[A-Za-z0-9_]+(?:(?:'(?=[A-Za-z0-9])|(?<=[0-9])[.,](?=[0-9]))[A-Za-z0-9_]+)*|[!-,.:-@[-^`{-~]"
)


def split_words(text: str) -> list[tuple[str, int, int]]:
    """The words of a text as (word, start, end), with `text[start:end] == word`.

    >>> split_words("Semi-supervised learning, 2nd ed.")
    [('Semi', 0, 4), ('supervised', 5, 15), ('learning', 16, 24), (',', 24, 25), ('2nd', 26, 29), ('ed', 30, 32), ('.', 32, 33)]
    """
    pattern = _ASCII_WORD if text.isascii() else _WORD
    return [(match[0], *match.span()) for match in pattern.finditer(text)]


def normalise(phrase: str) -> str:
    """The lower-cased words of a phrase, joined by single spaces: the form in which phrases are scored.

    >>> normalise("Semi-supervised  Learning")
    'semi supervised learning'
    """
    return " ".join(word.lower() for word, _, _ in split_words(phrase))


def join_title(title: str | None, text: str | None) -> str:
    """Joins title and text by a full stop, as SEKE reads them; none is added after a title that ends with `.`, `?` or `!`."""
    title, text = (title or "").strip(), (text or "").strip()
    if not title or not text:
        return title or text
    return f"{title} {text}" if title[-1] in ".?!" else f"{title}. {text}"
