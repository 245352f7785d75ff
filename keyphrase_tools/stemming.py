"""Cached stems: a corpus has few distinct words, and the stemmers are slow.

English words get Porter stems, as in both scoring conventions: NLTK's PorterStemmer (Porter 1980, with NLTK's extensions),
which also lower-cases. The other languages of `LANGUAGES` have NLTK's Snowball stemmers; in French and Italian an elided
article or pronoun is removed first ("d'estuaires", "dell'acqua"). NLTK is imported on the first call, since its import takes
more than a second.
"""

import re
from functools import cache, lru_cache

from .words import normal_form

LANGUAGES = (
    "arabic", "danish", "dutch", "english", "finnish", "french", "german", "hungarian", "italian", "norwegian",
    "portuguese", "romanian", "russian", "spanish", "swedish",
)  # fmt: skip
_ELIDED = {
    "french": "[cdjlmnst]|(?:jus|lors|puis|quoi)?qu",
    "italian": "[cdlmstv]|un|gl|(?:a|co|da|de|ne|pe|su)ll|(?:a|da|de|ne|su)gl",
}
_ELISIONS = {language: re.compile(rf"(?:{words})['\u2019](?=\w)", re.IGNORECASE) for language, words in _ELIDED.items()}


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
