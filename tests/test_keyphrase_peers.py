"""The free tools that the benchmarks compare with: algorithms on texts whose tags are given, and differences with intervals."""

import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
TAGS = {"A": ("ADJ", "JJ"), "N": ("NOUN", "NN"), "P": ("PROPN", "NNP"), "V": ("VERB", "VB"), ".": ("PUNCT", "."), "D": ("DET", "DT")}  # fmt: skip
TEXT = "graph/N cuts/N solve/V large/A energy/N problems/N ./. the/D graph/N cut/N of/D an/D energy/N problem/N ./. slow/A cuts/N"


@pytest.fixture(name="algorithms")
def fixture_algorithms(benchmark_module):
    return benchmark_module("keyphrase_algorithms")


@pytest.fixture(name="by_document")
def fixture_by_document(benchmark_module):
    return benchmark_module("by_document")


def read(algorithms, text: str) -> list:
    """The tokens of "word/KIND ..."."""
    pairs = [part.rsplit("/", 1) for part in text.split()]
    return [
        algorithms.Token(word, algorithms.stem(word), *TAGS[kind], content=kind not in (".", "D"))
        for word, kind in pairs
    ]


def test_candidates_are_matches_of_tags_known_by_their_stems(algorithms):
    tokens = read(algorithms, TEXT)
    found = algorithms.find_phrases(tokens, algorithms.NOUN_PHRASE, longest=3)
    names = [(" ".join(token.text for token in tokens[s[0] : s[0] + len(stems)]), s) for stems, s in found.items()]
    assert names == [
        ("graph cuts", [0, 8]),
        ("large energy problems", [3]),
        ("energy problem", [12]),
        ("slow cuts", [15]),
    ]
    assert not any(len(stems) == 3 for stems in algorithms.find_phrases(tokens, algorithms.NOUN_PHRASE, longest=2))


def test_pagerank_is_that_of_networkx(algorithms):
    networkx = pytest.importorskip("networkx")
    rng = np.random.default_rng(0)
    weights = rng.random((12, 12)) * (rng.random((12, 12)) < 0.3)
    weights[4] = 0  # a node without edges
    bias = rng.random(12)
    graph = networkx.from_numpy_array(weights, create_using=networkx.DiGraph)
    for given, personalization in ((None, None), (bias, dict(enumerate(bias)))):
        expected = networkx.pagerank(graph, personalization=personalization, tol=1e-10)
        np.testing.assert_allclose(algorithms.pagerank(weights, given), list(expected.values()), atol=1e-6)


def test_position_rank_is_the_papers_graph_pair_by_pair(algorithms):
    networkx = pytest.importorskip("networkx")
    tokens = read(algorithms, TEXT)
    graph = networkx.Graph()
    bias = Counter()
    for i, one in enumerate(tokens):
        if one.pos in algorithms.UNIVERSAL:
            bias[one.stem] += 1 / (i + 1)
        for other in tokens[i + 1 : i + 10]:
            if {one.pos, other.pos} <= algorithms.UNIVERSAL.keys() and one.stem != other.stem:
                weight = graph.get_edge_data(one.stem, other.stem, {"weight": 0})["weight"]
                graph.add_edge(one.stem, other.stem, weight=weight + 1)
    scores = networkx.pagerank(graph, personalization=bias, tol=1e-10)
    phrases = ["graph cuts", "large energy problems", "energy problem", "slow cuts"]
    expected = sorted(phrases, key=lambda phrase: -sum(scores[algorithms.stem(word)] for word in phrase.split()))
    assert algorithms.position_rank(tokens) == expected


def test_gaps_are_counted_from_the_end_of_the_earlier_occurrence(algorithms):
    weights = algorithms.inverse_gaps({("a", "b"): [0, 10], ("c",): [4]})
    assert weights[0, 1] == weights[1, 0] == pytest.approx(1 / 3 + 1 / 6)


def test_multipartite_rank_promotes_the_first_candidate_of_a_topic(algorithms):
    text = "graph/N cuts/N help/V vision/N ./. slow/A graph/N cuts/N and/D vision/N ./. old/A graph/N cuts/N"
    tokens = read(algorithms, text)
    topics = algorithms.cluster_topics([("graph", "cut"), ("vision",), ("slow", "graph", "cut")])
    assert topics[0] == topics[2] != topics[1]
    assert algorithms.multipartite_rank(tokens, n=2) == ["vision", "graph cuts"]
    plain = algorithms.multipartite_rank(tokens, alpha=0)
    assert plain.index("graph cuts") > algorithms.multipartite_rank(tokens, alpha=5).index("graph cuts")


