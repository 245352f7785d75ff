# needs: serve, onnx
"""The server: the pipeline's answers, dynamic batches, limits, malformed requests, shutdown."""

import asyncio
import json
import re
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx2
import pytest
from fastapi import HTTPException, Request
from starlette.testclient import TestClient
from transformers import pipeline
from typer.testing import CliRunner

from lexperts.cli.keyphrases import app as command
from lexperts_lite import serving
from lexperts_lite.batch_worker import AbandonedError, BatchWorker, QueueFullError, WorkerStoppedError
from lexperts_lite.server_requests import parse_body
from lexperts_lite.serving import create_app
from run_tools.versions import __version__

from .known_answers import assert_same, random_text
from .servers import JSON, ROOT, malformed_requests, metric, start_server

TEXTS = [random_text(words, seed) for seed, words in enumerate((40, 5, 120, 1, 30, 60))]
MAX_BODY_BYTES = 100_000
READ = "keyphrases_batch_documents_sum"  # the metric of documents that have been read


class Gate:
    """A pipeline that waits at a gate before it reads documents, and notes the sizes of its batches."""

    def __init__(self, extract):
        self.extract, self.tokenizer, self.open, self.sizes = extract, extract.tokenizer, threading.Event(), []
        self.open.set()

    def __call__(self, documents, **options):
        return self.extract(documents, **options)

    def read_block(self, documents, **options):
        self.sizes.append(len(documents))
        assert self.open.wait(60)
        if "poison" in documents:
            raise RuntimeError("out of memory")
        if "exit" in documents:
            raise SystemExit
        return self.extract.read_block(documents, **options)


@pytest.fixture
def gate(extract):
    return Gate(extract)


@pytest.fixture
def client(gate):
    with TestClient(
        create_app(gate, batch_size=8, max_queue=10, max_wait_ms=20), raise_server_exceptions=False
    ) as client:
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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 2},
        {"top_k": None, "threshold": 0.2},
        {"min_score": 0.4, "language": None},
        {"diversity": 0.6, "top_k": 3},
        {"candidates": ["ab", "a graph"]},
        {"candidates": {"x": ["b", "c d"]}, "language": "german"},
        {"on_long": "truncate"},
    ],
    ids=str,
)
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


def test_documents_of_several_clients_with_the_same_options_are_read_together(client, gate, extract):
    gate.open.clear()
    options = [{"top_k": 3}, {"top_k": 5}]
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(post, client, "the first")
        wait_until(lambda: gate.sizes == [1])
        rest = [pool.submit(post, client, text, **options[i % 2]) for i, text in enumerate(TEXTS)]
        wait_until(lambda: len(client.app.state.worker) == 6)
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
        wait_until(lambda: len(client.app.state.worker) == 6)
        start = time.monotonic()
        refused = post(client, TEXTS)  # 12 of 10
        assert time.monotonic() - start < 5
        assert refused.status_code == 503 and 1 <= int(refused.headers["Retry-After"]) <= 60
        fits = pool.submit(post, client, TEXTS[:4])
        wait_until(lambda: len(client.app.state.worker) == 10)
        assert post(client, "one").status_code == 503
        assert client.get("/healthz").status_code == 200
        gate.open.set()
        assert [len(results(future.result())) for future in (running, waiting, fits)] == [1, 6, 4]
    assert len(results(post(client, TEXTS))) == 6
    shown = client.get("/metrics").text
    assert metric(shown, 'keyphrases_requests_total{status="503"}') == 2
    assert metric(shown, 'keyphrases_requests_total{status="200"}') == 4
    assert metric(shown, "keyphrases_request_seconds_count") == 4
    assert metric(shown, "keyphrases_batch_documents_sum") == 17
    assert metric(shown, "keyphrases_queue_documents") == 0 and metric(shown, "keyphrases_ready") == 1


