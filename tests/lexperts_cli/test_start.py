"""Both command lines start light: what `--help` and `--version` need, and no model, is imported."""

import os
import subprocess
import sys
from configparser import ConfigParser
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "nltk", "pandas", "sklearn", "datasets", "matplotlib")


def entry_points() -> dict[str, str]:
    """{"keyphrases": "module:function"} of setup.cfg, which may be newer than what is installed."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = setup["options.entry_points"]["console_scripts"].strip().splitlines()
    return dict(map(str.strip, line.split("=")) for line in lines)


def start(name, *arguments, before=""):
    """Runs a console script as pip writes it, then names the heavy modules that it imported on the standard error."""
    module, function = entry_points()[name].split(":")
    code = (
        f"import atexit, sys\n{before}\n"
        f"atexit.register(lambda: print('HEAVY', [m for m in {HEAVY} if m in sys.modules], file=sys.stderr))\n"
        f"sys.argv = ['{name}', *sys.argv[1:]]\nfrom {module} import {function}\nsys.exit({function}())"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments], env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("option", ["--help", "--version"])
@pytest.mark.parametrize("name", ["keyphrases", "merge-experts"])
def test_help_and_version_import_no_model(name, option):
    done = start(name, option)
    assert done.returncode == 0, done.stderr
    assert "HEAVY []" in done.stderr
    if option == "--version":
        assert done.stdout.split() == [name, version("lexperts")]
    else:
        assert "--version" in done.stdout


@pytest.mark.parametrize("command", ["extract", "score", "explain", "card"])
def test_a_commands_help_imports_no_model(command):
    done = start("keyphrases", command, "--help")
    assert done.returncode == 0 and "HEAVY []" in done.stderr


@pytest.mark.parametrize("name, missing, extra", [("keyphrases", "typer", "cli"), ("merge-experts", "rich", "merge")])
def test_a_command_line_without_its_extra_names_it(name, missing, extra):
    done = start(name, "--help", before=f"sys.modules['{missing}'] = None")
    assert done.returncode == 1 and f"pip install lexperts[{extra}]" in done.stderr and "Traceback" not in done.stderr
