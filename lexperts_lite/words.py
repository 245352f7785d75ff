# SPDX-License-Identifier: Apache-2.0
"""Words of texts: where they are, and the forms in which they are compared, the same in training, prediction and scoring.

A word is a run of letters, digits and marks; it includes apostrophes inside it, and points or commas between its digits
("Bayes's", "802.11"). A term with signs of its own is one word ("C++", "C#", "R&D", "Node.js", ".NET", "Ca2+", "U.S."). Any other
visible character is a word by itself; a composed emoji counts as one character. Hyphens and slashes separate words and are not words
themselves, as in SEKE's reference, but offsets keep the original form: a phrase over "semi-supervised learning" is shown with its
hyphen. In scripts without spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese) each character is a word.

English words get Porter stems, as in both scoring conventions (see `porter`). The other languages of `LANGUAGES` have Snowball stemmers; in
French and Italian an elided article or pronoun is removed first ("d'estuaires", "dell'acqua").
"""

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import regex

from .clean import clean_characters
from .porter import porter_stem

JOINERS = "-/\u2010\u2011\u2012\u2013\u2217"  # hyphens, slash, en dash, and the asterisk, which the reference treats in the same way
APOSTROPHES = "'\u2019"
LONGEST = 100  # characters of a word in a phrase; a longer one is an encoded picture or the like
_INSIDE = dict.fromkeys(map(ord, APOSTROPHES + JOINERS))  # what a word may have inside
_POINT = re.compile(r"(?<=\d)[.,](?=\d)")
_ENGLISH = """
    a about above across after again against all along also although always am among an and another any are around as at away
    be because been before being below between both but by can cannot could did do does doing down during each either enough
    even ever every few for from further had has have having he her here hers him his how however i if in into is it its just
    less many may me might more most much must my neither never no nor not of off often on once only onto or other our out over
    own per rather same several shall she should since so some such than that the their them then there these they this those
    though through thus to too toward towards under until up upon us very was we were what when where whether which while who
    whom whose why will with within without would yet you your
"""
FUNCTION_WORDS = frozenset(_ENGLISH.split())

LANGUAGES = (
    "arabic", "danish", "dutch", "english", "finnish", "french", "german", "hungarian", "italian", "norwegian",
    "portuguese", "romanian", "russian", "spanish", "swedish",
)  # fmt: skip
# British spellings, and what is American in them: colour, fibre, catalogue, analyse, organisation, defence, programme, anaemia, oedema
_BRITISH = re.compile(
    r"(?<=..o)u(?=r)|(?<=[bt])re(?=s?$)|(?<=og)ue(?=s?$)|(?<=ly)s(?=e[drs]?$|ing$)|(?<=[a-z]{3}i)s(?=e[drs]?$|ing$|ation(?:s|al)?$)"
    r"|(?<=[a-z]en)c(?=es?$)|(?<=gram)me(?=s?$)|(?<=[fhknp])a(?=e[cdm])|^o(?=e[ds])|(?<=rh)o(?=ea)|(?<=alumin)i(?=um)|(?<=^gr)e(?=y)"
    r"|(?<=sul)ph(?=[aiu])"
)
_AMERICAN = {"re": "er", "s": "z", "c": "s", "e": "a", "ph": "f"}
_ELISIONS = {
    "french": re.compile(r"(?:[cdjlmnst]|(?:jus|lors|puis|quoi)?qu)['\u2019](?=\w)", re.IGNORECASE),
    "italian": re.compile(
        r"(?:[cdlmstv]|un|gl|(?:a|co|da|de|ne|pe|su)ll|(?:a|da|de|ne|su)gl)['\u2019](?=\w)", re.IGNORECASE
    ),
}

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
        units, continued: what `layout` reads from the text, once it has.
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
def is_phrase_word(word: str) -> bool:
    """Whether a keyphrase may have a word: it has no punctuation or symbol, except as a term such as "C++", for apostrophes inside it
    and for points between digits, and at most LONGEST characters."""
    if word.isalnum() or is_term(word):
        return len(word) <= LONGEST
    if not word or len(word) > LONGEST or word.strip(APOSTROPHES + JOINERS) != word:
        return False
    inner = _POINT.sub("", word.translate(_INSIDE))
    return not any(unicodedata.category(c)[0] in "PS" for c in inner)


def is_phrase(words: Sequence[str]) -> bool:
    """Whether words can form a keyphrase, see `is_phrase_word`."""
    return bool(words) and all(map(is_phrase_word, words))


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
    """The words of a phrase in the normal form, joined by single spaces: the form in which phrases are scored."""
    return " ".join(split_phrase(phrase))


def join_title(title: str | None, text: str | None) -> str:
    """Joins title and text by a full stop, as SEKE reads them; none is added after a title that ends with `.`, `?` or `!`."""
    title, text = (title or "").strip(), (text or "").strip()
    if not title or not text:
        return title or text
    return f"{title} {text}" if title[-1] in ".?!" else f"{title}. {text}"


def check_language(language: str | None) -> str | None:
    """Returns a language of `LANGUAGES`, or `None` for no stemming. Raises a `ValueError` for any other value."""
    if language is None or language in LANGUAGES:
        return language
    raise ValueError(
        f"language={language!r} has no stemmer. Use one of {', '.join(map(repr, LANGUAGES))}, or language=None to compare "
        "words without stemming, as for Chinese and Japanese."
    )


@lru_cache(maxsize=1 << 18)
def stem(word: str, language: str | None = "english") -> str:
    """The stem of a word in the normal form, without a possessive 's; with `language=None` the case-folded word."""
    word = normal_form(word)
    if language is None:
        return word.casefold()
    if word.endswith("'s") and len(word) > 2:
        word = word[:-2]
    if language in _ELISIONS and (elided := _ELISIONS[language].match(word)):
        word = word[elided.end() :]
    if language == "english":
        return porter_stem(word)
    import snowballstemmer  # reads the rules of all languages

    return snowballstemmer.stemmer(check_language(language)).stemWord(word)  # a new one, since it has a state


@lru_cache(maxsize=1 << 16)
def stem_phrase(phrase: str, language: str | None = "english") -> str:
    """The stems of a phrase's white-space separated words, joined by single spaces."""
    return " ".join(stem(word, language) for word in phrase.split())


@lru_cache(maxsize=1 << 18)
def spelling_stem(word: str, language: str | None = "english") -> str:
    """The stem by which keyphrases of a text are compared: as `stem`, but British spellings count as American ones.

    >>> spelling_stem("Colour") == spelling_stem("colors"), spelling_stem("four") == spelling_stem("for")
    (True, False)
    """
    if language == "english":
        word = _BRITISH.sub(lambda found: _AMERICAN.get(found[0], ""), normal_form(word))
    return stem(word, language)
