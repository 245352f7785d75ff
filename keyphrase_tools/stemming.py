"""Porter stems, cached: a corpus has few distinct words, and the stemmer is slow.

Both scoring conventions stem with NLTK's PorterStemmer (Porter 1980, with NLTK's extensions), which also lower-cases.
"""

from functools import lru_cache

from nltk.stem.porter import PorterStemmer

_porter = PorterStemmer()


@lru_cache(maxsize=1 << 18)
def stem(word: str) -> str:
    """One word -> its lower-cased Porter stem."""
    return _porter.stem(word)


@lru_cache(maxsize=1 << 16)
def stem_phrase(phrase: str) -> str:
    """A phrase -> the stems of its white-space separated words, joined by single spaces."""
    return " ".join(map(stem, phrase.split()))
