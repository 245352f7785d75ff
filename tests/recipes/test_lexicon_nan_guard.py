"""A training whose weights become NaN ends, keeps finite checkpoints, and resumes from them."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from lexperts.recipes.lexicon import train_expert, training
from tests.recipes.helpers import write_rows
from tests.recipes.test_lexicon_training import SCRATCH, some_rows


@pytest.fixture
def train(tmp_path, monkeypatch, capsys):
    """Runs main, with a NaN gradient in a given step -> exit status, error and folder."""
    rows, plain = write_rows(tmp_path / "rows.jsonl", some_rows(16)), training.CheckpointTrainer

    def run(name: str, *options, nan_at: int | None = None):
        class Poisoned(plain):
            def training_step(self, model, *given, **named):
                loss = super().training_step(model, *given, **named)
                if self.state.global_step + 1 == nan_at:
                    model.lm_head.weight.grad[0, 0] = torch.nan
                return loss

        given = ["--train_files", rows, "--output_dir", tmp_path / name, "--from_scratch", json.dumps(SCRATCH)]
        given += ["--per_device_train_batch_size", 4, "--max_steps", 6, "--report_to", "none", "--use_cpu", "true"]
        monkeypatch.setattr(training, "CheckpointTrainer", Poisoned)
        ended = None
        try:
            train_expert.main([*map(str, given), *map(str, options), "--disable_tqdm", "true"])
        except SystemExit as error:
            ended = error.code
        return SimpleNamespace(code=ended, error=capsys.readouterr().err, folder=tmp_path / name)

    return run


def test_it_ends_before_a_checkpoint_holds_nan_and_goes_on_from_the_last(train):
    every = ("--save_strategy", "steps", "--save_steps", 2)
    found = train("broken", *every, nan_at=4)
    last = found.folder / "checkpoint-2"
    assert found.code == 2
    assert "step 4: " in found.error and "NaN" in found.error and f"resumes from {last}" in found.error
    assert "learning_rate (now 5e-05)" in found.error
    assert sorted(path.name for path in found.folder.glob("checkpoint-*")) == ["checkpoint-2"]
    assert all(x.isfinite().all() for x in load_file(last / "model.safetensors").values())
    assert not (found.folder / "model.safetensors").exists()
    assert train("broken", *every).code is None and train("whole", *every).code is None
    resumed, whole = (load_file(found.folder.parent / name / "model.safetensors") for name in ("broken", "whole"))
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


@pytest.mark.parametrize("options", [("--logging_steps", 1), ("--logging_strategy", "no", "--save_strategy", "no")])
def test_without_a_checkpoint_it_says_so_at_the_next_log_or_the_epochs_end(train, options):
    found = train("broken", *options, nan_at=2)
    assert found.code == 2 and "starts again" in found.error
    assert f"step {2 if '--logging_steps' in options else 4}: " in found.error
    assert not (found.folder / "model.safetensors").exists()


def test_frozen_weights_are_not_looked_at():
    model = torch.nn.Linear(2, 2)
    assert training.is_finite(model)
    model.weight.data[0, 0] = torch.inf
    assert not training.is_finite(model)
    model.weight.requires_grad = False
    assert training.is_finite(model)
    assert training.is_finite(model.requires_grad_(False))
