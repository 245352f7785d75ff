"""`import lexperts` is enough, before or after transformers, and costs nothing without it."""

import subprocess
import sys

import pytest

OF_PACKAGE = {
    "modeling_exhird": "keyphrase-generation", "modeling_hypernet": "extractive-qa", "modeling_lexicon": "definition-modeling",
    "modeling_moesumm": "moe-summarization", "keyphrase_tools": "keyphrase-extraction",
}  # fmt: skip
TASKS = tuple(OF_PACKAGE.values())
MODEL_TYPES = ("seke", "exhird", "hypernet", "moesumm", "lexicon")
CHECK = f"""
from transformers import AutoConfig
from transformers.pipelines import PIPELINE_REGISTRY
assert set({TASKS}) <= set(PIPELINE_REGISTRY.get_supported_tasks())
for name in {MODEL_TYPES}:
    assert AutoConfig.for_model(name).model_type == name
"""


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("imports", ["import lexperts\nimport transformers", "import transformers\nimport lexperts"])
def test_one_import_registers_everything(imports):
    done = run(imports + CHECK)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "already registered" not in done.stderr


@pytest.mark.nightly
def test_any_package_may_be_imported_first():
    """Also before transformers; its pipeline then opens models with our checks. Forked where what transformers imports is."""
    done = run(
        "import importlib, os, sys, torch\n"
        "from contextlib import suppress\n"
        "for name in ('accelerate', 'huggingface_hub', 'jinja2', 'pandas', 'PIL.Image', 'scipy.optimize', 'tokenizers', 'torchao'):\n"
        "    with suppress(ImportError):\n"
        "        importlib.import_module(name)\n"
        "assert not {'transformers', 'lexperts'} & set(sys.modules)\n"
        f"for package, task in {OF_PACKAGE}.items():\n"
        "    for names in ([package], ['lexperts', package]):\n"
        "        if not os.fork():\n"
        "            try:\n"
        "                [importlib.import_module(name) for name in names]\n"
        "                from transformers.pipelines import PIPELINE_REGISTRY\n"
        "                opened = PIPELINE_REGISTRY.supported_tasks[task]['pt'][0].__module__\n"
        "                os._exit(opened.startswith('transformers.'))\n"
        "            finally:\n"
        "                os._exit(2)\n"
        "        print(os.waitpid(-1, 0)[1], *names)\n"
    )
    assert done.stdout.split() == [w for p in OF_PACKAGE for w in ("0", p, "0", "lexperts", p)], (
        done.stdout + done.stderr
    )


def test_the_import_alone_imports_neither_torch_nor_transformers():
    done = run("import sys, lexperts\nprint(lexperts.__version__, {'torch', 'transformers'} & set(sys.modules))")
    assert done.stdout.split()[1:] == ["set()"], done.stderr


def test_importing_changes_no_state_of_the_process():
    """Nor does it start threads or handle signals."""
    done = run(
        "import csv, gc, locale, logging, os, random, signal, socket, sys, threading, warnings\n"
        "import sklearn, torch, transformers.pipelines\n"
        "def state():\n"
        "    return [csv.field_size_limit(), random.getstate(), len(warnings.filters), locale.setlocale(locale.LC_ALL), dict(os.environ),\n"
        "            signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), logging.root.level, logging.root.handlers[:],\n"
        "            sys.getrecursionlimit(), sys.excepthook, threading.active_count(), os.getcwd(), socket.getdefaulttimeout(), gc.isenabled()]\n"
        "before = state()\n"
        "import lexperts, run_tools.run_over, keyphrase_tools.metrics, merge_tools, lexperts.cli.keyphrases\n"
        "import lexperts.recipes.data\n"
        "print([i for i, (a, b) in enumerate(zip(before, state())) if a != b])"
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr[-2000:]


def test_transformers_keeps_its_own_loader_and_a_collector_that_is_off_stays_off():
    done = run(
        "import gc\n"
        "gc.disable()\n"
        "import lexperts, transformers, importlib, sys\n"
        "assert not gc.isenabled() and 'modeling_seke' in sys.modules\n"
        "assert type(transformers.__spec__.loader).__name__ == 'SourceFileLoader'\n"
        "assert not [finder for finder in sys.meta_path if type(finder).__name__ == 'AfterTransformers']"
    )
    assert done.returncode == 0, done.stderr[-2000:]
