"""The similarity of a phrase to its document: the formula by hand, what is read from a configuration, and what a ranker makes of it."""

import numpy as np
import pytest
from transformers import pipeline

from keyphrase_tools.phrase_features import NAMES_WITH_SIMILARITY, find_phrases
from keyphrase_tools.phrase_similarity import read_similarity, similarities
from keyphrase_tools.ranker_fit import fit_ranker
from keyphrase_tools.ranking import PhraseRanker, read_rankers
from keyphrase_tools.word_classes import CLASSES, read_word_traits
from keyphrase_tools.words import split_words

TEXT = "Graph cuts solve energy problems. Belief propagation solves energy problems too."
WEIGHTS = {"bias": 0.0, "gold": 1.0, **dict.fromkeys(NAMES_WITH_SIMILARITY, 0.0)}


def traits_of(words, seed=0, topics=4):
    traits = np.random.default_rng(seed).normal(size=(len(words), 3 + 1 + topics)).astype(np.float32)
    traits[:, :3] = np.exp(traits[:, :3]) / np.exp(traits[:, :3]).sum(1, keepdims=True)
    return traits


def even(words):
    return np.tile([0.4, 0.3, 0.3], (len(words), 1))


def config_of(**fields):
    return type("Config", (), fields)()


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def test_the_feature_is_the_formula():
    words = split_words(TEXT)
    values = traits_of(words)
    (table,) = find_phrases([(words, even(words))], traits=[values])
    assert table.features.shape[1] == len(NAMES_WITH_SIMILARITY)
    column = table.features[:, NAMES_WITH_SIMILARITY.index("similarity")]
    t, offset = values[:, 4:].astype(float), values[:, 3].astype(float)
    document = t[[i for i, (word, _, _) in enumerate(words) if word != "."]].mean(0)
    for phrase, found in enumerate(column):
        spans = table.spans[table.bounds[phrase] : table.bounds[phrase + 1]].tolist()
        mean = np.mean([t[a:b].mean(0) for a, b in spans], axis=0)
        expected = cosine(mean, document) + np.mean([offset[a:b].mean() for a, b in spans])
        assert found == pytest.approx(expected, abs=1e-6), spans
    repeated = [i for i in range(len(column)) if table.bounds[i + 1] - table.bounds[i] > 1]
    assert repeated, "a phrase occurs twice"


def test_a_document_is_compared_with_itself_alone():
    documents = [split_words(TEXT), split_words("An energy problem."), split_words("")]
    values = [traits_of(words, seed) for seed, words in enumerate(documents)]
    together = find_phrases([(words, even(words)) for words in documents], traits=values)
    for words, own, table in zip(documents, values, together, strict=True):
        (alone,) = find_phrases([(words, even(words))], traits=[own])
        np.testing.assert_array_equal(alone.features, table.features)


def test_words_without_a_topic_have_no_cosine():
    zeros = np.zeros((3, 3))
    one = (np.array([0]), np.array([2]), np.array([0]), np.zeros(3, dtype=int), np.ones(3, dtype=bool))
    assert similarities(*one, zeros).tolist() == [0.0]


VALUE = {"offset": [0.0, 1.0, 2.0], "topics": [[0.5, 0.0, 1.0], [0.0, 1.0, 0.0]]}


def test_biases_come_first():
    weights, biases = read_similarity(config_of(keyphrase_similarity=VALUE, hidden_size=2))
    assert weights.tolist() == [[1, 2], [0, 1], [1, 0]] and biases.tolist() == [0, 0.5, 0]
    assert read_similarity(config_of()) is None


