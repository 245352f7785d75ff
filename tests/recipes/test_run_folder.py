"""A folder belongs to the run that made it: what is compared, what is not, and what overwriting removes."""

import json
from dataclasses import dataclass, field

import pytest
from huggingface_hub import constants
from transformers import TrainingArguments

from lexperts.recipes.common import run_folder, settings
from lexperts.recipes.common.run_folder import RunFolder
from run_tools.errors import SettingsMismatchError


@dataclass
class Options:
    train_files: list[str] = field(default_factory=list)
    backbone: str | None = None
    use_moe: bool = True
    show: int = 3


def training(folder, **changes):
    return TrainingArguments(str(folder), report_to="none", use_cpu=True, **changes)


def open_run(folder, options=None, overwrite=False, **changes):
    return run_folder.open_run("a/train.py", training(folder, **changes), options or Options(), overwrite=overwrite)


def left_by_a_run(folder, options=None, **changes):
    """A killed run's folder: its record and a checkpoint."""
    run = open_run(folder, options, **changes)
    (folder / "checkpoint-2").mkdir()
    (folder / "checkpoint-2" / "trainer_state.json").write_text("{}")
    return run


def write_model(folder, weights="1", **files):
    folder.mkdir(exist_ok=True)
    for name, content in {"config.json": "{}", "model.safetensors": weights, **files}.items():
        (folder / name).write_text(content)
    return str(folder)


def test_the_same_settings_resume_and_others_are_named(tmp_path):
    left_by_a_run(tmp_path)
    (tmp_path / "checkpoint-3").mkdir()  # killed while it was written
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "checkpoint-4" / "trainer_state.json").write_text('{"epoch": ')
    assert open_run(tmp_path).start == str(tmp_path / "checkpoint-2")
    with pytest.raises(SettingsMismatchError, match="learning_rate=5e-05.*0.5.*Use.*--output-dir,.*--overw"):
        open_run(tmp_path, learning_rate=0.5)
    with pytest.raises(SettingsMismatchError, match="use_moe=True.*False.*seed=42.*1"):
        open_run(tmp_path, Options(use_moe=False), seed=1)
    with pytest.raises(SettingsMismatchError, match="script=.a/train.py.*b/train.py"):
        run_folder.open_run("b/train.py", training(tmp_path), Options())


def test_what_does_not_affect_the_result_may_differ(tmp_path):
    left_by_a_run(tmp_path)
    changes = {"logging_steps": 7, "push_to_hub": True, "hub_model_id": "a/b", "dataloader_num_workers": 2}
    changes |= {"per_device_eval_batch_size": 3, "save_total_limit": 1, "disable_tqdm": True, "run_name": "x"}
    assert open_run(tmp_path, Options(show=0), **changes).start


def test_data_and_models_are_compared_by_their_content(tmp_path):
    rows, model = tmp_path / "rows.jsonl", tmp_path / "model"
    rows.write_text("one\n")
    options = Options([str(rows)], write_model(model))
    left_by_a_run(tmp_path / "run", options)
    (tmp_path / "moved.jsonl").write_text("one\n")
    moved = Options([str(tmp_path / "moved.jsonl")], write_model(tmp_path / "elsewhere"))
    assert open_run(tmp_path / "run", moved).start
    write_model(model, **{"results.json": "scores", "README.md": "a card", "run_settings.json": "{}"})
    (model / "checkpoint-1").mkdir()
    write_model(model / "checkpoint-1", "2")
    assert open_run(tmp_path / "run", options).start  # the model is the same
    rows.write_text("two\n")  # as many bytes
    with pytest.raises(
        SettingsMismatchError, match=r"train_files=\[rows.jsonl \(\w{8}\)\] before, \[rows.jsonl \(\w{8}\)\] now"
    ):
        open_run(tmp_path / "run", options)
    rows.write_text("one\n")
    write_model(model, "2")  # trained again in its place
    with pytest.raises(SettingsMismatchError, match="backbone=model "):
        open_run(tmp_path / "run", options)


