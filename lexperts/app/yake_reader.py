"""The same text by YAKE (Campos et al. 2020), an unsupervised extractor, if the package is installed."""

import re
from importlib.util import find_spec

INSTALL = "pip install yake"


def is_installed() -> bool:
    """Whether YAKE can be used."""
    return find_spec("yake") is not None


def read_by_yake(text: str, top_k: int) -> list[dict]:
    """YAKE's keyphrases in the form of the pipeline, best first.

    YAKE's scores are not probabilities: the lower the better. A phrase that does not occur literally in the text, such as one
    across a line of punctuation, has no mentions.
    """
    import yake

    found = yake.KeywordExtractor(lan="en", n=3, top=top_k).extract_keywords(text)
    return [
        {"keyphrase": phrase, "score": round(float(score), 6), "mentions": find_mentions(text, phrase)}
        for phrase, score in found
    ]


def find_mentions(text: str, phrase: str) -> list[dict]:
    """The places of a phrase, in any case and with any white space."""
    words = r"\s+".join(map(re.escape, phrase.split()))
    return [
        {"start": match.start(), "end": match.end()}
        for match in re.finditer(rf"(?<!\w){words}(?!\w)", text, re.IGNORECASE)
    ]
