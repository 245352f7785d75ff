# needs: onnx, serve
"""`lexperts-lite serve`, without PyTorch and transformers."""

import signal
import socket
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from configparser import ConfigParser
from inspect import signature

import httpx2
import pytest

from lexperts_lite import KeyphraseExtractor
from lexperts_lite.__main__ import main
from lexperts_lite.servers import OPTIONS
from lexperts_lite.serving import create_app

from .processes import ROOT, serve


def test_it_answers_by_the_packages_model_and_sigterm_during_requests_loses_none(tmp_path):
    texts = [f"Graph cuts segment images of kind {number}. " * 200 for number in range(8)]
    log = tmp_path / "log"
    with serve(log, "--batch-size", 1) as (process, url), ThreadPoolExecutor(8) as pool:
        sent = [pool.submit(httpx2.post, f"{url}/keyphrases", json={"inputs": text}, timeout=200) for text in texts]
        while "documents_count 0.0" in (shown := httpx2.get(f"{url}/metrics").text) or "queue_documents 0.0" in shown:
            assert not all(one.done() for one in sent)
        process.send_signal(signal.SIGTERM)
        answers = [one.result().json()["results"][0]["keyphrases"] for one in sent]
        assert process.wait(60) == -signal.SIGTERM and "Traceback" not in log.read_text()
    expected = KeyphraseExtractor()(texts[7])
    assert [phrase["keyphrase"] for phrase in answers[7]] == [phrase["keyphrase"] for phrase in expected]
    assert all("Graph cuts" in [phrase["keyphrase"] for phrase in answer] for answer in answers)


@pytest.mark.parametrize("words, shown", [
    (["--port", "70000"], "0-65535"), (["--port", "0", "--batch-size", "0"], "batch_size=0"), (["--modle", "x"], "--modle x"),
    (["--port", "0", "--max-wait-ms", "nan"], "max_wait_ms=nan"), (["--max-queue", "x"], "'x'"), (["--port", "0", "--model", "no/such"], "no/such"),
    (["--port", "taken"], "taken"), ([], "lexperts-lite[serve]"),
])  # fmt: skip
def test_what_cannot_be_served_is_one_line(words, shown, capfd, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        words, shown = ([port if word == "taken" else word for word in part] for part in (words, [shown]))
        if not words:
            monkeypatch.delitem(sys.modules, "lexperts_lite.serving")
            monkeypatch.setitem(sys.modules, "fastapi", None)
        assert main(["serve", *words]) == 2
    error = capfd.readouterr().err
    assert shown[0] in error and error.count("\n") == 1


def test_extra_and_defaults_are_those_of_lexperts():
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = tomllib.loads((ROOT / "lite" / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["serve"] == setup["options.extras_require"]["serve"].split()
    limits = [one for one in signature(create_app).parameters.values() if one.default is not one.empty]
    assert {one.name: one.default for one in limits} == {one.name: OPTIONS[one.name][0] for one in limits}
