# SPDX-License-Identifier: Apache-2.0
"""Labels of words: B begins a phrase, I continues it, and an I without a phrase before it begins one. Phrases end where the text is
divided (see `layout`). `ranking` makes keyphrases of them.
"""

import unicodedata
from collections.abc import Sequence

import numpy as np

from .words import APOSTROPHES, JOINERS, is_term

O, B, I = range(3)
SEKE_PUNCTUATION = frozenset("!#$%&'()*+,.:;<=>?@[\\]^_`{|}~")
LONGEST = 100  # characters of a word


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


def is_phrase(words: Sequence[str]) -> bool:
    """Whether words can form a keyphrase: no punctuation or symbols except in terms such as "C++", apostrophes inside words and
    points between digits, and no word of over LONGEST characters, such as an encoded picture."""
    return bool(words) and not any(_is_mark(word) for word in words)


def _is_mark(word: str) -> bool:
    inner = word.strip(APOSTROPHES + JOINERS)
    if inner != word or not inner or len(word) > LONGEST:
        return True
    if word.isalnum() or is_term(word):
        return False
    for i, c in enumerate(word):
        between_digits = word[max(i - 1, 0) : i].isdigit() and word[i + 1 : i + 2].isdigit()
        allowed = c in APOSTROPHES + JOINERS or (c in ".," and between_digits)
        if not allowed and (c in SEKE_PUNCTUATION or unicodedata.category(c)[0] in "PS"):
            return True
    return False


def mention_scores(
    probabilities: np.ndarray, spans: Sequence[tuple[int, int]], temperature: float | None = None
) -> np.ndarray:
    """The score of each span: the mean probability of its labels, B for the first word and I for the others.

    Args:
        probabilities (`(W, 3)`): of O, B and I for each word.
        spans: `(start, end)` of M spans.
        temperature: see `apply_temperature`.

    Returns:
        Scores `(M,)`.
    """
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
    try:
        tag_of_label = [tags[name.upper().replace("_", "-").split("-")[0]] for name in names]
    except KeyError:
        tag_of_label = []
    if set(tag_of_label) != {O, B, I}:
        raise ValueError(
            f"The model's labels are {', '.join(map(repr, names))}: keyphrase-extraction needs labels that begin a phrase (B "
            "or B-...), continue it (I or I-...), and O. If the model was trained with such labels, set their names: "
            "model.config.id2label = {0: 'O', 1: 'B-KEY', 2: 'I-KEY'}."
        )
    return tag_of_label
