"""A real server for tests: a process that serves keyphrases, and malformed requests to send to it."""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx2

ROOT = Path(__file__).resolve().parents[2]
JSON = {"Content-Type": "application/json"}


class Server:
    """A running server: its process, address and log."""

    def __init__(self, process: subprocess.Popen, log: Path):
        self.process, self.log = process, log
        self.url = self._wait()

    def _wait(self) -> str:
        """Waits until the server answers /healthz."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.text()
            found = re.search(r"serving on (http://\S+:\d+)", self.text())
            if found and is_ready(found[1]):
                return found[1]
            time.sleep(0.1)
        raise AssertionError(f"the server did not start: {self.text()}")

    def text(self) -> str:
        """The log so far."""
        return self.log.read_text(encoding="utf-8")

    def metric(self, name: str) -> float:
        """The value of a metric, 0 if it has not been counted yet."""
        return metric(httpx2.get(f"{self.url}/metrics").text, name)


def metric(text: str, name: str) -> float:
    """The value of a line of /metrics, 0 if it is not there."""
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.M)
    return float(found[1]) if found else 0.0


def is_ready(url: str) -> bool:
    """Whether /healthz answers 200."""
    try:
        return httpx2.get(f"{url}/healthz").status_code == 200
    except httpx2.TransportError:
        return False


def start_server(model: str, log: Path, *options):
    """Runs `lexperts keyphrases serve MODEL` on a free port until the block ends."""
    return start_process(log, ROOT, "-m", "lexperts", "keyphrases", "serve", model, "--port", "0", *options)


@contextmanager
def start_process(log: Path, path: Path, *words):
    """Runs Python with these words and modules of `path`, as a server until the block ends."""
    environment = os.environ | {"PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, *map(str, words)], stdout=file, stderr=subprocess.STDOUT, env=environment
        )
    try:
        yield Server(process, log)
    finally:
        process.kill()
        process.wait()


def malformed_requests(max_body_bytes: int) -> list[tuple[str, bytes, dict]]:
    """(name, body, headers) of requests that must get a 4xx status."""
    wrong = [None, True, 3, -1, 0, 1.5, 10**30, -(10**30), "", "x", "1", [], [[]], [None], {}, {"a": 1}, {"text": "a"}]
    bodies = {}
    for value in [None, True, 3, 1.5, 10**400, [], [[]], [None], ["a", 3], [["a"]], {}, {"a": 1}, {"text": 3}]:
        bodies[f"inputs={value!r:.30}"] = {"inputs": value}
    for value in [
        {"text": None},
        {"title": "a"},
        {"text": "a", "title": 3},
        {"text": ["a", "b"]},
        {"text": "a", "x": 1},
    ]:
        bodies[f"inputs={value!r}"] = {"inputs": value}
        bodies[f"inputs=[{value!r}]"] = {"inputs": ["a", value]}
    valid = {  # what `wrong` has of each option's valid values
        "top_k": (None, 3),
        "min_score": (None, 0),
        "threshold": (None,),
        "style": (None,),
        "diversity": (None, 0),
        "candidates": (None,),
        "language": (None,),
        "mentions": (True,),
    }
    for name, allowed in valid.items():
        for value in wrong:
            if not any(value is one or (type(value) is int and value == one) for one in allowed):
                bodies[f"{name}={value!r:.30}"] = {"inputs": "a", "parameters": {name: value}}
    for name in (
        "model",
        "device",
        "trust_remote_code",
        "batch_size",
        "revision",
        "max_length",
        "__class__",
        "x" * 5000,
    ):
        bodies[f"parameters.{name:.20}"] = {"inputs": "a", "parameters": {name: "a"}}
        bodies[f"{name:.20}"] = {"inputs": "a", name: "a"}
    for value in ([], "a", 3, [{}], True):
        bodies[f"parameters={value!r}"] = {"inputs": "a", "parameters": value}
    for value in ([""], {"a": "b"}, {"a": [3]}, [["a"], ["b"]]):
        bodies[f"candidates={value!r}"] = {"inputs": "a", "parameters": {"candidates": value}}
    bodies["candidates and threshold"] = {"inputs": "a", "parameters": {"candidates": ["a"], "threshold": 0.5}}
    bodies["too many documents"] = {"inputs": ["a"] * 1000}
    bodies["too long"] = {"inputs": ["a", "b " * 20_000]}
    bodies["too long a title"] = {"inputs": {"text": "a", "title": "b " * 30_000}}
    requests = [(name, json.dumps(body).encode(), JSON) for name, body in bodies.items()]
    raw = {
        "empty": b"", "blank": b"  \n", "null": b"null", "number": b"3", "string": b'"a"', "list": b'[{"inputs": "a"}]',
        "no quote": b'{"inputs": "a}', "single quotes": b"{'inputs': 'a'}", "comma": b'{"inputs": "a",}',
        "two values": b'{"inputs": "a"} {"inputs": "b"}', "comment": b'{"inputs": "a"} // b', "cut": b'{"inputs": ["a", "b',
        "NaN": b'{"inputs": "a", "parameters": {"min_score": NaN}}', "bare NaN": b"NaN",
        "Infinity": b'{"inputs": "a", "parameters": {"diversity": -Infinity}}',
        "1e999": b'{"inputs": "a", "parameters": {"threshold": 1e999}}',
        "digits": b'{"inputs": "a", "parameters": {"top_k": ' + b"9" * 20_000 + b"}}",
        "invalid UTF-8": b'{"inputs": "\xff\xfe"}', "cut UTF-8": b'{"inputs": "\xe2\x82"}',
        "surrogate": b'{"inputs": "\\ud800"}', "control": b'{"inputs": "\x00"}', "escape": b'{"inputs": "\\x"}',
        "nested lists": b'{"inputs": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "open lists": b"[" * 90_000,
        "nested objects": b'{"a":' * 15_000, "binary": bytes(range(256)) * 20, "gzip": b"\x1f\x8b\x08\x00" + b"\x00" * 50,
        "form": b"inputs=a&parameters=b", "XML": b"<inputs>a</inputs>", "pickle": b"\x80\x04K\x03.",
        "many errors": b'{"inputs": [' + b"1," * 40_000 + b"1]}",
    }  # fmt: skip
    requests += [(name, body, JSON) for name, body in raw.items()]
    good = b'{"inputs": "a"}'
    for kind in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "",
        "application/jsonx",
    ):
        requests.append((f"content type {kind!r}", good, {"Content-Type": kind}))
    requests.append(("gzip encoding", b"\x1f\x8b\x08\x00", JSON | {"Content-Encoding": "gzip"}))
    requests.append(("oversized", b'{"inputs": "' + b"a" * max_body_bytes + b'"}', JSON))
    return requests
