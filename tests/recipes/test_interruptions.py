"""What a training says after Ctrl-C: it resumes only if something was saved."""

import json
import re
from types import SimpleNamespace

import pytest
from transformers import Trainer

from lexperts.recipes.common.interruptions import describe_resuming
from lexperts.recipes.expert import train
from lexperts.recipes.lexicon import train_expert
from run_tools.errors import REPEAT, RESUME
from tests.recipes.helpers import run_main, save_tiny_llama, write_rows

OPTIONS = ("--max-steps", 3, "--use-cpu", "--report-to", "none", "--save-steps", 1)
ROWS = [{"text": "the end of x", "term": "a", "context": "a is x", "definition": "the end"}] * 4


def groups_of(folder, strategy="no", **more):
    return [SimpleNamespace(**more), SimpleNamespace(output_dir=str(folder), save_strategy=strategy)]


def interrupted(patch, step="training_step", after=0):
    """Ends a call of a method of the Trainer with Ctrl-C, after the first `after` calls."""
    method, calls = getattr(Trainer, step), []

    def call(*args, **kwargs):
        if len(calls) == after:
            raise KeyboardInterrupt
        calls.append(step)
        return method(*args, **kwargs)

    patch.setattr(Trainer, step, call)


@pytest.fixture
def files(tmp_path):
    save_tiny_llama(tmp_path / "base")
    return ("--model-name-or-path", tmp_path / "base", "--train-files", write_rows(tmp_path / "rows.jsonl", ROWS))


@pytest.mark.parametrize("main", [train.main, train_expert.main], ids=["expert", "lexicon-expert"])
@pytest.mark.parametrize("strategy, after, resumes", [("no", 2, False), ("steps", 0, False), ("steps", 2, True)])
def test_a_training_that_is_interrupted_says_whether_it_resumes(
    main, strategy, after, resumes, files, tmp_path, monkeypatch
):
    out = ("--output-dir", tmp_path / "out", *OPTIONS, "--save-strategy", strategy)
    with monkeypatch.context() as patch:
        interrupted(patch, after=after)
        done = run_main(main, *files, *out)
    assert done.returncode == 130
    line = re.search("interrupted: .*", done.stderr)[0]  # the progress bar may be on the same line
    if resumes:
        assert line == f"interrupted: {RESUME}"
    else:
        assert f"save_strategy is {strategy}" in line and line.endswith("start again.") and "resume" not in line
    assert run_main(main, *files, *out).returncode == 0
    assert (tmp_path / "out/model.safetensors").exists()


def test_whoever_has_overwritten_a_folder_is_told_to_resume_without_that_option(files, tmp_path, monkeypatch):
    out = ("--output-dir", tmp_path / "out", *OPTIONS, "--save-strategy", "steps")
    assert run_main(train.main, *files, *out).returncode == 0
    with monkeypatch.context() as patch:
        interrupted(patch, after=2)
        done = run_main(train.main, *files, *out, "--overwrite-output-dir", "true")
    assert "interrupted: Repeat the command without --overwrite-output-dir to resume." in done.stderr
    saved = {path.name for path in (tmp_path / "out").glob("checkpoint-*")}
    assert saved and run_main(train.main, *files, *out).returncode == 0
    assert saved <= {path.name for path in (tmp_path / "out").glob("checkpoint-*")}


def test_other_options_are_accepted_where_an_interrupted_training_has_saved_nothing(files, tmp_path, monkeypatch):
    out = ("--output-dir", tmp_path / "out", *OPTIONS, "--save-strategy", "no")
    with monkeypatch.context() as patch:
        interrupted(patch)
        assert run_main(train.main, *files, *out).returncode == 130
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["run_settings.json"]
    done = run_main(train.main, *files, *out, "--max-steps", 1)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads((tmp_path / "out/results.json").read_text())["ran"]["trained_steps"] == 1


@pytest.mark.parametrize(
    "path, content",
    [
        ("checkpoint-3/trainer_state.json", "{}"),
        ("draw_0/run_settings.json", '{"finished": true}'),
        ("draw_0/news-5.jsonl.settings.json", "{}"),
    ],
)
def test_a_checkpoint_a_finished_sample_and_finished_rows_are_resumed(path, content, tmp_path):
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(content)
    assert describe_resuming(groups_of(tmp_path)) == RESUME


@pytest.mark.parametrize(
    "path, content",
    [
        ("checkpoint-3/trainer_state.json", '{"epoch": '),  # killed while it was written
        ("draw_0/run_settings.json", '{"settings": {}}'),
        ("run_settings.json", '{"settings": {}}'),
    ],
)
def test_what_is_not_complete_is_not_resumed(path, content, tmp_path):
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(content)
    assert "start again" in describe_resuming(groups_of(tmp_path))


def test_commands_without_a_training_resume_and_nothing_was_begun_before_the_arguments_are_read():
    assert describe_resuming([SimpleNamespace(output="x")]) == RESUME
    assert describe_resuming([]) == REPEAT
