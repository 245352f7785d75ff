# needs: serve
"""The server: the pipeline's answers, dynamic batches, limits, malformed requests, shutdown."""

import json
import re
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from starlette.testclient import TestClient
from transformers import pipeline
from typer.testing import CliRunner

from lexperts.cli.keyphrases import app as command
from lexperts_lite.serving import create_app
from run_tools.versions import __version__

from .known_answers import assert_same, random_text
from .servers import ROOT, malformed_requests, metric, start_server
from .test_candidates import SUFFIXES

TEXTS = [random_text(words, seed) for seed, words in enumerate((40, 5, 120, 1, 30, 60))]
MAX_BODY_BYTES = 100_000
READ = "keyphrases_batch_documents_sum"  # the metric of documents that have been read
WAITING = "keyphrases_queue_documents"


class Gate:
    """A pipeline that waits at a gate before it reads documents, and notes the sizes of its batches."""

    def __init__(self, extract):
        self.extract, self.open, self.sizes, self.parts = extract, threading.Event(), [], 0
        self.merge_options = extract.merge_options
        self.open.set()

    def __call__(self, documents, **options):
        return self.extract(documents, **options)

    def read_block(self, documents, **options):
        self.sizes.append(len(documents))
        assert self.open.wait(60)
        if "poison" in documents:
            raise RuntimeError("out of memory")
        for part in self.extract.read_block(documents, **options):
            self.parts += 1
            yield part


@pytest.fixture
def gate(extract):
    return Gate(extract)


@pytest.fixture
def client(gate):
    limits = {
        "batch_size": 8,
        "max_queue": 10,
        "max_wait_ms": 20,
        "max_body_bytes": MAX_BODY_BYTES,
        "max_characters": 20_000,
    }
    with TestClient(create_app(gate, **limits), raise_server_exceptions=False) as client:
        yield client
        gate.open.set()


@pytest.fixture(scope="module")
def folder(extract, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    extract.save_pretrained(folder)
    return str(folder)


def post(client, inputs, **parameters):
    body = {"inputs": inputs} | ({"parameters": parameters} if parameters else {})
    return client.post("/keyphrases", json=body)


def results(response):
    assert response.status_code == 200, response.text
    return response.json()["results"]


def without_mentions(phrases):
    return [{name: value for name, value in phrase.items() if name != "mentions"} for phrase in phrases]


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def shown(client, name):
    return metric(client.get("/metrics").text, name)


@pytest.mark.parametrize("options", [
    {}, {"top_k": 2}, {"top_k": None, "threshold": 0.2}, {"min_score": 0.4, "language": None}, {"diversity": 0.6, "top_k": 3},
    {"candidates": ["ab", "a graph"]}, {"candidates": ["b", "c d"], "language": "german"}, {"nested": False},
], ids=str)  # fmt: skip
def test_answers_are_those_of_the_pipeline(options, client, extract):
    documents = [*TEXTS, {"title": TEXTS[1], "text": TEXTS[0]}, {"title": None, "text": ""}]
    expected = [extract(document, **options) for document in documents]
    assert sum(map(len, expected)) > 5
    answers = results(post(client, documents, **options, mentions=True))
    for answer, phrases in zip(answers, expected, strict=True):
        found, absent = ([p for p in answer["keyphrases"] if (p["score"] is None) is none] for none in (False, True))
        assert_same([found], [[p for p in phrases if p["score"] is not None]])
        assert absent == [p for p in phrases if p["score"] is None]
    assert results(post(client, documents[0], **options)) == [{"keyphrases": without_mentions(expected[0])}]
    assert {p.get("field") for p in answers[6]["keyphrases"] if p["mentions"]} <= {"title", "text"}


def test_candidates_have_the_documented_top_k(client):
    names = [f"{a}{b}" for a in "abcdefgh" for b in "xyz"]
    for options, count in (({}, 10), ({"top_k": 3}, 3), ({"top_k": None}, 24)):
        assert len(results(post(client, "a graph cut", candidates=names, **options))[0]["keyphrases"]) == count


def test_documents_of_several_clients_with_the_same_options_are_read_together(client, gate, extract):
    gate.open.clear()
    options = [{"top_k": 3}, {"top_k": 5}]
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(post, client, "the first")
        wait_until(lambda: gate.sizes == [1])
        rest = [pool.submit(post, client, text, **options[i % 2]) for i, text in enumerate(TEXTS)]
        wait_until(lambda: shown(client, WAITING) == 6)
        gate.open.set()
        answers = [results(future.result()) for future in (first, *rest)]
    assert gate.sizes == [1, 3, 3]
    for i, text in enumerate(TEXTS):
        expected = extract(text, **options[i % 2])
        with_mentions = [p | {"mentions": []} for p in answers[i + 1][0]["keyphrases"]]
        assert_same([with_mentions], [[p | {"mentions": []} for p in expected]])


def test_over_capacity_503_comes_at_once_and_the_server_recovers(client, gate):
    gate.open.clear()
    with ThreadPoolExecutor(3) as pool:
        running = pool.submit(post, client, "running")
        wait_until(lambda: gate.sizes == [1])
        waiting = pool.submit(post, client, TEXTS)
        wait_until(lambda: shown(client, WAITING) == 6)
        start = time.monotonic()
        refused = post(client, TEXTS)  # 12 of 10
        assert time.monotonic() - start < 5
        assert refused.status_code == 503 and 1 <= int(refused.headers["Retry-After"]) <= 60
        fits = pool.submit(post, client, TEXTS[:4])
        wait_until(lambda: shown(client, WAITING) == 10)
        assert post(client, "one").status_code == 503 and client.get("/healthz").json() == {"status": "ready"}
        gate.open.set()
        assert [len(results(future.result())) for future in (running, waiting, fits)] == [1, 6, 4]
    assert len(results(post(client, TEXTS))) == 6
    counts = {'keyphrases_requests_total{status="503"}': 2, 'keyphrases_requests_total{status="200"}': 4}
    counts |= {"keyphrases_request_seconds_count": 4, READ: 17, WAITING: 0}
    assert {name: shown(client, name) for name in counts} == counts


def test_a_failure_of_the_model_is_500_for_its_request_only(client, gate, caplog):
    gate.open.clear()
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(post, client, "first")]
        wait_until(lambda: gate.sizes == [1])
        futures += [pool.submit(post, client, text) for text in ("poison", TEXTS[0])]
        wait_until(lambda: shown(client, WAITING) == 2)
        gate.open.set()
        responses = [future.result() for future in futures]
    assert [response.status_code for response in responses] == [200, 500, 200]
    assert "RuntimeError" in responses[1].json()["detail"] and "out of memory" in caplog.text
    assert client.get("/healthz").status_code == 200