def test_a_document_that_cannot_be_read_has_an_error_and_the_others_their_keyphrases(client, gate, extract):
    answers = results(post(client, [TEXTS[0][:40], TEXTS[2], TEXTS[1]], on_long="error"))
    assert "error" in answers[1] and "Document 1 " in answers[1]["error"] and "keyphrases" not in answers[1]
    assert [list(answers[i]) for i in (0, 2)] == [["keyphrases"]] * 2
    assert gate.sizes == [3, 1, 1, 1]


def test_a_failure_of_the_model_is_500_for_its_request_only(client, gate, caplog):
    gate.open.clear()
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(post, client, "first")]
        wait_until(lambda: gate.sizes == [1])
        futures += [pool.submit(post, client, text) for text in ("poison", TEXTS[0])]
        wait_until(lambda: len(client.app.state.worker) == 2)
        gate.open.set()
        responses = [future.result() for future in futures]
    assert [response.status_code for response in responses] == [200, 500, 200]
    assert "RuntimeError" in responses[1].json()["detail"] and "out of memory" in caplog.text
    assert client.get("/healthz").status_code == 200


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_worker_is_reported_and_leaves_nobody_waiting(client, gate):
    assert post(client, "exit").status_code == 503
    wait_until(lambda: not client.app.state.worker.is_ready)
    assert client.get("/healthz").status_code == 503
    assert post(client, "a").status_code == 503
    assert metric(client.get("/metrics").text, "keyphrases_ready") == 0


def test_nothing_is_accepted_before_the_start_and_after_the_end(extract):
    app = create_app(extract)
    assert TestClient(app).get("/healthz").status_code == 503
    assert post(TestClient(app), "a").status_code == 503
    with TestClient(app) as client:
        assert client.get("/healthz").json() == {"status": "ready"}
    assert TestClient(app).get("/healthz").status_code == 503


def test_what_waits_is_read_before_the_worker_closes():
    gate, done = threading.Event(), []

    def read(documents, is_abandoned):
        gate.wait(60)
        done.extend(documents)
        return documents

    worker = BatchWorker(read, batch_size=2, max_wait=60, max_queue=5)
    worker.start()
    futures = worker.submit([1, 2], {}, "") + worker.submit([3, 4, 5], {}, "")
    wait_until(lambda: len(worker) == 3)
    with pytest.raises(QueueFullError) as error:
        worker.submit([6, 7, 8], {}, "")
    assert error.value.retry_after in (1, 2)
    futures[3].cancel()
    futures += worker.submit([6, 7, 8], {}, "")  # in place of the cancelled one
    closing = threading.Thread(target=worker.close)
    closing.start()
    wait_until(lambda: not worker.is_ready)
    with pytest.raises(WorkerStoppedError):
        worker.submit([9], {}, "")
    gate.set()
    closing.join(60)
    assert done == [1, 2, 3, 5, 6, 7, 8] and [f.result() for f in futures if not f.cancelled()] == done


def test_work_is_limited_not_characters(gate, extract):
    options = {"max_queue": 8, "max_tokens": 100, "max_candidates": 60, "max_wait_ms": 0}
    names = [f"{a}{b}" for a in "abcdefghij" for b in "xyz"]  # 30
    with TestClient(create_app(gate, **options), raise_server_exceptions=False) as client:
        assert post(client, ["a b"] * 2, candidates=names).status_code == 200
        refused = post(client, ["a b"] * 3, candidates=names)
        assert refused.status_code == 422 and "20" in refused.json()["detail"]
        assert post(client, ["a b"] * 2, candidates={name: [f"{name}s"] for name in names}).status_code == 422
        assert post(client, "b" * 10_000).status_code == 200  # one sub-token, [UNK]
        assert post(client, "b" * 99).status_code == 200
        for inputs in (["a b"] * 7 + ["a " * 90], {"text": "a " * 60, "title": "b " * 60}):
            refused = post(client, inputs)
            assert refused.status_code == 422 and "100 in one request" in refused.json()["detail"]
        gate.open.clear()  # 4 x 100 sub-tokens may wait
        read = len(gate.sizes)
        with ThreadPoolExecutor(8) as pool:
            futures = [pool.submit(post, client, "first")]
            wait_until(lambda: len(gate.sizes) > read)
            for waiting in range(1, 5):
                futures.append(pool.submit(post, client, "a " * 100))
                wait_until(lambda waiting=waiting: len(client.app.state.worker) == waiting)
            assert post(client, "a").status_code == 503
            gate.open.set()
            assert [future.result().status_code for future in futures] == [200] * 5


