"""How many documents a second does `lexperts keyphrases serve` read, and how long do clients wait?

    python benchmarks/serving.py                # about five minutes

Clients over HTTP on the same machine, each of which sends one document, waits for its keyphrases and sends the next one. A
client that gets 503 waits for the seconds of Retry-After. There are more clients at the end than the queue has room for, and then a
single one again. The model is the default model; the server and all clients share the machine's cores. Memory is the server's resident
size at the end of each load.
"""

import asyncio
import re
import subprocess
import sys
import time
from itertools import cycle
from pathlib import Path

import httpx2
import numpy as np
import psutil
from common import make_parser, write
from timing import describe

from run_tools.jsonl import read_jsonl
from run_tools.versions import package_versions

CORPUS = Path(__file__).resolve().parent.parent / "examples" / "corpus" / "test.jsonl"
START = 120  # seconds for the server to start


def start_server(options: list[str]) -> tuple[subprocess.Popen, str]:
    """The process of a server on a free port, and its address, once it is ready."""
    command = [sys.executable, "-m", "lexperts", "keyphrases", "serve", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    url = next(found[1] for line in process.stdout if (found := re.search(r"serving on (http://\S+:\d+)", line)))
    for _ in range(START):
        try:
            httpx2.get(f"{url}/healthz").raise_for_status()
            return process, url
        except httpx2.HTTPError:
            time.sleep(1)
    process.kill()
    raise RuntimeError(f"the server was not ready after {START} s")


async def send(client: httpx2.AsyncClient, documents, until: float, answered: list, refused: list) -> None:
    """One client: appends the seconds of each request that was answered, or refused."""
    while (start := time.perf_counter()) < until:
        response = await client.post("/keyphrases", json={"inputs": next(documents)})
        seconds = time.perf_counter() - start
        if response.status_code == 503:
            refused.append(seconds)
            await asyncio.sleep(min(int(response.headers["Retry-After"]), max(until - time.perf_counter(), 0)))
        else:
            (result,) = response.raise_for_status().json()["results"]
            assert "keyphrases" in result, result
            answered.append(seconds)


async def load(url: str, clients: int, seconds: float, documents) -> dict:
    """Runs clients at the same time -> what they measured."""
    answered, refused, before = [], [], batches(url)
    limits = httpx2.Limits(max_connections=clients)
    async with httpx2.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        start = time.perf_counter()
        await asyncio.gather(*(send(client, documents, start + seconds, answered, refused) for _ in range(clients)))
        elapsed = time.perf_counter() - start
    count, total = (after - first for after, first in zip(batches(url), before, strict=True))
    return {
        "clients": clients,
        "seconds": round(elapsed, 2),
        "documents": len(answered),
        "documents_per_second": round(len(answered) / elapsed, 2),
        **{f"p{q}_ms": round(1e3 * float(np.percentile(answered, q)), 1) for q in (50, 99)},
        "mean_batch": round(total / count, 2),
        "refused": len(refused),
        **{f"refused_p{q}_ms": round(1e3 * float(np.percentile(refused, q)), 1) if refused else None for q in (50, 99)},
    }


def batches(url: str) -> tuple[float, float]:
    """The numbers of batches and of documents in them so far."""
    text = httpx2.get(f"{url}/metrics").text
    return tuple(float(re.search(rf"^keyphrases_batch_documents_{x} (\S+)$", text, re.M)[1]) for x in ("count", "sum"))


def main():
    """Measures each number of clients in turn."""
    parser = make_parser(__doc__, "serving")
    parser.add_argument("--seconds", type=float, default=60, help="for each number of clients")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 128, 1])
    parser.add_argument("--data", type=Path, default=CORPUS, help="a .jsonl file with text and optionally title")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--max-queue", type=int, default=64)
    args = parser.parse_args()
    rows = read_jsonl(args.data, ("text",))
    documents = cycle({"text": row["text"], "title": row.get("title")} for row in rows)
    server = {"batch-size": args.batch_size, "max-queue": args.max_queue}
    process, url = start_server([f"--{name}={value}" for name, value in server.items()])
    results = []
    try:
        for clients in args.clients:
            row = asyncio.run(load(url, clients, args.seconds, documents))
            row["server_megabytes"] = round(psutil.Process(process.pid).memory_info().rss / 1e6)
            results.append(row)
            print(describe(row), flush=True)
    finally:
        process.terminate()
        process.wait()
    words = float(np.mean([len(row["text"].split()) for row in rows]))
    settings = {"seconds": args.seconds, "data": args.data.name, "documents": len(rows), "words": round(words, 1)}
    servers = package_versions(("fastapi", "uvicorn"))
    write(args.name, results, **settings, **server, **servers)


if __name__ == "__main__":
    main()
