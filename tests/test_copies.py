"""Files that every modeling package carries are the same, byte for byte (`make fix-copies`), and few; others travel once."""

import inspect
import os
import runpy
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_imports, get_relative_import_files
from transformers.pipelines import PIPELINE_REGISTRY

import lexperts  # noqa: F401  (registers the pipelines)

from .test_registration import TASKS

ROOT = Path(__file__).parents[1]
ALL = ("exhird", "hypernet", "lexicon", "moesumm", "seke")
COPIES = {
    **{f"modeling_{package}/shared_{package}.py": "modeling_seke/shared_seke.py" for package in ALL},
    "modeling_moesumm/cache_moesumm.py": "modeling_lexicon/cache_lexicon.py",
    "modeling_hypernet/pipeline_keyphrase_extraction.py": "modeling_seke/pipeline_keyphrase_extraction.py",
}


@pytest.mark.parametrize("copy, master", COPIES.items())
def test_a_copy_equals_its_master_and_is_short(copy, master):
    content = (ROOT / copy).read_bytes()
    assert content == (ROOT / master).read_bytes(), f"edit {master}: make fix-copies"
    assert content.count(b"\n") <= 150


def test_the_shared_file_opens_on_systems_without_fork(monkeypatch):
    monkeypatch.delattr(os, "register_at_fork")
    assert runpy.run_path(str(ROOT / "modeling_seke" / "shared_seke.py"))["TextPipeline"]


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
