"""`lexperts train exhird` with a decoder as its backbone, and the commands that open what it has trained."""

import json

import pytest
import torch
from datasets import disable_progress_bars
from transformers import AutoModelForCausalLM, BertConfig, BertModel, pipeline
from typer.testing import CliRunner

from lexperts.cli.keyphrases import app
from lexperts.recipes.exhird import train
from lexperts.recipes.exhird.decoder import is_decoder
from lexperts.recipes.exhird.schedule import StopAfterRises
from modeling_exhird import ExhirdForCausalLM
from tests.modeling_exhird.causal import BACKBONES, backbone_config, causal_tokenizer
from tests.recipes.helpers import fails, write_rows

FAST = ["--use-cpu", "--report-to", "none", "--disable-tqdm", "true", "--logging-steps", "1", "--bf16", "false"]
FAST += [
    "--per-device-train-batch-size",
    "4",
    "--num-train-epochs",
    "2",
    "--max-source-length",
    "100",
    "--max-length",
    "150",
]
DOCUMENTS = [
    {
        "title": ["Graph cuts", "", "Networks"][i % 3],
        "text": f"graph cuts segment images and networks number {i} learn",
        "keyphrases": ["graph cut", "image segmentation", "networks"],
    }
    for i in range(4)
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return str(write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", DOCUMENTS))


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("backbone")
    torch.manual_seed(0)
    for part in (AutoModelForCausalLM.from_config(backbone_config()), causal_tokenizer()):
        part.save_pretrained(folder)
    return str(folder)


def arguments(backbone, files, output, *more):
    data = ["--train-files", files, "--validation-files", files, "--output-dir", str(output)]
    return ["smollm2_cpu", "--backbone", backbone, "--adapter-rank", "2", *FAST, *data, *more]


def test_a_decoder_is_trained_scored_and_run_on_files(backbone, files, tmp_path, capsys):
    disable_progress_bars()
    output = tmp_path / "run"
    argv = arguments(backbone, files, output, "--test-files", f"mine={files}", "--show", "1")
    train.main(argv)
    out = capsys.readouterr().out
    assert (
        "validation loss per token" in out and "\nmine: present F1@M " in out and "  gold     graph cut; image" in out
    )
    generate = pipeline("keyphrase-generation", model=str(output), device="cpu")
    assert type(generate.model) is ExhirdForCausalLM and generate.model.config.adapter_rank == 2
    stock = AutoModelForCausalLM.from_pretrained(backbone).state_dict()
    weights = generate.model.state_dict()
    assert all(torch.equal(weights[f"backbone.{name}"], p) for name, p in stock.items())
    assert any(p.any() for name, p in weights.items() if "lora_B" in name)

    scores = json.loads((output / "scores.json").read_text())["mine"]
    assert {"present", "absent", "total", "repeats"} <= set(scores)

    options = [
        "--model",
        str(output),
        "--device",
        "cpu",
        "--batch-size",
        "2",
    ]
    done = CliRunner().invoke(app, ["generate", files, str(tmp_path / "out.jsonl"), *options])
    assert done.exit_code == 0, done.output
    written = [json.loads(line)["keyphrases"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    documents = [{name: row[name] for name in ("title", "text")} for row in DOCUMENTS]
    found = generate(documents, batch_size=2)
    expected = [[phrase["keyphrase"] for phrase in row] for row in found]
    assert [[phrase["keyphrase"] for phrase in row] for row in written] == expected

    capsys.readouterr()
    train.main(argv)  # nothing is trained again
    assert "'loss'" not in capsys.readouterr().out


def test_without_evaluation_none_is_made(backbone, files, tmp_path, capsys):
    train.main(arguments(backbone, files, tmp_path / "run", "--eval-strategy", "no"))
    out = capsys.readouterr().out
    assert "The model is in" in out and "validation loss" not in out
    states = [json.loads(path.read_text()) for path in (tmp_path / "run").glob("checkpoint-*/trainer_state.json")]
    assert states and not any("eval_loss" in entry for state in states for entry in state["log_history"])


def test_rises_of_the_loss_end_training(backbone, files, tmp_path, monkeypatch):
    def stop(callback, args, state, control, **kwargs):
        control.should_training_stop = callback.rises == 4

    monkeypatch.setattr(StopAfterRises, "on_evaluate", stop)
    train.main(arguments(backbone, files, tmp_path / "run", "--stop-after-rises", "4"))
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-1"]


def test_options_of_other_models_are_named(backbone, files, tmp_path):
    assert "--data" in fails(train.main, *arguments(backbone, files, tmp_path / "a", "--data", str(tmp_path)))
    assert "--plateau-schedule" in fails(
        train.main, *arguments(backbone, files, tmp_path / "a", "--plateau-schedule", "true")
    )
    for option in (("--freeze-backbone", "true"), ("--exclusive-loss-coef", "1.0"), ("--backbone-lr", "0.01")):
        assert f"{' '.join(option)} is for models with an encoder" in fails(
            train.main, *arguments(backbone, files, tmp_path / "a", *option)
        )
    short = arguments(backbone, files, tmp_path / "a", "--max-length", "12")
    assert "--max-length 12" in fails(train.main, *short)
    assert "--adapter-rank 2" in fails(
        train.main, *arguments(backbone, files, tmp_path / "b", "--encoder-type", "bigru")
    )


def test_decoders_are_told_from_encoders(backbone, tmp_path):
    assert is_decoder(backbone)
    for kind in BACKBONES:
        model = AutoModelForCausalLM.from_config(backbone_config(kind))
        model.save_pretrained(tmp_path / kind)
        assert is_decoder(str(tmp_path / kind))
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "vocab_size": 40,
    }
    BertModel(BertConfig(**sizes)).save_pretrained(tmp_path / "bert")
    assert not is_decoder(str(tmp_path / "bert"))
