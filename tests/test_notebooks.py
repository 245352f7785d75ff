# needs: test-all, smollm2
"""The notebooks run from top to bottom with tiny settings, without a network, and are saved without outputs."""

import os
from pathlib import Path

import pytest

from tests.tools import save_tiny_llama

nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")
manager = pytest.importorskip("jupyter_client.manager")

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
TINY = {  # a setting, files that are written, and a part of the output
    "keyphrases_of_a_csv": ("TOP_K = 2", ["papers.csv", "papers.keyphrases.csv"], "tidal"),
    "fine_tune_on_your_labels": ("STEPS = 1", ["my-keyphrase-model/model.safetensors"], "after"),
    "merge_three_experts": ("STEPS = 2", ["merged-experts/mixture/config.json"], "MixtralForCausalLM"),
    "train_and_merge_real_llamas": (
        'BASE = "base"; STEPS = 1',
        ["real-llamas/mixture/gate_statistics/code.safetensors"],
        "held-out tokens of licences",
    ),
}
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def kernel():
    """A kernel for all notebooks, so that torch is imported once; each begins with an empty namespace."""
    kernel = manager.KernelManager(kernel_name="python3")
    own = {"PYTHONPATH": str(ROOT), "PYDEVD_DISABLE_FILE_VALIDATION": "1", "TQDM_DISABLE": "1"}
    kernel.start_kernel(env={**os.environ, **own})
    yield kernel
    kernel.shutdown_kernel(now=True)


def test_each_notebook_is_tested():
    assert [path.stem for path in NOTEBOOKS] == sorted(TINY)


@pytest.mark.nightly
@each_notebook
def test_a_notebook_runs_from_top_to_bottom(path, kernel, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    setting, files, output = TINY[path.stem]
    (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    assert f"\n{setting.split(' = ')[0]} = " in f"\n{cell.source}"
    cell.source += f"\n{setting}"
    if "BASE" in setting:
        save_tiny_llama(tmp_path / "base")
    notebook.cells.insert(0, nbformat.v4.new_code_cell(f"%reset -f\n%cd -q {tmp_path}"))
    nbclient.NotebookClient(notebook, km=kernel, timeout=300).execute(reset_kc=True)
    for name in files:
        assert (tmp_path / name).is_file(), name
    assert output in str([cell.get("outputs") for cell in notebook.cells])


@each_notebook
def test_a_notebook_is_saved_without_outputs_and_explains_its_cells(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    prose = [cell for cell in notebook.cells if cell.cell_type == "markdown"]
    assert len(prose) >= len(code) - 1 and prose[0].source.startswith("# ") and "pip install" in prose[0].source
