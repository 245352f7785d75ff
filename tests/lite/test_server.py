# needs: onnx, serve
"""`lexperts-lite serve`: the answers and the errors of Lexperts' server on the same export, without PyTorch and transformers."""

import signal
import socket
import tomllib
from configparser import ConfigParser
from inspect import signature

import httpx2
import pytest
from starlette.testclient import TestClient
from transformers import pipeline

from lexperts_lite.serving import create_app
from run_tools.servers import OPTIONS
from tests.keyphrase_tools.servers import malformed_requests, start_process

from .processes import BLOCKED, ROOT, run

COMMAND = "from lexperts_lite.__main__ import main; sys.exit(main(sys.argv[1:]))"
MAX_BODY_BYTES = 100_000
TEXTS = [
    "graph cuts of networks",
    "",
    "learning for the network " * 50,
    "[SEP] of C++ in R&D",
    "naïve ﬁnancial networks",
]
REQUESTS = [
    {"inputs": "the graph cuts"},
    {"inputs": TEXTS, "parameters": {"mentions": True}},
    {"inputs": {"title": "Graph cuts", "text": "They segment images."}, "parameters": {"mentions": True}},
    {"inputs": TEXTS, "parameters": {"style": "tags", "top_k": 3}},
    {"inputs": TEXTS, "parameters": {"top_k": None, "threshold": 0.3}},
    {"inputs": TEXTS, "parameters": {"diversity": 0.5, "nested": False, "language": "german"}},
    {"inputs": TEXTS, "parameters": {"candidates": {"nets": ["networks", "a network"], "absent": []}}},
    {"inputs": TEXTS, "parameters": {"on_long": "error"}},
    {"inputs": "a", "parameters": {"style": "tagz"}},
    {"inputs": "a", "parameters": {"candidates": ["a", "a"]}},
    {"inputs": ["a"] * 200},
    {"inputs": "graph " * 15_000},
]


@pytest.fixture(scope="module")
def server(lite, exported, tmp_path_factory):
    """The server of the package, in a process of its own."""
    words = ["serve", "--model", exported, "--port", 0, "--max-tokens", 10_000, "--max-body-bytes", MAX_BODY_BYTES]
    log = tmp_path_factory.mktemp("server") / "log"
    with start_process(log, lite, "-c", BLOCKED + COMMAND, *words) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    """Sends to the server of the package."""
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def expected(exported):
    """Sends to the server of Lexperts."""
    app = create_app(
        pipeline("keyphrase-extraction", model=str(exported)), max_tokens=10_000, max_body_bytes=MAX_BODY_BYTES
    )
    with TestClient(app) as client:
        yield client


def rounded(value):
    """The value with scores of five digits."""
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return pytest.approx(value, abs=2e-6) if isinstance(value, float) else value


def test_answers_are_those_of_lexperts(client, expected):
    found, statuses = 0, []
    for request in REQUESTS:
        ours, theirs = (one.post("/keyphrases", json=request) for one in (client, expected))
        assert (ours.status_code, ours.json()) == (theirs.status_code, rounded(theirs.json())), request
        found += sum(len(result.get("keyphrases", ())) for result in ours.json().get("results", ()))
        statuses.append(ours.status_code)
    assert found > 40 and statuses == [200] * 8 + [422] * 4


def test_malformed_requests_get_the_errors_of_lexperts(client, expected, server):
    for name, body, headers in malformed_requests(MAX_BODY_BYTES):
        ours, theirs = (one.post("/keyphrases", content=body, headers=headers) for one in (client, expected))
        assert 400 <= ours.status_code < 500, name
        assert (ours.status_code, ours.json()) == (theirs.status_code, theirs.json()), name
    assert "Traceback" not in server.text()


def test_pages_are_those_of_lexperts(client, expected):
    for path in ("/openapi.json", "/docs", "/healthz", "/static-offline-docs/swagger-ui.css", "/none"):
        ours, theirs = client.get(path), expected.get(path)
        assert (ours.status_code, ours.content) == (theirs.status_code, theirs.content), path
    names = [
        {line.split()[2] for line in one.get("/metrics").text.splitlines() if line.startswith("# TYPE")}
        for one in (client, expected)
    ]
    assert names[0] == names[1] and "keyphrases_ready" in names[0]


def test_sigterm_ends_the_server_of_the_packages_model(lite, tmp_path):
    with start_process(tmp_path / "log", lite, "-c", BLOCKED + COMMAND, "serve", "--port", 0, "--threads", 2) as server:
        answer = httpx2.post(f"{server.url}/keyphrases", json={"inputs": "Graph cuts segment images."}).json()
        assert "Graph cuts" in [phrase["keyphrase"] for phrase in answer["results"][0]["keyphrases"]]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == -signal.SIGTERM and "Traceback" not in server.text()


def test_what_cannot_be_served_is_one_line(lite, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = (
            (["--port", port], f"Address already in use (while attempting to bind on address ('127.0.0.1', {port}))"),
            (["--port", 70_000], "port must be 0-65535"),
            (["--port", 0, "--batch-size", 0], "batch_size=0"),
            (["--port", 0, "--max-wait-ms", "nan"], "max_wait_ms=nan"),
            (["--max-queue", "x"], "--max-queue: invalid int value: 'x'"),
            (["--modle", "x"], "--modle x"),
            (["--port", 0, "--model", tmp_path], f"{tmp_path} has no config.json"),
        )
        for words, message in cases:
            done = run(lite, COMMAND, "serve", *words)
            assert done.returncode == 2 and message in done.stderr and done.stderr.count("error: ") == 1, done.stderr
    done = run(lite, "sys.modules['fastapi'] = None\n" + COMMAND, "serve")
    assert done.returncode == 2 and done.stderr.endswith("pip install 'lexperts-lite[serve]'\n"), done.stderr


def test_extra_and_defaults_are_those_of_lexperts():
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = tomllib.loads((ROOT / "lite" / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["serve"] == setup["options.extras_require"]["serve"].split()
    limits = [one for one in signature(create_app).parameters.values() if one.default is not one.empty]
    assert {one.name: one.default for one in limits} == {one.name: OPTIONS[one.name][0] for one in limits}
