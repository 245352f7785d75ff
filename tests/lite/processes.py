"""Processes that have the package, and neither PyTorch nor transformers."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# scipy, which nltk imports where it is there, asks for torch
BLOCKED = (
    "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'lexperts', 'keyphrase_tools', 'scipy')))\n"
)


def run(code, *arguments, blocked=True):
    """Runs code in a process that has the package, and neither PyTorch nor transformers."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", (BLOCKED if blocked else "") + code, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
