# SPDX-License-Identifier: Apache-2.0
"""Classes of words, by which a ranker knows the shape of a phrase: nouns, modifiers that may stand before one, and all others.

A linear layer on the backbone's last hidden states tells them apart. Its weights are few, are fitted by `fit_word_classes` to the tags
of a tagger, and are saved in the configuration as `keyphrase_word_classes`; a tagger is not needed afterwards.
"""

from collections.abc import Mapping, Sequence

import numpy as np

CLASSES = ("other", "modifier", "noun")
OTHER, MODIFIER, NOUN = range(3)
DIGITS = 5  # of a weight
LEAST_SPREAD = (
    0.01  # of a dimension, relative to the median: one that hardly varies would get a weight that swamps the others
)
FIELD = "keyphrase_word_classes"


def read_word_classes(config) -> tuple[np.ndarray, np.ndarray] | None:
    """The weights `(3, d)` and biases `(3,)` of a model's configuration, float32; `None` if it has none.

    Raises:
        ValueError: if they are not one list of d + 1 finite numbers, the bias first, for each class.
    """
    found = getattr(config, FIELD, None)
    if found is None:
        return None
    again = f"Fit them again with lexperts_lite.word_classes.fit_word_classes, or set model.config.{FIELD} = None."
    if not isinstance(found, Mapping) or set(found) != set(CLASSES):
        raise ValueError(f"{FIELD} does not have the keys {', '.join(CLASSES)}. {again}")
    try:
        rows = np.array([found[name] for name in CLASSES], dtype=np.float64)
    except (TypeError, ValueError):
        rows = np.zeros(0)
    if rows.ndim != 2 or not np.isfinite(rows).all():
        raise ValueError(f"{FIELD} is not one list of finite numbers for each class, all of the same length. {again}")
    size = getattr(config, "hidden_size", rows.shape[1] - 1)
    if rows.shape[1] != size + 1:
        raise ValueError(f"{FIELD} has {rows.shape[1] - 1} weights for states of size {size}. {again}")
    return rows[:, 1:].astype(np.float32), rows[:, 0].astype(np.float32)


def fit_word_classes(states: np.ndarray, classes: Sequence[int]) -> dict[str, list[float]]:
    """The value of `keyphrase_word_classes`, by multinomial logistic regression on standardised states.

    Args:
        states (`(n, d)`): of n words, the backbone's last hidden states at their first sub-tokens.
        classes (`(n,)`): OTHER, MODIFIER or NOUN.

    Raises:
        ImportError: if scikit-learn is not installed.
        ValueError: if a class has no words.
    """
    try:
        from sklearn.linear_model import LogisticRegression
    except ImportError as error:
        raise ImportError(
            "fit_word_classes needs scikit-learn. Install it with: pip install 'lexperts[train]'"
        ) from error
    if missing := [name for i, name in enumerate(CLASSES) if i not in set(classes)]:
        raise ValueError(f"No word is of the class {missing[0]!r}. Use more texts.")
    states = np.asarray(states, dtype=np.float64)
    mean, spread = states.mean(0), states.std(0)
    spread = np.maximum(spread, LEAST_SPREAD * np.median(spread))
    spread[spread == 0] = 1
    regression = LogisticRegression(C=0.1, max_iter=500).fit((states - mean) / spread, classes)
    weights = regression.coef_ / spread
    rows = np.concatenate([(regression.intercept_ - weights @ mean)[:, None], weights], axis=1)
    return {name: [float(f"{w:.{DIGITS}g}") for w in row] for name, row in zip(CLASSES, rows, strict=True)}
