"""A sentence encoder as a teacher in `train seke`: what a lesson is, and that the student learns it and the configuration keeps it."""

import numpy as np
import pytest
import torch

from keyphrase_tools.phrase_similarity import read_similarity, similarities
from keyphrase_tools.word_classes import MODIFIER, NOUN, OTHER
from keyphrase_tools.words import split_words
from lexperts.recipes.seke import similarity
from lexperts.recipes.seke.similarity import add_similarity, find_noun_phrases, make_lessons
from lexperts.recipes.seke.word_classes import TaggedDocument

KINDS = {"grey": MODIFIER, "large": MODIFIER, "owl": NOUN, "nest": NOUN, "star": NOUN, "light": NOUN, "model": NOUN}
VECTORS = np.random.default_rng(0).normal(size=(40, 12))  # of words, for states and teacher alike


def vector(word):
    return VECTORS[sum(map(ord, word.lower())) % 40]


def tagged(text):
    words = split_words(text)
    classes = np.array([KINDS.get(word.lower(), OTHER) for word, _, _ in words])
    return TaggedDocument(text, words, {i: vector(word) for i, (word, _, _) in enumerate(words)}, classes)


def encode(texts):
    """A sentence encoder: the mean of its words' vectors."""
    return np.stack([np.mean([vector(word) for word, _, _ in split_words(text)], axis=0) for text in texts])


@pytest.fixture(name="encoder", autouse=True)
def fixture_encoder(monkeypatch):
    embed = similarity.embed_texts
    monkeypatch.setattr(similarity, "embed_texts", lambda texts, _: embed(texts, encode))


def test_noun_phrases_are_known_without_their_case():
    document = tagged("The grey owl and the Grey Owl left a nest.")
    assert find_noun_phrases(document) == {"grey owl": [(1, 3), (5, 7)], "nest": [(9, 10)]}
    del document.states[1]  # a word in no window
    assert find_noun_phrases(document) == {"Grey Owl": [(5, 7)], "nest": [(9, 10)]}


def test_a_lesson_has_the_teachers_cosines():
    (lesson, nothing) = make_lessons([tagged("The grey owl left a nest of light."), tagged("A nest.")], "any")
    assert nothing is None
    assert lesson.phrases.shape == (3, 12) and lesson.lengths.exp().round().tolist() == [2, 1, 1]
    phrase, document = encode(["grey owl", "The grey owl left a nest of light."])
    expected = phrase @ document / np.linalg.norm(phrase) / np.linalg.norm(document)
    assert lesson.cosines[0].item() == pytest.approx(expected, abs=1e-5)


def test_the_configuration_gives_what_the_student_has_learned():
    random, names = np.random.default_rng(3), list(KINDS)
    texts = [" and a ".join(random.choice(names, 12)) + "." for _ in range(60)]
    documents = [tagged(text) for text in texts]
    extract = type("Extract", (), {"model": torch.nn.Module()})()
    extract.model.config = type("Config", (), {"hidden_size": 12})()
    record = add_similarity(extract, documents, "any", seed=1)
    assert record["documents"] >= 45 and record["correlation"] > 0.8
    weights, biases = read_similarity(extract.model.config)
    found, expected = [], []
    for document in documents[4::5]:
        values = np.stack([document.states[i] for i in range(len(document.words))]) @ weights.T + biases
        spans = [spans[0] for spans in find_noun_phrases(document).values()]
        start, end = np.array(spans).T
        counted = np.array([word != "." for word, _, _ in document.words])
        of_document = np.zeros(len(document.words), dtype=int)
        ours = similarities(start, end - start, np.arange(len(spans)), of_document, counted, values)
        (lesson,) = make_lessons([document], "any")
        single = (lesson.lengths == 0).numpy()  # the student's term of the length is left to the ranker
        if single.sum() > 3:
            found.append(np.corrcoef(ours[single], lesson.cosines.numpy()[single])[0, 1])
            expected.append(1)
    assert len(found) > 3 and np.mean(found) > 0.8
