"""diversity=: maximal marginal relevance on the model's states, with windows, titles, CRFs and streams."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForTokenClassification, pipeline

from keyphrase_tools import KeyphraseExtractionPipeline
from lexperts_lite.diversity import WordStates, diversify, phrase_vectors
from lexperts_lite.input_documents import split_into_blocks
from lexperts_lite.words import split_words
from tests.keyphrase_tools.known_answers import TEXT, assert_same, names, random_text
from tests.tiny_models import make_model

LABELS = {0: "O", 1: "B-KEY", 2: "I-KEY"}
LONG = random_text(150, 5)


def hidden_states(extract, text):
    """The last states (S, d) of a text of one window, straight from the model."""
    inputs = extract.tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        return extract.model.eval()(**inputs, output_hidden_states=True).hidden_states[-1][0]


def reference(phrases, vectors, diversity):
    """Maximal marginal relevance by its definition, without shortcuts."""

    def cosine(i, j):
        return float(vectors[i] @ vectors[j] / (np.linalg.norm(vectors[i]) * np.linalg.norm(vectors[j])))

    chosen, left = [0], list(range(1, len(phrases)))
    lowest = min(phrase["score"] for phrase in phrases)
    score = [(phrase["score"] - lowest) / (phrases[0]["score"] - lowest) for phrase in phrases]
    while left:
        value = {i: (1 - diversity) * score[i] - diversity * max(cosine(i, j) for j in chosen) for i in left}
        best = max(left, key=lambda i: (value[i], -i))
        chosen.append(best)
        left.remove(best)
    return chosen


# ---- the order


@pytest.mark.parametrize("diversity", [0.2, 0.5, 1.0])
def test_the_order_is_that_of_the_definition_on_the_models_states(extract, diversity):
    text = random_text(20, 9)
    phrases = extract(text, top_k=None)
    states, encoded = hidden_states(extract, text), extract.tokenizer(text)
    vectors = []
    for phrase in phrases:
        pieces = []
        for mention in phrase["mentions"]:
            inside = text[mention["start"] : mention["end"]]
            starts = [mention["start"] + i for i, c in enumerate(inside) if i == 0 or inside[i - 1] == " "]
            pieces += [states[encoded.char_to_token(start)].numpy() for start in starts]
        vectors.append(np.mean(pieces, axis=0))
    expected = [phrases[i] for i in reference(phrases, vectors, diversity)]
    assert len(phrases) > 6 and extract(text, top_k=None, diversity=diversity) == expected
    assert expected != phrases
    assert extract(text, top_k=3, diversity=diversity) == expected[:3]


def test_with_diversity_0_no_states_are_computed_and_nothing_changes(extract, monkeypatch):
    texts = [TEXT, LONG]
    plain, forward, given = extract(texts), extract.model.forward, []

    def seen(*args, **kwargs):
        given.append(kwargs)
        return forward(*args, **kwargs)

    monkeypatch.setattr(extract.model, "forward", seen)
    assert extract(texts, diversity=0) == extract(texts, diversity=0.0) == plain
    assert given and not any("output_hidden_states" in kwargs for kwargs in given)
    extract(texts, diversity=0.1)
    assert given[-1]["output_hidden_states"] is True


def test_diversity_changes_the_order_and_nothing_else(extract):
    texts = [TEXT, LONG, "", "graph"]
    plain, diverse = extract(texts, top_k=None), extract(texts, top_k=None, diversity=0.8)
    by_place = [[sorted(phrases, key=lambda p: p["start"]) for phrases in answers] for answers in (plain, diverse)]
    assert by_place[0] == by_place[1] and plain != diverse
    assert [phrases[:1] for phrases in plain] == [phrases[:1] for phrases in diverse]


vectors = st.lists(st.lists(st.floats(-1, 1, width=32), min_size=3, max_size=3), min_size=1, max_size=8)


@settings(max_examples=100, deadline=None)
@given(vectors, st.floats(0, 1), st.integers(1, 9), st.randoms())
def test_a_choice_is_a_permutation_and_a_shorter_one_its_beginning(vectors, diversity, top_k, random):
    scores = sorted((random.random() for _ in vectors), reverse=True)
    phrases = [{"score": score, "n": i} for i, score in enumerate(scores)]
    unit = np.array(vectors) / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6)
    chosen = diversify(phrases, unit, diversity)
    assert sorted(p["n"] for p in chosen) == list(range(len(vectors))) and chosen[0] is phrases[0]
    assert diversify(phrases, unit, diversity, top_k) == chosen[:top_k]
    assert diversify(phrases, unit, 0.0) == phrases


def test_of_two_near_copies_the_second_comes_late():
    phrases = [{"score": s} for s in (0.9, 0.8, 0.5)]
    vectors = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert [p["score"] for p in diversify(phrases, vectors, 0.5)] == [0.9, 0.5, 0.8]
    assert [p["score"] for p in diversify(phrases, vectors, 0.1)] == [0.9, 0.8, 0.5]
    assert diversify([], np.zeros((0, 0)), 0.5) == []


# ---- any model


@pytest.mark.parametrize("name", ["bert", "deberta-v2", "modernbert"])
def test_any_backbone(sharp_seke, tiny_tokenizer, name):
    extract = KeyphraseExtractionPipeline(sharp_seke(name), tiny_tokenizer, top_k=None)
    plain, diverse = extract(LONG), extract(LONG, diversity=0.9)
    assert plain != diverse and sorted(map(str, plain)) == sorted(map(str, diverse))


def test_a_stock_token_classifier(backbone_config, tiny_tokenizer):
    torch.manual_seed(0)
    model = AutoModelForTokenClassification.from_config(backbone_config("bert", id2label=LABELS)).eval()
    model.classifier.weight.data *= 30
    extract = pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer, top_k=None)
    assert extract(LONG) != extract(LONG, diversity=0.9) != []


def test_a_model_with_a_crf_and_titles(tiny_tokenizer):
    model = make_model("HypernetForTokenClassification")
    model.classifier.weight.data *= 30
    extract = KeyphraseExtractionPipeline(model, tiny_tokenizer, top_k=None)
    document = {"title": "graph cut", "text": random_text(60, 2)}
    plain, diverse = extract(document), extract(document, diversity=0.9)
    assert len(plain) > 3 and plain != diverse
    assert sorted(map(str, plain)) == sorted(map(str, diverse))  # the CRF's path still chooses the labels


def test_a_model_without_hidden_states_is_named(lookup):
    with pytest.raises(ValueError, match="hidden_states.*output_hidden_states=True"):
        lookup()("x bx", diversity=0.5)
    assert names(lookup()("x bx", diversity=0)) == ["bx"]


@pytest.mark.parametrize("diversity", [-0.1, 1.5, float("nan"), "high", True])
def test_a_diversity_outside_0_to_1_is_refused(extract, diversity):
    with pytest.raises(ValueError, match="diversity="):
        extract(TEXT, diversity=diversity)


# ---- windows, batches and streams


def test_a_words_state_is_that_of_the_window_where_it_is_furthest_from_an_edge(extract):
    text = random_text(120, 4)
    windows = extract.preprocess([text], max_length=30).windows
    assert len(windows) > 3
    values, expected, random = {}, {}, np.random.default_rng(0)
    for w in windows:
        p = random.dirichlet([1, 1, 1], size=len(w.word_starts))
        values[w.number] = {"states": random.normal(size=(len(p), 2)), "probabilities": p, "tags": p.argmax(-1)}
    for word in range(len(split_words(text))):
        places = [(w.edge_distance[i], -w.number, i) for w in windows for i in np.flatnonzero(w.word_starts == word)]
        _, number, i = max(places)
        if values[-number]["tags"][i]:
            expected[word] = values[-number]["states"][i]
    for order in (windows, windows[::-1], windows[1::2] + windows[::2]):
        block = extract.preprocess([text], max_length=30)
        block.states = WordStates(1)
        for window in order:
            block.add(window, values[window.number])
        found = block.states.pop(0)
        assert found.keys() == expected.keys() and all((found[w] == expected[w]).all() for w in found)
        assert block.states.pop(0) == {}


def test_only_words_of_phrases_and_candidates_are_kept():
    p = np.array([[1.0, 0, 0], [0.85, 0.05, 0.1], [1.0, 0, 0], [1.0, 0, 0]])
    values = {"probabilities": p, "states": np.arange(8, dtype=np.float32).reshape(-1, 2)}
    for threshold, mentions, kept in (
        (0.1, None, {1}),
        (None, None, set()),
        (0.1, [{"cut": [(3, 4)], "x": []}], {1, 3}),
    ):
        collected = WordStates(1, threshold, mentions)
        collected.add(0, np.arange(4), values)
        assert set(collected.pop(0)) == kept


def test_a_phrase_without_states_has_the_vector_0():
    words = [("a", 0, 1), ("b", 2, 3)]
    phrases = [{"mentions": [{"start": 0, "end": 3}]}, {"mentions": [{"start": 2, "end": 3}]}]
    vectors = phrase_vectors(phrases, words, {0: np.array([3.0, 4.0])})
    assert vectors.tolist() == [pytest.approx([0.6, 0.8]), [0.0, 0.0]]
    assert phrase_vectors(phrases, words, {}).shape == (2, 0)


def test_the_answer_is_the_same_alone_and_in_a_mixed_batch(extract):
    texts = [TEXT, random_text(3), LONG, "", random_text(40, 2)]
    alone = [extract(text, diversity=0.7) for text in texts]
    for options in ({"batch_size": 2}, {"batch_size": 64}):
        answers = extract(texts, diversity=0.7, **options)
        assert [names(answer) for answer in answers] == [names(answer) for answer in alone]
        assert_same(answers, alone)


def test_candidates_can_be_diverse_too(extract):
    text = random_text(40, 6)
    candidates = text.split()[:12]
    plain = extract(text, candidates=[*dict.fromkeys(candidates), "absent phrase"])
    diverse = extract(text, candidates=[*dict.fromkeys(candidates), "absent phrase"], diversity=0.9)
    assert plain != diverse and sorted(map(str, plain)) == sorted(map(str, diverse))
    assert diverse[0] == plain[0] and diverse[-1] == plain[-1] and plain[-1]["mentions"] == []


def test_a_stream_of_blocks(extract):
    texts = [TEXT, LONG, random_text(40, 2)]
    (block,) = split_into_blocks(texts, 10)
    found = {}
    for finished in extract.read_block(block, batch_size=1, diversity=0.7):
        found |= finished
    assert_same([found[i] for i in range(3)], extract(texts, diversity=0.7))


def test_a_pipeline_can_be_pickled_after_diversity_was_used(extract):
    expected = extract(LONG, diversity=0.5)
    again = pickle.loads(pickle.dumps(extract))
    assert_same([again(LONG, diversity=0.5)], [expected])
    assert_same([extract(LONG, diversity=0.5)], [expected])  # pickling has removed nothing from this one
