"""The fit of a ranker: its first step is a minimum of the stated loss, and compares the phrases of one document only."""

import numpy as np
import pytest

from keyphrase_tools.ranker_fit import DECAY, order_phrases

SIZES = np.array([4, 3, 5, 2])


@pytest.fixture(name="phrases")
def fixture_phrases():
    """Features (14, 3), and which phrases are right: those of the third document all are not, those of the last all are."""
    random = np.random.default_rng(0)
    return random.normal(size=(14, 3)), np.array([1, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1], dtype=bool)


def plain_loss(w, x, right, weight):
    """The formula, document by document."""
    loss, start = DECAY * (w @ w), 0
    counted = [
        i for i, right_of in enumerate(np.split(right, SIZES.cumsum()[:-1])) if right_of.any() and not right_of.all()
    ]
    for i, size in enumerate(SIZES):
        scores, found = x[start : start + size] @ w, right[start : start + size]
        if i in counted:
            log_softmax = scores - np.log(np.exp(scores).sum())
            loss -= weight[i] / weight[counted].sum() * log_softmax[found].mean()
        start += size
    return loss


def test_the_weights_are_a_minimum_of_the_formula(phrases):
    x, right = phrases
    weight = np.array([1.0, 3.0, 2.0, 5.0])
    w = order_phrases(x, right, SIZES, weight)
    least = plain_loss(w, x, right, weight)
    for step in np.random.default_rng(1).normal(size=(50, 3)):
        assert plain_loss(w + 0.05 * step, x, right, weight) > least


def test_what_all_phrases_of_a_document_share_does_not_count(phrases):
    x, right = phrases
    weight = np.ones(4)
    shifted = x + np.repeat(np.random.default_rng(2).normal(size=(4, 3)), SIZES, axis=0)
    np.testing.assert_allclose(
        order_phrases(shifted, right, SIZES, weight), order_phrases(x, right, SIZES, weight), atol=1e-4
    )


def test_documents_whose_phrases_are_all_right_or_all_wrong_do_not_count(phrases):
    x, right = phrases
    changed = x.copy()
    changed[7:] *= 9
    expected = order_phrases(x, right, SIZES, np.ones(4))
    np.testing.assert_allclose(order_phrases(changed, right, SIZES, np.array([1, 1, 7, 7])), expected, atol=1e-4)
