"""What holds for every command that trains: finished runs, other settings, overwriting, interruptions, bad files."""

import json
import shutil
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
)

from lexperts.recipes import TRAIN
from lexperts.recipes.common.training import StopAtNaN, is_finite
from lexperts.recipes.lexicon.train_expert import train_tokenizer
from tests.modeling_exhird import causal
from tests.recipes import helpers
from tests.recipes.helpers import KilledError, kill_after_a_checkpoint, save_tiny_bart, write_rows

LLAMA = {
    "vocab_size": 320, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip
RNN = ["--encoder-type", "bigru", "--hidden-size", 16, "--num-hidden-layers", 1]
STEPS = ["--num-train-epochs", 1, "--save-strategy", "steps", "--save-steps", 1, "--learning-rate", 0.01]
STEPS += ["--per-device-train-batch-size", 4, "--use-cpu", "--report-to", "none", "--disable-tqdm", "true"]
EVALUATED = ["--eval-strategy", "steps", "--eval-steps", 1]
THINGS = ("bird", "boat", "bell", "barn", "book")


def some_rows(count=12):
    """Rows with the columns of all commands."""
    rows = []
    for i in range(count):
        one, other = THINGS[i % 5], THINGS[(i + 1) % 5]
        text = f"the graph cut of {one} {i} is learning in graph networks, and the {other} went away"
        rows.append(
            {
                "title": ["graph cut", "learning", ""][i % 3], "text": text, "keyphrases": ["graph cut", "networks"],
                "label": ["sport", "arts"][i % 2], "id": f"q{i}", "question": "the network", "context": text,
                "answers": {"text": ["learning"], "answer_start": [text.index("learning")]},
                "term": f"{one} {i}", "definition": f"a thing of kind {i % 4}", "document": f"{text}. It was {i}.",
                "summary": f"A {one} met a {other}.",
            }
        )  # fmt: skip
    return rows


# command -> options without the data, an option of its own with another value, and the option that names a model
COMMANDS: dict[str, tuple[Callable, tuple, str | None]] = {
    "seke": (
        lambda at: ["--backbone", at.bert, "--max-length", 64, "--calibrate", "false", *EVALUATED],
        ("use_moe", True, False),
        "backbone",
    ),
    **{
        f"hypernet-{kind}": (
            lambda at, sizes=sizes: ["--backbone", at.bert, "--meta-embedding-size", 4, "--hidden-size", 8, *sizes],
            ("bidirectional", False, True),
            "backbone",
        )
        for kind, sizes in {
            "keyphrases": ["--max-length", 60, "--validation-share", 0.25, *EVALUATED],
            "classes": ["--max-length", 60, "--validation-share", 0.25, *EVALUATED],
            "qa": ["--max-seq-len", 60, "--doc-stride", 8],
        }.items()
    },
    "exhird": (lambda at: ["--validation-files", at.rows, *RNN, *EVALUATED], ("hidden_size", 16, 8), None),
    "moesumm": (
        lambda at: ["--model-name-or-path", at.bart, "--deputy-intermediate-size", 8, "--eval-strategy", "no"],
        ("num_deputies", 3, 2),
        "model_name_or_path",
    ),
    "expert": (
        lambda at: ["--model-name-or-path", at.llama, "--max-length", 32, "--eval-strategy", "no"],
        ("lora", False, True),
        "model_name_or_path",
    ),
    "lexicon-expert": (lambda at: ["--from-scratch", json.dumps(LLAMA)], ("learn", "definition", "row"), None),
    "lexicon-router": (
        lambda at: ["--model-name-or-path", at.mixtral], ("train", "gates", "experts"), "model_name_or_path",
    ),
}  # fmt: skip
each_command = pytest.mark.parametrize("name", COMMANDS)


def test_every_training_command_is_here():
    assert {*COMMANDS, "exhird-data"} == set(TRAIN)  # which does not train


def run(name, *argv):
    import_module(TRAIN[name].name).main([str(argument) for argument in argv])


def fails(name, *argv):
    """The one error line of a command that ends with exit status 2."""
    return helpers.fails(import_module(TRAIN[name].name).main, *argv)


@pytest.fixture(scope="module")
def inputs(backbone_config, tiny_tokenizer, tmp_path_factory):
    """Rows and tiny models of every kind."""
    folder = tmp_path_factory.mktemp("inputs")
    at = SimpleNamespace(**{name: folder / name for name in ("bert", "bart", "mixtral", "llama", "mail", "decoder")})
    at.rows = write_rows(folder / "rows.jsonl", some_rows())
    for split in ("train", "validation", "test"):
        write_rows(at.mail / f"{split}.jsonl", some_rows())
    torch.manual_seed(0)
    AutoModel.from_config(backbone_config("bert")).save_pretrained(at.bert)
    tiny_tokenizer.save_pretrained(at.bert)
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "initializer_range": 0.2}
    LlamaForCausalLM(LlamaConfig(**LLAMA, **ids)).save_pretrained(at.llama)
    MixtralForCausalLM(MixtralConfig(**LLAMA, **ids, num_local_experts=2)).save_pretrained(at.mixtral)
    for place in (at.llama, at.mixtral):
        train_tokenizer(some_rows(), LLAMA["vocab_size"]).save_pretrained(place)
    for part in (AutoModelForCausalLM.from_config(causal.backbone_config()), causal.causal_tokenizer()):
        part.save_pretrained(at.decoder)
    save_tiny_bart(at.bart, [row[name] for row in some_rows() for name in ("document", "summary")])
    return at


