# SPDX-License-Identifier: Apache-2.0
"""Diverse keyphrases: maximal marginal relevance (Carbonell and Goldstein 1998) on the model's own states.

The next phrase is the one with the largest (1 - diversity) * relevance - diversity * (largest cosine to a phrase before it). The
relevance of a phrase is its score, scaled from 0 for the lowest to 1 for the best: cosines would outweigh the small probabilities of
an unusual document. The vector of a phrase is the mean, over the words of all mentions, of the backbone's last hidden states at
their first sub-tokens.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import numpy as np

from .decoding import O, word_tags


class WordStates:
    """The hidden states of words that may belong to phrases. Words that are labelled O and belong to no candidate take no memory.

    Args:
        documents: the number of documents.
        threshold: of the labels, see `decoding.word_tags`, for a model that does not decode them itself.
        mentions: for each document, those of its candidates, if any; see `candidates.Candidates.find`.
    """

    def __init__(
        self,
        documents: int,
        threshold: float | None = None,
        mentions: Sequence[Mapping[str, Sequence[tuple[int, int]]]] | None = None,
    ):
        self._states: list[dict[int, np.ndarray]] = [{} for _ in range(documents)]
        self._threshold = threshold
        self._matched = [
            {word for spans in of_document.values() for start, end in spans for word in range(start, end)}
            for of_document in mentions or [{}] * documents
        ]

    def add(self, document: int, words: np.ndarray, values: Mapping[str, np.ndarray]) -> None:
        """Adds n words `(n,)` of a document, or replaces what is known about them; values are their `states` `(n, d)`, `probabilities`
        `(n, 3)` and, if the model decodes them, `tags` `(n,)`.
        """
        of_words, tags = self._states[document], values.get("tags")
        tags = word_tags(values["probabilities"], self._threshold) if tags is None else tags
        for word, tag, state in zip(words.tolist(), tags, values["states"], strict=True):
            if tag != O or word in self._matched[document]:
                of_words[word] = state.copy()
            else:
                of_words.pop(word, None)

    def pop(self, document: int) -> dict[int, np.ndarray]:
        """The states `(d,)` of a document's words, which are then forgotten."""
        states, self._states[document] = self._states[document], {}
        return states


def phrase_vectors(
    phrases: Sequence[dict], words: Sequence[tuple[str, int, int]], states: Mapping[int, np.ndarray]
) -> np.ndarray:
    """The vectors `(P, d)` of P phrases, of length 1; 0 for a phrase without states.

    Args:
        phrases: with "mentions", whose "start" and "end" are offsets in the text of the words.
        words: of the document, as (word, start, end).
        states: the state `(d,)` of each word.
    """
    starts, size = [start for _, start, _ in words], len(next(iter(states.values()), ()))
    vectors = np.zeros((len(phrases), size), dtype=np.float32)
    for vector, phrase in zip(vectors, phrases, strict=True):
        spans = [(bisect_left(starts, m["start"]), bisect_left(starts, m["end"])) for m in phrase["mentions"]]
        of_phrase = [states[word] for span in spans for word in range(*span) if word in states]
        if of_phrase:
            vector[:] = np.mean(of_phrase, axis=0)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(norms > 0, norms, 1)


def diversify(phrases: Sequence[dict], vectors: np.ndarray, diversity: float, top_k: int | None = None) -> list[dict]:
    """Chooses phrases by maximal marginal relevance.

    Args:
        phrases: P phrases with "score", best first.
        vectors (`(P, d)`): of the phrases, of length 1.
        diversity: from 0, by score only, to 1, by difference only after the first.
        top_k: the number of phrases, `None` for all.

    Returns:
        The chosen phrases, in order. The first is always the best; of equal values the earlier phrase is chosen.
    """
    scores = np.array([phrase["score"] for phrase in phrases], dtype=np.float64)
    scores = (scores - scores.min(initial=1)) / max(np.ptp(scores) if len(scores) else 0, 1e-9)
    left, chosen, nearest = np.ones(len(phrases), dtype=bool), [], np.zeros(len(phrases))
    while left.any() and (top_k is None or len(chosen) < top_k):
        value = (1 - diversity) * scores - diversity * nearest if chosen else scores
        best = int(np.where(left, value, -np.inf).argmax())
        similarity = vectors @ vectors[best]
        nearest = np.maximum(nearest, similarity) if chosen else similarity
        left[best] = False
        chosen.append(best)
    return [phrases[i] for i in chosen]
