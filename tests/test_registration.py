"""`import lexperts` is enough, before or after transformers, and costs nothing without it."""

import subprocess
import sys

import pytest

TASKS = ("definition-modeling", "extractive-qa", "keyphrase-extraction", "keyphrase-generation", "moe-summarization")
MODEL_TYPES = ("seke", "exhird", "hypernet", "moesumm", "lexicon")
CHECK = f"""
from transformers import AutoConfig
from transformers.pipelines import PIPELINE_REGISTRY
assert set({TASKS}) <= set(PIPELINE_REGISTRY.get_supported_tasks())
for name in {MODEL_TYPES}:
    assert AutoConfig.for_model(name).model_type == name
"""


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("imports", ["import lexperts\nimport transformers", "import transformers\nimport lexperts"])
def test_one_import_registers_everything(imports):
    done = run(imports + CHECK)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "already registered" not in done.stderr


def test_the_import_alone_imports_neither_torch_nor_transformers():
    done = run("import sys, lexperts\nprint(lexperts.__version__, {'torch', 'transformers'} & set(sys.modules))")
    assert done.stdout.split()[1:] == ["set()"], done.stderr


def test_transformers_keeps_its_own_loader():
    done = run(
        "import lexperts, transformers, importlib, sys\n"
        "assert type(transformers.__spec__.loader).__name__ == 'SourceFileLoader'\n"
        "assert not [finder for finder in sys.meta_path if type(finder).__name__ == 'AfterTransformers']"
    )
    assert done.returncode == 0, done.stderr[-2000:]
