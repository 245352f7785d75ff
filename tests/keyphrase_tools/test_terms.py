"""Terms of several words: what they are, and that no phrase begins or ends inside one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lexperts_lite.decoding import O
from lexperts_lite.phrase_features import find_phrases
from lexperts_lite.ranking import rank_phrases
from lexperts_lite.terms import continued_words, is_whole, join_probabilities, join_tags
from lexperts_lite.words import split_words

WORDS = st.lists(
    st.sampled_from(["SARS-CoV-2", "k-means", "CoV", "means", "TCP/IP", "cut", ",", "\n\n"]), min_size=1, max_size=9
)


def terms_of(text):
    """The words, those of a term joined by `~`."""
    words, joined = split_words(text), ""
    for (word, _, _), continues in zip(words, continued_words(words), strict=True):
        joined += ("~" if continues else " ") + word
    return joined.split()


def labels(data, words):
    """Probabilities (W, 3) of O, B and I."""
    row = st.lists(st.integers(1, 9), min_size=3, max_size=3)
    rows = np.array(data.draw(st.lists(row, min_size=len(words), max_size=len(words))), dtype=float).reshape(-1, 3)
    return rows / rows.sum(1, keepdims=True)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("SARS-CoV-2, IL-6 and COVID-19", ["SARS~CoV~2", ",", "IL~6", "and", "COVID~19"]),
        ("2,4-D 5-HT GPT-3.5 10-year 3D-printed", ["2,4~D", "5~HT", "GPT~3.5", "10~year", "3D~printed"]),
        ("k-means, \u03b1-synuclein, 3D U-Net, T-cell", ["k~means", ",", "\u03b1~synuclein", ",", "3D", "U~Net", ",", "T~cell"]),
        ("RT-PCR MERS-CoV CRISPR-Cas9 BiLSTM-CRF", ["RT~PCR", "MERS~CoV", "CRISPR~Cas9", "BiLSTM~CRF"]),
        ("TCP/IP I/O CI/CD 9/11 HTTP/1.1", ["TCP~IP", "I~O", "CI~CD", "9~11", "HTTP~1.1"]),
        ("semi-supervised, state-of-the-art, Coca-Cola", ["semi", "supervised", ",", "state", "of", "the", "art", ",", "Coca", "Cola"]),
        ("CPU/GPU and/or C/C++ GPU-based REAL-TIMES", ["CPU", "GPU", "and", "or", "C", "C++", "GPU", "based", "REAL", "TIMES"]),
        ("a - 2, a -2, pre- and 2", ["a", "2", ",", "a", "2", ",", "pre", "and", "2"]),
        ("k\n-means http://x.org/k-means", ["k", "means", "http", ":", "x.org", "k", "means"]),  # two lines; hidden
        ("\u5317\u4eac-\u4e0a\u6d77", list("\u5317\u4eac\u4e0a\u6d77")),
        ("", []),
    ],
)  # fmt: skip
def test_terms_of(text, expected):
    assert terms_of(text) == expected


def test_words_without_their_text_have_no_terms():
    assert not continued_words(["k", "means"]).any()


@settings(max_examples=100, deadline=None)
@given(WORDS, st.data())
def test_no_phrase_begins_or_ends_inside_a_term(parts, data):
    text = " ".join(parts)
    words = split_words(text)
    p, continued = labels(data, words), continued_words(words)
    found = find_phrases([(words, p)])[0].spans.tolist()
    starts = {start: i for i, (_, start, _) in enumerate(words)}
    ends = {end: i + 1 for i, (_, _, end) in enumerate(words)}
    tags = data.draw(st.none() | st.just(p.argmax(-1)))
    for phrase in rank_phrases(text, words, p, threshold=0.3, tags=tags):
        found += [(starts[mention["start"]], ends[mention["end"]]) for mention in phrase["mentions"]]
    assert all(is_whole(continued, *span) for span in found)


@settings(max_examples=100, deadline=None)
@given(WORDS, st.data())
def test_joining_changes_words_of_terms_only(parts, data):
    words = split_words(" ".join(parts))
    p, continued = labels(data, words), continued_words(words)
    in_term = continued | np.append(continued[1:], False)[: len(words)]
    joined, tags = join_probabilities(p, continued), join_tags(p.argmax(-1), continued)
    np.testing.assert_allclose(joined.sum(1), 1)
    np.testing.assert_array_equal(joined[~in_term], p[~in_term])
    np.testing.assert_array_equal(tags[~in_term], p.argmax(-1)[~in_term])
    np.testing.assert_allclose(joined[continued, O], joined[np.flatnonzero(continued) - 1, O])
    assert joined[:, O].sum() == pytest.approx(p[:, O].sum())


def test_a_part_that_is_labelled_gives_the_whole_term():
    text = "the SARS-CoV-2 test"
    words = split_words(text)
    p = np.array([[0.9, 0.05, 0.05], [0.2, 0.7, 0.1], [0.6, 0.2, 0.2], [0.7, 0.1, 0.2], [0.9, 0.05, 0.05]])
    (phrase,) = rank_phrases(text, words, p, threshold=0.5)
    assert phrase["keyphrase"] == "SARS-CoV-2"
    assert phrase["score"] == pytest.approx((0.5 * 0.7 / 0.8 + 0.5 + 0.5) / 3)  # p(O) of the term is 0.5
