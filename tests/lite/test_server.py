# needs: onnx, serve
"""`lexperts-lite serve`, without PyTorch and transformers."""

import signal
import socket
import tomllib
from configparser import ConfigParser
from inspect import signature

import httpx2

from lexperts_lite.servers import OPTIONS
from lexperts_lite.serving import create_app
from tests.keyphrase_tools.servers import start_process

from .processes import BLOCKED, ROOT, run

COMMAND = "from lexperts_lite.__main__ import main; sys.exit(main(sys.argv[1:]))"


def test_it_answers_by_the_packages_model_until_sigterm(tmp_path):
    with start_process(tmp_path / "log", ROOT, "-c", BLOCKED + COMMAND, "serve", "--port", 0, "--threads", 2) as server:
        answer = httpx2.post(f"{server.url}/keyphrases", json={"inputs": "Graph cuts segment images."}).json()
        assert "Graph cuts" in [phrase["keyphrase"] for phrase in answer["results"][0]["keyphrases"]]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == -signal.SIGTERM and "Traceback" not in server.text()


def test_what_cannot_be_served_is_one_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = (
            (["--port", port], f"{port}"),
            (["--port", 70_000], "0-65535"),
            (["--port", 0, "--batch-size", 0], "batch_size=0"),
            (["--port", 0, "--max-wait-ms", "nan"], "max_wait_ms=nan"),
            (["--max-queue", "x"], "'x'"),
            (["--modle", "x"], "--modle x"),
            (["--port", 0, "--model", tmp_path], f"{tmp_path} has no config.json"),
        )
        for words, shown in cases:
            done = run(COMMAND, "serve", *words)
            assert done.returncode == 2 and shown in done.stderr and done.stderr.count("\n") == 1, done.stderr
    done = run("sys.modules['fastapi'] = None\n" + COMMAND, "serve")
    assert done.returncode == 2 and "lexperts-lite[serve]" in done.stderr, done.stderr


def test_extra_and_defaults_are_those_of_lexperts():
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = tomllib.loads((ROOT / "lite" / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["serve"] == setup["options.extras_require"]["serve"].split()
    limits = [one for one in signature(create_app).parameters.values() if one.default is not one.empty]
    assert {one.name: one.default for one in limits} == {one.name: OPTIONS[one.name][0] for one in limits}
