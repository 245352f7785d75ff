"""What `pip install lexperts` brings: every module, every configuration, the commands, and nothing else."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("keyphrase_tools", "lexperts", "merge_tools", *(path.name for path in ROOT.glob("modeling_*")))
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> set[str]:
    """The names of the files in a wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in (*PACKAGES, "run_tools"):  # the last is of lexperts-lite, and has the version
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    done = subprocess.run([sys.executable, "-c", BUILD, str(folder)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return set(zipfile.ZipFile(folder / done.stdout.split()[-1]).namelist())


def test_the_wheel_has_every_module_and_configuration(wheel):
    expected = {
        path.relative_to(ROOT).as_posix()
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.suffix in (".py", ".yml") or path.name == "py.typed"
    }
    assert {f"{name}/py.typed" for name in PACKAGES} <= expected <= wheel


def test_the_wheel_has_nothing_else(wheel):
    assert {name.split("/")[0] for name in wheel if ".dist-info/" not in name} == set(PACKAGES)
