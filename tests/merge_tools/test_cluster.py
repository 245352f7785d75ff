# needs: cluster
"""`merge_tools.cluster`: every method, what is written, and what cannot be split."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from typer.testing import CliRunner

from lexperts.cli.merge import app
from merge_tools import cluster
from merge_tools.cluster import METHODS, balanced_labels
from merge_tools.texts import read_definitions
from modeling_lexicon.data_lexicon import format_prompt
from run_tools.errors import UserError

ROWS = [
    {"term": term, "context": f"the {term} of the {scene} {i}", "definition": f"a thing {i}"}
    for i in range(10)
    for term, scene in (("cat", "farm"), ("dog", "farm"), ("saw", "workshop"), ("axe", "workshop"))
]


@pytest.fixture
def data(tmp_path):
    (tmp_path / "data").mkdir()
    for name, rows in (("a", ROWS[:30]), ("b", [*ROWS[30:], {"term": "x", "context": "", "definition": "y"}])):
        (tmp_path / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "data"


def embed(texts):
    """Vectors in two directions, by topic, and a small part that depends on the text."""
    noise = np.array([np.random.default_rng(sum(map(ord, text))).normal(0, 0.1, 4) for text in texts])
    return noise + [[3.0 * ("farm" in text), 3.0 * ("workshop" in text), 0, 0] for text in texts]


def read(folder, k):
    return [[json.loads(line) for line in (folder / f"{c}.jsonl").read_text().splitlines()] for c in range(k)]


@pytest.mark.parametrize("method", METHODS)
def test_every_row_is_written_once_and_a_seed_repeats_the_result(method, data, tmp_path):
    embedder = None if method in ("tfidf", "random") else embed
    result = cluster(data, tmp_path / "out", k=2, method=method, embedder=embedder)
    parts = read(tmp_path / "out", 2)
    assert [len(part) for part in parts] == result["sizes"] and (result["rows"], result["dropped"]) == (40, 1)
    assert all(row.pop("domain") == c for c, part in enumerate(parts) for row in part)
    assert sorted(map(str, sum(parts, []))) == sorted(map(str, ROWS))
    assert json.loads((tmp_path / "out" / "clusters.json").read_text()) == result
    for part, terms in zip(parts, result["terms"], strict=True):
        scenes = {row["context"].split()[-2] for row in part}
        assert "definition" not in terms and (method == "random" or (len(scenes) == 1 and scenes < {*terms}))
    assert ("embedder" in result) == (embedder is not None) == (tmp_path / "out" / "centroids.safetensors").exists()
    cluster(data, tmp_path / "again", k=2, method=method, embedder=embedder)
    for path in (tmp_path / "out").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 5), st.integers(0, 30), st.integers(0, 1000))
def test_sizes_of_balanced_clusters_differ_by_at_most_one(K, more, seed):
    d = np.random.default_rng(seed).random((K + more, K))
    d[:, 0] -= seed % 3  # 2: all rows are nearest to the first
    labels = balanced_labels(d)
    assert np.ptp(np.bincount(labels, minlength=K)) <= 1
    if K == 2 and more % 2 == 0:  # the least cost: the rows that gain most by the first cluster are in it
        assert (labels == 0).nonzero()[0].tolist() == sorted(np.argsort(d[:, 0] - d[:, 1])[: len(d) // 2])


def test_a_definition_has_a_row_for_each_context_and_incomplete_ones_are_counted(tmp_path):
    row, path = {"term": "cut", "definition": "a partition", "id": 1}, tmp_path / "a.jsonl"
    rows = [{**row, "context": ["a cut", " ", "cuts"]}, {**row, "context": "x", "term": None}, row]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_definitions([path]) == ([{**row, "context": "a cut"}, {**row, "context": "cuts"}], 3)
    path.write_text(json.dumps(row))
    with pytest.raises(UserError, match=r"a.jsonl.*1.*'term', 'context', 'definition'"):
        read_definitions([path])


def test_centroids_are_means_of_unit_vectors(data, tmp_path):
    assert sorted(cluster(data, tmp_path / "out", k=7, embedder=embed)["sizes"]) == [5, 5, 6, 6, 6, 6, 6]
    with safe_open(tmp_path / "out" / "centroids.safetensors", "np") as file:
        centroids = file.get_tensor("centroids")
        assert file.metadata() == {"embedder": "embed"} and centroids.dtype == np.float32
    for centroid, part in zip(centroids, read(tmp_path / "out", 7), strict=True):
        x = embed([format_prompt(row["term"], row["context"]) for row in part])
        assert np.allclose(centroid, (x / np.linalg.norm(x, axis=1, keepdims=True)).mean(0), atol=1e-6)


@pytest.mark.parametrize("options, message", [
    ({"method": "balance"}, "balance.*balanced"),
    ({"k": 0}, "k=0"),
    ({"k": 41}, "k=41.*40"),
    ({"embedder": None}, "balanced.*embedder"),
    ({"embedder": lambda texts: np.full((len(texts), 4), np.nan)}, "40 .*the cat of"),
    ({"embedder": lambda texts: np.ones((3, 4))}, r"\(3, 4\)"),
    ({"embedder": lambda texts: np.ones((len(texts), 4)), "method": "kmeans"}, "k=2"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:Number of distinct clusters")
def test_what_cannot_be_split_writes_nothing(options, message, data, tmp_path):
    with pytest.raises(UserError, match=message):
        cluster(data, tmp_path / "out", **{"k": 2, "embedder": embed} | options)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_on_the_command_line(data, tmp_path):
    (tmp_path / "out").mkdir()  # an empty folder may exist
    done = CliRunner().invoke(app, ["cluster", str(data), str(tmp_path / "out"), "-k", "2", "--embedder", "minilm"])
    assert done.exit_code == 0 and "40 rows, 1 dropped" in done.output and "workshop" in done.output, done.output
    assert "sentence-transformers/all-MiniLM-L6-v2" in (tmp_path / "out" / "clusters.json").read_text()
