"""The commands start light: `--help` and `--version` import no model, and every help shows an example."""

import os
import signal
import subprocess
import sys
from configparser import ConfigParser
from importlib.metadata import version
from pathlib import Path

import pytest
import typer

from lexperts.cli import build_app

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "nltk", "pandas", "sklearn", "datasets", "matplotlib")
GROUPS = typer.main.get_command(build_app()).commands
COMMANDS = [(group, name) for group, command in GROUPS.items() for name in getattr(command, "commands", ())]
COMMANDS += [(group,) for group, command in GROUPS.items() if not hasattr(command, "commands")]


def entry_points() -> dict[str, str]:
    """{"keyphrases": "module:function"} of setup.cfg, which may be newer than what is installed."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = setup["options.entry_points"]["console_scripts"].strip().splitlines()
    return dict(map(str.strip, line.split("=")) for line in lines)


def start(*commands, before=""):
    """Runs console scripts as pip writes them, in one process, then prints the heavy modules that they imported."""
    code = (
        "import importlib, sys\n" + before + "\ndef run(name, module, function, *arguments):\n"
        "    sys.argv = [name, *arguments]\n"
        "    try:\n        getattr(importlib.import_module(module), function)()\n"
        "    except SystemExit as end:\n        return end.code\n"
    )
    for name, *arguments in commands:
        code += f"status = run({name!r}, *{entry_points()[name].split(':')}, *{arguments})\nprint('END', status, flush=True)\n"
    code += f"print('HEAVY', [m for m in {HEAVY} if m in sys.modules], file=sys.stderr)\nsys.exit(status)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )


def test_help_and_version_import_no_model():
    names = ("lexperts", "keyphrases", "merge-experts")
    done = start(*((name, option) for name in names for option in ("--help", "--version")))
    assert done.returncode == 0 and "HEAVY []" in done.stderr, done.stderr
    outputs = done.stdout.split("END 0\n")
    for name, help, printed in zip(names, outputs[::2], outputs[1::2], strict=False):
        assert "--version" in help and printed.split() == [name, version("lexperts")]


def test_the_help_of_every_command_imports_no_model_and_shows_an_example():
    done = start(*(("lexperts", *words, "--help") for words in COMMANDS))
    assert done.returncode == 0 and "HEAVY []" in done.stderr, done.stderr
    for words, help in zip(COMMANDS, done.stdout.split("END 0\n"), strict=False):
        shown = " ".join(" ".join(line for line in help.splitlines() if "Usage:" not in line).split())
        assert f"lexperts {' '.join(words)} " in shown, words


def test_what_is_wrong_with_a_training_is_named_before_a_model_is_imported():
    train, rows = ("lexperts", "train", "seke"), str(ROOT / "examples/corpus/test.jsonl")
    wrong = (*train, "minilm_cpu", "--train-files", rows, "--text-column", "txt")
    done = start((*train, "--show-config", "minilm_cpu"), (*train, "--show-config", "minilm"), wrong)
    printed = (ROOT / "lexperts/recipes/seke/minilm_cpu.yml").read_text(encoding="utf-8")
    assert done.stdout == f"{printed}END 0\nEND 2\nEND 2\n" and "HEAVY []" in done.stderr
    assert all(part in done.stderr for part in ("'minilm' is", "minilm_cpu", "'txt'")) and done.returncode == 2


@pytest.mark.parametrize(
    "module, command", [("merge_tools", "merge inspect x"), ("lexperts.recipes.seke", "train seke x")]
)
def test_ctrl_c_while_a_command_is_imported_is_one_line(module, command):
    press = (
        "import os, signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\nclass Press:\n"
        f"    def find_spec(self, name, path=None, target=None):\n        if name == {module!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\nsys.meta_path.insert(0, Press())"
    )
    done = start(("lexperts", *command.split()), before=press)
    first, *more = done.stderr.splitlines()
    assert done.returncode == 130 and first.startswith("interrupted: R") and more == ["HEAVY []"]


@pytest.mark.parametrize("name", ["lexperts", "keyphrases", "merge-experts"])
def test_ctrl_c_while_python_ends_prints_nothing(name):
    press = (
        "import atexit, os, signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))"
    )
    done = start((name, "--version"), before=press)
    assert done.returncode == -signal.SIGINT and done.stderr == "HEAVY []\n"
