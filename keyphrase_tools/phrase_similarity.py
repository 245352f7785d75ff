# SPDX-License-Identifier: Apache-2.0
"""How close a phrase is to its document, as a sentence encoder sees it: a feature of the ranker.

KeyBERT (Grootendorst 2020) ranks phrases by the cosine of a sentence encoder's vectors of the phrase, read alone, and of the document,
for which each phrase has to be read. Here linear layers on the states h_w that a model computes anyway are fitted to these cosines, see
`lexperts train seke --sentence-encoder`. With t_w = A h_w + c, and their means t_c over the words of a phrase's mentions and t_D over
those of the document,

    similarity = cos(t_c, t_D) + mean over the words of the phrase of (u h_w + b)
"""

from collections.abc import Mapping

import numpy as np

FIELD = "keyphrase_similarity"
KEYS = ("offset", "topics")
SIMILARITY = "similarity"


def read_similarity(config) -> tuple[np.ndarray, np.ndarray] | None:
    """The weights `(1 + k, d)` and biases `(1 + k,)` of a model's configuration, u and b first, float32; `None` if it has none.

    Raises:
        ValueError: if they are not lists of d + 1 finite numbers, the bias first: one list, "offset", and one or more, "topics".
    """
    found = getattr(config, FIELD, None)
    if found is None:
        return None
    again = f"Train with --sentence-encoder again, or set model.config.{FIELD} = None."
    if not isinstance(found, Mapping) or set(found) != set(KEYS):
        raise ValueError(f"{FIELD} does not have the keys {', '.join(KEYS)}. {again}")
    try:
        rows = np.array([found["offset"], *found["topics"]], dtype=np.float64)
    except (TypeError, ValueError):
        rows = np.zeros(0)
    if rows.ndim != 2 or len(rows) < 2 or not np.isfinite(rows).all():
        raise ValueError(f"{FIELD} does not consist of lists of finite numbers, all of the same length. {again}")
    size = getattr(config, "hidden_size", rows.shape[1] - 1)
    if rows.shape[1] != size + 1:
        raise ValueError(f"{FIELD} has {rows.shape[1] - 1} weights for states of size {size}. {again}")
    return rows[:, 1:].astype(np.float32), rows[:, 0].astype(np.float32)


def similarities(
    start: np.ndarray,
    length: np.ndarray,
    bounds: np.ndarray,
    document: np.ndarray,
    counted: np.ndarray,
    values: np.ndarray,
) -> np.ndarray:
    """The similarity of C phrases to their documents, `(C,)`.

    Args:
        start, length (`(M,)`): the first word and the number of words of each mention, phrase by phrase.
        bounds (`(C,)`): the index of each phrase's first mention.
        document (`(W,)`): of each word, in order, from 0.
        counted (`(W,)`): whether a word counts for its document.
        values (`(W, 1 + k)`): u h_w + b and t_w of each word.
    """
    of_mention = values[start].astype(np.float64)
    for step in range(1, int(length.max(initial=1))):
        longer = length > step
        of_mention[longer] += values[start[longer] + step]
    of_mention /= length[:, None]
    mentions = np.diff(np.append(bounds, len(start)))[:, None]
    of_phrase = np.add.reduceat(of_mention, bounds) / mentions
    counted_of, size = document[counted], int(document[-1]) + 1
    columns = [np.bincount(counted_of, column, minlength=size) for column in values[counted, 1:].T]
    of_document = np.stack(columns, axis=1)[document[start[bounds]]]
    lengths = np.linalg.norm(of_phrase[:, 1:], axis=1) * np.linalg.norm(of_document, axis=1)
    return of_phrase[:, 0] + (of_phrase[:, 1:] * of_document).sum(1) / np.maximum(lengths, 1e-9)