def test_candidates_have_the_documented_top_k(client):
    names = [f"{a}{b}" for a in "abcdefgh" for b in "xyz"]
    for options, count in (({}, 10), ({"top_k": 3}, 3), ({"top_k": None}, 24)):
        assert len(results(post(client, "a graph cut", candidates=names, **options))[0]["keyphrases"]) == count


def test_candidates_of_many_documents_are_not_kept_in_memory_together(gate, extract):
    read = serving.reader(gate, 16, max_candidates=8)
    found = read(TEXTS, bool, candidates=["ab", "a graph", "b"], top_k=2)
    assert gate.sizes == [2, 2, 2] and found == [
        extract(text, candidates=["ab", "a graph", "b"], top_k=2) for text in TEXTS
    ]


def test_a_batch_that_nobody_waits_for_any_more_is_left(extract):
    parts, gone = [], threading.Event()

    class Count:
        def read_block(self, documents, **options):
            for part in extract.read_block(documents, **options):
                parts.append(part)
                gone.set()
                yield part

    worker = BatchWorker(serving.reader(Count(), 1, 100), batch_size=4, max_wait=0)
    worker.start()
    futures = worker.submit([random_text(3000, 1)], {}, "", abandoned=gone)
    with pytest.raises(AbandonedError):
        futures[0].result(60)
    assert len(parts) == 1
    assert worker.submit(["a"], {}, "")[0].result(60) == extract("a") and len(parts) == 2  # somebody waits for this one
    worker.close()


def test_the_root_leads_to_the_documentation(client):
    answer = client.get("/")
    assert answer.status_code == 200 and answer.url.path == "/docs"


def test_a_body_that_does_not_come_is_not_awaited_for_long(monkeypatch):
    monkeypatch.setattr(serving, "BODY_TIMEOUT", 0.05)
    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}

    async def receive():
        await asyncio.sleep(60)

    with pytest.raises(HTTPException) as error:
        asyncio.run(serving.read_body(Request(scope, receive), 1000))
    assert error.value.status_code == 408


def test_the_documentation_loads_nothing_from_other_hosts(client):
    page = client.get("/docs").text
    assert "http://" not in page and "https://" not in page
    assert client.get("/static-offline-docs/swagger-ui-bundle.js").status_code == 200
    described = client.get("/openapi.json").json()
    assert described["info"]["version"] == __version__
    operation = described["paths"]["/keyphrases"]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert "$ref" not in json.dumps(schema) and {"inputs", "parameters"} == set(schema["properties"])
    assert {"200", "400", "413", "415", "422", "503"} <= set(operation["responses"])


@pytest.mark.parametrize(
    "limit", ["batch_size", "max_queue", "max_tokens", "max_candidates", "max_body_bytes", "max_wait_ms"]
)
def test_a_limit_without_sense_is_an_error(limit, extract):
    for value in (-1, *([float("nan"), float("inf")] if limit == "max_wait_ms" else [])):
        with pytest.raises(ValueError, match=f"{limit}={value}"):
            create_app(extract, **{limit: value})


