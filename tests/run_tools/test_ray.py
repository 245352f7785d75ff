# needs: ray
"""`run_over` with workers of Ray, and `KeyphraseExtractor` in Ray Data; skipped without Ray."""

import os
import runpy
import signal
import sys
from functools import partial
from pathlib import Path

import httpx2
import pyarrow
import pytest
from pyarrow import parquet
from transformers import pipeline
from typer.testing import CliRunner

from lexperts.cli.keyphrases import app
from run_tools.run_over import run_over
from tests.corpora import check_example, extract_file, lines

pytestmark = pytest.mark.nightly

ray = pytest.importorskip("ray")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """120 documents, three of which have no text."""
    texts = [" ".join(f"graph {i} cut {j}" for j in range(1 + i % 9)) for i in range(120)]
    texts = [None if i % 50 == 7 else text for i, text in enumerate(texts)]
    path = tmp_path_factory.mktemp("source") / "in.parquet"
    parquet.write_table(pyarrow.table({"id": list(map(str, range(120))), "text": texts}), path)
    return path


@pytest.fixture(scope="module")
def cluster():
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


def words(texts):
    return [{"words": len(text.split()), "process": os.getpid()} for text in texts]


def text_of(row):
    if row["text"] is None:
        raise ValueError("there is no text")
    return row["text"]


def count_words(source, output, process, workers):
    options = {"check": text_of, "batch_size": 10, "keep": [], "results": ("words",), "workers": workers}
    return run_over(lambda: process, source, output, {}, **options)


def test_two_workers_write_what_one_process_writes(cluster, source, tmp_path):
    for workers in (0, 2):
        assert count_words(source, tmp_path / f"{workers}.jsonl", words, workers) == (120, 3, 120)
    alone, together = lines(tmp_path / "0.jsonl"), lines(tmp_path / "2.jsonl")
    assert len({row["process"] for row in together if "error" not in row}) == 2
    assert [row | {"process": 0} for row in alone] == [row | {"process": 0} for row in together]


def test_the_batch_of_a_lost_worker_is_processed_again(cluster, source, tmp_path):
    mark = tmp_path / "lost"

    def process(texts, always=False):
        if texts[0].startswith("graph 40 ") and (always or not mark.exists()):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return words(texts)

    assert count_words(source, tmp_path / "out.jsonl", process, 2) == (120, 3, 120) and mark.exists()
    with pytest.raises(RuntimeError, match="A worker failed"):
        count_words(source, tmp_path / "lost.jsonl", partial(process, always=True), 2)
    assert len(lines(tmp_path / "lost.jsonl")) == 40
    assert count_words(source, tmp_path / "lost.jsonl", words, 0) == (120, 3, 80)


def test_the_command_has_workers_and_without_ray_the_extra_is_named(cluster, folder, source, tmp_path, monkeypatch):
    given = ["extract", str(source), str(tmp_path / "out.jsonl"), "--model", folder, "--workers", "1"]
    assert CliRunner().invoke(app, given).exit_code == 0
    extract_file(folder, source, tmp_path / "whole.jsonl", num_threads=1, top_k=10)
    assert lines(tmp_path / "out.jsonl") == lines(tmp_path / "whole.jsonl")
    monkeypatch.setitem(sys.modules, "ray", None)
    done = CliRunner().invoke(app, [*given[:2], str(tmp_path / "other.jsonl"), *given[3:]])
    assert done.exit_code == 2 and "lexperts[ray]" in done.stderr


def test_the_example_gives_what_the_command_gives(cluster, folder, tmp_path):
    """Ray Data maps the class, which each worker calls."""
    check_example("ray_keyphrases.py", folder, tmp_path, "--workers", 1)


def test_the_example_serves_what_the_pipeline_gives(cluster, folder):
    serve = pytest.importorskip("ray.serve", reason="needs ray[serve]", exc_type=ImportError)
    deployment = runpy.run_path(str(ROOT / "examples" / "serve_with_ray.py"))["deployment"]
    text = "the graph cut of networks and the graph cuts for learning"
    phrases = pipeline("keyphrase-extraction", model=folder)(text)
    expected = [{name: value for name, value in phrase.items() if name != "mentions"} for phrase in phrases]
    try:
        serve.start(http_options={"port": 8817})
        serve.run(deployment(folder))
        with httpx2.Client(base_url="http://127.0.0.1:8817", timeout=60) as client:
            assert client.get("/healthz").json() == {"status": "ready"}
            answer = client.post("/keyphrases", json={"inputs": text})
            assert answer.status_code == 200 and answer.json()["results"] == [{"keyphrases": expected}] and expected
            assert client.post("/keyphrases", json={"inputs": 3}).status_code == 422
    finally:
        serve.shutdown()
