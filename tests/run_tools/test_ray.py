"""Blocks processed by workers of Ray, and `KeyphraseExtractor` in Ray Data; skipped without Ray."""

import os
import runpy
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import psutil
import pyarrow
import pytest
import torch
from pyarrow import parquet
from transformers import pipeline
from typer.testing import CliRunner

from keyphrase_tools.extractor import KeyphraseExtractor
from lexperts.cli.keyphrases import app
from run_tools.corpus import engines
from run_tools.corpus.block_runs import run_blocks
from run_tools.corpus.documents import Corpus
from run_tools.corpus.engines import LocalEngine, RayEngine
from run_tools.processes import assigned_cores
from run_tools.resume import ResumableOutput
from tests.corpora import check_example, extract_file, lines, write_jsonl
from tests.run_tools.ray_processes import Counts, LoadedInTurn

ray = pytest.importorskip("ray")
ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """120 documents, three of which have no text."""
    texts = [" ".join(f"graph {i} cut {j}" for j in range(1 + i % 9)) for i in range(120)]
    texts = [None if i % 50 == 7 else text for i, text in enumerate(texts)]
    path = tmp_path_factory.mktemp("source") / "in.parquet"
    parquet.write_table(pyarrow.table({"id": list(map(str, range(120))), "text": texts}), path)
    return path


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """The documents of `source`, all with a text."""
    rows = [{"text": " ".join(f"graph {i} cut {j}" for j in range(1 + i % 9))} for i in range(120)]
    return write_jsonl(tmp_path_factory.mktemp("texts") / "in.jsonl", rows)


@pytest.fixture(scope="module")
def output_without_ray(folder, source, tmp_path_factory):
    """The output without Ray."""
    path = tmp_path_factory.mktemp("whole") / "out.jsonl"
    extract_file(folder, source, path, block_size=10, num_threads=1)
    return path


def test_a_driver_has_no_assigned_cores(cluster):
    assert assigned_cores() is None


@pytest.fixture(scope="module")
def cluster():
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


def test_two_workers_write_what_one_process_writes(cluster, folder, source, output_without_ray, tmp_path):
    found = extract_file(folder, source, tmp_path / "out.jsonl", block_size=10, engine=RayEngine(workers=2))
    assert found[:3] == (120, 3, []) and (tmp_path / "out.jsonl").read_bytes() == output_without_ray.read_bytes()


def count_words(source, output, engine, **options):
    corpus = Corpus(source, title_column=None)
    return run_blocks(Counts(**options), corpus, output, block_size=10, engine=engine)


@pytest.mark.parametrize("workers, fatal", [(2, "graph 45 cut 0"), (1, "graph 45 cut 0"), (1, "describe")])
def test_a_lost_worker_loads_the_model_again_and_repeats_its_block(cluster, workers, fatal, texts, tmp_path):
    mark = tmp_path / "lost"
    assert count_words(texts, tmp_path / "out.jsonl", RayEngine(workers=workers), fatal=fatal, mark=mark)[:2] == (
        120,
        0,
    )
    assert mark.exists() and all(row["loaded"] for row in lines(tmp_path / "out.jsonl"))
    count_words(texts, tmp_path / "whole.jsonl", LocalEngine())
    assert lines(tmp_path / "out.jsonl") == lines(tmp_path / "whole.jsonl")


def test_a_block_that_always_loses_its_worker_is_named(cluster, texts, tmp_path):
    with pytest.raises(RuntimeError, match="Documents 40 to 49 could not be processed: its worker was lost 4 times"):
        count_words(texts, tmp_path / "out.jsonl", RayEngine(workers=2), fatal="graph 45 cut 0")


def test_as_many_blocks_as_workers_are_processed_together(cluster, source, tmp_path):
    corpus = Corpus(source, title_column=None)
    with RayEngine(workers=2) as engine:
        engine.start(LoadedInTurn(tmp_path / "first"))
        results = [rows for _, rows in engine.run(corpus.blocks(60, {}, print), print)]
    assert len({row["process"] for rows in results for row in rows}) == len(results) == 2


def test_workers_with_different_models_are_refused(cluster, texts, tmp_path):
    with pytest.raises(ValueError, match="not the same in all workers: they differ in weights"):
        count_words(texts, tmp_path / "out.jsonl", RayEngine(workers=2), differs=True)


