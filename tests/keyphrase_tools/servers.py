"""Malformed requests to the server."""

import gzip
import json

JSON = {"Content-Type": "application/json"}


def malformed_requests(max_body_bytes: int) -> list[tuple[str, bytes, dict]]:
    """(name, body, headers) of requests that must get a 4xx status."""
    bodies = []
    for value in [None, True, 3, 1.5, 10**400, [], [[]], [None], ["a", 3], [["a"]], {}, {"a": 1}, {"text": 3}, {"text": None},
                  {"title": "a"}, {"text": "a", "title": 3}, {"text": ["a", "b"]}, {"text": "a", "x": 1}]:  # fmt: skip
        bodies += [{"inputs": value}, {"inputs": ["a", value]}]
    wrong = [None, True, 3, -1, 0, 1.5, 10**30, -(10**30), "", "x", "1", [], [[]], [None], {}, {"a": 1}, {"text": "a"}]
    valid = {  # what `wrong` has of each option's valid values
        "top_k": (None, 3), "min_score": (None, 0), "threshold": (None,), "style": (None,), "diversity": (None, 0),
        "candidates": (None,), "language": (None,), "nested": (None, True), "mentions": (True,),
    }  # fmt: skip
    for name, allowed in valid.items():
        values = [v for v in wrong if not any(v is one or (type(v) is int and v == one) for one in allowed)]
        bodies += [{"inputs": "a", "parameters": {name: value}} for value in values]
    for name in ("model", "device", "trust_remote_code", "batch_size", "max_length", "__class__", "x" * 5000):
        bodies += [{"inputs": "a", "parameters": {name: "a"}}, {"inputs": "a", name: "a"}]
    bodies += [{"inputs": "a", "parameters": value} for value in ([], "a", 3, [{}], True)]
    for value in ([""], {"a": "b"}, {"a": [3]}, [["a"], ["b"]], ["a " * 51]):
        bodies.append({"inputs": "a", "parameters": {"candidates": value}})
    bodies.append({"inputs": "a", "parameters": {"candidates": ["a"], "threshold": 0.5}})
    bodies += [
        {"inputs": value} for value in (["a"] * 1000, ["a", "b " * 20_000], {"text": "a", "title": "b " * 30_000})
    ]
    raw = [
        b"", b"  \n", b"null", b"3", b'"a"', b'[{"inputs": "a"}]', b'{"inputs": "a}', b"{'inputs': 'a'}", b'{"inputs": "a",}',
        b'{"inputs": "a"} {"inputs": "b"}', b'{"inputs": "a"} // b', b'{"inputs": ["a", "b', b'{"inputs": "a", "inputs": "b"}',
        b'{"inputs": "a", "parameters": {"min_score": NaN}}', b"NaN", b'{"inputs": "a", "parameters": {"diversity": -Infinity}}',
        b'{"inputs": "a", "parameters": {"threshold": 1e999}}', b'{"inputs": "a", "parameters": {"top_k": ' + b"9" * 20_000 + b"}}",
        b'{"inputs": "\xff\xfe"}', b'{"inputs": "\xe2\x82"}', b'{"inputs": "\\ud800"}', b'{"inputs": "\x00"}', b'{"inputs": "\\x"}',
        b'{"inputs": ' + b"[" * 40_000 + b"]" * 40_000 + b"}", b"[" * 90_000, b'{"a":' * 15_000, bytes(range(256)) * 20,
        b"inputs=a&parameters=b", b"<inputs>a</inputs>", b"\x80\x04K\x03.", b'{"inputs": [' + b"1," * 40_000 + b"1]}",
    ]  # fmt: skip
    requests = [(f"{body!r:.90}", body, JSON) for body in [*(json.dumps(body).encode() for body in bodies), *raw]]
    good, form = b'{"inputs": "a"}', "multipart/form-data; boundary=x"
    for kind in ("text/plain", "application/x-www-form-urlencoded", form, "", "application/jsonx"):
        requests.append((f"content type {kind!r}", good, {"Content-Type": kind}))
    requests.append(("gzip", gzip.compress(good), JSON | {"Content-Encoding": "gzip"}))
    requests.append(("oversized", b'{"inputs": "' + b"a" * max_body_bytes + b'"}', JSON))
    return requests
