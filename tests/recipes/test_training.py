"""What holds for every training: runs that are killed, repeated, changed or complete; weights that become NaN; bad files."""

import json
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModel, Trainer

from lexperts.cli.train import app
from lexperts.recipes import TRAIN, training
from tests.recipes.trainings import TRAININGS, some_rows
from tests.tools import fails, save_tiny_bart, save_tiny_llama, write_rows

each_training = pytest.mark.parametrize("name", TRAININGS)


class KilledError(BaseException):
    """In place of a SIGKILL."""


@pytest.fixture(scope="module")
def at(backbone_config, tiny_tokenizer, tmp_path_factory):
    """Rows and tiny models."""
    folder = tmp_path_factory.mktemp("inputs")
    at = SimpleNamespace(**{name: folder / name for name in ("bert", "bart", "llama", "mixtral", "mail")})
    at.rows = write_rows(folder / "rows.jsonl", some_rows())
    at.texts = write_rows(folder / "texts.jsonl", [{"text": row["text"]} for row in some_rows()])
    for split in ("train", "validation", "test"):
        write_rows(at.mail / f"{split}.jsonl", some_rows())
    torch.manual_seed(0)
    AutoModel.from_config(backbone_config("bert")).save_pretrained(at.bert)
    tiny_tokenizer.save_pretrained(at.bert)
    save_tiny_llama(at.llama)
    save_tiny_bart(at.bart, [row[name] for row in some_rows() for name in ("document", "summary")])
    return at


def run(name, argv, folder):
    with pytest.raises(SystemExit) as ended:
        app([name, *map(str, argv), "--output-dir", str(folder)])
    assert not ended.value.code


def error_of(name, argv, folder) -> str:
    """The one line of a run that is refused, with exit status 2."""
    return fails(app, name, *argv, "--output-dir", folder)


@pytest.fixture(scope="module")
def whole(at, tmp_path_factory):
    """whole(name) -> the folder of a complete run; each is run once."""
    folder = tmp_path_factory.mktemp("whole")

    def train(name):
        if not (folder / name).exists():
            run(name, TRAININGS[name](at), folder / name)
        return folder / name

    return train


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.glob("model*.safetensors")}


def test_every_training_is_here():
    assert set(TRAININGS) == set(TRAIN)


@each_training
def test_a_killed_run_that_is_repeated_ends_with_the_same_bytes(name, at, whole, tmp_path, monkeypatch):
    save = Trainer._save_checkpoint

    def save_and_die(trainer, *args, **kwargs):
        save(trainer, *args, **kwargs)
        raise KilledError

    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(Trainer, "_save_checkpoint", save_and_die)
        run(name, TRAININGS[name](at), tmp_path)
    (tmp_path / "checkpoint-999").mkdir()  # half a checkpoint
    run(name, TRAININGS[name](at), tmp_path)
    assert contents(tmp_path) == contents(whole(name)) != {}


@pytest.mark.parametrize("presses, advice", [(1, " to resume"), (2, "")])
def test_ctrl_c_saves_before_it_ends_a_run_and_pressed_again_it_does_not(
    presses, advice, at, tmp_path, monkeypatch, capsys
):
    step = Trainer.training_step

    def press(*args, **kwargs):
        for _ in range(presses):
            signal.raise_signal(signal.SIGINT)
        return step(*args, **kwargs)

    monkeypatch.setattr(Trainer, "training_step", press)
    argv = [*TRAININGS["hypernet-qa"](at), "--save-steps", 100, "--output-dir", tmp_path]
    with pytest.raises(SystemExit) as ended:
        app(["hypernet-qa", *map(str, argv)])
    assert ended.value.code == 130
    assert capsys.readouterr().err.endswith(f"interrupted: Repeat the command{advice}.\n")
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"] * (presses == 1)


