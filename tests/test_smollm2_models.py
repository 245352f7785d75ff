"""The models over SmolLM2 that pipelines open without a model argument, with their real weights."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import pipeline
from typer.testing import CliRunner

import lexperts  # noqa: F401
from lexperts.cli.define import app
from run_tools.model_options import PACKAGED_MODELS
from run_tools.packaged import find_packaged

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("lexperts_smollm2", "lexperts_lexicon_smollm2")
pytestmark = pytest.mark.skipif(not all(map(find_spec, NEEDED)), reason="the models are not installed: make test does")

RIVER = {"term": "bank", "context": "They sat on the bank of the river."}
MONEY = {"term": "bank", "context": "The bank refused to lend the company any more money."}


@pytest.fixture(scope="module")
def define():
    return pipeline("definition-modeling")


def test_a_term_is_defined_for_the_sense_that_it_has_in_its_context(define):
    river, money = define([RIVER, MONEY])
    assert river["definition"] != money["definition"] and 0 < min(river["score"], money["score"]) < 1
    assert define(MONEY)["definition"] == money["definition"]


def test_the_command_needs_no_model(define):
    done = CliRunner().invoke(app, ["term", RIVER["term"], "--context", RIVER["context"]])
    assert done.exit_code == 0 and done.stdout.splitlines()[-1] == define(RIVER)["definition"]


def test_what_is_tracked_is_small_and_the_backbone_is_shared():
    name = PACKAGED_MODELS["lexicon-smollm2"]
    assert (ROOT / "models" / "lexicon-smollm2" / name / "trained.safetensors").stat().st_size < 30e6
    folder = Path(find_packaged("lexicon-smollm2"))
    assert (folder / "backbone.safetensors").stat().st_nlink > 1 and not (folder / "model.safetensors").exists()


def test_a_saved_copy_is_complete_and_knows_nothing_of_this_machine(define, tmp_path):
    define.save_pretrained(tmp_path)
    assert str(Path.home()) not in (tmp_path / "config.json").read_text()
    assert pipeline("definition-modeling", model=str(tmp_path))(RIVER) == define(RIVER)
