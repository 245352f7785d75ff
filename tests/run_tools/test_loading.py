"""Checkpoints that are damaged, incomplete or hostile: one line that names them, no pickle file is read, and no code of strangers is run."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForTokenClassification, BertForTokenClassification, pipeline
from typer.testing import CliRunner

import lexperts  # noqa: F401  (registers the checks of pipelines)
from lexperts.cli.keyphrases import app
from run_tools.loading import (
    CheckpointError,
    PipelineLoadingError,
    open_config,
    open_model,
    open_pipeline,
    open_tokenizer,
)

from ..tiny_models import CASES

SEKE, TASK, WEIGHTS = CASES["SekeForTokenClassification"].cls, "keyphrase-extraction", "model.safetensors"


@pytest.fixture
def stock(backbone_config, tiny_tokenizer, tmp_path):
    """A stock token classifier in a folder."""
    torch.manual_seed(0)
    labels = {"id2label": {0: "O", 1: "B", 2: "I"}, "label2id": {"O": 0, "B": 1, "I": 2}}
    BertForTokenClassification(backbone_config(**labels)).save_pretrained(tmp_path / "stock")
    tiny_tokenizer.save_pretrained(tmp_path / "stock")
    return tmp_path / "stock"


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def to_pickle(folder):
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def index_of(file):
    """Names another file in an index of shards."""

    def damage(folder):
        names = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, file)}
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))

    return damage


DAMAGES = {  # -> what the message names
    "config cut": (lambda folder: os.truncate(folder / "config.json", 50), "config.json"),
    "config binary": (lambda folder: (folder / "config.json").write_bytes(bytes(range(256))), "config.json"),
    "config nested": (lambda folder: (folder / "config.json").write_bytes(b"[" * 200_000), "Recursion"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "unknown type": (lambda folder: edit(folder / "config.json", model_type="bertt"), "`bertt`"),
    "kernel": (lambda folder: edit(folder / "config.json", _attn_implementation="org/kernel"), "'org/kernel'"),
    "tokenizer cut": (lambda folder: os.truncate(folder / "tokenizer.json", 500), "stock"),
    "weights cut": (lambda folder: os.truncate(folder / WEIGHTS, 5_000), "header"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), WEIGHTS),
    "a pickle": (to_pickle, WEIGHTS),
    "a missing shard": (index_of("model-2.safetensors"), "model-2.safetensors"),
    "other shapes": (lambda folder: edit(folder / "config.json", intermediate_size=7), "stock"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_named_in_one_line(name, stock):
    damage, part = DAMAGES[name]
    damage(stock)
    with pytest.raises(CheckpointError) as error:
        open_pipeline(TASK, stock)
    message = str(error.value)
    assert part in message and ("stock" in message or name == "kernel") and "\n" not in message and len(message) < 1100
    if name.startswith(("config", "unknown", "kernel")):
        with pytest.raises(CheckpointError):
            open_config(stock)
    elif name.startswith("tokenizer"):
        with pytest.raises(CheckpointError):
            open_tokenizer(stock)
    elif name != "no config":
        with pytest.raises(CheckpointError):
            open_model(AutoModelForTokenClassification, stock)
        with pytest.raises(PipelineLoadingError):
            pipeline(TASK, model=str(stock))
    if "tokenizer" not in name:
        with pytest.raises(CheckpointError, match="stock|kernel"):
            SEKE.from_backbone(stock)


@pytest.mark.parametrize("model", ["./nowhere", "tinny", "org/nothing"])
def test_a_model_that_does_not_exist_is_named(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=model):
        open_pipeline(TASK, model)


def without(folder, part):
    """Removes the weights with a part of a name."""
    kept = {key: value for key, value in load_file(folder / WEIGHTS).items() if part not in key}
    save_file(kept, folder / WEIGHTS, {"format": "pt"})


def test_weights_that_are_missing_are_an_error_in_stock_models_and_commands(stock, tmp_path):
    without(stock, "classifier")
    for opens in (lambda: open_model(AutoModelForTokenClassification, stock), lambda: open_pipeline(TASK, stock)):
        with pytest.raises(CheckpointError, match="classifier.bias"):
            opens()
    with pytest.raises(PipelineLoadingError, match="classifier.bias"):
        pipeline(TASK, model=str(stock))
    (tmp_path / "a.txt").write_text("A graph cut.")
    done = CliRunner().invoke(app, ["extract", str(tmp_path / "a.txt"), str(tmp_path / "o.jsonl"), "-m", str(stock)])
    assert done.exit_code == 2 and "classifier.bias" in done.output and not (tmp_path / "o.jsonl").exists()


def plant(folder, code):
    """Gives a checkpoint a model_type that only its own code has."""
    (folder / "planted.py").write_text(code)
    auto_map = {"AutoConfig": "planted.C", "AutoModelForTokenClassification": "planted.M"}
    edit(folder / "config.json", model_type="planted", auto_map=auto_map)


@pytest.mark.parametrize("command", ["extract", "serve", "export"])
def test_no_command_runs_or_asks_for_code_of_a_checkpoint(command, stock, tmp_path, monkeypatch):
    """An unknown model_type with auto_map: transformers asks on the standard input by default."""
    plant(stock, "raise SystemExit('it ran')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    (tmp_path / "a.txt").write_text("A graph cut.")
    out = str(tmp_path / "o.jsonl")
    words = {
        "extract": [str(tmp_path / "a.txt"), out, "-m", str(stock)],
        "serve": [str(stock), "--port", "0"],
        "export": [str(stock), out],
    }[command]
    done = CliRunner().invoke(app, [command, *words], input="n\n")
    assert done.exit_code == 2 and "it ran" not in done.output and "trust" in done.output.splitlines()[-1], done.output
    with pytest.raises(CheckpointError, match="trust_remote_code"):
        open_config(stock)
    for options in ({}, {"trust_remote_code": True}):  # a new model could not be opened again
        with pytest.raises(OSError, match="custom code"):
            SEKE.from_backbone(stock, **options)
    assert open_tokenizer(stock).is_fast  # needs no code


def test_code_of_a_checkpoint_runs_with_the_flag(stock, tmp_path):
    plant(
        stock,
        "from transformers import BertConfig, BertForTokenClassification\n"
        "class C(BertConfig):\n    model_type = 'planted'\n"
        "class M(BertForTokenClassification):\n    config_class = C\n",
    )
    (tmp_path / "a.txt").write_text("A graph cut.")
    words = ["extract", str(tmp_path / "a.txt"), str(tmp_path / "o.jsonl"), "-m", str(stock), "--trust-remote-code"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