def test_documents_characters_and_candidates_are_limited(gate):
    options = {"max_queue": 8, "max_characters": 100, "max_candidates": 60, "max_wait_ms": 0}
    names = [f"{a}{b}" for a in "abcdefghij" for b in "xyz"]  # 30
    with TestClient(create_app(gate, **options), raise_server_exceptions=False) as client:
        assert post(client, ["a b"] * 2, candidates=names).status_code == 200
        assert post(client, "b" * 100).status_code == 200
        for inputs, parameters, limit in (
            (["a b"] * 3, {"candidates": names}, "max_candidates=60"),
            (["a b"] * 9, {}, "max_queue=8"),
            (["a b"] * 7 + ["a " * 45], {}, "max_characters=100"),
            ({"text": "a " * 30, "title": "b " * 30}, {}, "max_characters=100"),
        ):
            refused = post(client, inputs, **parameters)
            assert refused.status_code == 422 and limit in refused.json()["detail"]
        gate.open.clear()  # 4 x 100 characters may wait
        read = len(gate.sizes)
        with ThreadPoolExecutor(8) as pool:
            futures = [pool.submit(post, client, "first")]
            wait_until(lambda: len(gate.sizes) > read)
            for waiting in range(1, 5):
                futures.append(pool.submit(post, client, "a " * 50))
                wait_until(lambda waiting=waiting: shown(client, WAITING) == waiting)
            assert post(client, "a").status_code == 503
            gate.open.set()
            assert [future.result().status_code for future in futures] == [200] * 5


def test_candidates_that_share_stems_cannot_hold_the_server(extract):
    stems = [f"connect{a} adjust{b} adapt{c}" for a in SUFFIXES for b in SUFFIXES for c in SUFFIXES][:4000]
    with TestClient(create_app(extract)) as client:
        start = time.monotonic()
        (result,) = results(post(client, "connect adjust adapt . " * 2000, candidates=stems, top_k=None))
        assert time.monotonic() - start < 60 and len(result["keyphrases"]) < 4000


