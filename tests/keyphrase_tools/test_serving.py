# needs: serve
"""The server: the pipeline's answers, dynamic batches, limits, malformed requests, clients that are gone."""

import asyncio
import json
import re
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from keyphrase_tools.loading import open_extractor
from lexperts.cli.keyphrases import app as command
from lexperts_lite.serving import create_app
from run_tools.versions import __version__

from .known_answers import assert_same, random_text
from .servers import malformed_requests
from .test_candidates import SUFFIXES

TEXTS = [random_text(words, seed) for seed, words in enumerate((40, 5, 120, 1, 30, 60))]
LIMITS = {"batch_size": 8, "max_queue": 10, "max_wait_ms": 20, "max_body_bytes": 100_000, "max_characters": 20_000}
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
    gate = Gate(extract)
    yield gate
    gate.open.set()


@pytest.fixture
def client(gate):
    with TestClient(create_app(gate, **LIMITS), raise_server_exceptions=False) as client:
        yield client
        gate.open.set()


def post(client, inputs, **parameters):
    return client.post("/keyphrases", json={"inputs": inputs, "parameters": parameters})


def results(response):
    assert response.status_code == 200, response.text
    return response.json()["results"]


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def metric(client, name):
    found = re.search(rf"^{re.escape(name)} (\S+)$", client.get("/metrics").text, re.M)
    return float(found[1]) if found else 0.0


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
    (answer,) = results(client.post("/keyphrases", json={"inputs": documents[0], "parameters": options}))
    assert answer["keyphrases"] == [{k: v for k, v in p.items() if k != "mentions"} for p in expected[0]]
    assert {p.get("field") for p in answers[6]["keyphrases"] if p["mentions"]} <= {"title", "text"}


def test_candidates_have_the_documented_top_k(client):
    names = [f"{a}{b}" for a in "abcdefgh" for b in "xyz"]
    for options, count in (({}, 10), ({"top_k": 3}, 3), ({"top_k": None}, 24)):
        assert len(results(post(client, "a graph cut", candidates=names, **options))[0]["keyphrases"]) == count


def test_batches_have_equal_options_a_failure_is_of_its_request_and_over_capacity_is_503_at_once(
    client, gate, extract, caplog
):
    gate.open.clear()
    options = [{"top_k": 3}, {"top_k": 5}]
    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(post, client, "the first")
        wait_until(lambda: gate.sizes == [1])
        rest = []
        for i, text in enumerate([*TEXTS, "poison"]):
            rest.append(pool.submit(post, client, text, mentions=True, **options[i % 2]))
            wait_until(lambda i=i: metric(client, WAITING) == i + 1)
        refused = post(client, TEXTS[:4])  # 11 of 10
        assert refused.status_code == 503 and 1 <= int(refused.headers["Retry-After"]) <= 60
        fits = pool.submit(post, client, TEXTS[:3])
        wait_until(lambda: metric(client, WAITING) == 10)
        assert post(client, "one").status_code == 503 and client.get("/healthz").json() == {"status": "ready"}
        gate.open.set()
        assert len(results(fits.result())) == 3 and len(results(first.result())) == 1
        *answers, failed = [future.result() for future in rest]
    assert gate.sizes == [1, 4, 1, 1, 1, 1, 3, 3]  # those beside the poison are read again, one by one
    answers = [results(answer)[0]["keyphrases"] for answer in answers]
    assert_same(answers, [extract(text, **options[i % 2]) for i, text in enumerate(TEXTS)])
    assert failed.status_code == 500 and "RuntimeError" in failed.json()["detail"] and "out of memory" in caplog.text
    counts = {'keyphrases_requests_total{status="503"}': 2, 'keyphrases_requests_total{status="200"}': 8}
    counts |= {"keyphrases_request_seconds_count": 8, READ: 11, WAITING: 0}
    assert {name: metric(client, name) for name in counts} == counts