@pytest.mark.parametrize(
    "body, status, detail",
    [
        (
            b'{"inputs": "a", "parameters": {"topk": 2}}',
            422,
            "parameters.topk: is not a field. Did you mean 'top_k'? See /docs",
        ),
        (b'{"inputs": {"txt": "a"}}', 422, "inputs.txt: is not a field. Did you mean 'text'?"),
        (b'{"inputs": "a", "parameters": {"top_k": "two"}}', 422, "top_k: Input should be a valid integer, not 'two'"),
        (
            b'{"inputs": "a", "parameters": {"candidates": []}}',
            422,
            "parameters.candidates: List should have at least 1 item",
        ),
        (b'{"inputs": "a", "parameters": {"candidates": 5}}', 422, "Must be a list of phrases, or an object"),
        (b'{"inputs": ["a private text", 5]}', 422, "inputs.1: Must be a text"),
        (b'{"inputs": "\\ud83d"}', 400, "is half of a character. Send both halves"),
        (b'{"inputs": "\xff"}', 400, "The body is not UTF-8 (byte 13). Send UTF-8"),
    ],
)
def test_the_error_of_a_request_names_the_option_its_value_and_what_was_meant(body, status, detail):
    with pytest.raises(HTTPException) as error:
        parse_body(body)
    assert error.value.status_code == status and detail in error.value.detail
    assert "private" not in error.value.detail and error.value.detail.count(" not ") <= 2


def test_malformed_requests_get_4xx_and_no_traceback(folder, tmp_path):
    requests = malformed_requests(MAX_BODY_BYTES)
    assert len(requests) >= 200
    limits = ("--max-body-bytes", MAX_BODY_BYTES, "--max-tokens", 20_000)
    with start_server(folder, tmp_path / "log", *limits) as server, httpx2.Client(base_url=server.url) as client:
        statuses = {}
        for name, body, headers in requests:
            response = client.post("/keyphrases", content=body, headers=headers)
            statuses[name] = response.status_code
            if 400 <= response.status_code < 500:
                assert isinstance(response.json()["detail"], str) and len(response.content) < 1000, name
        assert {name: status for name, status in statuses.items() if status not in (400, 413, 415, 422)} == {}
        assert statuses["oversized"] == 413 and statuses["NaN"] == 422 and statuses["empty"] == 400

        def chunks():
            yield b'{"inputs": "'
            for _ in range(MAX_BODY_BYTES // 1000):
                yield b"a" * 1000

        assert client.post("/keyphrases", content=chunks(), headers=JSON).status_code == 413
        assert [client.get(path).status_code for path in ("/keyphrases", "/other", "/docs/../../etc")] == [
            405,
            404,
            404,
        ]
        assert raw_answer(server.url, b"GET /docs HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n").startswith(
            b"HTTP/1.1 400"
        )
        long = b"POST /keyphrases HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 99999999999\r\n\r\n"
        assert raw_answer(server.url, long).startswith(b"HTTP/1.1 413")
        assert client.post("/keyphrases", json={"inputs": "a"}).status_code == 200
        assert server.metric('keyphrases_requests_total{status="500"}') == 0
        assert "Traceback" not in server.text() and "Error" not in server.text()


def raw_answer(url: str, request: bytes) -> bytes:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(request)
        return connection.recv(1000)


def test_sigterm_during_requests_loses_nothing(folder, tmp_path, extract):
    documents = [random_text(1000, seed) for seed in range(12)]
    with start_server(folder, tmp_path / "log", "--batch-size", 1) as server, ThreadPoolExecutor(12) as pool:
        url = f"{server.url}/keyphrases"
        futures = [pool.submit(httpx2.post, url, json={"inputs": text}, timeout=300) for text in documents]
        wait_until(lambda: server.metric("keyphrases_queue_documents") + server.metric(READ) >= 11)  # and one is read
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "Shutting down" in server.text())
        assert not all(future.done() for future in futures)
        wait_until(lambda: is_refused(url))
        answers = [results(future.result())[0]["keyphrases"] for future in futures]
        assert server.process.wait(60) == -signal.SIGTERM
        assert "Traceback" not in server.text()
    for text, phrases in zip(documents[:2], answers[:2], strict=True):
        assert phrases == without_mentions(extract(text))


def is_refused(url: str) -> bool:
    try:
        httpx2.post(url, json={"inputs": "a"})
    except httpx2.ConnectError:
        return True
    return False


