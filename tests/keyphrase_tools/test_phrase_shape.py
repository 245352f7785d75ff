"""Word classes, and what a ranker reads from them: by hand, fitted, and in the pipeline and an exported graph."""

import numpy as np
import pytest
import torch
from transformers import pipeline

from keyphrase_tools.ranker_fit import fit_ranker
from lexperts_lite.phrase_features import NAMES, NAMES_WITH_SHAPE, find_phrases
from lexperts_lite.phrase_shape import noun_phrase_ends, noun_phrases
from lexperts_lite.ranking import PhraseRanker
from lexperts_lite.word_classes import CLASSES, fit_word_classes, read_word_classes
from lexperts_lite.words import split_words, stem_phrase

TEXT = "The old owl sees grey owls, and flies to the dark nest. Owls fly."
WORDS = {"old": 1, "grey": 1, "dark": 1, "owl": 2, "owls": 2, "nest": 2}
SHAPED = {"bias": 0.0, "gold": 1.0, **dict.fromkeys(NAMES_WITH_SHAPE, 0.0)}


def classes_of(words, sure=0.9):
    """(W, 3): a class for each word, with this probability."""
    rows = np.full((len(words), 3), (1 - sure) / 2)
    rows[np.arange(len(words)), [WORDS.get(word.lower(), 0) for word, _, _ in words]] = sure
    return rows.astype(np.float32)


def even(words):
    """The same labels for every word."""
    return np.tile([0.5, 0.25, 0.25], (len(words), 1))


def shape_of(text, sure=0.9):
    """Phrase in lower case -> name of a feature -> its value."""
    words = split_words(text)
    (table,) = find_phrases([(words, even(words))], classes=[classes_of(words, sure)])
    first = table.spans[table.bounds[:-1]].tolist()
    names = [" ".join(word.lower() for word, _, _ in words[start:end]) for start, end in first]
    assert table.features.shape[1] == len(NAMES_WITH_SHAPE)
    return {
        name: dict(zip(NAMES_WITH_SHAPE, row, strict=True)) for name, row in zip(names, table.features, strict=True)
    }


def test_whole_noun_phrases_stand_out_by_hand():
    found = shape_of(TEXT)
    assert found["old owl"]["best_noun_phrase"] == pytest.approx(0.95 * 0.9 * 0.9 * 0.95, rel=1e-5)  # The _ sees
    assert found["old"]["best_noun_phrase"] == pytest.approx(0.95 * 0.05 * 0.9 * 0.1, rel=1e-5)  # part of "old owl"
    assert found["owl"]["best_noun_phrase"] == pytest.approx(
        0.95 * 0.9 * 1 * 0.95, rel=1e-5
    )  # "Owls" after a full stop
    part = 0.95 * 0.9 * 0.05  # after an adjective
    mentions = [part * 0.95, part, 0.95 * 0.9 * 0.95]
    assert found["owl"]["noun_phrase"] == pytest.approx(np.mean(mentions), rel=1e-5)
    assert found["owl"]["noun_phrases"] == pytest.approx(np.log1p(sum(mentions)), rel=1e-5)
    assert found["old owl"]["document x noun_phrase"] == pytest.approx(
        found["old owl"]["document"] * found["old owl"]["noun_phrase"]
    )
    assert max(found, key=lambda name: found[name]["best_noun_phrase"]) in {"old owl", "grey owls", "dark nest", "owl"}


def test_the_central_word_is_frequent_and_early():
    found = shape_of(TEXT)
    assert found["owl"]["central"] == max(row["central"] for name, row in found.items() if " " not in name)
    assert found["old owl"]["central"] == pytest.approx(found["old"]["central"] + found["owl"]["central"])


