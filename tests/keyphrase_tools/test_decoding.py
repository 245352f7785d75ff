"""Decoding: spans of labels, and the ranking of the phrases that they make."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lexperts_lite.decoding import O, join_probabilities, join_tags, tag_spans, word_tags
from lexperts_lite.layout import continued_words
from lexperts_lite.ranking import rank_phrases, without_nested
from lexperts_lite.words import is_phrase, split_words, stem_phrase

from .known_answers import names


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=12))
def test_spans_are_the_words_not_labelled_o_cut_at_every_b(tags):
    spans = tag_spans(tags)
    assert spans == tag_spans(np.array(tags))
    assert [i for start, end in spans for i in range(start, end)] == [i for i, t in enumerate(tags) if t]
    starts = {start for start, _ in spans}
    for i, label in enumerate(tags):
        assert (i in starts) is (label == 1 or (label == 2 and (i == 0 or tags[i - 1] == 0)))


def test_without_a_threshold_the_most_likely_label_is_used_and_with_one_b_and_i_together():
    p = np.array([[0.4, 0.3, 0.3], [0.4, 0.25, 0.35], [0.7, 0.2, 0.1], [0.1, 0.8, 0.1]])
    expected = {None: [0, 0, 0, 1], 0.5: [1, 2, 0, 1], 0.25: [1, 2, 1, 1], 0.85: [0, 0, 0, 1]}
    assert {threshold: word_tags(p, threshold).tolist() for threshold in expected} == expected


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from(["SARS-CoV-2", "k-means", "CoV", "TCP/IP", "cut", ",", "\n\n"]), max_size=9), st.randoms()
)
def test_joining_changes_words_of_terms_only(parts, random):
    words = split_words(" ".join(parts))
    p = np.random.default_rng(random.getrandbits(32)).dirichlet([1, 1, 1], size=len(words)).reshape(-1, 3)
    continued = continued_words(words)
    in_term = continued | np.append(continued[1:], False)[: len(words)]
    joined, tags = join_probabilities(p, continued), np.array(join_tags(p.argmax(-1), continued))
    np.testing.assert_allclose(joined.sum(1), 1)
    np.testing.assert_array_equal(joined[~in_term], p[~in_term])
    np.testing.assert_array_equal(tags[~in_term], p.argmax(-1)[~in_term])
    np.testing.assert_allclose(joined[continued, O], joined[np.flatnonzero(continued) - 1, O])
    assert joined[:, O].sum() == pytest.approx(p[:, O].sum())


def sure(*labels, p=0.8):
    """Probabilities under which the words have these labels."""
    rows = np.full((len(labels), 3), (1 - p) / 2)
    rows[np.arange(len(labels)), labels] = p
    return rows


def phrases_of(text, probabilities, **options):
    return rank_phrases(text, split_words(text), probabilities, **options)


def test_a_part_that_is_labelled_gives_the_whole_term():
    p = np.array([[0.9, 0.05, 0.05], [0.2, 0.7, 0.1], [0.6, 0.2, 0.2], [0.7, 0.1, 0.2], [0.9, 0.05, 0.05]])
    (phrase,) = phrases_of("the SARS-CoV-2 test", p, threshold=0.5)
    assert phrase["keyphrase"] == "SARS-CoV-2"
    assert phrase["score"] == pytest.approx((0.5 * 0.7 / 0.8 + 0.5 + 0.5) / 3)  # p(O) of the term is 0.5


def test_the_best_come_first_and_ties_in_the_shown_digits_go_to_the_earlier_phrase():
    probabilities = sure(1, 1, 1, 1)
    probabilities[2:] = [[0.05, 0.9, 0.05], [0.1, 0.8 + 1e-9, 0.1]]
    assert names(phrases_of("alpha beta gamma delta", probabilities)) == ["gamma", "alpha", "beta", "delta"]


def test_mentions_of_equal_stems_are_one_keyphrase_with_the_best_score():
    probabilities = sure(1, 2, 0, 0, 1, 2, 0, 0, 1)
    probabilities[4:6] = sure(1, 2, p=0.9)
    graph_cut, graph = phrases_of("Graph cut, then graph cuts; semi-graph", probabilities)
    assert graph["keyphrase"] == "graph" and len(graph["mentions"]) == 1
    mentions = [{"start": 0, "end": 9, "score": 0.8}, {"start": 16, "end": 26, "score": 0.9}]
    assert graph_cut == {"keyphrase": "Graph cut", "score": 0.9, "start": 0, "end": 9, "mentions": mentions}


def test_a_keyphrase_ends_before_a_possessive():
    text = "Tesla\u2019s, Tesla's, Tesla; Denis Villeneuve's film, Bayes's rule"
    found = phrases_of(text, sure(1, 0, 1, 0, 1, 0, 1, 2, 0, 0, 1, 2))
    assert sorted(names(found)) == ["Bayes's rule", "Denis Villeneuve", "Tesla"]
    for phrase in found:
        assert {text[mention["start"] : mention["end"]] for mention in phrase["mentions"]} == {phrase["keyphrase"]}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["graph", "graphs", "cut", ",", "semi-net", "802.11"]), max_size=12), st.randoms())
def test_ranked_phrases_are_ordered_distinct_and_in_their_places(chunks, random):
    text = " ".join(chunks)
    words = split_words(text)
    probabilities = np.random.default_rng(random.getrandbits(32)).dirichlet([1, 1, 1], size=len(words)).reshape(-1, 3)
    phrases = rank_phrases(text, words, probabilities)
    keys = [(-phrase["score"], phrase["start"]) for phrase in phrases]
    assert keys == sorted(keys)
    stems = [stem_phrase(phrase["keyphrase"].replace("-", " ")) for phrase in phrases]
    assert len(set(stems)) == len(stems)
    allowed = [span for span in tag_spans(probabilities.argmax(-1)) if is_phrase([w[0] for w in words[slice(*span)]])]
    mentions = sorted((m["start"], m["end"]) for phrase in phrases for m in phrase["mentions"])
    assert mentions == [(words[start][1], words[end - 1][2]) for start, end in allowed]
    for phrase in phrases:
        first = min(phrase["mentions"], key=lambda mention: mention["start"])
        assert (phrase["start"], phrase["end"]) == (first["start"], first["end"])
        assert phrase["score"] == max(mention["score"] for mention in phrase["mentions"])
        assert text[phrase["start"] : phrase["end"]] == phrase["keyphrase"]


@pytest.mark.parametrize("found, kept", [
    (["webhook endpoint", "webhooks", "endpoint url", "the webhook endpoint", "url", "hook"], [0, 2, 5]),
    (["C++", "C", "Tesla\u2019s car", "Tesla's"], [0, 1, 2]),
])  # fmt: skip
def test_of_phrases_inside_each_other_the_best_stays(found, kept):
    phrases = [{"keyphrase": name} for name in found]
    assert without_nested(phrases) == [phrases[i] for i in kept]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(" ".join), max_size=12, unique=True))
def test_of_all_pairs_inside_each_other_one_stays(found):
    kept = []
    for phrase in found:
        if not any(f" {phrase} " in f" {other} " or f" {other} " in f" {phrase} " for other in kept):
            kept.append(phrase)
    assert [phrase["keyphrase"] for phrase in without_nested([{"keyphrase": name} for name in found])] == kept
