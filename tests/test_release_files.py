"""Workflows, container and hooks agree with Makefile, setup.cfg and constraints.txt; text files are UTF-8 on every machine."""

import ast
import json
import re
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from lexperts.cli import build_app

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)


def read_setup() -> ConfigParser:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    return setup


def jobs_of(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]


def steps_of(path: Path) -> list[dict]:
    return [step for job in jobs_of(path).values() for step in job["steps"]]


@each_workflow
def test_workflows_run_make_targets_only(path):
    lines = [step["run"] for step in steps_of(path) if "run" in step]
    targets = {re.match(r"make ([a-z0-9-]+)", line)[1] for line in lines}
    assert lines and targets <= set(re.findall(r"^([a-z0-9-]+):", MAKEFILE, re.M))


@each_workflow
def test_actions_are_pinned_and_permissions_are_minimal(path):
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert content["permissions"] == {"contents": "read"}
    granted = [job["permissions"] for job in content["jobs"].values() if "permissions" in job]
    assert granted == ([{"id-token": "write"}] if path.name == "release.yml" else [])
    assert all("timeout-minutes" in job for job in content["jobs"].values())
    uses = {step["uses"] for step in steps_of(path) if "uses" in step}
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@(release/)?v\d+", name) for name in uses)


def test_the_supported_pythons_are_tested():
    metadata = read_setup()["metadata"]["classifiers"]
    tested = jobs_of(ROOT / ".github" / "workflows" / "tests.yml")["tests"]["strategy"]["matrix"]["python"]
    assert set(re.findall(r"Python :: (3\.\d+)", metadata)) <= set(tested)


def test_the_rehearsal_expects_the_keyphrases_of_the_readme():
    smoke = (ROOT / ".ci" / "smoke.py").read_text(encoding="utf-8")
    expected = ast.literal_eval(re.search(r"^SHOWN = (.*)$", smoke, re.M)[1])
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert expected == re.findall(r"^0\.\d\d  (.+)$", readme, re.M)


def test_hooks_use_the_ruff_of_continuous_integration():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    (ruff,) = [repo["rev"] for repo in hooks if "ruff" in repo["repo"]]
    assert f"ruff=={ruff.removeprefix('v')}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")


def test_the_container_starts_an_existing_command_as_another_user():
    entry = json.loads(re.search(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.M)[1])
    help = CliRunner().invoke(build_app(), [*entry[1:3], "--help"]).output
    assert all(word in help for word in entry if word.startswith("--"))
    port = entry[entry.index("--port") + 1]
    assert f"EXPOSE {port}\n" in DOCKERFILE and f"127.0.0.1:{port}/healthz" in DOCKERFILE
    assert re.search(r"^USER [1-9]\d*$", DOCKERFILE, re.M)
    assert set(re.findall(r"'\.\[(\w+)\]'", DOCKERFILE)) <= set(read_setup()["options.extras_require"])


def test_the_container_gets_all_packages():
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    packages = set(read_setup()["options.packages.find"]["include"].split())
    assert {name if name.startswith("modeling") else name.rstrip(".*") for name in packages} <= kept
    assert {"setup.cfg", "pyproject.toml", "constraints.txt", "README.md", "LICENSE", "models"} <= kept


# in text mode and without an encoding; ruff's PLW1514 misses paths whose type it cannot infer
LOCALE = r"\.(read_text\(\)|write_text\((?!.*(encoding=|'utf-8')).*\)|open\((mode=)?'[rwaxt+]+'(?!.*encoding=).*\))$"


def without_encoding(code: str) -> list[int]:
    """Lines with a call that reads or writes text in the local encoding."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    return sorted({call.lineno for call in calls if re.search(LOCALE, ast.unparse(call))})


def test_encodings_are_named():
    wrong = 'p.read_text()\np.write_text(x)\nwith p.open("a"):\n  pass\np.open("w", errors="ignore")\n'
    right = (
        'p.read_text("utf-8")\np.write_text(x, encoding=e)\np.open("rb")\nos.open(p, 0)\nM.open(f)\np.open(mode="wb")\n'
    )
    assert without_encoding(wrong) == [1, 2, 3, 5] and without_encoding(right) == []
    names = ("*_tools", "lexperts*", "examples", "benchmarks", "modeling_*")
    paths = [path for name in names for path in ROOT.glob(f"{name}/**/*.py")]
    found = {str(path): lines for path in paths if (lines := without_encoding(path.read_text("utf-8")))}
    assert len(paths) > 150 and found == {}
