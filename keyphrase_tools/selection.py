"""Chooses the keyphrases of one document: candidates of the user, the ranker's phrases, or labelled phrases; then those that are in no
other, and diversity.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from .candidates import rank_candidates
from .decoding import rank_phrases
from .diversity import diversify, phrase_vectors
from .ranking import RankedPhrases
from .stemming import stem
from .words import split_phrase


def select_phrases(
    block: Mapping,
    number: int,
    p: np.ndarray,
    ranked: RankedPhrases | None,
    *,
    language: str | None,
    temperature: float | None,
    threshold: float | None,
    top_k: int | None = 10,
    min_score: float | None = None,
    candidates=None,
    diversity: float = 0.0,
    nested: bool = True,
    match_case: bool | str = "auto",
) -> list[dict]:
    """The keyphrases of a document, best first, with offsets in the user's own strings.

    Args:
        block: what the pipeline's `preprocess` returns.
        number: the document's index in the block.
        p (`(W, 3)`): probabilities of O, B and I for each word.
        ranked: the phrases of a model with a ranker; otherwise labels are chosen by `threshold`.
        others: as in a call of the pipeline. `match_case` was used when the candidates were found.
    """
    among = None if diversity > 0 or not nested else top_k  # more than will be returned, to choose from
    document, word_probabilities, absent = block["documents"][number], block["word_probabilities"], []
    if candidates is not None:
        is_read, spans = word_probabilities.is_read(number), block["spans"][number]
        vocabulary = candidates.of(block["first"] + number)
        phrases, absent = rank_candidates(vocabulary, spans, document, p, is_read, temperature)
    elif ranked is not None:
        phrases = ranked.select(among, min_score)
    else:
        tags = word_probabilities.tags(number)  # only without a threshold
        phrases = rank_phrases(document.text, document.words, p, threshold, tags, temperature, language)
    phrases = [phrase for phrase in phrases if phrase["score"] >= (min_score or 0)]
    if not nested:
        phrases = without_nested(phrases, language)
    if "word_states" in block:
        vectors = phrase_vectors(phrases, document.words, block["word_states"].pop(number))
        phrases = diversify(phrases, vectors, diversity, top_k)
    phrases = [document.phrase_to_source(phrase) for phrase in phrases[:top_k]]
    return phrases if min_score else (phrases + absent)[:top_k]


def without_nested(phrases: Sequence[dict], language: str | None = "english") -> list[dict]:
    """The phrases that are not inside a better one and have no better one inside, in order.

    A phrase is inside another if its stems are, one after the other. Of two such phrases the better stays.

    Args:
        phrases: with "keyphrase", best first.
        language: of the stems, see `stemming.stem`.
    """
    kept, stems_of_kept = [], []
    for phrase in phrases:
        stems = tuple(stem(word, language) for word in split_phrase(phrase["keyphrase"]))
        if not any(_contains(stems, other) or _contains(other, stems) for other in stems_of_kept):
            kept.append(phrase)
            stems_of_kept.append(stems)
    return kept


def _contains(words: tuple[str, ...], part: tuple[str, ...]) -> bool:
    n = len(part)
    return any(words[i : i + n] == part for i in range(len(words) - n + 1))
