"""Cached Porter stems: a corpus has few distinct words, and the stemmer is slow.

Both scoring conventions use NLTK's PorterStemmer (Porter 1980, with NLTK's extensions), which also lower-cases. NLTK is
imported on the first call, since its import takes more than a second.
"""

from functools import cache, lru_cache


@cache
def _porter():
    from nltk.stem.porter import PorterStemmer

    return PorterStemmer()


@lru_cache(maxsize=1 << 18)
def stem(word: str) -> str:
    """The lower-cased Porter stem of a word."""
    return _porter().stem(word)


@lru_cache(maxsize=1 << 16)
def stem_phrase(phrase: str) -> str:
    """The stems of a phrase's white-space separated words, joined by single spaces."""
    return " ".join(map(stem, phrase.split()))
