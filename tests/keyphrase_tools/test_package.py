"""`import keyphrase_tools` registers models and pipeline, imports no NLTK, and offers its modules as attributes."""

import doctest
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CODE = """
import sys
import keyphrase_tools
assert "keyphrase_tools.metrics" not in sys.modules and "nltk" not in sys.modules
print(keyphrase_tools.metrics.keyphrase_f1.__module__, hasattr(keyphrase_tools, "no_such_module"))
from transformers import AutoConfig
from transformers.pipelines import PIPELINE_REGISTRY
print(AutoConfig.for_model("seke").model_type, "keyphrase-extraction" in PIPELINE_REGISTRY.get_supported_tasks())
"""


def test_one_import_registers_the_models_and_gives_the_modules():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["keyphrase_tools.metrics False", "seke True"]


@pytest.mark.parametrize("name", [
    "keyphrase_tools.labels", "keyphrase_tools.metrics", "keyphrase_tools.phrase_lists",
    *(f"lexperts_lite.{name}" for name in ("call_options", "clean", "decoding", "porter", "words")),
])  # fmt: skip
def test_the_examples_of_docstrings_hold(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted and not result.failed