def test_another_version_of_lexperts_is_named(tmp_path, monkeypatch):
    left_by_a_run(tmp_path)
    monkeypatch.setattr(settings, "__version__", "9.9")
    with pytest.raises(SettingsMismatchError, match="lexperts=.*'9.9' now"):
        open_run(tmp_path)


def test_other_settings_are_accepted_before_anything_is_made_and_refused_without_a_record(tmp_path):
    open_run(tmp_path)
    assert open_run(tmp_path, learning_rate=0.5).start is None  # the first start failed, as by a wrong option
    assert json.loads((tmp_path / "run_settings.json").read_text())["settings"]["learning_rate"] == 0.5
    (tmp_path / "run_settings.json").unlink()
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(SettingsMismatchError, match="model.safetensors, without a record"):
        open_run(tmp_path)


def test_overwriting_removes_the_run_and_nothing_else(tmp_path, capsys):
    left_by_a_run(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    run = open_run(tmp_path, overwrite=True, learning_rate=0.5)
    assert run.start is None and not list(tmp_path.glob("checkpoint-*")) and (tmp_path / "notes.txt").exists()
    assert "checkpoint-2" in capsys.readouterr().out
    start = Options(backbone=write_model(tmp_path / "base"))
    with pytest.raises(SettingsMismatchError, match="would remove .*base, an input of this run"):
        open_run(tmp_path, start, overwrite=True)
    with pytest.raises(SettingsMismatchError, match="an input of this run"):  # a model trained in its own folder
        open_run(tmp_path / "base", start, overwrite=True)
    assert (tmp_path / "base" / "model.safetensors").exists()


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("record", ["none", "damaged", "of something else"])
def test_overwriting_removes_nothing_in_a_folder_that_no_run_has_written(record, tmp_path):
    write_model(tmp_path)
    write_model(tmp_path / "base")
    if record != "none":
        (tmp_path / "run_settings.json").write_text("{" if record == "damaged" else '{"mine": 1}')
    before = content(tmp_path)
    with pytest.raises(SettingsMismatchError, match="would remove .*base, .*run_settings.json.* missing or damaged"):
        open_run(tmp_path, overwrite=True)
    assert content(tmp_path) == before


@pytest.mark.parametrize("name", ["embeddings.safetensors", "photos.bin", "checkpoint-best"])
def test_overwriting_does_not_remove_what_only_looks_like_an_output(name, tmp_path):
    left_by_a_run(tmp_path)
    (tmp_path / name).write_text("mine")
    before = content(tmp_path)
    with pytest.raises(SettingsMismatchError, match=f"would remove .*{name}, .* its name .*Move"):
        open_run(tmp_path, overwrite=True)
    assert content(tmp_path) == before


def test_overwriting_a_finished_run_removes_the_files_that_its_record_names(tmp_path):
    left_by_a_run(tmp_path).mark_finished()
    (tmp_path / "checkpoint-2" / "notes.txt").write_text("mine")
    before = content(tmp_path)
    with pytest.raises(SettingsMismatchError, match="notes.txt,.*run_settings.json"):
        open_run(tmp_path, overwrite=True)
    assert content(tmp_path) == before
    (tmp_path / "checkpoint-2" / "notes.txt").unlink()
    open_run(tmp_path, overwrite=True)
    assert [path.name for path in content(tmp_path)] == ["run_settings.json"]


def test_overwriting_a_killed_run_leaves_a_users_file_in_a_checkpoint(tmp_path):
    run = left_by_a_run(tmp_path)
    run.record_checkpoint("checkpoint-2")
    (tmp_path / "checkpoint-3").mkdir()  # killed while it was written
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text("{")
    for name in ("checkpoint-2", "checkpoint-3"):
        (tmp_path / name / "notes.txt").write_text("mine")
        run.record_checkpoint("checkpoint-4")  # of the same run, resumed
        with pytest.raises(SettingsMismatchError, match=f"{name}/notes.txt,.*run_settings.json"):
            open_run(tmp_path, overwrite=True)
        (tmp_path / name / "notes.txt").unlink()
    (tmp_path / "checkpoint-2" / "notes.txt").write_text("mine")
    run.mark_finished()
    with pytest.raises(SettingsMismatchError, match="notes.txt"):
        open_run(tmp_path, overwrite=True)
    (tmp_path / "checkpoint-2" / "notes.txt").unlink()
    open_run(tmp_path, overwrite=True)
    assert [path.name for path in content(tmp_path)] == ["run_settings.json"]


def test_finished_is_a_run_with_these_settings_that_came_to_its_end(tmp_path):
    run = left_by_a_run(tmp_path)
    assert not run.finished
    run.mark_finished(ran={"trained_steps": 2})
    assert run.finished and run.read()["ran"] == {"trained_steps": 2}
    assert not RunFolder(tmp_path, {**run.settings, "seed": 1}).finished


def test_a_checkpoint_is_taken_from_a_run_with_the_same_settings_alone(tmp_path):
    left_by_a_run(tmp_path / "same")
    left_by_a_run(tmp_path / "other", learning_rate=0.5)
    for name in ("same", "other"):
        (tmp_path / name / "checkpoint-999").mkdir()  # killed while it was written
        (tmp_path / name / "checkpoint-best").mkdir()  # the user's
    given = {name: str(tmp_path / name / "checkpoint-2") for name in ("same", "other")}
    assert open_run(tmp_path / "new", resume_from_checkpoint=given["same"]).start == given["same"]
    with pytest.raises(SettingsMismatchError, match="learning_rate=0.5 before, 5e-05 now"):
        open_run(tmp_path / "new", resume_from_checkpoint=given["other"])
    (tmp_path / "other" / "run_settings.json").unlink()
    with pytest.raises(SettingsMismatchError, match="no record of its settings"):
        open_run(tmp_path / "new", resume_from_checkpoint=given["other"])
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        open_run(tmp_path / "new", resume_from_checkpoint=str(tmp_path / "same" / "checkpoint-999"))
    with pytest.raises(ValueError, match="resume-from-checkpoint false"):
        open_run(tmp_path / "same", resume_from_checkpoint="false")
    assert open_run(tmp_path / "same", resume_from_checkpoint="true").start == given["same"]


def test_a_run_that_was_moved_ends_with_its_own_best_model(tmp_path):
    left_by_a_run(tmp_path / "old")
    state = {"global_step": 2, "best_model_checkpoint": str(tmp_path / "old" / "checkpoint-1")}
    (tmp_path / "old" / "checkpoint-2" / "trainer_state.json").write_text(json.dumps(state))
    (tmp_path / "old" / "checkpoint-1").mkdir()
    (tmp_path / "old").rename(tmp_path / "new")
    (tmp_path / "old" / "checkpoint-1").mkdir(parents=True)  # of another run
    start = open_run(tmp_path / "new").start
    found = json.loads((tmp_path / "new" / "checkpoint-2" / "trainer_state.json").read_text())
    assert start == str(tmp_path / "new" / "checkpoint-2")
    assert found == state | {"best_model_checkpoint": str(tmp_path / "new" / "checkpoint-1")}
    (tmp_path / "new" / "checkpoint-1").rmdir()
    with pytest.raises(ValueError, match="checkpoint-1 does not exist"):
        open_run(tmp_path / "new")


def test_a_hub_repository_is_known_by_its_commit_once_it_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    head = tmp_path / "hub" / "models--a--b" / "refs" / "main"
    head.parent.mkdir(parents=True)
    left_by_a_run(tmp_path / "run", Options(backbone="a/b"))
    head.write_text("1234567890")
    assert open_run(tmp_path / "run", Options(backbone="a/b")).start
    left_by_a_run(tmp_path / "later", Options(backbone="a/b"))
    head.write_text("abcdef1234")
    with pytest.raises(SettingsMismatchError, match=r"backbone=a/b \(12345678\) before, a/b \(abcdef12\) now"):
        open_run(tmp_path / "later", Options(backbone="a/b"))
