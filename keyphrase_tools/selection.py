"""Chooses the keyphrases of one document: candidates of the user, the ranker's phrases, or labelled phrases; then diversity."""

from collections.abc import Mapping

import numpy as np

from .candidates import rank_candidates
from .decoding import rank_phrases
from .diversity import diversify, phrase_vectors
from .ranking import RankedPhrases


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
) -> list[dict]:
    """The keyphrases of a document, best first, with offsets in the user's own strings.

    Args:
        block: what the pipeline's `preprocess` returns.
        number: the document's index in the block.
        p (`(W, 3)`): probabilities of O, B and I for each word.
        ranked: the phrases of a model with a ranker; otherwise labels are chosen by `threshold`.
        others: as in a call of the pipeline.
    """
    document, word_probabilities, absent = block["documents"][number], block["word_probabilities"], []
    if candidates is not None:
        is_read, spans = word_probabilities.is_read(number), block["spans"][number]
        vocabulary = candidates.of(block["first"] + number)
        phrases, absent = rank_candidates(vocabulary, spans, document, p, is_read, temperature)
    elif ranked is not None:
        phrases, top_k = ranked.select(top_k, min_score, spare=diversity > 0)
    else:
        tags = word_probabilities.tags(number)  # only without a threshold
        phrases = rank_phrases(document.text, document.words, p, threshold, tags, temperature, language)
    phrases = [phrase for phrase in phrases if phrase["score"] >= (min_score or 0)]
    if "word_states" in block:
        vectors = phrase_vectors(phrases, document.words, block["word_states"].pop(number))
        phrases = diversify(phrases, vectors, diversity, top_k)
    phrases = [document.phrase_to_source(phrase) for phrase in phrases[:top_k]]
    return phrases if min_score else (phrases + absent)[:top_k]
