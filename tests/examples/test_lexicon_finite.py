"""A training of the lexicon's examples whose weights become NaN ends, keeps what is sound, and goes on from there."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer

from tests.examples.scripts import scripts_of
from tests.examples.test_lexicon_examples import SCRATCH, some_rows, write_rows


@pytest.fixture(scope="module")
def lexicon():
    with scripts_of("lexicon", "finite", "train_expert") as found:
        yield found


@pytest.fixture
def train(tmp_path, lexicon, monkeypatch, capsys):
    """The script's main, with a gradient that is NaN in the given step, if any -> what it says, and the folder."""
    rows = write_rows(tmp_path / "rows.jsonl", some_rows(16))

    def run(name: str, *options, nan_at: int | None = None):
        class Poisoned(Trainer):
            def training_step(self, model, *given, **named):
                loss = super().training_step(model, *given, **named)
                if self.state.global_step + 1 == nan_at:
                    model.lm_head.weight.grad[0, 0] = torch.nan
                return loss

        given = [
            "script",
            "--train_files",
            rows,
            "--output_dir",
            tmp_path / name,
            "--from_scratch",
            json.dumps(SCRATCH),
        ]
        given += ["--per_device_train_batch_size", 4, "--max_steps", 6, "--report_to", "none", "--use_cpu", "true"]
        monkeypatch.setattr(sys, "argv", [*map(str, given), *map(str, options), "--disable_tqdm", "true"])
        monkeypatch.setattr(lexicon.train_expert, "Trainer", Poisoned)
        ended = None
        try:
            lexicon.train_expert.main()
        except SystemExit as error:
            ended = error.code
        return SimpleNamespace(code=ended, error=capsys.readouterr().err, folder=tmp_path / name)

    return run


def test_it_ends_before_a_checkpoint_holds_nan_and_goes_on_from_the_last(train):
    every = ("--save_strategy", "steps", "--save_steps", 2)
    found = train("broken", *every, nan_at=4)
    last = found.folder / "checkpoint-2"
    assert found.code == 2
    assert "step 4: the weights hold NaN" in found.error and f"goes on from {last}, which is sound" in found.error
    assert "a lower learning_rate (now 5e-05)" in found.error
    assert sorted(path.name for path in found.folder.glob("checkpoint-*")) == ["checkpoint-2"]
    assert all(x.isfinite().all() for x in load_file(last / "model.safetensors").values())
    assert not (found.folder / "model.safetensors").exists()
    assert train("broken", *every).code is None and train("whole", *every).code is None
    mended, whole = (load_file(found.folder.parent / name / "model.safetensors") for name in ("broken", "whole"))
    assert all(torch.equal(mended[name], whole[name]) for name in whole)


@pytest.mark.parametrize("options", [("--logging_steps", 1), ("--logging_strategy", "no", "--save_strategy", "no")])
def test_without_a_checkpoint_it_says_so_at_the_next_log_or_the_epochs_end(train, options):
    found = train("broken", *options, nan_at=2)
    assert found.code == 2 and "starts again, for there is no checkpoint yet" in found.error
    assert f"step {2 if '--logging_steps' in options else 4}: " in found.error
    assert not (found.folder / "model.safetensors").exists()


def test_frozen_weights_are_not_looked_at(lexicon):
    model = torch.nn.Linear(2, 2)
    assert lexicon.finite.is_finite(model)
    model.weight.data[0, 0] = torch.inf
    assert not lexicon.finite.is_finite(model)
    model.weight.requires_grad = False
    assert lexicon.finite.is_finite(model)
    assert lexicon.finite.is_finite(model.requires_grad_(False))