def data_option(name, path):
    return ["--datasets", f"mail={path}"] if name == "moesumm" else ["--train-files", path]


def arguments(name, at, output):
    data = data_option(name, at.mail if name == "moesumm" else at.rows)
    return [*STEPS, *COMMANDS[name][0](at), *data, "--output-dir", output]


@pytest.fixture(scope="module")
def trained(inputs, tmp_path_factory):
    """trained(name) -> the folder of a finished run; each command is run once."""
    folder, finished = tmp_path_factory.mktemp("trained"), set()

    def train(name):
        if name not in finished:
            run(name, *arguments(name, inputs, folder / name))
            finished.add(name)
        return folder / name

    return train


def weights_of(folder):
    return (folder / "model.safetensors").read_bytes()


@each_command
def test_a_killed_run_resumes_to_the_same_weights(name, inputs, trained, tmp_path, monkeypatch):
    argv = arguments(name, inputs, tmp_path / "run")
    with monkeypatch.context() as patch, pytest.raises(KilledError):
        kill_after_a_checkpoint(patch)
        run(name, *argv)
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-1"]
    assert not (tmp_path / "run" / "model.safetensors").exists()
    (tmp_path / "run" / "checkpoint-999").mkdir()  # half a checkpoint
    run(name, *argv)
    assert weights_of(tmp_path / "run") == weights_of(trained(name))


@each_command
def test_a_run_that_stopped_early_is_not_trained_further_by_the_same_command(name, inputs, tmp_path, monkeypatch):
    argv, output = arguments(name, inputs, tmp_path / "run"), tmp_path / "run"

    def stop(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 2

    with monkeypatch.context() as patch:
        patch.setattr(StopAtNaN, "on_step_end", stop)
        run(name, *argv)
    stopped = weights_of(output)
    run(name, *argv)
    assert weights_of(output) == stopped
    assert not (output / "checkpoint-3").exists()


@pytest.fixture
def nan_in_step(monkeypatch):
    """nan_in_step(n): gradients have a NaN in the n-th step of each training."""
    plain = Trainer.training_step

    def use(step):
        def training_step(self, model, *given, **named):
            loss = plain(self, model, *given, **named)
            if self.state.global_step + 1 == step:
                next(p.grad for p in model.parameters() if p.grad is not None).view(-1)[0] = torch.nan
            return loss

        monkeypatch.setattr(Trainer, "training_step", training_step)

    return use


@each_command
def test_weights_that_become_nan_end_a_run_which_resumes_from_the_last_finite_ones(
    name, inputs, trained, tmp_path, nan_in_step
):
    argv, output = arguments(name, inputs, tmp_path / "run"), tmp_path / "run"
    nan_in_step(2)
    error = fails(name, *argv)
    assert "step 2: " in error and "NaN" in error and f"resumes from {output / 'checkpoint-1'}" in error
    assert "learning_rate (now 0.01)" in error
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-1"]
    assert not (output / "model.safetensors").exists()
    nan_in_step(None)
    run(name, *argv)
    assert weights_of(output) == weights_of(trained(name))


@pytest.mark.parametrize("options", [("--logging-steps", 1), ("--logging-strategy", "no")])
def test_without_a_checkpoint_nan_is_an_error_at_the_next_log_or_the_epochs_end(options, inputs, tmp_path, nan_in_step):
    argv = [*arguments("lexicon-expert", inputs, tmp_path / "run"), *options, "--save-strategy", "no"]
    nan_in_step(2)
    error = fails("lexicon-expert", *argv)
    assert "starts again" in error and f"step {2 if '--logging-steps' in options else 3}: " in error
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_few_shot_training_ends_at_nan_too(inputs, tmp_path, nan_in_step):
    argv = arguments("moesumm", inputs, tmp_path / "run") + ["--setting", "few_shot", "--few-shot-rows", 8]
    nan_in_step(2)
    assert "step 2: the weights contain NaN" in fails("moesumm", *argv)


def test_frozen_weights_may_be_infinite():
    model = torch.nn.Linear(2, 2)
    assert is_finite(model)
    model.weight.data[0, 0] = torch.inf
    assert not is_finite(model)
    model.weight.requires_grad = False
    assert is_finite(model)
    assert is_finite(model.requires_grad_(False))


# a command over other models, with parameters, groups of them and rows of their own
OTHER_MODELS = {
    "exhird, warm start": lambda at: ["--encoder-type", "pretrained", "--backbone", at.bert, "--hidden-size", 16],
    "exhird, warm start with a schedule of the Trainer": lambda at: [
        *("--encoder-type", "pretrained", "--backbone", at.bert, "--hidden-size", 16),
        *("--plateau-schedule", "false", "--backbone-lr", 0.001),
    ],
    "exhird, decoder": lambda at: [
        "--encoder-type",
        "pretrained",
        "--backbone",
        at.decoder,
        "--plateau-schedule",
        "false",
    ],
    "moesumm, decoder": lambda at: ["--model-name-or-path", at.llama],
}


@pytest.mark.parametrize("case", OTHER_MODELS)
def test_a_killed_run_of_another_model_resumes_to_the_same_weights(case, inputs, tmp_path, monkeypatch):
    name = case.split(",")[0]

    def train(folder):
        run(name, *arguments(name, inputs, tmp_path / folder), *OTHER_MODELS[case](inputs))
        return weights_of(tmp_path / folder)

    with monkeypatch.context() as patch, pytest.raises(KilledError):
        kill_after_a_checkpoint(patch)
        train("killed")
    assert train("killed") == train("whole")


@each_command
def test_a_finished_run_is_not_repeated_and_other_settings_are_refused(name, inputs, trained, monkeypatch):
    output = trained(name)
    argv, before = arguments(name, inputs, output), weights_of(output)
    _, (option, old, new), _ = COMMANDS[name]
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "training_step", lambda *_, **__: pytest.fail("a step was trained again"))
        assert "learning_rate=0.01 before, 0.5 now" in fails(name, *argv, "--learning-rate", 0.5)
        assert f"{option}={old!r} before, {new!r} now" in fails(name, *argv, f"--{option}", str(new).lower())
        run(name, *argv)
    assert weights_of(output) == before


