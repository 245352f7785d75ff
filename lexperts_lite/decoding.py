# SPDX-License-Identifier: Apache-2.0
"""Labels of words: B begins a phrase, I continues it, and an I without a phrase before it begins one. Phrases end where the text is
divided, and contain all of a term or nothing of it (see `layout`). `ranking` makes keyphrases of them.
"""

from collections.abc import Sequence

import numpy as np

O, B, I = range(3)


def word_tags(probabilities: np.ndarray, threshold: float | None = None) -> np.ndarray:
    """Chooses a label for each word.

    Without a threshold this is the most likely label. With one, a word is B or I, whichever is more likely, if the sum of
    their probabilities reaches the threshold: a model that is unsure where a phrase begins splits the probability between
    B and I, and O would win.

    Args:
        probabilities (`(W, 3)`): of O, B and I for each word.
        threshold: between 0 and 1.

    Returns:
        Labels `(W,)`: 0 (O), 1 (B) or 2 (I).
    """
    if threshold is None:
        return probabilities.argmax(-1)
    inside = np.where(probabilities[:, I] > probabilities[:, B], I, B)
    return np.where(1 - probabilities[:, O] >= threshold, inside, O)


def tag_spans(tags: Sequence[int], units: Sequence[int] | np.ndarray | None = None) -> list[tuple[int, int]]:
    """The phrases as spans of words `(start, end)`, in text order, from one label per word (0 O, 1 B, 2 I).

    Args:
        tags (`(W,)`): the labels.
        units (`(W,)`): of layout, see `layout.unit_numbers`; a phrase ends with its unit.

    >>> tag_spans([1, 2, 0, 2, 1])
    [(0, 2), (3, 4), (4, 5)]
    >>> tag_spans([1, 2, 2], [0, 0, 1])
    [(0, 2), (2, 3)]
    """
    spans, start = [], None
    for i, label in enumerate([*tags, O]):
        if start is not None and (label != I or (units is not None and units[i] != units[i - 1])):
            spans.append((start, i))
            start = None
        if label == B or (label == I and start is None):
            start = i
    return spans


def begin_units(probabilities: np.ndarray, units: np.ndarray) -> np.ndarray:
    """Probabilities `(W, 3)` in which no label continues over a unit of layout: I of its first word counts as B."""
    first = np.flatnonzero(units[1:] != units[:-1]) + 1
    p = probabilities.copy() if first.size else probabilities
    p[first, B] += p[first, I]
    p[first, I] = 0
    return p


def join_tags(tags: Sequence[int], continued: np.ndarray) -> Sequence[int]:
    """Labels in which all words of a term are labelled if one of them is; `continued` `(W,)` as `layout.continued_words`.

    >>> join_tags([0, 0, 2, 1], np.array([False, False, True, False])).tolist()
    [0, 1, 2, 1]
    """
    if not continued.any():
        return tags
    tags = np.array(tags)
    terms = np.cumsum(~continued) - 1  # (W,)
    labelled = np.bincount(terms, tags != O)[terms] > 0
    tags[continued] = np.where(labelled[continued], I, O)
    tags[labelled & (tags == O)] = B
    return tags


def join_probabilities(p: np.ndarray, continued: np.ndarray) -> np.ndarray:
    """Probabilities `(W, 3)` in which each word of a term has the mean p(O) of its words, and only the first word may begin a phrase."""
    if not continued.any():
        return p
    terms = np.cumsum(~continued) - 1  # (W,)
    size = np.bincount(terms)
    outside, p = (np.bincount(terms, p[:, O]) / size)[terms], p.copy()
    first = (size[terms] > 1) & ~continued
    begins = (p[first, B] + 1e-9) / (p[first, B] + p[first, I] + 1e-9)  # B, of B and I
    for words, share in ((first, begins), (continued, 0.0)):
        p[words, O], p[words, B] = outside[words], share * (1 - outside[words])
        p[words, I] = (1 - share) * (1 - outside[words])
    return p


def mention_scores(
    probabilities: np.ndarray, spans: Sequence[tuple[int, int]], temperature: float | None = None
) -> np.ndarray:
    """The score `(M,)` of each span `(start, end)`: the mean probability of its labels, B for the first word and I for the others."""
    begins = np.array([probabilities[start, B] for start, _ in spans])
    inside = np.array([probabilities[start + 1 : end, I].sum() for start, end in spans])
    scores = (begins + inside) / np.array([end - start for start, end in spans])
    return scores if temperature is None else apply_temperature(scores, temperature)


def apply_temperature(p: np.ndarray, temperature: float) -> np.ndarray:
    """Divides the log-odds of probabilities by a temperature. Above 1 it lowers the confidence; the order never changes."""
    p = np.clip(p, 1e-7, 1 - 1e-7)
    return 1 / (1 + np.exp(-np.log(p / (1 - p)) / temperature))


def read_labels(id2label: dict[int, str]) -> list[int]:
    """The tag of each label id, 0 (O), 1 (B) or 2 (I), from the labels' names; types such as -KEY are ignored."""
    tags = {"O": O, "OUTSIDE": O, "B": B, "I": I}
    names = [id2label[i] for i in sorted(id2label)]
    found = [tags.get(name.upper().replace("_", "-").split("-")[0]) for name in names]
    if set(found) != {O, B, I}:
        raise ValueError(
            f"The model's labels are {', '.join(map(repr, names))}: keyphrase-extraction needs labels that begin a phrase (B "
            "or B-...), continue it (I or I-...), and O. If the model was trained with such labels, set their names: "
            "model.config.id2label = {0: 'O', 1: 'B-KEY', 2: 'I-KEY'}."
        )
    return [tag for tag in found if tag is not None]
