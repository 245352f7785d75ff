"""The resumable JSON Lines writer: interruptions, settings, seeds."""

import json

import pytest
import torch

from lexperts.recipes.common.jsonl_resume import ResumableJsonl, count_lines, digest, read_lines
from lexperts.recipes.common.run_folder import SettingsMismatchError
from lexperts.recipes.moesumm.train import check_model

ROWS = list(range(10))
SETTINGS = {"num_beams": 4, "model": {"name": "a", "sha256": "0123456789"}}


def squares(rows, first):
    assert rows == ROWS[first : first + len(rows)]
    return [{"row": row, "square": row**2} for row in rows]


def complete(path, settings=SETTINGS, **options):
    file = ResumableJsonl(path, settings)
    new = file.write(ROWS, squares, batch_size=4, **options)
    file.finish()
    return new


def test_write_and_finish(tmp_path):
    path = tmp_path / "new" / "x.jsonl"
    assert complete(path) == 10
    assert read_lines(path) == squares(ROWS, 0) and sorted(p.name for p in path.parent.iterdir()) == [
        "x.jsonl",
        "x.settings.json",
    ]
    file = ResumableJsonl(path, SETTINGS)
    assert file.is_complete() and file.write(ROWS, None, batch_size=4) == 0
    file.add_report({"rows": 10})
    assert file.read_record() == {"settings": SETTINGS, "report": {"rows": 10}} and file.is_complete()


@pytest.mark.parametrize("batch_size", [3, 4, 20])
@pytest.mark.parametrize("cut", [0, 1, 30, 50, 100, 150])
def test_killed_at_any_byte(tmp_path, cut, batch_size):
    """The part ends anywhere, also inside a line; with a seed the sampled numbers are those of an uninterrupted run."""

    def sampled(rows, first):
        return [{"row": row, "x": torch.rand(()).item(), "text": "é\u2028"} for row in rows]

    whole = ResumableJsonl(tmp_path / "whole.jsonl", SETTINGS)
    whole.write(ROWS, sampled, batch_size=batch_size, seed=5)
    content = whole.part.read_bytes()
    file = ResumableJsonl(tmp_path / "x.jsonl", SETTINGS)
    file.write(ROWS[:0], sampled, batch_size=batch_size)
    file.part.write_bytes(content[:cut])
    done = content[:cut].count(b"\n")
    assert file.write(ROWS, sampled, batch_size=batch_size, seed=5) == 10 - done
    assert file.part.read_bytes() == content and len(file.read_part()) == 10


def test_error_keeps_finished_batches(tmp_path):
    file = ResumableJsonl(tmp_path / "x.jsonl", SETTINGS)

    def failing(rows, first):
        if first >= 4:
            raise RuntimeError("out of memory")
        return squares(rows, first)

    with pytest.raises(RuntimeError):
        file.write(ROWS, failing, batch_size=4)
    assert count_lines(file.part) == 4 and not file.is_complete()
    assert file.write(ROWS, squares, batch_size=4) == 6
    with pytest.raises(ValueError, match="1 results for the 4 rows"):
        ResumableJsonl(tmp_path / "y.jsonl", SETTINGS).write(ROWS, lambda rows, first: [{}], batch_size=4)


@pytest.mark.parametrize("finished", [True, False])
def test_other_settings(tmp_path, finished):
    path = tmp_path / "x.jsonl"
    ResumableJsonl(path, SETTINGS).write(ROWS, squares, batch_size=4)
    if finished:
        ResumableJsonl(path, SETTINGS).finish()
    for settings, name in (
        (SETTINGS | {"num_beams": 2}, "num_beams=4 before, 2 now"),
        (SETTINGS | {"length_penalty": 2.0}, "length_penalty=None before, 2.0 now"),
        (SETTINGS | {"model": {"name": "a", "sha256": "abcdefgh"}}, "a .abcdefgh. now"),
    ):
        with pytest.raises(SettingsMismatchError, match=name):
            ResumableJsonl(path, settings).is_complete()
        with pytest.raises(SettingsMismatchError, match=name):
            ResumableJsonl(path, settings).write(ROWS, squares, batch_size=4)
    renamed = SETTINGS | {"model": {"name": "b", "sha256": "0123456789"}}
    assert ResumableJsonl(path, renamed).is_complete() == finished  # the same content under another name
    other = ResumableJsonl(path, {"num_beams": 2})
    assert not other.is_complete(overwrite=True) and not other.part.exists() and not other.record.exists()


def test_no_record(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("{}\n", encoding="utf-8")
    with pytest.raises(SettingsMismatchError, match="x.settings.json"):
        ResumableJsonl(path, SETTINGS).is_complete()
    path.unlink()
    # a record alone, of a run that was killed before its first row, does not bind anyone
    (tmp_path / "x.settings.json").write_text(json.dumps({"settings": {"num_beams": 1}}), encoding="utf-8")
    assert complete(path) == 10


def test_finish_with_other_lines(tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    file = ResumableJsonl(tmp_path / "x.jsonl", SETTINGS)
    file.write(ROWS, squares, batch_size=4)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ResumableJsonl, "remove_part", killed)
        file.finish({"best": line["square"]} for line in file.read_part())
    assert [line["best"] for line in read_lines(file.path)] == [row**2 for row in ROWS] and file.part.exists()
    assert file.is_complete() and not file.part.exists()


@pytest.mark.parametrize("name", ["x.jsonl", "x.part", "x.settings.json"])
@pytest.mark.parametrize("overwrite", [True, False])
def test_a_file_of_the_user_is_neither_read_nor_removed(name, overwrite, tmp_path):
    (tmp_path / name).write_text("mine\n")
    file = ResumableJsonl(tmp_path / "x.jsonl", SETTINGS)
    for start in (lambda: file.is_complete(overwrite), lambda: file.write(ROWS, squares, batch_size=4)):
        with pytest.raises(SettingsMismatchError, match="x.settings.json"):
            start()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: "mine\n"}


def test_a_part_that_is_not_of_the_finished_run_stays(tmp_path):
    complete(tmp_path / "x.jsonl")
    (tmp_path / "x.part").write_text("mine")
    file = ResumableJsonl(tmp_path / "x.jsonl", SETTINGS)
    assert file.is_complete() and file.part.read_text() == "mine"
    assert not ResumableJsonl(tmp_path / "x.jsonl", {"num_beams": 2}).is_complete(overwrite=True)
    assert file.part.read_text() == "mine" and not file.path.exists()


def test_digest():
    assert digest([{"a": 1, "b": "é"}]) == digest([{"b": "é", "a": 1}]) != digest([{"a": 1, "b": "e"}])


def test_a_folder_with_the_name_of_a_samples_model_stays(tmp_path):
    file, saved = ResumableJsonl(tmp_path / "x.jsonl", SETTINGS), tmp_path / "x-model"
    check_model(file, saved)
    saved.mkdir()
    with pytest.raises(SettingsMismatchError, match="x-model exists, but x.settings.json"):
        check_model(file, saved)
    file.start()
    check_model(file, saved)  # of a run that was killed before its first row
    assert not file.is_complete() and file.write(ROWS, squares, batch_size=4) == 10