def test_documents_of_a_client_that_has_gone_are_not_read(folder, tmp_path):
    body = json.dumps({"inputs": [random_text(1500, seed) for seed in range(40)]}).encode()
    head = (
        f"POST /keyphrases HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with start_server(folder, tmp_path / "log", "--batch-size", 1, "--max-tokens", 1_000_000) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + body[:1000])
        wait_until(lambda: server.metric('keyphrases_requests_total{status="499"}') == 1)
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + body)
            wait_until(lambda: server.metric("keyphrases_queue_documents") > 30)
        wait_until(lambda: server.metric('keyphrases_requests_total{status="499"}') == 2)
        assert httpx2.post(f"{server.url}/keyphrases", json={"inputs": "a"}, timeout=60).status_code == 200
        assert server.metric(READ) < 20 and "Traceback" not in server.text()


def test_a_refused_client_gets_its_503_and_keeps_its_connection(folder, tmp_path):
    """The body comes after the head, as HTTP clients send it: a server that answers before it would reset the connection."""
    slow, small = ({"inputs": random_text(words, 1)} for words in (6000, 1))
    body = json.dumps(small).encode()
    head = b"POST /keyphrases HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    done = threading.Event()

    def keep_busy(url):
        with httpx2.Client(timeout=60) as client:
            while not done.is_set():
                assert client.post(url, json=slow).status_code in (200, 503)

    def is_refused(connection):
        connection.sendall(head % len(body))
        time.sleep(0.2)
        connection.sendall(body)
        answer = b""
        while not answer.endswith(b"}"):
            received = connection.recv(1000)
            assert received
            answer += received
        assert b"connection: close" not in answer.lower()
        return answer.startswith(b"HTTP/1.1 503")

    options = ("--batch-size", 1, "--max-queue", 1, "--max-tokens", 1_000_000)
    with start_server(folder, tmp_path / "log", *options) as server, ExitStack() as stack:
        busy = stack.enter_context(ThreadPoolExecutor())
        stack.callback(done.set)
        futures = [busy.submit(keep_busy, f"{server.url}/keyphrases") for _ in range(3)]  # read, waits, is refused
        host, port = server.url.removeprefix("http://").split(":")
        connection = stack.enter_context(socket.create_connection((host, int(port)), 60))
        for pause in (0, 5.5):  # uvicorn by itself closes a connection after 5 s, and Retry-After may be longer
            time.sleep(pause)
            wait_until(lambda: is_refused(connection))
        done.set()
        for future in futures:
            future.result()


def test_an_address_of_another_machine_is_refused():
    done = CliRunner().invoke(command, ["serve", "--port", "0", "--host", "203.0.113.1"])
    assert done.exit_code == 2 and "203.0.113.1" in done.output and "Traceback" not in done.output


def test_a_port_in_use_is_reported_before_the_model_is_opened():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = CliRunner().invoke(command, ["serve", "no/such-model", "--port", port])
    assert done.exit_code == 2 and port in done.output and "no/such-model" not in done.output


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "lexperts_lite.serving")
    monkeypatch.setitem(sys.modules, "fastapi", None)
    done = CliRunner().invoke(command, ["serve"])
    assert done.exit_code == 2 and "pip install 'lexperts[serve]'" in done.output


def test_the_answer_in_the_documentation_is_that_of_the_default_model():
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    request = json.loads(re.search(r"-d '(.*?)'\n", page)[1])
    shown = json.loads(re.search(r"```json\n(.*?)```", page, re.S)[1])
    with TestClient(create_app(pipeline("keyphrase-extraction"))) as client:
        answer = client.post("/keyphrases", json=request).json()
    assert len(shown["results"]) == len(answer["results"]) == 1
    one, two = (value["results"][0]["keyphrases"] for value in (answer, shown))
    assert [p["score"] for p in one] == pytest.approx([p["score"] for p in two], abs=1e-4)
    assert [p | {"score": None} for p in one] == [p | {"score": None} for p in two]
