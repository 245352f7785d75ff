"""Decoding: spans of labels, what a phrase may hold, and the ranking of phrases."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lexperts_lite.decoding import is_phrase, mention_scores, tag_spans, word_tags
from lexperts_lite.ranking import rank_phrases, without_nested
from lexperts_lite.words import split_words, stem_phrase

some_tags = st.lists(st.integers(0, 2), max_size=12)


# ---- phrases as spans


@settings(max_examples=300, deadline=None)
@given(some_tags)
def test_spans_are_the_words_not_labelled_o_cut_at_every_b(tags):
    spans = tag_spans(tags)
    assert [i for start, end in spans for i in range(start, end)] == [i for i, t in enumerate(tags) if t]
    starts = {start for start, _ in spans}
    for i, label in enumerate(tags):
        begins = label == 1 or (label == 2 and (i == 0 or tags[i - 1] == 0))
        assert (i in starts) is begins


def test_spans_are_the_same_for_lists_and_arrays():
    assert tag_spans(np.array([2, 2, 1, 0, 1])) == tag_spans([2, 2, 1, 0, 1]) == [(0, 2), (2, 3), (4, 5)]


# ---- what a phrase may hold


@pytest.mark.parametrize(
    "words",
    [
        ["graph", "cuts"],
        ["Bayes's", "rule"],
        ["don\u2019t"],
        ["802.11", "network"],
        ["1,000"],
        ["snake", "22"],
        ["cafe\u0301"],
        ["深"],
        ["c++"],
        [".NET", "R&D"],
        ["Node.js"],
        ["U.S.", "Ca2+"],
        ["methionyl" * 11],
    ],
)
def test_these_are_phrases(words):
    assert is_phrase(words)


@pytest.mark.parametrize(
    "words",
    [
        [],
        [""],
        ["graph", ","],
        ["'"],
        ["'tis"],
        ["boys'"],
        ["+"],
        ["e.g"],
        ["1."],
        [".5"],
        ["1,a"],
        ["$5"],
        ["🙂"],
        ["\u20ac"],
        ["\u201cx\u201d"],
        ["snake_case"],
        ["-"],
        ["x-"],
        ["graph", "aGVs" * 26],
    ],
)
def test_these_are_none(words):
    assert not is_phrase(words)


# ---- rank and score


def sure(*labels, p=0.8):
    """Probabilities under which the words have these labels."""
    rows = np.full((len(labels), 3), (1 - p) / 2)
    rows[np.arange(len(labels)), labels] = p
    return rows


def phrases_of(text, probabilities):
    return rank_phrases(text, split_words(text), probabilities)


def test_a_score_is_the_mean_probability_of_b_then_i():
    probabilities = np.array([[0.1, 0.7, 0.2], [0.3, 0.1, 0.6], [0.2, 0.1, 0.7]])
    scores = mention_scores(probabilities, [(0, 3), (1, 2), (1, 3)])
    np.testing.assert_allclose(scores, [(0.7 + 0.6 + 0.7) / 3, 0.1, (0.1 + 0.7) / 2])


def test_the_best_come_first_and_ties_go_to_the_earlier_phrase():
    text = "alpha beta gamma delta"
    probabilities = sure(1, 1, 1, 1)
    probabilities[2] = [0.05, 0.9, 0.05]
    assert [phrase["keyphrase"] for phrase in phrases_of(text, probabilities)] == ["gamma", "alpha", "beta", "delta"]


def test_scores_that_differ_beyond_the_shown_digits_are_ties():
    probabilities = np.array([[0.2, 0.8 - 1e-9, 0.0], [0.2, 0.8, 0.0]])
    assert [phrase["keyphrase"] for phrase in phrases_of("alpha beta", probabilities)] == ["alpha", "beta"]


def test_mentions_of_equal_stems_are_one_keyphrase_with_the_best_score():
    text = "Graph cut, then graph cuts; semi-graph"
    probabilities = sure(1, 2, 0, 0, 1, 2, 0, 0, 1)
    probabilities[4:6] = sure(1, 2, p=0.9)
    graph_cut, graph = phrases_of(text, probabilities)
    assert graph["keyphrase"] == "graph" and len(graph["mentions"]) == 1
    assert graph_cut == {
        "keyphrase": "Graph cut",
        "score": 0.9,
        "start": 0,
        "end": 9,
        "mentions": [{"start": 0, "end": 9, "score": 0.8}, {"start": 16, "end": 26, "score": 0.9}],
    }


def test_a_possessive_is_the_same_keyphrase_and_shown_only_if_there_is_no_other_form():
    text = "Tesla\u2019s, Tesla's, Tesla; Ada's"
    tesla, ada = sorted(phrases_of(text, sure(1, 0, 1, 0, 1, 0, 1)), key=lambda phrase: phrase["start"])
    assert (tesla["keyphrase"], tesla["start"], len(tesla["mentions"])) == ("Tesla", 18, 3)
    assert ada["keyphrase"] == "Ada's"


def test_phrases_with_punctuation_are_dropped_whole():
    assert phrases_of("graph, cuts", sure(1, 2, 2)) == []
    assert [phrase["keyphrase"] for phrase in phrases_of("graph, cuts", sure(1, 0, 2))] == ["graph", "cuts"]


def test_a_keyphrase_keeps_the_texts_own_form():
    (phrase,) = phrases_of("a semi-supervised\nlearning", sure(0, 1, 2, 2))
    assert phrase["keyphrase"] == "semi-supervised learning"


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(["graph", "graphs", "cut", ",", "semi-net", "802.11"]), max_size=12), st.data())
def test_ranked_phrases_are_ordered_distinct_and_in_their_places(chunks, data):
    text = " ".join(chunks)
    words = split_words(text)
    rows = data.draw(
        st.lists(st.lists(st.integers(1, 9), min_size=3, max_size=3), min_size=len(words), max_size=len(words))
    )
    probabilities = np.array(rows, dtype=float).reshape(-1, 3)
    probabilities /= probabilities.sum(-1, keepdims=True)
    phrases = rank_phrases(text, words, probabilities)
    keys = [(-phrase["score"], phrase["start"]) for phrase in phrases]
    assert keys == sorted(keys)
    stems = [stem_phrase(phrase["keyphrase"].replace("-", " ")) for phrase in phrases]
    assert len(set(stems)) == len(stems)
    allowed = [span for span in tag_spans(probabilities.argmax(-1)) if is_phrase([w[0] for w in words[slice(*span)]])]
    mentions = sorted((m["start"], m["end"]) for phrase in phrases for m in phrase["mentions"])
    assert mentions == [(words[start][1], words[end - 1][2]) for start, end in allowed]
    for phrase in phrases:
        first = phrase["mentions"][0]
        assert (phrase["start"], phrase["end"]) == (first["start"], first["end"])
        assert phrase["start"] == min(mention["start"] for mention in phrase["mentions"])
        assert phrase["score"] == max(mention["score"] for mention in phrase["mentions"])
        assert text[phrase["start"] : phrase["end"]] == phrase["keyphrase"]


def test_without_a_threshold_the_most_likely_label_is_used_and_with_one_b_and_i_together():
    p = np.array([[0.4, 0.3, 0.3], [0.4, 0.25, 0.35], [0.7, 0.2, 0.1], [0.1, 0.8, 0.1]])
    assert word_tags(p).tolist() == [0, 0, 0, 1]
    assert word_tags(p, 0.5).tolist() == [1, 2, 0, 1]
    assert word_tags(p, 0.25).tolist() == [1, 2, 1, 1]
    assert word_tags(p, 0.85).tolist() == [0, 0, 0, 1]


# ---- keyphrases inside others


def test_of_phrases_inside_each_other_the_best_stays():
    found = ["webhook endpoint", "webhooks", "endpoint url", "the webhook endpoint", "url", "hook"]
    kept = [phrase["keyphrase"] for phrase in without_nested([{"keyphrase": name} for name in found])]
    assert kept == ["webhook endpoint", "endpoint url", "hook"]


def test_words_without_an_alphabet_and_equal_looking_ones_are_compared_too():
    found = [{"keyphrase": name} for name in ("C++", "C", "Tesla\u2019s car", "Tesla's")]
    assert [phrase["keyphrase"] for phrase in without_nested(found)] == ["C++", "C", "Tesla\u2019s car"]