@pytest.mark.parametrize("ended", ["after a checkpoint by time", "by Ctrl-C in the last step of an epoch"])
def test_a_run_that_is_evaluated_by_epochs_is_ended_and_resumed_within_one(ended, at, tmp_path, monkeypatch):
    files = ["--train-files", f"a={at.rows}", f"b={at.rows}", "--validation-files", at.rows, "--style-dropout", 0.5]
    epochs = [
        "--num-train-epochs",
        2,
        "--save-strategy",
        "epoch",
        "--eval-strategy",
        "epoch",
        "--early-stopping-patience",
        0,
    ]
    argv = [*TRAININGS["seke"](at), *files, *epochs]
    run("seke", argv, tmp_path / "whole")
    save, step = Trainer._save_checkpoint, Trainer.training_step

    def save_and_die(trainer, *args, **kwargs):
        save(trainer, *args, **kwargs)
        raise KilledError

    def press(trainer, *args, **kwargs):
        if trainer.state.global_step == 5:  # before the sixth and last step of the first epoch
            signal.raise_signal(signal.SIGINT)
        return step(trainer, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises((KilledError, SystemExit)):
        if ended.startswith("by"):
            patch.setattr(Trainer, "training_step", press)
        else:
            patch.setattr(Trainer, "_save_checkpoint", save_and_die)
            patch.setattr(training, "SECONDS", 0)
        app(["seke", *map(str, argv), "--output-dir", str(tmp_path / "run")])
    saved = [path.name for path in (tmp_path / "run").glob("checkpoint-*")]
    assert saved == ["checkpoint-6" if ended.startswith("by") else "checkpoint-1"]
    run("seke", argv, tmp_path / "run")
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
    scores = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("run", "whole")]
    assert scores[0]["best_validation_f1@10"] == scores[1]["best_validation_f1@10"]
    assert [entry["epoch"] for entry in scores[0]["log"] if "eval_loss" in entry] == [1.0, 2.0]


@each_training
def test_a_complete_run_stays_and_another_one_in_its_folder_is_refused(name, at, whole, tmp_path, capsys):
    shutil.copytree(whole(name), tmp_path / "run")
    argv, before = TRAININGS[name](at), contents(tmp_path / "run")
    run(name, argv, tmp_path / "run")
    assert "complete" in capsys.readouterr().out
    assert "learning_rate=0.01 before, 0.5 now" in error_of(name, [*argv, "--learning-rate", 0.5], tmp_path / "run")
    (tmp_path / "run" / "arguments.yml").unlink()
    assert str(tmp_path / "run") in error_of(name, argv, tmp_path / "run")
    assert contents(tmp_path / "run") == before


def test_changed_rows_are_refused(at, tmp_path):
    rows = shutil.copyfile(at.rows, tmp_path / "rows.jsonl")
    argv = [rows if word == at.rows else word for word in TRAININGS["hypernet-qa"](at)]
    run("hypernet-qa", argv, tmp_path / "other")
    write_rows(rows, some_rows(8))
    assert "rows.jsonl" in error_of("hypernet-qa", argv, tmp_path / "other")


@each_training
def test_weights_that_become_nan_end_a_run_before_they_are_saved(name, at, tmp_path, monkeypatch):
    step = Trainer.training_step

    def training_step(trainer, model, *given, **named):
        loss = step(trainer, model, *given, **named)
        if trainer.state.global_step == 1:
            next(p.grad for p in model.parameters() if p.grad is not None).view(-1)[0] = torch.nan
        return loss

    monkeypatch.setattr(Trainer, "training_step", training_step)
    assert "step 2: weights are NaN" in error_of(name, TRAININGS[name](at), tmp_path)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"] and not contents(tmp_path)


@each_training
def test_bad_files_and_options_are_named_in_one_line(name, at, tmp_path):
    argv = TRAININGS[name](at)
    broken = write_rows(tmp_path / "broken.jsonl", some_rows(1))
    broken.write_text(broken.read_text() + '{"text": \n')

    def with_data(path):
        option = ["--datasets", f"mail={path}"] if name == "moesumm" else ["--train-files", path]
        return [*argv, *option]

    assert "missing.jsonl" in error_of(name, with_data(tmp_path / "missing.jsonl"), tmp_path / "run")
    assert "broken.jsonl, line 2" in error_of(name, with_data(broken), tmp_path / "run")
    assert "'--learning-rate'" in error_of(name, [*argv, "--lerning-rate", 1], tmp_path / "run")
    assert "'many'" in error_of(name, [*argv, "--num-train-epochs", "many"], tmp_path / "run")
    run(name, argv, tmp_path / "run")  # nothing is left in the folder that would prevent it
