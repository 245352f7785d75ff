"""The example for Spark gives what the command gives; that for Ray is tested in `run_tools/test_ray.py`. Spark needs Java."""

import shutil
import sys
from pathlib import Path

import pytest

from .corpora import check_example

pytest.importorskip("pyspark")
ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(not shutil.which("java"), reason="needs Java")
def test_the_example_gives_what_the_command_gives(folder, tmp_path, monkeypatch):
    for name, value in (("PYTHONPATH", ROOT), ("OMP_NUM_THREADS", 1), ("PYSPARK_PYTHON", sys.executable)):
        monkeypatch.setenv(name, str(value))  # of Spark's workers
    check_example("spark_keyphrases.py", folder, tmp_path, "--master", "local[1]")
