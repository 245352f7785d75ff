"""What `pip install lexperts` brings: every module, every configuration, the commands, and nothing else."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("keyphrase_tools", "lexperts", "merge_tools", *(path.name for path in ROOT.glob("modeling_*")))
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


def test_the_wheel_has_every_module_and_configuration_and_nothing_else(tmp_path):
    for name in (*PACKAGES, "run_tools"):  # the last is of lexperts-lite, and has the version
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    done = subprocess.run([sys.executable, "-c", BUILD, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    wheel = set(zipfile.ZipFile(tmp_path / done.stdout.split()[-1]).namelist())
    expected = {
        path.relative_to(ROOT).as_posix()
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.suffix in (".py", ".yml") or path.name == "py.typed"
    }
    assert {f"{name}/py.typed" for name in PACKAGES} <= expected <= wheel
    assert {name.split("/")[0] for name in wheel if ".dist-info/" not in name} == set(PACKAGES)