@each_command
def test_changed_rows_are_refused_unless_the_run_is_overwritten(name, inputs, trained, tmp_path, capsys):
    shutil.copytree(trained(name), tmp_path / "run", ignore=shutil.ignore_patterns("optimizer.pt"))
    argv = arguments(name, inputs, tmp_path / "run")
    others = [{**row, "text": row["text"].upper(), "summary": "?"} for row in some_rows()]
    path = write_rows(tmp_path / "mail" / "train.jsonl", others)
    data = data_option(name, path.parent if name == "moesumm" else path)
    expected = "datasets=[mail=" if name == "moesumm" else "train_files=[rows.jsonl ("
    assert expected in fails(name, *argv, *data)
    run(name, *argv, *data, "--overwrite-output-dir", "true")
    assert "removed from" in capsys.readouterr().out


@each_command
def test_bad_files_and_models_are_named_in_one_line(name, inputs, tmp_path):
    argv = arguments(name, inputs, tmp_path / "run")
    broken = write_rows(tmp_path / "broken.jsonl", some_rows(1))
    broken.write_text(broken.read_text() + '{"text": \n')
    odd = write_rows(tmp_path / "odd.jsonl", [{"speech": "a graph"}] * 3)
    assert "missing.jsonl" in fails(name, *argv, *data_option(name, tmp_path / "missing.jsonl"))
    assert "broken.jsonl, line 2" in fails(name, *argv, *data_option(name, broken))
    error = fails(name, *argv, *data_option(name, odd))
    assert "'speech'" in error or "odd.jsonl" in error
    model = COMMANDS[name][2]
    if model:
        assert "nowhere/at-all" in fails(name, *argv, f"--{model}", "nowhere/at-all")
    assert not (tmp_path / "run" / "model.safetensors").exists()


@each_command
def test_a_run_that_ended_inside_an_epoch_is_not_trained_further(name, inputs, tmp_path, monkeypatch):
    argv = [*arguments(name, inputs, tmp_path), "--max-steps", 1, "--lr-scheduler-type", "constant"]
    run(name, *argv)
    before = weights_of(tmp_path)
    monkeypatch.setattr(Trainer, "training_step", lambda *_, **__: pytest.fail("a step was trained again"))
    run(name, *argv)
    assert weights_of(tmp_path) == before
