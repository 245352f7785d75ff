"""Rankers: scores, the best number, the fit of their weights and of word classes, and the pipeline of a model that has one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import pipeline

from keyphrase_tools.ranker_fit import DECAY, fit_ranker, fit_word_classes, order_phrases
from lexperts_lite.call_options import MIN_PHRASES
from lexperts_lite.features import CLASSES, FEATURES, NOUN_FEATURES
from lexperts_lite.ranking import PhraseRanker, read_word_classes, without_nested
from lexperts_lite.words import split_words

from .known_answers import assert_same

TEXT = "Graph cuts, and a graph cut of networks"
OWLS = "The old owl sees grey owls, and flies to the dark nest. Owls fly."
WEIGHTS = {"bias": 0.0, "gold": 1.0, **dict.fromkeys(FEATURES.keys() - NOUN_FEATURES, 0.0)}


@pytest.fixture
def document():
    """The words of TEXT and their probabilities (W, 3)."""
    b = [0.8, 0.1, 0, 0, 0, 0.5, 0.1, 0, 0.3]
    i = [0.1, 0.6, 0, 0, 0, 0.2, 0.5, 0, 0.0]
    return split_words(TEXT), np.array([[1 - x - y, x, y] for x, y in zip(b, i, strict=True)])


def owl_classes(words):
    """(W, 3): a class for each word of OWLS."""
    kinds = {"old": 1, "grey": 1, "dark": 1, "owl": 2, "owls": 2, "nest": 2}
    classes = np.full((len(words), 3), 0.05, dtype=np.float32)
    classes[np.arange(len(words)), [kinds.get(word.lower(), 0) for word, _, _ in words]] = 0.9
    return classes


def rank(weights, text, words, p, classes=None) -> list[dict]:
    return PhraseRanker(weights).rank([(text, words, p)], classes=classes)[0].phrases()


# ---- the ranker


def test_scores_are_probabilities_and_every_mention_is_reported(document):
    phrases = rank({"bias": -1.0, "gold": 1.0, "expected_mentions": 2.0}, TEXT, *document)
    best = phrases[0]
    assert (best["keyphrase"], best["start"], best["end"]) == ("Graph cuts", 0, 10)
    assert [TEXT[m["start"] : m["end"]] for m in best["mentions"]] == ["Graph cuts", "graph cut"]
    assert best["score"] == pytest.approx(1 / (1 + np.exp(1 - 2 * np.log1p(0.48 + 0.25))), abs=1e-6)
    assert [phrase["score"] for phrase in phrases] == sorted((phrase["score"] for phrase in phrases), reverse=True)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=12), st.floats(1, 3))
def test_the_number_of_phrases_has_the_highest_expected_f1(scores, gold):
    scores = sorted(scores, reverse=True)
    expected = [2 * sum(scores[:n]) / (n + gold * sum(scores)) for n in range(1, len(scores) + 1)]
    number = PhraseRanker(WEIGHTS | {"gold": gold}).best_number(scores)
    assert expected[number - 1] == pytest.approx(max(expected))
    assert PhraseRanker(WEIGHTS).best_number([]) == 0


@pytest.mark.parametrize("weights, shown", [
    ({"gold": 1.0}, "bias"), (WEIGHTS | {"colour": 1.0}, "colour"), (WEIGHTS | {"span": float("nan")}, "span=nan"), (WEIGHTS | {"span": True}, "span=True"),
])  # fmt: skip
def test_weights_that_are_wrong_are_named(weights, shown):
    with pytest.raises(ValueError, match=shown):
        PhraseRanker(weights)


# ---- the fit


def test_the_fit_finds_what_tells_keyphrases_apart(document):
    (words, p), random = document, np.random.default_rng(0)
    noisy = [np.clip(p + random.normal(0, 0.05, p.shape), 0.001, 1) for _ in range(60)]
    documents = [(words, each / each.sum(1, keepdims=True)) for each in noisy]
    weights = fit_ranker(documents, [["graph cut"]] * 60, groups=[i % 2 for i in range(60)])
    assert set(weights) == set(WEIGHTS) and weights["gold"] == 1.0  # the gold phrase is a candidate
    assert fit_ranker(documents, [["graph cut", "hash table"]] * 60)["gold"] == pytest.approx(2.0, rel=0.01)
    for one in documents[:10]:
        best, *others = rank(weights, TEXT, *one)
        assert best["keyphrase"] == "Graph cuts" and best["score"] > 0.8 > 0.5 > max(p["score"] for p in others)
    with pytest.raises(ValueError, match="0 of"):
        fit_ranker(documents, [["nothing of it"]] * 60)


def test_the_fit_prefers_noun_phrases():
    words = split_words(OWLS)
    document, gold = (words, np.tile([0.5, 0.25, 0.25], (len(words), 1))), ["old owl", "grey owl", "dark nest"]
    weights = fit_ranker([document] * 20, [gold] * 20, classes=[owl_classes(words)] * 20)
    assert set(weights) == {"bias", "gold", *FEATURES} and PhraseRanker(weights).reads_classes
    best = rank(weights, OWLS, *document, [owl_classes(words)])[:3]
    assert {phrase["keyphrase"] for phrase in best} == {"old owl", "grey owls", "dark nest"}


def test_a_group_counts_by_its_share(document):
    words, p = document
    documents, gold = [(words, p)] * 40, [["graph cut"]] * 20 + [["hash table"]] * 20
    groups = ["a"] * 20 + ["b"] * 20
    for shares, first in (({"a": 1.0, "b": 0.01}, "Graph cuts"), ({"a": 0.5, "b": 0.5}, None), (None, None)):
        best = rank(fit_ranker(documents, gold, groups, shares), TEXT, words, p)[0]
        assert (best["keyphrase"] == first and best["score"] > 0.9) if first else best["score"] < 0.9


SIZES = np.array([4, 3, 5, 2])  # of the phrases of four documents; none of the third is right, all of the last are


@pytest.fixture(name="phrases")
def fixture_phrases():
    x = np.random.default_rng(0).normal(size=(14, 3))
    return x, np.array([1, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1], dtype=bool)


def plain_loss(w, x, right, weight):
    """The formula, document by document."""
    loss, start = DECAY * (w @ w), 0
    parts = np.split(right, SIZES.cumsum()[:-1])
    counted = [i for i, of in enumerate(parts) if of.any() and not of.all()]
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


# ---- word classes


def config_of(weights, size=32):
    return type("Config", (), {"keyphrase_word_classes": weights, "hidden_size": size})()


def test_the_fit_tells_classes_apart():
    random = np.random.default_rng(0)
    classes = random.integers(0, 3, 600)
    states = random.normal(size=(600, 32)) + 4 * random.normal(size=(3, 32))[classes]
    weight, bias = read_word_classes(config_of(fit_word_classes(states, classes)))
    assert ((states @ weight.T + bias).argmax(1) == classes).mean() > 0.99
    with pytest.raises(ValueError, match="'noun'"):
        fit_word_classes(states, np.minimum(classes, 1))
    # a dimension that hardly varies, as a unit that training has switched off, does not swamp the others
    noise = 1e-7 * (np.arange(600) % 2 + classes)
    states = np.column_stack([states, 1 + noise, np.full(600, 3.0)])
    weight, bias = read_word_classes(config_of(fit_word_classes(states, classes), 34))
    changed = np.column_stack([states[:, :32], 1 - 1e-3 * np.ones(600), np.full(600, 3.0)])  # by another dtype, say
    assert ((changed @ weight.T + bias).argmax(1) == classes).mean() > 0.99 and np.abs(weight).max() < 100


@pytest.mark.parametrize("value", [
    {"other": [0.0], "noun": [0.0]}, dict.fromkeys(CLASSES, [0.0] * 5), dict.fromkeys(CLASSES, [float("nan")] * 33), [1, 2],
], ids=str)  # fmt: skip
def test_a_classifier_that_does_not_fit_is_refused(value):
    with pytest.raises(ValueError, match="not one list of 33 finite numbers for each of other, modifier, noun"):
        read_word_classes(config_of(value))


# ---- the pipeline


def test_the_pipeline_uses_the_ranker_of_the_model_unless_a_threshold_is_given(sharp_seke, tiny_tokenizer, tmp_path):
    model, text = sharp_seke(), "the graph cut of networks and the graph cuts for learning"
    plain = pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer)
    expected = plain(text, threshold=0.2)
    model.config.keyphrase_ranker = {"bias": -4.0, "gold": 1.0, "expected_mentions": 8.0}
    extract = pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer)
    assert extract(text, threshold=0.2, min_score=0.0) == expected
    block = extract.read([text])
    words, p = block.documents[0].words, block.probabilities.document(0)
    ranked = rank(model.config.keyphrase_ranker, text, words, p)
    assert extract(text, min_score=0.0, top_k=None) == ranked
    number = PhraseRanker(model.config.keyphrase_ranker).best_number([phrase["score"] for phrase in ranked])
    assert 0 < number < len(ranked)
    for least in (0, number + 1, 99):
        found = extract(text, min_phrases=least, top_k=None)
        assert found[:number] == ranked[:number] and len(found) <= max(number, least)
        assert found[number:] == [one for one in without_nested(ranked) if one in found[number:]]
        assert len(found) >= min(least, len(without_nested(ranked)))
        assert extract(text, min_phrases=least, top_k=2) == found[:2]
        apart = extract(text, min_score=0.0, top_k=None, nested=False)
        kept = extract(text, min_phrases=least, top_k=None, nested=False)
        assert kept == apart[: len(kept)] and len(kept) >= min(least, len(apart))
    assert extract(text) == extract(text, min_phrases=MIN_PHRASES)
    middle = ranked[len(ranked) // 2]["score"]
    sure = [phrase for phrase in ranked if phrase["score"] >= middle]
    assert extract(text, min_score=middle, top_k=None) == sure != ranked
    extract.save_pretrained(tmp_path)
    assert pipeline("keyphrase-extraction", model=str(tmp_path))(text) == extract(text)
    batch = [text, "graph", "", "learning networks " * 90]
    assert extract(batch, min_score=0.0) == [extract(one, min_score=0.0) for one in batch]
    diverse = extract(batch, diversity=0.5)
    assert diverse == [extract(one, diversity=0.5) for one in batch]
    assert [len(phrases) for phrases in diverse] == [len(phrases) for phrases in extract(batch)]
    names = {phrase["keyphrase"] for phrase in extract(text, diversity=1.0, top_k=number)}
    assert names == {phrase["keyphrase"] for phrase in ranked[:number]}  # only what is returned without diversity


@pytest.fixture
def shaped(sharp_seke, tiny_tokenizer):
    """A pipeline over a tiny SEKE with word classes, whose ranker prefers noun phrases."""
    model = sharp_seke()
    random, d = np.random.default_rng(1), model.config.hidden_size
    model.config.keyphrase_word_classes = {name: [0.0, *random.normal(size=d).tolist()] for name in CLASSES}
    model.config.keyphrase_ranker = {"bias": 0.0, "gold": 1.0, "best_noun_phrase": 3.0, "relative_first": -0.5}
    yield pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer, top_k=None, min_score=0.0)
    model.config.keyphrase_word_classes = model.config.keyphrase_ranker = None


def test_classes_are_the_linear_layer_on_the_backbones_states_in_any_batch(shaped, tmp_path):
    (weight, bias), words = map(torch.from_numpy, read_word_classes(shaped.model.config)), split_words(OWLS)
    inputs = shaped.tokenizer(OWLS, return_tensors="pt", return_offsets_mapping=True)
    offsets = inputs.pop("offset_mapping")[0, 1:, 0].tolist()
    with torch.no_grad():
        states = shaped.model(**inputs, output_hidden_states=True).hidden_states[-1][0]
    expected = (states @ weight.T + bias).softmax(-1)[[1 + offsets.index(start) for _, start, _ in words]]
    np.testing.assert_allclose(shaped.read([OWLS]).probabilities.classes(0), expected.numpy(), atol=1e-5)
    texts = [OWLS, "The owl.", "", OWLS * 3]
    alone = [shaped(text) for text in texts]
    assert len({phrase["score"] for phrase in alone[0]}) > 3
    assert_same(shaped(texts, batch_size=4), alone)
    shaped.save_pretrained(tmp_path)
    assert pipeline("keyphrase-extraction", model=str(tmp_path), top_k=None, min_score=0.0)(OWLS) == alone[0]


def test_a_ranker_without_its_classes_is_refused(shaped, tiny_tokenizer):
    shaped.model.config.keyphrase_word_classes = None
    with pytest.raises(ValueError, match="needs keyphrase_word_classes"):
        pipeline("keyphrase-extraction", model=shaped.model, tokenizer=tiny_tokenizer)
