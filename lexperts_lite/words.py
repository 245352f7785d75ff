# SPDX-License-Identifier: Apache-2.0
"""Words of texts: where they are, and the forms in which they are compared, the same in training, prediction and scoring.

A word is a run of letters, digits and marks; it includes apostrophes inside it, and points or commas between its digits
("Bayes's", "802.11"). A term with signs of its own is one word ("C++", "C#", "R&D", "Node.js", ".NET", "Ca2+", "U.S."). Any other
visible character is a word by itself; a composed emoji counts as one character. Hyphens and slashes separate words and are not words
themselves, as in SEKE's reference, but offsets keep the original form: a phrase over "semi-supervised learning" is shown with its
hyphen; `terms` keeps the words of "SARS-CoV-2" together. In scripts without spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese) each character is a word. Nothing is downloaded.

English words get Porter stems, as in both scoring conventions: NLTK's PorterStemmer (Porter 1980, with NLTK's extensions). The
other languages of `LANGUAGES` have NLTK's Snowball stemmers; in French and Italian an elided article or pronoun is removed first
("d'estuaires", "dell'acqua"). NLTK is imported on the first call, since its import takes more than a second.
"""

import re
import unicodedata
from functools import cache, lru_cache
from typing import Any

import regex

from .clean_text import clean_characters

JOINERS = "-/\u2010\u2011\u2012\u2013\u2217"  # hyphens, slash, en dash, and the asterisk, which the reference treats in the same way
APOSTROPHES = "'\u2019"

LANGUAGES = (
    "arabic", "danish", "dutch", "english", "finnish", "french", "german", "hungarian", "italian", "norwegian",
    "portuguese", "romanian", "russian", "spanish", "swedish",
)  # fmt: skip
_ELIDED = {
    "french": "[cdjlmnst]|(?:jus|lors|puis|quoi)?qu",
    "italian": "[cdlmstv]|un|gl|(?:a|co|da|de|ne|pe|su)ll|(?:a|da|de|ne|su)gl",
}
_ELISIONS = {language: re.compile(rf"(?:{words})['\u2019](?=\w)", re.IGNORECASE) for language, words in _ELIDED.items()}

_MARKS = (
    r"[\p{M}\u200c\u200d\u00ad]"  # combining marks, zero-width (non-)joiners, soft hyphens: never a word by themselves
)
_SPACELESS = r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]"
_LETTER = rf"(?!{_SPACELESS})[\p{{L}}\p{{N}}_]{_MARKS}*"
_INNER = rf"(?:[{APOSTROPHES}](?=[\p{{L}}\p{{N}}])|(?<=\p{{Nd}})[.,](?=\p{{Nd}}))(?!{_SPACELESS})"
# what makes a term of the letters before it; of endings after a point only these, since texts lack blanks between sentences
_ENDING = (
    r"(?:(?=[+#&.])(?:(?<=[A-Za-z])\+\+(?:[0-9]{2})?(?![A-Za-z0-9_+])"  # C++, C++17
    r"|(?<![A-Za-z0-9_][A-Za-z])(?<=[A-Za-z])#(?![A-Za-z0-9_#])"  # C#
    r"|(?<=[A-Za-z0-9])(?<![A-Za-z0-9_]{5})(?:&[A-Za-z0-9]{1,4}){1,3}+(?![A-Za-z0-9_;=&])"  # R&D, not &amp;
    r"|(?:(?<=\b[A-Za-z][0-9])|(?<=\b[A-Za-z]{2}[0-9])|(?<=\b[A-Za-z]{3}[0-9])|(?<=\b[A-Za-z]{2}[0-9]{2})|(?<=\bNa)|(?<=\b[HK]))"
    r"\+(?![A-Za-z0-9_+(])"  # Ca2+, CD4+, HER2+
    r"|(?<=\b[A-Z])(?:\.[A-Z])+(?![A-Za-z0-9_])(?:\.(?![a-z]))?"  # U.S.
    r"|(?<=[A-Za-z0-9])\.(?:js|JS|ts|jl|py|rs|ai|io|com|org|[Nn]et|NET)(?![A-Za-z0-9_]|\.[A-Za-z0-9_])))"  # Node.js
)
_DOT_NET = r"(?<![^\s(/])\.(?:NET|[Nn]et)(?![A-Za-z0-9_])"
_TERM = re.compile(rf"[A-Za-z0-9']+{_ENDING}|{_DOT_NET}")
_WORD = regex.compile(
    rf"(?:{_LETTER})(?:{_LETTER}|{_INNER})*{_ENDING}?"
    rf"|{_SPACELESS}{_MARKS}*"
    rf"|{_DOT_NET}"
    rf"|(?![\s\p{{C}}{JOINERS}]|{_MARKS})\X"
)
# the same rule for texts of ASCII characters, five times as fast
_ASCII_WORD = re.compile(
    rf"[A-Za-z0-9_]+(?:(?:'(?=[A-Za-z0-9])|(?<=[0-9])[.,](?=[0-9]))[A-Za-z0-9_]+)*{_ENDING}?|{_DOT_NET}|[!-,.:-@[-^`{{-~]"
)