def test_documents_characters_and_candidates_are_limited(gate):
    options = {"max_queue": 8, "max_characters": 100, "max_candidates": 60, "max_wait_ms": 0}
    names = [f"{a}{b}" for a in "abcdefghij" for b in "xyz"]  # 30
    with TestClient(create_app(gate, **options), raise_server_exceptions=False) as client:
        assert post(client, ["a b"] * 2, candidates=names).status_code == 200
        assert post(client, "b" * 100).status_code == 200
        for inputs, parameters, limit in (
            (["a b"] * 3, {"candidates": names}, "max_candidates=60"),
            (["a b"] * 9, {}, "max_queue=8"),
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
                wait_until(lambda waiting=waiting: metric(client, WAITING) == waiting)
            assert post(client, "a").status_code == 503
            gate.open.set()
            assert [future.result().status_code for future in futures] == [200] * 5
        assert set(gate.sizes[read:]) == {1}  # each text has the characters of a batch


@pytest.mark.parametrize("candidates, text", [
    ([f"connect{a} adjust{b} adapt{c}" for a in SUFFIXES for b in SUFFIXES for c in SUFFIXES][:4000], "connect adjust adapt . " * 400),
    (["a " * 49 + "b"], "a " * 10_000),
], ids=["stems", "long"])  # fmt: skip
def test_candidates_cannot_hold_the_server(extract, candidates, text):
    with TestClient(create_app(extract)) as client:
        start = time.process_time()
        (result,) = results(post(client, text, candidates=candidates, top_k=None))
        assert time.process_time() - start < 20 and len(result["keyphrases"]) < 4000


def test_documents_of_a_client_that_has_gone_are_not_read(gate):
    app, sent = create_app(gate, batch_size=1), []
    received = [{"type": "http.request", "body": json.dumps({"inputs": TEXTS}).encode(), "more_body": False}]
    scope = {"type": "http", "method": "POST", "path": "/keyphrases", "query_string": b""}
    scope["headers"] = [(b"content-type", b"application/json")]

    async def receive():
        return received.pop() if received else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    async def run():
        async with app.router.lifespan_context(app):
            gate.open.clear()
            await app(scope, receive, send)
            gate.open.set()
            while app.state.batcher.arrived.is_set():
                await asyncio.sleep(0.01)

    asyncio.run(run())
    assert sent[0]["status"] == 499 and gate.sizes == [1]


def test_reading_ends_between_two_batches_of_the_model_if_nobody_waits(gate):
    with TestClient(create_app(gate, batch_size=1)) as client:
        batcher = client.app.state.batcher
        task = SimpleNamespace(
            document=random_text(1000, 1), options={}, future=SimpleNamespace(cancelled=lambda: False)
        )
        assert batcher.read([task])[0] and gate.parts > 5
        gate.parts, task.future.cancelled = 0, lambda: True
        assert batcher.read([task]) == [[]] and gate.parts == 1


def test_malformed_requests_get_4xx_and_no_traceback(client, caplog):
    requests, statuses = malformed_requests(LIMITS["max_body_bytes"]), {}
    assert len(requests) >= 200
    for name, body, headers in requests:
        response = client.post("/keyphrases", content=body, headers=headers)
        statuses[name] = response.status_code
        assert isinstance(response.json()["detail"], str) and len(response.content) < 1000, name
    special = {"oversized": 413, "gzip": 415}
    assert {name: status for name, status in statuses.items() if status not in (400, 422)} == special
    assert [client.get(path).status_code for path in ("/keyphrases", "/other")] == [405, 404]
    redirected = client.post(
        "/keyphrases/", json={"inputs": "a"}, headers={"Host": "a.example"}, follow_redirects=False
    )
    assert redirected.status_code == 404
    marked = client.post("/keyphrases", content=b'\xef\xbb\xbf{"inputs": "a"}', headers=requests[0][2])
    assert len(results(marked)) == 1  # a byte-order mark
    assert client.post("/keyphrases", json={"inputs": "a"}).status_code == 200 and "Traceback" not in caplog.text


@pytest.mark.parametrize("body, shown", [
    ('{"inputs": "a", "parameters": {"topk": 2}}', "parameters.topk"), ('{"inputs": {"txt": "a"}}', "inputs.txt"),
    ('{"inputs": "a", "parameters": {"top_k": "two"}}', "parameters.top_k"), ('{"inputs": ["a private text", 5]}', "inputs.1"),
    ('{"inputs": "a", "parameters": {"style": "tagz"}}', "style='tagz'"), ('{"inputs": "a", "parameters": {"candidates": []}}', "candidates"),
    ('{"inputs": {"text": "a", "text": "private"}}', "text is given twice"), ("", "body"),
])  # fmt: skip
def test_the_error_of_a_request_names_the_field_and_repeats_no_text(client, body, shown):
    response = client.post("/keyphrases", content=body, headers={"Content-Type": "application/json"})
    detail = response.json()["detail"]
    assert response.status_code == 422 and shown in detail and "private" not in detail


def test_the_documentation_loads_nothing_from_other_hosts(client):
    root = client.get("/")
    assert root.status_code == 200 and root.url.path == "/docs"
    assert "http://" not in root.text and "https://" not in root.text
    assert client.get("/static-offline-docs/swagger-ui-bundle.js").status_code == 200
    described = client.get("/openapi.json").json()
    assert described["info"]["version"] == __version__ and "/keyphrases" in described["paths"]


def test_what_cannot_be_served_is_reported_before_the_model_is_opened(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = CliRunner().invoke(command, ["serve", "no/such-model", "--port", port])
    assert done.exit_code == 2 and port in done.output and "no/such-model" not in done.output
    monkeypatch.delitem(sys.modules, "lexperts_lite.serving")
    monkeypatch.setitem(sys.modules, "fastapi", None)
    done = CliRunner().invoke(command, ["serve"])
    assert done.exit_code == 2 and "lexperts[serve]" in done.output


def test_the_answer_in_the_documentation_is_that_of_the_default_model():
    page = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    request = json.loads(re.search(r"-d '(.*?)'\n", page)[1])
    written = json.loads(re.search(r"```json\n(.*?)```", page, re.S)[1])
    with TestClient(create_app(open_extractor(device="cpu"))) as client:
        answer = client.post("/keyphrases", json=request).json()
    one, two = (value["results"][0]["keyphrases"] for value in (answer, written))
    assert [p | {"score": round(p["score"], 6)} for p in one] == two