def test_tf_idf_is_the_formula(algorithms):
    corpus = [read(algorithms, text) for text in ("graph/N cuts/N", "graph/N theory/N", "energy/N of/D graph/N")]
    counts, number = frequencies = algorithms.document_frequencies(corpus)
    assert (counts["graph",], counts["graph", "cut"], number) == (3, 1, 3)
    assert ("energi", "graph") not in counts  # a stop word is between them
    tokens = read(algorithms, "graph/N cuts/N and/D cuts/N")
    assert algorithms.tf_idf(tokens, frequencies) == ["cuts", "graph cuts", "graph"]  # 2 log2(4/2), 1 log2(4/2), 0
    assert math.log2((number + 1) / (counts["graph",] + 1)) == 0


@pytest.mark.parametrize("name", ["position_rank", "multipartite_rank"])
@pytest.mark.parametrize("text", ["solve/V ./.", "energy/N"])
def test_texts_with_no_or_one_candidate(algorithms, name, text):
    assert getattr(algorithms, name)(read(algorithms, text)) == re.findall("energy", text)


ROWS = [
    {"correct@5": 2, "correct@10": 3, "num_preds": 10, "num_targets": 4},
    {"correct@5": 0, "correct@10": 0, "num_preds": 0, "num_targets": 0},
    {"correct@5": 1, "correct@10": 1, "num_preds": 2, "num_targets": 5},
]


def test_counts_of_documents_give_the_f1_of_all(by_document):
    from keyphrase_tools.metrics import keyphrase_f1, keyphrase_f1_by_document

    predicted = [["graph cut", "energy"], ["x"], ["a", "b", "c", "d", "e", "f"], []]
    gold = [["graph cut", "tree"], [], ["a", "f", "z"], ["q"]]
    counts = by_document.decode(by_document.encode(keyphrase_f1_by_document(predicted, gold, k=by_document.CUTS)))
    for k in by_document.CUTS:
        kept = by_document.precision_and_recall(counts, k)[counts["num_targets"] > 0]
        expected = keyphrase_f1(predicted, gold, k=k)[f"f1@{k}"]
        assert by_document.f1_of_means(kept.mean(axis=0)) == pytest.approx(expected, abs=5e-5)


def test_a_difference_has_a_paired_interval(by_document):
    ours = by_document.encode(ROWS * 20)
    worse = by_document.encode([row | {"correct@5": 0} for row in ROWS * 20])
    value, low, high, documents = by_document.difference(ours, worse, 5)
    precision, recall = (2 / 5 + 1 / 2) / 2, (2 / 4 + 1 / 5) / 2
    assert value == pytest.approx(2 * precision * recall / (precision + recall)) and documents == 60
    assert low < value < high and low > 0
    assert by_document.difference(ours, ours, 10)[:3] == (0, 0, 0)


def test_a_difference_counts_the_documents_that_both_have_read(by_document):
    ours, first = by_document.encode(ROWS * 20), by_document.encode(ROWS)
    assert by_document.difference(ours, first, 5).documents == 3
    with pytest.raises(ValueError, match="same --data"):
        by_document.difference(ours, by_document.encode(ROWS[::-1]), 5)


def test_the_best_free_tool_is_the_one_with_the_smallest_lead_on_the_same_documents(benchmark_module, by_document):
    makers = benchmark_module("makers.peers")
    ours = {"by_document": by_document.encode([row | {"correct@5": 0} for row in ROWS] + ROWS * 5)}
    others = {
        ("YAKE", "nus"): {"by_document": by_document.encode(ROWS * 6), "seke": {"f1@5": 0.4}},
        ("KeyBERT", "nus"): {"by_document": by_document.encode(ROWS), "seke": {"f1@5": 0.4}},  # the first three only
        ("TF-IDF", "inspec"): {"by_document": by_document.encode(ROWS * 6), "seke": {"f1@5": 0.9}},
    }
    system, lead = makers.closest(ours, others, "nus", 5)
    assert system == "KeyBERT" and lead.documents == 3 and lead.value < 0
    assert makers.describe_lead(ours, others, "nus", 5).startswith("KeyBERT 40.0: -")
