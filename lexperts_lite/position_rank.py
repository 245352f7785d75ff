# SPDX-License-Identifier: Apache-2.0
"""How central the words of a document are: PositionRank (Florescu and Caragea 2017), a PageRank that begins at early words.

Words are the nodes, and each two that stand within WINDOW words of each other are joined by an edge, with a weight for each time. With
the degrees D of the nodes, the weights A, and the sum of 1 / position over the mentions of a word in b, scaled to sum to 1:

    r = (1 - d) b + d A D^-1 r
"""

import numpy as np

WINDOW = 10  # words
DAMPING = 0.85  # d
STEPS = 12  # of the power iteration; d^12 of what is left of the start
FLOOR = 1e-3


def position_ranks(numbers: np.ndarray, document: np.ndarray, position: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """log(n r) of each word of some documents, `(W,)`, where n is the number of different words of its document; 0 for words that
    are not counted. A word of average rank has 0.

    Args:
        numbers (`(W,)`): which words are the same; words of different documents never are.
        document (`(W,)`): of each word, in order, from 0.
        position (`(W,)`): of each word in its document, from 0.
        counted (`(W,)`): whether a word is a node; the others only stand between.
    """
    chosen, ranks = np.flatnonzero(counted), np.zeros(len(numbers))
    if not len(chosen):
        return ranks
    of_document, size = document[chosen], int(document[-1]) + 1
    of_words = of_document.astype(np.int64) * (int(numbers.max()) + 1) + numbers[chosen]
    _, node = np.unique(of_words, return_inverse=True)
    count = int(node.max()) + 1
    document_of = np.zeros(count, dtype=np.intp)
    document_of[node] = of_document
    nodes = np.bincount(document_of, minlength=size)
    start = np.bincount(node, 1 / (1 + position[chosen]), minlength=count)
    start /= np.bincount(document_of, start, minlength=size)[document_of]
    first, second = neighbours(node, of_document, position[chosen])
    degree = np.bincount(first, minlength=count).clip(min=1)
    r = 1 / nodes[document_of]
    for _ in range(STEPS):
        r = (1 - DAMPING) * start + DAMPING * np.bincount(second, (r / degree)[first], minlength=count)
    ranks[chosen] = np.log(r * nodes[document_of] + FLOOR)[node]
    return ranks


def neighbours(
    node: np.ndarray, document: np.ndarray, position: np.ndarray, window: int = WINDOW
) -> tuple[np.ndarray, np.ndarray]:
    """Both ends of each edge, in both directions: the nodes of two different words less than `window` positions apart."""
    ends: list[np.ndarray] = []
    others: list[np.ndarray] = []
    for step in range(1, window):
        a, b = node[:-step], node[step:]
        near = (document[step:] == document[:-step]) & (position[step:] - position[:-step] < window) & (a != b)
        ends += [a[near], b[near]]
        others += [b[near], a[near]]
    return np.concatenate(ends), np.concatenate(others)