def test_a_phrase_does_not_go_on_over_a_unit_of_layout():
    units, allowed = np.array([0, 0, 1, 1]), np.ones(4, dtype=bool)
    classes = np.array([[0.1, 0.1, 0.8]] * 4)
    found = noun_phrases(np.array([0, 1, 2]), np.array([2, 1, 2]), units, allowed, classes)
    np.testing.assert_allclose(found, [0.9 * 0.8, 0.9 * 0.8 * 0.1, 0.9 * 0.8])


def test_features_do_not_depend_on_the_batch():
    texts = [TEXT, "", "Owls fly to the nest of the old owl", TEXT.upper()]
    documents = [split_words(text) for text in texts]
    together = find_phrases([(w, even(w)) for w in documents], classes=[classes_of(w) for w in documents])
    for words, found in zip(documents, together, strict=True):
        (alone,) = find_phrases([(words, even(words))], classes=[classes_of(words)])
        np.testing.assert_array_equal(found.features, alone.features)


def test_the_fit_prefers_noun_phrases():
    words = split_words(TEXT)
    documents, gold = [(words, even(words))] * 20, [["old owl", "grey owl", "dark nest"]] * 20
    weights = fit_ranker(documents, gold, classes=[classes_of(words)] * 20)
    assert set(weights) == set(SHAPED) and PhraseRanker(weights).reads_shape
    (ranked,) = PhraseRanker(weights).rank([(TEXT, *documents[0])], classes=[classes_of(words)])
    assert {phrase["keyphrase"] for phrase in ranked.phrases(3)} == {"old owl", "grey owls", "dark nest"}
    assert set(fit_ranker(documents, gold)) == {"bias", "gold", *NAMES}


# the classifier


@pytest.fixture(scope="module")
def classifier():
    """States of three classes that a linear layer tells apart, and the fitted weights."""
    random = np.random.default_rng(0)
    classes = random.integers(0, 3, 600)
    states = random.normal(size=(600, 32)) + 4 * random.normal(size=(3, 32))[classes]
    return states, classes, fit_word_classes(states, classes)


def test_the_fit_tells_classes_apart(classifier):
    states, classes, weights = classifier
    config = type("Config", (), {"keyphrase_word_classes": weights, "hidden_size": 32})()
    weight, bias = read_word_classes(config)
    assert ((states @ weight.T + bias).argmax(1) == classes).mean() > 0.99
    with pytest.raises(ValueError, match="'noun'"):
        fit_word_classes(states, np.minimum(classes, 1))


def test_a_dimension_that_hardly_varies_does_not_swamp_the_others(classifier):
    """As a unit that training has switched off: standardised, its noise would get a weight of millions."""
    states, classes, _ = classifier
    noise = 1e-7 * (np.arange(600) % 2 + classes)
    weights = fit_word_classes(np.column_stack([states, 1 + noise, np.full(600, 3.0)]), classes)
    rows = np.array([weights[name] for name in CLASSES])
    changed = np.column_stack([states, 1 - 1e-3 * np.ones(600), np.full(600, 3.0)])  # by another dtype, say
    assert ((changed @ rows[:, 1:].T + rows[:, 0]).argmax(1) == classes).mean() > 0.99
    assert np.abs(rows[:, 1:]).max() < 100


@pytest.mark.parametrize(
    "value, message",
    [
        ({"other": [0.0], "noun": [0.0]}, "does not have the keys"),
        (dict.fromkeys(CLASSES, [0.0] * 5), "has 4 weights for states of size 32"),
        ({"other": [0.0], "modifier": [0.0, 1.0], "noun": [0.0]}, "same length"),
        (dict.fromkeys(CLASSES, [float("nan")] * 33), "finite"),
        ([1, 2], "does not have the keys"),
    ],
    ids=str,
)
def test_weights_that_do_not_fit_are_refused(value, message):
    config = type("Config", (), {"keyphrase_word_classes": value, "hidden_size": 32})()
    with pytest.raises(ValueError, match=message):
        read_word_classes(config)


# the pipeline


