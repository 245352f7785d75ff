"""Processes that have the package, and neither PyTorch nor transformers."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCKED = "import sys; sys.modules.update(torch=None, transformers=None, lexperts=None, keyphrase_tools=None, scipy=None)\n"  # scipy, which nltk imports where it is there, asks for torch


def run(lite, code, *arguments, blocked=True):
    """Runs code in a process that has the package, and neither PyTorch nor transformers."""
    environment = {**os.environ, "PYTHONPATH": str(lite)}
    command = [sys.executable, "-c", (BLOCKED if blocked else "") + code, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
