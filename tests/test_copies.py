"""Files that every modeling package carries are the same, byte for byte (`make fix-copies`), and few; others travel once."""

import inspect
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_imports, get_relative_import_files
from transformers.pipelines import PIPELINE_REGISTRY

import lexperts  # noqa: F401  (registers the pipelines)

from .test_registration import TASKS

ROOT = Path(__file__).parents[1]
ALL = ("exhird", "hypernet", "lexicon", "moesumm", "seke")
MASTERS = {"backbone": "seke", "saving": "seke", "validation": "seke", "cache": "lexicon", "answers": "lexicon"}
WITHOUT = {
    "backbone": {"exhird", "lexicon"},
    "cache": {"exhird", "hypernet", "seke"},
    "answers": {"hypernet", "seke"},
}  # no backbone, no decoder


def copies():
    """(copy, master) of each file."""
    for name, master in MASTERS.items():
        for package in ALL:
            yield ROOT / f"modeling_{package}/{name}_{package}.py", ROOT / f"modeling_{master}/{name}_{master}.py"
    for folder in ("modeling_exhird", "modeling_hypernet", "modeling_lexicon", "modeling_moesumm", "keyphrase_tools"):
        yield ROOT / folder / "pipeline_base.py", ROOT / "modeling_lexicon" / "pipeline_base.py"
    stub = "pipeline_keyphrase_extraction.py"
    yield ROOT / "modeling_hypernet" / stub, ROOT / "modeling_seke" / stub


@pytest.mark.parametrize("copy, master", list(copies()), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_copy_equals_its_master(copy, master):
    if copy.parent.name.removeprefix("modeling_") in WITHOUT.get(copy.name.partition("_")[0], ()):
        assert not copy.exists()
    else:
        assert copy.read_bytes() == master.read_bytes(), f"edit {master.name} in {master.parent.name}: make fix-copies"


@pytest.mark.parametrize("package", ALL)
def test_a_package_has_few_copied_lines(package):
    own = [copy for copy, _ in copies() if copy.parent.name == f"modeling_{package}" and copy.exists()]
    assert len(own) >= 3 and sum(len(path.read_text(encoding="utf-8").splitlines()) for path in own) <= 300


def travelling(task: str) -> list[str]:
    """The files of a task's pipeline."""
    pipeline = inspect.getfile(PIPELINE_REGISTRY.supported_tasks[task]["impl"])
    return [pipeline, *get_relative_import_files(pipeline)]


def test_files_that_travel_alone_name_their_licence():
    paths = [path for package in ALL for path in ROOT.glob(f"modeling_{package}/*_*.py") if path.name != "__init__.py"]
    for path in paths:
        assert Path(path).read_text(encoding="utf-8").startswith("# SPDX-License-Identifier: Apache-2.0\n"), path


@pytest.mark.parametrize("task", [task for task in TASKS if task != "keyphrase-extraction"])
def test_files_that_travel_with_a_checkpoint_need_no_package_of_ours(task):
    """So transformers finds none missing on another machine; imports in `try` blocks do not count."""
    for file in travelling(task):
        ours = {"run_tools", "lexperts_lite", "keyphrase_tools", "merge_tools", "lexperts"} & set(get_imports(file))
        assert not ours, f"{file} imports {ours}"
