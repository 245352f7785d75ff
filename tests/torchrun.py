"""A script in two processes on the CPU, as torchrun starts them."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Gloo's worker threads outlive destroy_process_group, and one that is not done when Python shuts down aborts its process.
WITHOUT_SHUTDOWN = "\nimport os\nos._exit(0)\n"


def run_by_torchrun(code: str, folder: Path, *arguments: str) -> None:
    """Run `code` in two processes, `folder` and `arguments` in their sys.argv; what fails in one fails the test."""
    script = folder / "script.py"
    script.write_text(code + WITHOUT_SHUTDOWN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "PYTHONFAULTHANDLER": "1",
    }
    done = subprocess.run(
        [*command, str(folder), *arguments], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-6000:]