@pytest.mark.parametrize(
    "value, message",
    [
        ([1], "does not have the keys offset, topics"),
        ({"offset": [1.0]}, "does not have the keys"),
        ({"offset": [1.0, 2.0, 3.0], "topics": []}, "does not consist of lists of finite numbers"),
        ({"offset": [1.0, 2.0, 3.0], "topics": [[1.0, 2.0]]}, "does not consist of lists of finite numbers"),
        ({"offset": [1.0, 2.0, float("nan")], "topics": [[1.0, 2.0, 3.0]]}, "does not consist of"),
        ({"offset": [1.0, "a", 3.0], "topics": [[1.0, 2.0, 3.0]]}, "does not consist of"),
        ({"offset": [1.0, 2.0], "topics": [[1.0, 2.0]]}, "has 1 weights for states of size 2"),
    ],
)
def test_wrong_values_are_named(value, message):
    with pytest.raises(ValueError, match=message):
        read_similarity(config_of(keyphrase_similarity=value, hidden_size=2))


def test_similarity_needs_word_classes():
    with pytest.raises(ValueError, match="keyphrase_similarity needs keyphrase_word_classes"):
        read_word_traits(config_of(keyphrase_similarity=VALUE, hidden_size=2))
    with pytest.raises(ValueError, match="a weight of similarity, for which the model needs keyphrase_similarity"):
        read_rankers(config_of(keyphrase_ranker=WEIGHTS, keyphrase_word_classes={}))


def test_a_ranker_learns_that_close_phrases_are_keyphrases():
    random, documents, gold, traits = np.random.default_rng(1), [], [], []
    for _ in range(40):
        words = split_words(TEXT)
        values = traits_of(words, 0)
        values[:, 4:] = random.normal(size=(len(words), 4))
        (table,) = find_phrases([(words, even(words))], traits=[values])
        closest = table.features[:, NAMES_WITH_SIMILARITY.index("similarity")].argsort()[-3:]
        spans = table.spans[table.bounds[closest]]
        gold.append([" ".join(word.lower() for word, _, _ in words[a:b]) for a, b in spans])
        documents.append((words, even(words)))
        traits.append(values)
    weights = fit_ranker(documents, gold, traits=traits)
    assert set(weights) == set(WEIGHTS)
    ranker = PhraseRanker(weights)
    assert ranker.reads_shape and ranker.reads_similarity
    ranked = ranker.rank([(TEXT, *one) for one in documents], traits=traits)
    found = [{phrase["keyphrase"].lower() for phrase in one.phrases(3)} for one in ranked]
    assert np.mean([len(a & set(b)) / 3 for a, b in zip(found, gold, strict=True)]) > 0.7


def test_a_ranker_of_noun_phrases_ignores_similarity():
    words = split_words(TEXT)
    weights = {name: 1.0 for name in WEIGHTS if "similarity" not in name}
    traits = traits_of(words)
    with_more, without = (
        PhraseRanker(weights).rank([(TEXT, words, even(words))], traits=[values])[0]
        for values in (traits, traits[:, :3])
    )
    assert with_more.scores == without.scores


def test_the_pipeline_gives_the_rankers_features(tiny_seke, tiny_tokenizer):
    """Alone and in a batch, and after it was saved."""
    model, random = tiny_seke(), np.random.default_rng(0)
    d = model.config.hidden_size
    model.config.keyphrase_word_classes = {name: random.normal(size=d + 1).tolist() for name in CLASSES}
    model.config.keyphrase_similarity = {
        "offset": random.normal(size=d + 1).tolist(),
        "topics": random.normal(size=(4, d + 1)).tolist(),
    }
    model.config.keyphrase_ranker = WEIGHTS | {"similarity": 3.0}
    extract = pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer)
    block = extract.read([TEXT])
    traits = block.probabilities.traits(0)
    assert traits.shape == (len(split_words(TEXT)), 3 + 1 + 4)
    np.testing.assert_allclose(traits[:, :3].sum(1), 1, atol=1e-5)
    (table,) = find_phrases([(split_words(TEXT), block.probabilities.document(0))], traits=[traits])
    similarity = table.features[:, NAMES_WITH_SIMILARITY.index("similarity")]
    found = extract(TEXT, top_k=None)
    assert found[0]["score"] == pytest.approx(1 / (1 + np.exp(-3 * similarity.max())), abs=2e-5)
    assert extract([TEXT, "graph cuts"], batch_size=2, top_k=None)[0] == found
