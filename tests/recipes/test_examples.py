# needs: summaries, definitions, cluster
"""Each file of examples/ runs for a few steps, offline, and leaves a model that opens."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.recipes.lexicon_helpers import kind_rows, save_embedder
from tests.tools import read_rows, save_tiny_llama, write_rows

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run_example(name: str, output: Path, *more: str) -> None:
    """Imports the file, which no package contains, and calls its `main`."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(["--steps", "2", "--output", str(output), *more])


def test_two_experts_are_merged_into_a_mixtral_and_again(tmp_path, capsys):
    for _ in range(2):  # the second run replaces the mixture of the first
        run_example("merge_experts", tmp_path)
        assert "MixtralForCausalLM with 2 experts" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "mixture").config.num_local_experts == 2


def test_real_llamas_are_trained_and_merged_from_texts_that_everybody_has(tmp_path, capsys):
    save_tiny_llama(tmp_path / "base")
    run_example("merge_real_llamas", tmp_path / "out", "--base", str(tmp_path / "base"))
    printed = capsys.readouterr().out
    for part in ("held-out tokens", "gain kept", "[reference] The try statement", "All of it took"):
        assert part in printed


@pytest.mark.nightly
def test_the_recipe_of_lm_lexicon_runs_and_resumes(tmp_path):
    rows = kind_rows(0, 60)
    save_tiny_llama(tmp_path / "base")
    save_embedder(tmp_path / "embedder", rows)
    for split, part in (("train", rows[:48]), ("validation", rows[48:54]), ("test", rows[54:])):
        write_rows(tmp_path / "data" / f"{split}.jsonl", part)
    (tmp_path / "lexperts").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m lexperts "$@"\n')
    (tmp_path / "lexperts").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    environment |= {"STEPS": "2", "EXPERTS": "2", "BEST_OF": "2"}
    environment |= {"TRAINING": "--max-steps 2 --use-cpu true --bf16 false --report-to none"}
    environment |= {"DATA": f"{tmp_path}/data", "MODEL": f"{tmp_path}/base", "EMBEDDER": f"{tmp_path}/embedder"}
    for _ in range(2):  # what is finished is not made again
        options = {"cwd": tmp_path, "env": environment, "timeout": 600, "stdout": subprocess.PIPE, "text": True}
        done = subprocess.run(["bash", EXAMPLES / "lm_lexicon.sh"], check=True, **options)
        out = tmp_path / "runs" / "lm-lexicon"
        assert "best - greedy" in done.stdout
        assert len(read_rows(out / "best.jsonl")) == 6
    assert AutoModelForCausalLM.from_pretrained(out / "tuned").config.num_local_experts == 2