@pytest.fixture
def shaped(sharp_seke, tiny_tokenizer):
    """A pipeline over a tiny SEKE with word classes, whose ranker prefers noun phrases."""
    model = sharp_seke()
    random, d = np.random.default_rng(1), model.config.hidden_size
    model.config.keyphrase_word_classes = {name: [0.0, *random.normal(size=d).tolist()] for name in CLASSES}
    model.config.keyphrase_ranker = SHAPED | {"best_noun_phrase": 3.0, "central": 0.5, "document x noun_phrases": 0.2}
    yield pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer, top_k=None, min_score=0.0)
    model.config.keyphrase_word_classes = model.config.keyphrase_ranker = None


def test_the_pipeline_gives_the_same_alone_in_a_batch_and_in_windows(shaped):
    texts = [TEXT, "The owl.", "", TEXT * 3]
    alone = [shaped(text) for text in texts]
    assert alone[0] and len({phrase["score"] for phrase in alone[0]}) > 3
    for found, expected in zip(shaped(texts, batch_size=4), alone, strict=True):
        assert [p["keyphrase"] for p in found] == [p["keyphrase"] for p in expected]
        np.testing.assert_allclose([p["score"] for p in found], [p["score"] for p in expected], atol=1e-5)
    block = shaped.read([TEXT * 3], max_length=16)
    classes = block.probabilities.classes(0)
    np.testing.assert_allclose(classes.sum(1), 1, atol=1e-5)
    assert len(block.windows) > 1


def test_classes_are_the_linear_layer_on_the_backbones_states(shaped):
    (weight, bias), words = read_word_classes(shaped.model.config), split_words(TEXT)
    inputs = shaped.tokenizer(TEXT, return_tensors="pt", return_offsets_mapping=True)
    offsets = inputs.pop("offset_mapping")[0, :, 0].tolist()
    with torch.no_grad():
        states = shaped.model(**inputs, output_hidden_states=True).hidden_states[-1][0]
    expected = (states @ torch.from_numpy(weight).T + torch.from_numpy(bias)).softmax(-1)
    found = shaped.read([TEXT]).probabilities.classes(0)
    first = [next(i for i, offset in enumerate(offsets) if i and offset == start) for _, start, _ in words]
    np.testing.assert_allclose(found, expected[first].numpy(), atol=1e-5)


def test_a_saved_model_keeps_its_classes(shaped, tmp_path):
    shaped.save_pretrained(tmp_path)
    again = pipeline("keyphrase-extraction", model=str(tmp_path), top_k=None, min_score=0.0)
    assert again(TEXT) == shaped(TEXT)


def test_a_ranker_without_its_classes_is_refused(sharp_seke, tiny_tokenizer):
    model = sharp_seke()
    model.config.keyphrase_ranker = SHAPED
    with pytest.raises(ValueError, match="needs keyphrase_word_classes"):
        pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer)
    model.config.keyphrase_ranker = None


def test_a_noun_phrase_is_a_candidate_whatever_its_labels():
    words = split_words(TEXT)
    nothing = np.tile([0.999, 0.0005, 0.0005], (len(words), 1))
    (without,) = find_phrases([(words, nothing)])
    assert not len(without.features)
    (table,) = find_phrases([(words, nothing)], classes=[classes_of(words)])
    found = {stem_phrase(" ".join(word for word, _, _ in words[a:b])) for a, b in table.spans}
    assert found == {"old owl", "grey owl", "dark nest", "owl"}


def test_noun_phrases_end_with_their_last_noun_and_do_not_pass_a_line():
    classes = np.eye(3)[[1, 2, 1, 0, 2, 2, 2, 1]]
    units = np.array([0, 0, 0, 0, 0, 0, 1, 1])
    assert noun_phrase_ends(units, np.ones(8, dtype=bool), classes).tolist() == [2, 1, 2, 3, 6, 5, 7, 7]
    assert noun_phrase_ends(units, np.array([1, 0, 1, 1, 1, 1, 1, 1], dtype=bool), classes)[0] == 0
