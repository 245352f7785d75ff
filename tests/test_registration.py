"""`import lexperts` is enough, before or after transformers, and costs nothing without it."""

import subprocess
import sys

import pytest

OF_PACKAGE = {
    "modeling_exhird": "keyphrase-generation", "modeling_hypernet": "extractive-qa", "modeling_lexicon": "definition-modeling",
    "modeling_moesumm": "moe-summarization", "keyphrase_tools": "keyphrase-extraction",
}  # fmt: skip
TASKS = tuple(OF_PACKAGE.values())
CHECK = f"""
from transformers import AutoConfig
from transformers.pipelines import PIPELINE_REGISTRY
assert set({TASKS}) <= set(PIPELINE_REGISTRY.get_supported_tasks())
for name in ("seke", "exhird", "hypernet", "moesumm", "lexicon"):
    assert AutoConfig.for_model(name).model_type == name
assert type(transformers.__spec__.loader).__name__ == "SourceFileLoader"
assert not [finder for finder in sys.meta_path if type(finder).__name__ == "AfterTransformers"]
"""
# no state of the process changes, no thread starts, no signal is handled, a collector that is off stays off
AFTER = f"""
import csv, gc, locale, logging, os, random, signal, socket, sys, threading, warnings
import sklearn, torch, transformers.pipelines
gc.disable()
def state():
    return [csv.field_size_limit(), random.getstate(), len(warnings.filters), locale.setlocale(locale.LC_ALL), dict(os.environ),
            signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), logging.root.level, logging.root.handlers[:],
            sys.getrecursionlimit(), sys.excepthook, threading.active_count(), os.getcwd(), socket.getdefaulttimeout(), gc.isenabled()]
before = state()
import lexperts, run_tools.run_over, keyphrase_tools.metrics, merge_tools, lexperts.cli.keyphrases, lexperts.recipes.data
assert not [i for i, (a, b) in enumerate(zip(before, state())) if a != b]
{CHECK}
"""
BEFORE = f"import gc, sys\ngc.disable()\nimport lexperts, transformers\nassert not gc.isenabled()\n{CHECK}"
# in processes that are forked where all that transformers imports is
ANY_FIRST = f"""
import importlib, os, sys, torch
from contextlib import suppress
for name in ("accelerate", "huggingface_hub", "jinja2", "pandas", "PIL.Image", "scipy.optimize", "tokenizers", "torchao"):
    with suppress(ImportError):
        importlib.import_module(name)
assert not {{"transformers", "lexperts"}} & set(sys.modules)
for package, task in {OF_PACKAGE}.items():
    for names in ([package], ["lexperts", package]):
        if not os.fork():
            try:
                [importlib.import_module(name) for name in names]
                from transformers.pipelines import PIPELINE_REGISTRY
                opened = PIPELINE_REGISTRY.supported_tasks[task]["pt"][0].__module__
                os._exit(opened.startswith("transformers."))
            finally:
                os._exit(2)
        assert os.waitpid(-1, 0)[1] == 0, names
"""


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(AFTER, id="after transformers"),
        pytest.param(BEFORE, id="before transformers", marks=pytest.mark.nightly),
        pytest.param(ANY_FIRST, id="any package first", marks=pytest.mark.nightly),
        pytest.param(
            "import sys, lexperts\nassert lexperts.__version__ and not {'torch', 'transformers'} & {*sys.modules}",
            id="without",
        ),
    ],
)
def test_one_import_registers_everything_and_changes_nothing_else(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "already registered" not in done.stderr, done.stderr[-2000:]