def test_documents_of_a_client_that_has_gone_are_not_read(folder, tmp_path):
    body = json.dumps({"inputs": [random_text(1500, seed) for seed in range(40)]}).encode()
    head = (
        f"POST /keyphrases HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with start_server(folder, tmp_path / "log", "--batch-size", 1, "--max-characters", 1_000_000) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + body)
            wait_until(lambda: server.metric(WAITING) > 30)
        wait_until(lambda: server.metric('keyphrases_requests_total{status="499"}') == 1)
        assert httpx2.post(f"{server.url}/keyphrases", json={"inputs": "a"}, timeout=60).status_code == 200
        assert server.metric(READ) < 20 and "Traceback" not in server.text()


def test_reading_ends_between_two_batches_of_the_model_if_nobody_waits(gate):
    with TestClient(create_app(gate, batch_size=1), raise_server_exceptions=False) as client:
        batcher = client.app.state.batcher
        found = batcher.read([Waiting(random_text(3000, 1), is_gone=False)])
        parts, gate.parts = gate.parts, 0
        assert found[0] and parts > 5
        assert batcher.read([Waiting(random_text(3000, 1), is_gone=True)]) == [[]] and gate.parts == 1


class Waiting:
    """A task whose client waits, or has gone."""

    options: dict = {}

    def __init__(self, document, is_gone):
        self.document, self.future = document, self
        self.cancelled = lambda: is_gone


def test_malformed_requests_get_4xx_and_no_traceback(client, caplog):
    requests = malformed_requests(MAX_BODY_BYTES)
    assert len(requests) >= 200
    statuses = {}
    for name, body, headers in requests:
        response = client.post("/keyphrases", content=body, headers=headers)
        statuses[name] = response.status_code
        if 400 <= response.status_code < 500:
            assert isinstance(response.json()["detail"], str) and len(response.content) < 1000, name
    assert {name: status for name, status in statuses.items() if status not in (400, 413, 422)} == {}
    assert statuses["oversized"] == 413 and statuses["NaN"] == 422 and statuses["empty"] == 422
    assert [client.get(path).status_code for path in ("/keyphrases", "/other")] == [405, 404]
    assert client.post("/keyphrases/", json={"inputs": "a"}, follow_redirects=False).status_code == 404
    assert client.post("/keyphrases", json={"inputs": "a"}).status_code == 200 and "Traceback" not in caplog.text


@pytest.mark.parametrize("body, shown", [
    ({"inputs": "a", "parameters": {"topk": 2}}, "parameters.topk"), ({"inputs": {"txt": "a"}}, "inputs.txt"),
    ({"inputs": "a", "parameters": {"top_k": "two"}}, "parameters.top_k"), ({"inputs": ["a private text", 5]}, "inputs.1"),
    ({"inputs": "a", "parameters": {"style": "tagz"}}, "style='tagz'"), ({"inputs": "a", "parameters": {"candidates": []}}, "candidates"),
])  # fmt: skip
def test_the_error_of_a_request_names_the_field_and_repeats_no_text(client, body, shown):
    response = client.post("/keyphrases", json=body)
    detail = response.json()["detail"]
    assert response.status_code == 422 and shown in detail and "private" not in detail


def test_sigterm_during_requests_loses_nothing(folder, tmp_path, extract):
    documents = [random_text(1000, seed) for seed in range(12)]
    with start_server(folder, tmp_path / "log", "--batch-size", 1) as server, ThreadPoolExecutor(12) as pool:
        url = f"{server.url}/keyphrases"
        futures = [pool.submit(httpx2.post, url, json={"inputs": text}, timeout=300) for text in documents]
        wait_until(lambda: server.metric(WAITING) + server.metric(READ) >= 11)  # and one is read
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "Shutting down" in server.text())
        answers = [results(future.result())[0]["keyphrases"] for future in futures]
        assert server.process.wait(60) == -signal.SIGTERM
        assert "Traceback" not in server.text()
    for text, phrases in zip(documents[:2], answers[:2], strict=True):
        assert phrases == without_mentions(extract(text))


def test_the_documentation_loads_nothing_from_other_hosts(client):
    root = client.get("/")
    assert root.status_code == 200 and root.url.path == "/docs"
    assert "http://" not in root.text and "https://" not in root.text
    assert client.get("/static-offline-docs/swagger-ui-bundle.js").status_code == 200
    described = client.get("/openapi.json").json()
    assert described["info"]["version"] == __version__ and "/keyphrases" in described["paths"]


@pytest.mark.parametrize(
    "limit", ["batch_size", "max_queue", "max_characters", "max_candidates", "max_body_bytes", "max_wait_ms"]
)
def test_a_limit_without_sense_is_an_error(limit, extract):
    for value in (-1, *([float("nan"), float("inf")] if limit == "max_wait_ms" else [])):
        with pytest.raises(ValueError, match=f"{limit}={value}"):
            create_app(extract, **{limit: value})


def test_what_cannot_be_served_is_reported_before_the_model_is_opened(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = CliRunner().invoke(command, ["serve", "no/such-model", "--port", port])
    assert done.exit_code == 2 and port in done.output and "no/such-model" not in done.output
    done = CliRunner().invoke(command, ["serve", "--port", "0", "--host", "203.0.113.1"])
    assert done.exit_code == 2 and "203.0.113.1" in done.output and "Traceback" not in done.output
    monkeypatch.delitem(sys.modules, "lexperts_lite.serving")
    monkeypatch.setitem(sys.modules, "fastapi", None)
    done = CliRunner().invoke(command, ["serve"])
    assert done.exit_code == 2 and "lexperts[serve]" in done.output


def test_the_answer_in_the_documentation_is_that_of_the_default_model():
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    request = json.loads(re.search(r"-d '(.*?)'\n", page)[1])
    written = json.loads(re.search(r"```json\n(.*?)```", page, re.S)[1])
    with TestClient(create_app(pipeline("keyphrase-extraction"))) as client:
        answer = client.post("/keyphrases", json=request).json()
    assert len(written["results"]) == len(answer["results"]) == 1
    one, two = (value["results"][0]["keyphrases"] for value in (answer, written))
    assert [p["score"] for p in one] == pytest.approx([p["score"] for p in two], abs=1e-4)
    assert [p | {"score": None} for p in one] == [p | {"score": None} for p in two]
