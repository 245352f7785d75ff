# SPDX-License-Identifier: Apache-2.0
"""The weights of a `ranking.PhraseRanker` and of the classifier of words that it may need, fitted on documents that the model was not
trained on. The ranker is fitted in two steps.

First an order within each document. With the standardised features x_c of C phrases, the weights w are those with the least

    - mean over documents, mean over right phrases c, of log softmax_c(x w)  +  DECAY |w|^2

that is, phrases of one document are compared with each other only. A plain logistic regression on all phrases spends its weights on
telling documents apart instead, and ranks other kinds of text worse. DECAY is large for the same reason: it keeps the weights of
features that vary together alike, so that no kind of text among the documents decides alone.

Then probabilities: a logistic regression of whether a phrase is right on x w and the features of the document.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from lexperts_lite.features import CLASSES, FEATURES, NOUN_FEATURES, PhraseTable, Words, find_phrases
from lexperts_lite.words import check_language, stem

DECAY = 0.4
OF_DOCUMENT = ("document", "density", "begins")  # features that are the same for all phrases of a document
DIGITS = 5  # of a weight of the classifier
LEAST_SPREAD = (
    0.01  # of a dimension, relative to the median: one that hardly varies would get a weight that swamps the others
)


def fit_ranker(
    documents: Sequence[tuple[Words, np.ndarray]],
    gold: Sequence[Sequence[str]],
    groups: Sequence | None = None,
    shares: Mapping | None = None,
    language: str | None = "english",
    classes: Sequence[np.ndarray] | None = None,
) -> dict[str, float]:
    """The weights of a `PhraseRanker`.

    Args:
        documents: for each document, its words and their probabilities `(W, 3)`; documents that the model was not trained on.
        gold: for each document, the gold phrases, as `labels.present_keyphrases` returns them.
        groups: for each document, the group (such as the data set) that it belongs to.
        shares: for each group, the weight of all its documents together; the same for each by default.
        language: of the stems by which phrases are compared, as in `labels.present_keyphrases`; save it as `config.keyphrase_language`.
        classes: for each document those of its words, as in `find_phrases`, for a ranker that knows noun phrases.

    Raises:
        ValueError: if the candidates are all right or all wrong.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    names = [name for name in FEATURES if classes is not None or name not in NOUN_FEATURES]
    tables = find_phrases(documents, check_language(language), classes, names)
    keys_of = [{tuple(stem(word, language) for word in phrase.split()) for phrase in of} for of in gold]
    right_of = [
        right_phrases(words, table, keys, language)
        for (words, _), table, keys in zip(documents, tables, keys_of, strict=True)
    ]
    sizes = np.array([len(right) for right in right_of])
    features, right = np.concatenate([table.features for table in tables]), np.concatenate(right_of)
    if len(set(right.tolist())) < 2:
        raise ValueError(
            f"{int(right.sum())} of {len(right)} candidates are gold keyphrases: a ranker cannot be fitted. Train the model longer, or "
            "use more documents."
        )
    groups = [0] * len(documents) if groups is None else list(groups)
    shares = {group: 1.0 if shares is None else shares[group] for group in groups}
    num_documents, num_phrases = defaultdict(int), defaultdict(int)
    for group, of_document, size in zip(groups, right_of, sizes.tolist(), strict=True):
        num_documents[group] += bool(of_document.any() and not of_document.all())
        num_phrases[group] += size
    scaler = StandardScaler().fit(features)
    x = scaler.transform(features)
    per_document = np.array([shares[group] / max(num_documents[group], 1) for group in groups])
    w = order_phrases(x, right, sizes, per_document)
    per_phrase = np.array([len(x) * shares[group] / max(num_phrases[group], 1) for group in groups]) / sum(
        shares.values()
    )
    weight, of_document = np.repeat(per_phrase, sizes), [names.index(name) for name in OF_DOCUMENT]
    evidence = np.column_stack([x @ w, x[:, of_document]])
    regression = LogisticRegression(C=10, max_iter=1000).fit(evidence, right, sample_weight=weight)
    w = w * regression.coef_[0, 0]
    w[of_document] += regression.coef_[0, 1:]
    weights = w / scaler.scale_
    bias = regression.intercept_[0] - (weights * scaler.mean_).sum()
    # with an intercept, the expected number of keyphrases is the number of right candidates
    num_gold = [len(keys) for keys in keys_of]
    values = {"bias": bias, "gold": max(float(per_phrase @ num_gold / (weight @ right)), 1.0)}
    return {name: round(float(value), 6) for name, value in (values | dict(zip(names, weights, strict=True))).items()}


def right_phrases(words: Words, table: PhraseTable, keys: set[tuple[str, ...]], language: str | None) -> np.ndarray:
    """Whether the stems of each phrase of a document are among those of its gold phrases, `(C,)`."""
    spans = table.spans[table.bounds[:-1]]
    return np.array([tuple(stem(word, language) for word, _, _ in words[a:b]) in keys for a, b in spans], dtype=bool)


def order_phrases(x: np.ndarray, right: np.ndarray, sizes: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The weights w `(F,)` of the first step.

    Args:
        x (`(C, F)`): standardised features of all phrases, document by document.
        right (`(C,)`): whether a phrase is a keyphrase.
        sizes (`(N,)`): the number of phrases of each document.
        weight (`(N,)`): of each document; those whose phrases are all right or all wrong have none.
    """
    from scipy.optimize import minimize

    number = np.repeat(np.arange(len(sizes)), sizes)
    num_right = np.bincount(number, right, minlength=len(sizes))
    weight = np.where((num_right > 0) & (num_right < sizes), weight, 0.0)
    weight = weight / weight.sum() if weight.any() else weight
    of_phrase, share_of_right = weight[number], right / np.maximum(num_right, 1)[number]

    def loss_and_gradient(w: np.ndarray) -> tuple[float, np.ndarray]:
        scores = x @ w
        largest = np.full(len(sizes), -np.inf)
        np.maximum.at(largest, number, scores)
        scores -= largest[number]
        exp = np.exp(scores)
        total = np.bincount(number, exp, minlength=len(sizes))[number]
        loss = -(of_phrase * share_of_right) @ (scores - np.log(total)) + DECAY * (w @ w)
        return float(loss), x.T @ (of_phrase * (exp / total - share_of_right)) + 2 * DECAY * w

    return minimize(loss_and_gradient, np.zeros(x.shape[1]), jac=True, method="L-BFGS-B").x


def fit_word_classes(states: np.ndarray, classes: Sequence[int]) -> dict[str, list[float]]:
    """The value of `config.keyphrase_word_classes`, by multinomial logistic regression on standardised states. A tagger, which gives the
    classes, is not needed afterwards.

    Args:
        states (`(n, d)`): of n words, the backbone's last hidden states at their first sub-tokens.
        classes (`(n,)`): indices of `features.CLASSES`.

    Raises:
        ValueError: if a class has no words.
    """
    from sklearn.linear_model import LogisticRegression

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
