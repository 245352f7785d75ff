"""Ranking by evidence: candidates, features by hand, the fit, and the pipeline of a model that has a ranker."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import pipeline

from keyphrase_tools.ranker_fit import fit_ranker
from lexperts_lite.decoding import mention_scores
from lexperts_lite.layout import begin_units, unit_numbers
from lexperts_lite.phrase_features import INTERACTIONS, MAX_WORDS, MIN_PROBABILITY, NAMES, WordArrays, find_phrases
from lexperts_lite.ranking import PhraseRanker
from lexperts_lite.terms import continued_words, join_probabilities
from lexperts_lite.words import split_words, stem

from . import plain_candidates
from .plain_candidates import log_odds

TEXT = "Graph cuts, and a graph cut of networks"
WEIGHTS = {"bias": 0.0, "gold": 1.0, **dict.fromkeys(NAMES, 0.0)}


def probabilities(*rows) -> np.ndarray:
    """(p(B), p(I)) of each word -> (W, 3)."""
    return np.array([[1 - b - i, b, i] for b, i in rows])


@pytest.fixture
def document():
    #      Graph       cuts        ,       and     a       graph       cut         of      networks
    p = [(0.8, 0.1), (0.1, 0.6), (0, 0), (0, 0), (0, 0), (0.5, 0.2), (0.1, 0.5), (0, 0), (0.3, 0.0)]
    return split_words(TEXT), probabilities(*p)


def candidates_of(words, p, language="english") -> list[tuple[list[tuple[int, int]], np.ndarray]]:
    """(spans, features) of each candidate of one document."""
    (found,) = find_phrases([(words, p)], language)
    return list(zip(spans_of(found), found.features, strict=True))


def spans_of(table) -> list[list[tuple[int, int]]]:
    """The mentions of each phrase."""
    spans = [tuple(span) for span in table.spans.tolist()]
    return [spans[a:b] for a, b in pairwise(table.bounds)]


def rank(weights, text, words, p) -> list[dict]:
    return PhraseRanker(weights).rank([(text, words, p)])[0].phrases()


def features_of(candidates, words, phrase: str) -> dict[str, float]:
    for spans, features in candidates:
        start, end = spans[0]
        if " ".join(word.lower() for word, _, _ in words[start:end]) == phrase:
            return dict(zip(NAMES, features, strict=True)) | {"spans": spans}
    raise AssertionError(f"{phrase} is not a candidate")


def test_features_of_a_phrase_with_two_mentions_by_hand(document):
    words, p = document
    found = features_of(candidates_of(words, p), words, "graph cuts")
    span = np.array([0.8 * 0.6, 0.5 * 0.5])  # p(B) p(I); the words after them cannot continue the phrase
    assert found["spans"] == [(0, 2), (5, 7)]
    assert found["span"] == pytest.approx(log_odds(span.max()))
    assert found["labels"] == pytest.approx(log_odds((0.8 + 0.6) / 2))
    assert found["inside"] == pytest.approx(
        log_odds(0.7)
    )  # the less certain word of "Graph cuts": 1 - p(O) = 0.1 + 0.6
    assert found["expected_mentions"] == pytest.approx(np.log1p(span.sum()))
    assert found["mentions"] == pytest.approx(np.log(2))
    assert found["first"] == found["relative_first"] == 0
    assert [found[name] for name in ("one_word", "two_words", "three_words", "more_words")] == [0, 1, 0, 0]
    assert found["labelled"] == 1
    inside = np.array([0.9, 0.7, 0, 0, 0.7, 0.6, 0, 0.3])  # without the comma
    assert found["density"] == pytest.approx(np.log(inside.mean() + 1e-3))
    assert found["begins"] == pytest.approx(np.log1p(0.8 + 0.1 + 0.5 + 0.1 + 0.3))
    assert found["document"] == pytest.approx(np.log(9))
    for a, b in INTERACTIONS:
        assert found[f"{a} x {b}"] == pytest.approx(found[a] * found[b])


def test_a_word_that_may_be_continued_is_less_likely_a_phrase_by_itself(document):
    words, p = document
    found = features_of(candidates_of(words, p), words, "graph")
    assert found["span"] == pytest.approx(log_odds(0.8 * (1 - 0.6)))
    assert found["spans"] == [(0, 1), (5, 6)] and found["labelled"] == 0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_candidates_have_no_punctuation_and_one_entry_per_phrase(data):
    texts = st.lists(st.sampled_from(["graph", "cuts", "Graphs", ",", "a", "(", "net"]), min_size=1, max_size=20)
    words = split_words(" ".join(data.draw(texts)))
    rows = data.draw(
        st.lists(st.tuples(st.floats(0, 0.5), st.floats(0, 0.5)), min_size=len(words), max_size=len(words))
    )
    p, keys = probabilities(*rows), []
    for spans, features in candidates_of(words, p):
        stems = {tuple(stem(word) for word, _, _ in words[start:end]) for start, end in spans}
        assert len(stems) == 1 and len(next(iter(stems))) <= MAX_WORDS and np.isfinite(features).all()
        assert not any(word in ",(" for start, end in spans for word, _, _ in words[start:end])
        assert features[NAMES.index("span")] >= log_odds(MIN_PROBABILITY) - 1e-9
        keys += stems
    assert len(keys) == len(set(keys))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_batch_of_documents_has_the_candidates_of_the_plain_version(data):
    """Also where a label, a phrase or a repetition would run on into the next document or unit of layout."""
    strings = [
        "graph",
        "cuts",
        "Graphs",
        "cut",
        ",",
        "a",
        "of",
        "net",
        "IT",
        "OF",
        "GRAPH",
        "-",
        "a@b.org",
        "k-cuts",
        "2-D",
        "D",
    ]
    text = st.lists(st.sampled_from([*strings, "\n\n"]), max_size=14)
    documents = []
    for words in data.draw(st.lists(text, min_size=1, max_size=4)):
        words = split_words(" ".join(words))
        row = st.tuples(st.floats(0, 0.5), st.floats(0, 0.5))
        rows = data.draw(st.lists(row, min_size=len(words), max_size=len(words)))
        documents.append((words, probabilities(*rows).reshape(-1, 3)))
    language = data.draw(st.sampled_from(["english", "german", None]))
    for (words, p), found in zip(documents, find_phrases(documents, language), strict=True):
        expected = plain_candidates.find_phrases(words, p, language)
        assert spans_of(found) == [spans for spans, _ in expected]
        if expected:
            features = np.array([[features[name] for name in NAMES] for _, features in expected])
            np.testing.assert_allclose(found.features, features, rtol=1e-9, atol=1e-12)
            p = join_probabilities(begin_units(p, unit_numbers(words)), continued_words(words))
            scores = np.concatenate([mention_scores(p, spans) for spans, _ in expected])
            np.testing.assert_allclose(found.scores, scores, rtol=1e-9)


def test_scores_do_not_depend_on_the_batch(document):
    words, p = document
    ranker = PhraseRanker(dict.fromkeys(("bias", "gold", *NAMES), 0.37))
    alone = ranker.rank([(TEXT, words, p)])[0].phrases()
    others = [("", [], np.zeros((0, 3))), *[(TEXT, words, p / 2)] * 7]
    assert ranker.rank([*others, (TEXT, words, p), *others])[len(others)].phrases() == alone


def test_a_document_without_words_has_no_candidates():
    assert candidates_of([], np.zeros((0, 3))) == []
    assert candidates_of(split_words("..."), probabilities((0.5, 0.1), (0.5, 0.1), (0.5, 0.1))) == []
    assert rank(WEIGHTS, "...", split_words("..."), probabilities(*[(0.5, 0.1)] * 3)) == []


def test_scores_are_probabilities_and_every_mention_is_reported(document):
    words, p = document
    phrases = rank(WEIGHTS | {"bias": -1.0, "mentions": 2.0}, TEXT, words, p)
    best = phrases[0]
    assert (best["keyphrase"], best["start"], best["end"]) == ("Graph", 0, 5) and len(best["mentions"]) == 2
    assert best["score"] == pytest.approx(1 / (1 + np.exp(1 - 2 * np.log(2))), abs=1e-6)
    assert [TEXT[m["start"] : m["end"]] for m in phrases[1]["mentions"]] == ["Graph cuts", "graph cut"]
    assert [phrase["score"] for phrase in phrases] == sorted((phrase["score"] for phrase in phrases), reverse=True)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=12), st.floats(1, 3))
def test_the_number_of_phrases_has_the_highest_expected_f1(scores, gold):
    scores = sorted(scores, reverse=True)
    expected = [2 * sum(scores[:n]) / (n + gold * sum(scores)) for n in range(1, len(scores) + 1)]
    number = PhraseRanker(WEIGHTS | {"gold": gold}).best_number(scores)
    assert expected[number - 1] == pytest.approx(max(expected))
    assert PhraseRanker(WEIGHTS).best_number([]) == 0


@pytest.mark.parametrize("weights", [{"bias": 0.0}, WEIGHTS | {"colour": 1.0}])
def test_weights_of_other_features_are_refused(weights):
    with pytest.raises(ValueError, match="colour" if "colour" in weights else "span"):
        PhraseRanker(weights)


def test_the_fit_finds_what_tells_keyphrases_apart(document):
    words, p = document
    random = np.random.default_rng(0)
    documents, gold = [], []
    for _ in range(60):
        noisy = np.clip(p + random.normal(0, 0.05, p.shape), 0.001, 1)
        documents.append((words, noisy / noisy.sum(1, keepdims=True)))
        gold.append(["graph cut"])
    weights = fit_ranker(documents, gold, groups=[i % 2 for i in range(60)])
    json.dumps(weights)
    assert weights["gold"] == 1.0  # the gold phrase is always a candidate
    lost = fit_ranker(documents, [["graph cut", "hash table"]] * 60)
    assert lost["gold"] == pytest.approx(2.0, rel=0.01)
    for words, p in documents[:10]:
        phrases = rank(weights, TEXT, words, p)
        assert phrases[0]["keyphrase"] == "Graph cuts" and phrases[0]["score"] > 0.8
        assert all(phrase["score"] < 0.5 for phrase in phrases[1:])


def test_a_group_counts_by_its_share(document):
    words, p = document
    documents, gold = [(words, p)] * 40, [["graph cut"]] * 20 + [["hash table"]] * 20
    groups = ["a"] * 20 + ["b"] * 20
    for shares, first in (({"a": 1.0, "b": 0.01}, "Graph cuts"), ({"a": 0.5, "b": 0.5}, None), (None, None)):
        best = rank(fit_ranker(documents, gold, groups, shares), TEXT, words, p)[0]
        assert (best["keyphrase"] == first and best["score"] > 0.9) if first else best["score"] < 0.9


def test_edges_of_function_words_are_seen():
    words = split_words("The politics of IT and US trade")
    p = np.tile([0.2, 0.4, 0.4], (len(words), 1))
    column = NAMES.index("function_word")
    seen = {
        " ".join(word for word, _, _ in words[a:b]): features[column]
        for spans, features in candidates_of(words, p)
        for a, b in spans
    }
    assert seen["politics of"] == seen["The politics"] == seen["and US"] == 1
    assert seen["IT"] == seen["US trade"] == seen["politics of IT"] == 0
    assert not any(features[column] for _, features in candidates_of(words, p, "german"))


def test_a_fit_needs_right_and_wrong_candidates(document):
    with pytest.raises(ValueError, match="0 of"):
        fit_ranker([document], [["nothing of it"]])


def test_the_pipeline_uses_the_ranker_of_the_model_unless_a_threshold_is_given(sharp_seke, tiny_tokenizer, tmp_path):
    model, text = sharp_seke(), "the graph cut of networks and the graph cuts for learning"
    plain = pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer)
    expected = plain(text, threshold=0.2)
    model.config.keyphrase_ranker = WEIGHTS | {"bias": -4.0, "mentions": 8.0}
    extract = pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer)
    assert extract(text, threshold=0.2, min_score=0.0) == expected
    ((words, p),) = extract.read_words([text])
    ranked = rank(model.config.keyphrase_ranker, text, words, p)
    assert extract(text, min_score=0.0, top_k=None) == ranked
    number = PhraseRanker(model.config.keyphrase_ranker).best_number([phrase["score"] for phrase in ranked])
    assert extract(text) == ranked[:number] and 0 < number < len(ranked)
    assert extract(text, min_score=0.6) == [phrase for phrase in ranked if phrase["score"] >= 0.6] != ranked
    extract.save_pretrained(tmp_path)
    assert pipeline("keyphrase-extraction", model=str(tmp_path))(text) == extract(text)
    batch = [text, "graph", "", "learning networks " * 90]
    assert extract(batch, min_score=0.0) == [extract(one, min_score=0.0) for one in batch]
    diverse = extract(batch, diversity=0.5)
    assert diverse == [extract(one, diversity=0.5) for one in batch]
    assert [len(phrases) for phrases in diverse] == [len(phrases) for phrases in extract(batch)]
    names = {phrase["keyphrase"] for phrase in extract(text, diversity=1.0, top_k=number)}
    assert names == {phrase["keyphrase"] for phrase in ranked[:number]}  # only what is returned without diversity


def test_function_words_alone_are_no_phrase():
    """Whatever the model labels: "the" and "such as" say nothing, "state of the art" and the acronym IT do."""
    words = split_words("The US is a state of the art such as IT does.")
    p = np.tile([0.1, 0.6, 0.3], (len(words), 1))
    found = {" ".join(word for word, _, _ in words[a:b]) for spans, _ in candidates_of(words, p) for a, b in spans}
    assert {"US", "IT", "state of the", "state", "art", "the art"} <= found
    assert not {"The", "is", "a", "of", "the", "such", "as", "is a", "of the", "such as"} & found
    in_german = {
        " ".join(word for word, _, _ in words[a:b]) for spans, _ in candidates_of(words, p, "german") for a, b in spans
    }
    assert {"The", "such as"} <= in_german


def test_function_words_in_a_line_of_capitals_are_no_acronyms():
    text = "THE LAWS OF MOTION\n\nThe IT department, IBM IT services and A STATE OF IT"
    words = split_words(text)
    functional = WordArrays([(words, np.full((len(words), 3), 1 / 3))], "english").functional
    found = [word for (word, _, _), is_functional in zip(words, functional, strict=True) if is_functional]
    assert found == ["THE", "OF", "The", "and", "A", "OF", "IT"]
