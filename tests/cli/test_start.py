"""The commands start light: `--help` and `--version` import no model, and every help shows an example."""

import os
import subprocess
import sys
from configparser import ConfigParser
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lexperts.cli import build_app
from lexperts.recipes import DEFINE, EVALUATE, TRAIN

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "nltk", "pandas", "sklearn", "datasets", "matplotlib")
GROUPS = {"train": TRAIN, "evaluate": EVALUATE, "define": DEFINE}
RECIPES = [(group, name) for group, commands in GROUPS.items() for name in commands]


def entry_points() -> dict[str, str]:
    """{"keyphrases": "module:function"} of setup.cfg, which may be newer than what is installed."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = setup["options.entry_points"]["console_scripts"].strip().splitlines()
    return dict(map(str.strip, line.split("=")) for line in lines)


def start(name, *arguments, before=""):
    """Runs a console script as pip writes it, then prints the heavy modules that it imported on the standard error."""
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
@pytest.mark.parametrize("name", ["lexperts", "keyphrases", "merge-experts"])
def test_help_and_version_import_no_model(name, option):
    done = start(name, option)
    assert done.returncode == 0, done.stderr
    assert "HEAVY []" in done.stderr
    if option == "--version":
        assert done.stdout.split() == [name, version("lexperts")]
    else:
        assert "--version" in done.stdout


@pytest.mark.parametrize("group, name", RECIPES, ids=lambda value: value)
def test_the_help_of_a_recipe_imports_no_model_and_shows_an_example(group, name):
    done = start("lexperts", group, name, "--help")
    assert done.returncode == 0, done.stderr
    assert "HEAVY []" in done.stderr
    assert f"lexperts {group} {name} " in done.stdout.split("Options:")[0]


def test_the_help_of_all_other_commands_shows_an_example():
    runner, app = CliRunner(), build_app()
    for group in ("keyphrases", "merge", "define", "summarize", "app"):
        commands = {
            "keyphrases": ("extract", "score", "explain", "card", "serve"),
            "merge": (
                "compose",
                "check",
                "inspect",
                "verify",
                "add",
                "remove",
                "extract",
                "export",
                "route",
                "cluster",
            ),
            "define": ("terms",),
            "summarize": (None,),
            "app": (None,),
        }[group]
        for command in commands:
            words = [group, command] if command else [group]
            done = runner.invoke(app, [*words, "--help"])
            assert done.exit_code == 0
            assert f"lexperts {' '.join(words)} " in " ".join(done.output.split()), words


def test_a_configuration_is_printed_and_a_wrong_name_names_the_others():
    done = start("lexperts", "train", "seke", "--show-config", "minilm_cpu")
    assert done.stdout == (ROOT / "lexperts/recipes/seke/minilm_cpu.yml").read_text(encoding="utf-8")
    assert "HEAVY []" in done.stderr
    done = start("lexperts", "train", "seke", "--show-config", "minilm")
    assert done.returncode == 2 and "'minilm'" in done.stderr and "minilm_cpu" in done.stderr


def test_a_command_line_without_its_extra_names_it():
    done = start("merge-experts", "--help", before="sys.modules['rich'] = None")
    assert done.returncode == 1 and "pip install lexperts[merge]" in done.stderr and "Traceback" not in done.stderr
