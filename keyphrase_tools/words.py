"""Texts as words with their places, by one rule for training, prediction and scoring.

A word is a run of letters, digits and marks; apostrophes inside it and points or commas between its digits stay
("Bayes's", "802.11"). Any other visible character is a word of its own, a composed emoji counted as one character.
Hyphens and slashes part words and become no word themselves, as in SEKE's reference, but offsets keep the text's own
form: a phrase over "semi-supervised learning" is shown with its hyphen. Scripts without spaces (Chinese, Japanese, Thai,
Lao, Khmer, Burmese) give a word a character. Nothing is downloaded.
"""

import regex

JOINERS = (
    "-/\u2010\u2011\u2012\u2013\u2217"  # hyphens, slash, en dash, and the asterisk that the reference treats alike
)
APOSTROPHES = "'\u2019"

_MARKS = r"[\p{M}\u200c\u200d\u00ad]"  # combining marks, zero-width (non-)joiners, soft hyphens: never a word alone
_SPACELESS = r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]"
_LETTER = rf"(?!{_SPACELESS})[\p{{L}}\p{{N}}_]{_MARKS}*"
_INNER = rf"(?:[{APOSTROPHES}](?=[\p{{L}}\p{{N}}])|(?<=\p{{Nd}})[.,](?=\p{{Nd}}))(?!{_SPACELESS})"
_WORD = regex.compile(
    rf"(?:{_LETTER})(?:{_LETTER}|{_INNER})*"
    rf"|{_SPACELESS}{_MARKS}*"
    rf"|(?![\s\p{{C}}{JOINERS}]|{_MARKS})\X"
)


def split_words(text: str) -> list[tuple[str, int, int]]:
    """A text -> its words as (word, start, end), with `text[start:end] == word`.

    >>> split_words("Semi-supervised learning, 2nd ed.")
    [('Semi', 0, 4), ('supervised', 5, 15), ('learning', 16, 24), (',', 24, 25), ('2nd', 26, 29), ('ed', 30, 32), ('.', 32, 33)]
    """
    return [(match[0], match.start(), match.end()) for match in _WORD.finditer(text)]


def normalise(phrase: str) -> str:
    """A phrase as its lower-cased words with single spaces between them: the form in which phrases are scored.

    >>> normalise("Semi-supervised  Learning")
    'semi supervised learning'
    """
    return " ".join(word.lower() for word, _, _ in split_words(phrase))


def join_title(title: str | None, text: str | None) -> str:
    """Title, full stop, text: what SEKE reads. A title that ends a sentence by itself gets no second stop."""
    title, text = (title or "").strip(), (text or "").strip()
    if not title or not text:
        return title or text
    return f"{title} {text}" if title[-1] in ".?!" else f"{title}. {text}"
