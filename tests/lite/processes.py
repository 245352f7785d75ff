"""Processes that have the package, and neither PyTorch nor transformers."""

import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx2

ROOT = Path(__file__).resolve().parents[2]
BLOCKED = "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'lexperts', 'keyphrase_tools', 'nltk', 'scipy')))\n"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(code, *arguments):
    """Runs code in a process that has the package, and neither PyTorch nor transformers."""
    command = [sys.executable, "-c", BLOCKED + code, *map(str, arguments)]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


@contextmanager
def serve(log: Path, *words):
    """Runs `lexperts-lite serve` on a free port until the block ends; -> the process and its address."""
    code = f"{BLOCKED}from lexperts_lite.__main__ import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "serve", "--port", "0", *map(str, words)]
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=ENVIRONMENT)
    try:
        deadline = time.monotonic() + 120
        while not (found := re.search(r"serving on (http://\S+:\d+)", log.read_text())) or not is_ready(found[1]):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield process, found[1]
    finally:
        process.kill()
        process.wait()


def is_ready(url: str) -> bool:
    """Whether /healthz answers 200."""
    try:
        return httpx2.get(f"{url}/healthz").status_code == 200
    except httpx2.TransportError:
        return False