def test_a_killed_run_resumes_with_a_worker_lost_and_ends_with_the_same_bytes(
    folder, source, output_without_ray, tmp_path
):
    """First the driver is killed, then a worker of the run that resumes."""
    output, parts = tmp_path / "out.jsonl", tmp_path / "out.jsonl.parts"
    start = [sys.executable, "-m", "lexperts", "keyphrases", "extract", str(source), str(output), "--model", folder]
    start += ["--engine", "ray", "--workers", "1", "--block-size", "10"]

    def run_until(blocks):
        process = subprocess.Popen(start, env=ENVIRONMENT, stderr=subprocess.PIPE)
        while process.poll() is None and not (parts.exists() and len(ResumableOutput(output, "").blocks()) >= blocks):
            time.sleep(0.005)
        return process, [p for p in psutil.Process(process.pid).children(recursive=True) if "ray::Worker" in p.name()]

    process, _ = run_until(1)
    process.kill()
    process.communicate()
    finished = {path.name: path.read_bytes() for path in parts.glob("*.jsonl")}
    assert 1 <= len(finished) < 12
    process, workers = run_until(len(finished) + 1)
    workers[0].kill()
    kept = {name: (parts / name).read_bytes() for name in finished if (parts / name).exists()}
    _, errors = process.communicate()
    assert process.returncode == 0, errors.decode()[-2000:]
    assert all(finished[name] == content for name, content in kept.items())
    assert output.read_bytes() == output_without_ray.read_bytes()


def test_a_model_that_does_not_load_in_a_worker_is_one_message(cluster, source, tmp_path):
    paths = [str(source), str(tmp_path / "out.jsonl")]
    done = CliRunner().invoke(app, ["extract", *paths, "--model", "no/such-model", "--engine", "ray", "--workers", "2"])
    assert done.exit_code == 2 and done.stderr.count("error: ") == 1
    assert "does not load in a worker" in done.stderr and "'no/such-model' could not be opened" in done.stderr
    assert not (tmp_path / "out.jsonl.parts").exists()


def test_more_workers_than_the_machine_has_cores_are_refused(cluster, folder, source, tmp_path):
    for options, message in (((3, 0), "3 workers need 3 CPUs, .* has 2"), ((1, 1), "1 workers need 1 GPUs, .* has 0")):
        engine = RayEngine(workers=options[0], gpus_per_worker=options[1])
        with pytest.raises(ValueError, match=message):
            extract_file(folder, source, tmp_path / "out.jsonl", engine=engine)


def test_an_address_that_does_not_answer_is_named_quickly(folder, source, tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        for name in (address, f"ray://{address}"):
            paths = [str(source), str(tmp_path / "out.jsonl")]
            started = time.monotonic()
            done = CliRunner().invoke(app, ["extract", *paths, "--model", folder, "--engine", "ray", "--address", name])
            assert done.exit_code == 2 and f"cluster at {name} does not answer" in done.stderr, done.output
            assert time.monotonic() - started < 20


def test_an_address_of_another_server_is_named(cluster, monkeypatch):
    engines.check_address(ray.get_runtime_context().gcs_address)
    monkeypatch.setattr(engines, "TIMEOUT", 1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        for name in (address, f"ray://{address}"):
            with pytest.raises(ConnectionError, match="no Ray cluster answers there"):
                engines.check_address(name)


def test_without_ray_the_extra_is_named(monkeypatch, folder, source, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    paths = [str(source), str(tmp_path / "out.jsonl")]
    done = CliRunner().invoke(app, ["extract", *paths, "--model", folder, "--engine", "ray"])
    assert done.exit_code == 2 and "pip install 'lexperts[ray]'" in done.stderr
    done = CliRunner().invoke(app, ["extract", *paths, "--model", folder, "--workers", "2"])
    assert done.exit_code == 2 and "Add --engine ray" in done.stderr


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


def test_ray_data_maps_an_instance(cluster, folder, source, output_without_ray, tmp_path):
    data = ray.data.read_parquet(str(source))
    data = data.map_batches(KeyphraseExtractor(folder), batch_format="pyarrow", batch_size=10)
    data.write_parquet(str(tmp_path / "out"))
    rows = parquet.read_table(tmp_path / "out").sort_by("id").to_pylist()
    expected = sorted(lines(output_without_ray), key=lambda row: row["id"])
    assert [row["id"] for row in rows] == [row["id"] for row in expected]
    assert [row["error"] for row in rows] == [row.get("error") for row in expected]
    for row, other in zip(rows, expected, strict=True):
        assert [p["keyphrase"] for p in row["keyphrases"] or []] == [
            p["keyphrase"] for p in other.get("keyphrases", [])
        ]


def test_a_worker_has_the_threads_that_it_was_given(cluster, folder):
    """Also in a process that Ray uses again."""

    @ray.remote
    def threads():
        KeyphraseExtractor(folder)({"text": ["graph"]})
        return torch.get_num_threads()

    assert [ray.get(threads.options(num_cpus=count).remote()) for count in (1, 2, 1)] == [1, 2, 1]


def test_engines_have_the_same_methods():
    assert engines.Engine.__abstractmethods__ == {"start", "run"}
    assert all(engine.start is not engines.Engine.start for engine in (LocalEngine, RayEngine))
