"""diversity=: maximal marginal relevance on the model's states, with windows, titles, CRFs and streams."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForTokenClassification

from keyphrase_tools import KeyphraseExtractionPipeline
from lexperts_lite.diversity import diversify, phrase_vectors
from lexperts_lite.input_documents import split_into_blocks
from tests.keyphrase_tools.known_answers import TEXT, assert_same, names, random_text
from tests.tiny_models import make_model

LABELS = {0: "O", 1: "B-KEY", 2: "I-KEY"}
LONG = random_text(150, 5)


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


@pytest.mark.parametrize("diversity", [0.2, 0.5, 1.0])
def test_the_order_is_that_of_the_definition_on_the_models_states(extract, diversity):
    text = random_text(20, 9)
    phrases, encoded, vectors = extract(text, top_k=None), extract.tokenizer(text, return_tensors="pt"), []
    with torch.no_grad():
        states = extract.model.eval()(**encoded, output_hidden_states=True).hidden_states[-1][0]
    for phrase in phrases:
        pieces = []
        for mention in phrase["mentions"]:
            inside = text[mention["start"] : mention["end"]]
            starts = [mention["start"] + i for i, c in enumerate(inside) if i == 0 or inside[i - 1] == " "]
            pieces += [states[encoded.char_to_token(start)].numpy() for start in starts]
        vectors.append(np.mean(pieces, axis=0))
    expected = [phrases[i] for i in reference(phrases, vectors, diversity)]
    assert len(phrases) > 6 and extract(text, top_k=None, diversity=diversity) == expected != phrases
    assert extract(text, top_k=3, diversity=diversity) == expected[:3]
    assert extract(text, top_k=None, diversity=0) == phrases


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
    assert diversify(phrases, unit, 0.0) == phrases and diversify([], np.zeros((0, 0)), 0.5) == []


MODELS = {
    "stock": lambda config: AutoModelForTokenClassification.from_config(config("bert", id2label=LABELS)).eval(),
    "CRF and titles": lambda config: make_model("HypernetForTokenClassification"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_any_model_gives_its_phrases_in_another_order(backbone_config, tiny_tokenizer, kind):
    torch.manual_seed(0)
    model = MODELS[kind](backbone_config)
    model.classifier.weight.data *= 30
    extract = KeyphraseExtractionPipeline(model, tiny_tokenizer, top_k=None)
    documents = [TEXT, LONG, {"title": "graph cut", "text": random_text(60, 2)}, "", "graph"]
    plain, diverse = extract(documents), extract(documents, diversity=0.9)
    assert plain != diverse and min(len(phrases) for phrases in plain[:3]) > 2
    for one, other in zip(plain, diverse, strict=True):
        assert one[:1] == other[:1] and sorted(map(str, one)) == sorted(map(str, other))


def test_a_model_without_hidden_states_is_named(lookup):
    with pytest.raises(ValueError, match="hidden_states.*output_hidden_states=True"):
        lookup()("x bx", diversity=0.5)
    assert names(lookup()("x bx", diversity=0)) == ["bx"]


def test_a_phrase_without_states_has_the_vector_0():
    words = [("a", 0, 1), ("b", 2, 3)]
    phrases = [{"mentions": [{"start": 0, "end": 3}]}, {"mentions": [{"start": 2, "end": 3}]}]
    vectors = phrase_vectors(phrases, words, {0: np.array([3.0, 4.0])})
    assert vectors.tolist() == [pytest.approx([0.6, 0.8]), [0.0, 0.0]]
    assert phrase_vectors(phrases, words, {}).shape == (2, 0)


def test_the_answer_is_the_same_alone_in_batches_in_a_block_and_in_a_pickled_copy(extract):
    texts, found = [TEXT, random_text(3), LONG, "", random_text(40, 2)], {}
    alone = [extract(text, diversity=0.7) for text in texts]
    (block,) = split_into_blocks(texts, 10)
    for finished in extract.read_block(block, batch_size=1, diversity=0.7):
        found |= finished
    again = pickle.loads(pickle.dumps(extract))
    answers = [extract(texts, diversity=0.7, batch_size=2), again(texts, diversity=0.7), [found[i] for i in range(5)]]
    for others in (*answers, extract(texts, diversity=0.7)):  # pickling has removed nothing from this one
        assert list(map(names, others)) == list(map(names, alone))
        assert_same(others, alone)


def test_candidates_can_be_diverse_too(extract):
    text = random_text(40, 6)
    candidates = [*dict.fromkeys(text.split()[:12]), "absent phrase"]
    plain, diverse = extract(text, candidates=candidates), extract(text, candidates=candidates, diversity=0.9)
    assert plain != diverse and sorted(map(str, plain)) == sorted(map(str, diverse))
    assert diverse[0] == plain[0] and diverse[-1] == plain[-1] and plain[-1]["mentions"] == []