class Words(list):
    """The words of a text as (word, start, end).

    Attributes:
        text: in which the words are.
        units: what `layout.unit_numbers` reads from the text, once it has.
        continued: what `terms.continued_words` reads from the text, once it has.
    """

    text: str
    units: Any = None
    continued: Any = None


def split_words(text: str) -> Words:
    """The words of a text as (word, start, end), with `text[start:end] == word`.

    >>> split_words("Semi-supervised learning, 2nd ed.")
    [('Semi', 0, 4), ('supervised', 5, 15), ('learning', 16, 24), (',', 24, 25), ('2nd', 26, 29), ('ed', 30, 32), ('.', 32, 33)]
    """
    pattern = _ASCII_WORD if text.isascii() else _WORD
    words = Words([(match[0], *match.span()) for match in pattern.finditer(text)])
    words.text = text
    return words


def is_term(word: str) -> bool:
    """Whether a word is a term with signs of its own, such as "C++", "R&D" or "Node.js"."""
    return _TERM.fullmatch(word) is not None


@lru_cache(maxsize=1 << 18)
def normal_form(word: str) -> str:
    """The form in which words are compared: lower case, one form of apostrophes and of characters that look alike.

    >>> normal_form("Alzheimer\u2019s"), normal_form("\ufb01nancial"), normal_form("soft\u00adware")
    ("alzheimer's", 'financial', 'software')
    """
    if word.isascii():
        return word.lower()
    word = clean_characters(word).replace("\u00ad", "").replace("\u2019", "'")
    return unicodedata.normalize("NFC", word.lower())


def split_phrase(phrase: str) -> list[str]:
    """The words of a phrase in the normal form.

    >>> split_phrase("Semi-supervised  Learning")
    ['semi', 'supervised', 'learning']
    """
    return [normal_form(word) for word, _, _ in split_words(clean_characters(phrase))]


def normalise(phrase: str) -> str:
    """The words of a phrase in the normal form, joined by single spaces: the form in which phrases are scored.

    >>> normalise("Semi-supervised  Learning")
    'semi supervised learning'
    """
    return " ".join(split_phrase(phrase))


def join_title(title: str | None, text: str | None) -> str:
    """Joins title and text by a full stop, as SEKE reads them; none is added after a title that ends with `.`, `?` or `!`."""
    title, text = (title or "").strip(), (text or "").strip()
    if not title or not text:
        return title or text
    return f"{title} {text}" if title[-1] in ".?!" else f"{title}. {text}"


def check_language(language: str | None) -> str | None:
    """Returns a language of `LANGUAGES`, or `None` for no stemming.

    Raises:
        ValueError: for any other value; the message lists the languages.
    """
    if language is None or language in LANGUAGES:
        return language
    raise ValueError(
        f"language={language!r} has no stemmer. Use one of {', '.join(map(repr, LANGUAGES))}, or language=None to compare "
        "words without stemming, as for Chinese and Japanese."
    )


@cache
def _stemmer(language: str):
    if language == "english":
        from nltk.stem.porter import PorterStemmer

        return PorterStemmer()
    from nltk.stem.snowball import SnowballStemmer

    return SnowballStemmer(check_language(language))


@lru_cache(maxsize=1 << 18)
def stem(word: str, language: str | None = "english") -> str:
    """The stem of a word in the normal form (see `words.normal_form`), without a possessive 's; with `language=None` the
    case-folded word.

    Raises:
        ValueError: for an unknown language.
    """
    word = normal_form(word)
    if language is None:
        return word.casefold()
    if word.endswith("'s") and len(word) > 2:
        word = word[:-2]
    if language in _ELISIONS:
        word = _ELISIONS[language].sub("", word, count=1) if _ELISIONS[language].match(word) else word
    return _stemmer(language).stem(word)


@lru_cache(maxsize=1 << 16)
def stem_phrase(phrase: str, language: str | None = "english") -> str:
    """The stems of a phrase's white-space separated words, joined by single spaces."""
    return " ".join(stem(word, language) for word in phrase.split())
