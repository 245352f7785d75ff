"""Files that every modeling package carries are the same, byte for byte: `make fix-copies`."""

import inspect
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_imports, get_relative_import_files
from transformers.pipelines import PIPELINE_REGISTRY

import lexperts  # noqa: F401  (registers the pipelines)

ROOT = Path(__file__).parents[1]
PACKAGES = ("exhird", "hypernet", "lexicon", "moesumm")


@pytest.mark.parametrize("package", ["exhird", "moesumm"])
def test_a_copy_of_the_cache_equals_its_master(package):
    copy, master = (ROOT / f"modeling_{name}" / f"cache_{name}.py" for name in (package, "lexicon"))
    assert copy.read_bytes() == master.read_bytes(), (
        f"edit {master.name} in modeling_lexicon, then run: make fix-copies"
    )


@pytest.mark.parametrize("folder", ["modeling_exhird", "modeling_hypernet", "modeling_moesumm", "keyphrase_tools"])
def test_a_copy_of_the_base_pipeline_equals_its_master(folder):
    copy, master = (ROOT / name / "pipeline_base.py" for name in (folder, "modeling_lexicon"))
    assert copy.read_bytes() == master.read_bytes(), (
        "edit pipeline_base.py in modeling_lexicon, then run: make fix-copies"
    )


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", ["backbone_{}.py", "saving_{}.py", "validation_{}.py", "handler.py", "card.py"])
def test_a_copy_equals_its_master(name, package):
    copy, master = ROOT / f"modeling_{package}" / name.format(package), ROOT / "modeling_seke" / name.format("seke")
    if package == "lexicon" and name.startswith("backbone"):
        assert not copy.exists()  # it has no backbone
    else:
        assert copy.read_bytes() == master.read_bytes(), (
            f"edit {master.name} in modeling_seke, then run: make fix-copies"
        )


@pytest.mark.parametrize(
    "task",
    ["extractive-qa", "definition-modeling", "keyphrase-extraction", "keyphrase-generation", "moe-summarization"],
)
def test_files_that_travel_with_a_checkpoint_need_no_package_of_ours(task):
    pipeline = inspect.getfile(PIPELINE_REGISTRY.supported_tasks[task]["impl"])
    for file in (pipeline, *get_relative_import_files(pipeline)):
        ours = {"run_tools", "keyphrase_tools", "merge_tools", "lexperts"} & set(get_imports(file))
        assert not ours, f"{file} imports {ours}"
