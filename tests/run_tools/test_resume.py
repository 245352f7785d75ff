"""Resumable outputs: interruptions, settings, seeds, and files of the user."""

import json
from pathlib import Path

import pytest
import torch

from lexperts.recipes.moesumm.train import check_model
from run_tools.claims import Claim
from run_tools.errors import UserError
from run_tools.fingerprints import digest
from run_tools.jsonl import read_lines
from run_tools.resume import ResumableJsonl, SettingsMismatchError
from run_tools.settings import find_changes

ROWS = list(range(10))
SETTINGS = {"num_beams": 4, "model": {"name": "a", "sha256": "0123456789"}}


def squares(rows, first):
    assert rows == ROWS[first : first + len(rows)]
    return [{"row": row, "square": row**2} for row in rows]


def complete(path, settings=SETTINGS, **options):
    file = ResumableJsonl(path, settings)
    new = file.write(ROWS, squares, batch_size=4, **options)
    file.finish_output()
    return new


def test_write_and_finish(tmp_path):
    path = tmp_path / "new" / "x.jsonl"
    file = ResumableJsonl(path, SETTINGS)
    assert file.write(ROWS, squares, batch_size=4) == 10 and not file.is_complete()
    file.finish_output(facts={"rows": 10})
    assert read_lines(path) == squares(ROWS, 0)
    assert sorted(p.name for p in path.parent.iterdir()) == [".x.jsonl.run.json", "x.jsonl"]
    file = ResumableJsonl(path, SETTINGS)
    assert file.is_complete() and file.write(ROWS, None, batch_size=4) == 0
    record = file.find_record()
    assert (record.settings, record.facts, record.size) == (SETTINGS, {"rows": 10}, path.stat().st_size)


@pytest.mark.parametrize("batch_size", [3, 4, 20])
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_killed_at_any_block_it_ends_in_the_same_bytes(tmp_path, cut, batch_size):
    """With a seed, the sampled numbers are those of an uninterrupted run."""

    def sampled(rows, first):
        return [{"row": row, "x": torch.rand(()).item(), "text": "é\u2028\ud800"} for row in rows]

    def killed(rows, first):
        if first >= cut * batch_size:
            raise KeyboardInterrupt
        return sampled(rows, first)

    file, whole = (ResumableJsonl(tmp_path / name, SETTINGS) for name in ("x.jsonl", "whole.jsonl"))
    assert whole.write(ROWS, sampled, batch_size=batch_size, seed=5) == 10
    done = min(cut * batch_size, 10)
    if done < 10:
        with pytest.raises(KeyboardInterrupt):
            file.write(ROWS, killed, batch_size=batch_size, seed=5)
    assert file.write(ROWS, sampled, batch_size=batch_size, seed=5) == 10 - (done if done < 10 else 0)
    assert [row["row"] for row in file.read_rows()] == ROWS
    file.finish_output()
    whole.finish_output()
    assert file.path.read_bytes() == whole.path.read_bytes()


def test_an_error_keeps_finished_batches(tmp_path):
    file = ResumableJsonl(tmp_path / "x.jsonl", SETTINGS)

    def failing(rows, first):
        if first >= 4:
            raise RuntimeError("out of memory")
        return squares(rows, first)

    with pytest.raises(RuntimeError):
        file.write(ROWS, failing, batch_size=4)
    assert file.count_rows() == 4 and not file.is_complete()
    assert file.write(ROWS, squares, batch_size=4) == 6
    with pytest.raises(ValueError, match="1 results for the 4 rows"):
        ResumableJsonl(tmp_path / "y.jsonl", SETTINGS).write(ROWS, lambda rows, first: [{}], batch_size=4)


@pytest.mark.parametrize("finished", [True, False])
def test_other_settings_are_named(tmp_path, finished):
    path = tmp_path / "x.jsonl"
    ResumableJsonl(path, SETTINGS).write(ROWS, squares, batch_size=4)
    if finished:
        ResumableJsonl(path, SETTINGS).finish_output()
    for settings, name in (
        (SETTINGS | {"num_beams": 2}, "num_beams=4 before, 2 now"),
        (SETTINGS | {"length_penalty": 2.0}, r"length_penalty=\(not given\) before, 2.0 now"),
        (SETTINGS | {"model": {"name": "a", "sha256": "abcdefgh"}}, "a .abcdefgh. now"),
    ):
        for start in (ResumableJsonl(path, settings).is_complete, ResumableJsonl(path, settings).start):
            with pytest.raises(SettingsMismatchError, match=name):
                start()
    renamed = SETTINGS | {"model": {"name": "b", "sha256": "0123456789"}}
    assert ResumableJsonl(path, renamed).is_complete() == finished  # the same content under another name
    assert not ResumableJsonl(path, {"num_beams": 2}).is_complete(overwrite=True)
    assert not list(tmp_path.iterdir())


def test_a_claim_without_rows_binds_no_one(tmp_path):
    ResumableJsonl(tmp_path / "x.jsonl", {"num_beams": 1}).start()
    assert complete(tmp_path / "x.jsonl") == 10


def test_finish_with_other_lines(tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    file = ResumableJsonl(tmp_path / "x.jsonl", SETTINGS)
    file.write(ROWS, squares, batch_size=4)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Claim, "remove", killed)
        file.finish_output({"best": line["square"]} for line in file.read_rows())
    assert [line["best"] for line in read_lines(file.path)] == [row**2 for row in ROWS] and file.parts.exists()
    assert file.is_complete() and not file.parts.exists()


@pytest.mark.parametrize("name", ["x.jsonl", ".x.jsonl.run.json", "x.jsonl.parts", "x.jsonl.parts/mine.txt"])
@pytest.mark.parametrize("overwrite", [True, False])
def test_a_file_of_the_user_is_neither_read_nor_removed(name, overwrite, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine\n")
    file = ResumableJsonl(tmp_path / "x.jsonl", SETTINGS)
    for start in (lambda: file.is_complete(overwrite), lambda: file.write(ROWS, squares, batch_size=4)):
        with pytest.raises(ValueError, match=Path(name).name):
            start()
    assert [p.read_text() for p in tmp_path.rglob("*") if p.is_file()] == ["mine\n"]


@pytest.mark.parametrize("overwrite", [True, False])
def test_parts_that_are_not_of_the_finished_run_stay(overwrite, tmp_path):
    complete(tmp_path / "x.jsonl")
    part = tmp_path / "x.jsonl.parts" / "000000000000-000000000004.jsonl"
    part.parent.mkdir()
    part.write_text("mine")
    before = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for settings in (SETTINGS, {"num_beams": 2}):
        with pytest.raises(UserError, match="x.jsonl.parts holds .* no record"):
            ResumableJsonl(tmp_path / "x.jsonl", settings).is_complete(overwrite)
    assert {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_folder_with_the_name_of_a_samples_model_stays(tmp_path):
    file, saved = ResumableJsonl(tmp_path / "x.jsonl", SETTINGS), tmp_path / "x-model"
    check_model(file, saved)
    saved.mkdir()
    with pytest.raises(SettingsMismatchError, match="x-model exists, but .*x.jsonl.run.json"):
        check_model(file, saved)
    file.start()
    check_model(file, saved)  # of a run that was killed before its first row
    assert not file.is_complete() and file.write(ROWS, squares, batch_size=4) == 10


# ---- settings


def test_digest():
    assert digest([{"a": 1, "b": "é"}]) == digest([{"b": "é", "a": 1}]) != digest([{"a": 1, "b": "e"}])


MODEL = {"name": "a", "sha256": "x" * 64}


@pytest.mark.parametrize(
    "before, now, changes",
    [
        ({"language": None}, {}, ["language=None before, (not given) now"]),
        ({"language": None}, {"language": None}, []),
        ({"model": MODEL}, {"model": MODEL | {"name": "b"}}, []),  # it was only moved
        ({"model": {"name": "a"}}, {"model": {"name": "b"}}, ["model=a before, b now"]),  # of unknown content
        ({"model": {"name": "a"}}, {"model": {"name": "a", "commit": "1"}}, []),
        (
            {"model": MODEL, "config.x": "1"},
            {"model": MODEL | {"sha256": "y" * 64}, "config.x": "2"},
            ["model=a (xxxxxxxx) before, a (yyyyyyyy) now"],
        ),
        ({"model": MODEL, "config.x": "1"}, {"model": MODEL, "config.x": "2"}, ["config.x='1' before, '2' now"]),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, ["a.c=2 before, 3 now"]),
        (
            {"files": [MODEL]},
            {"files": [MODEL, MODEL]},
            ["files=[a (xxxxxxxx)] before, [a (xxxxxxxx), a (xxxxxxxx)] now"],
        ),
    ],
)
def test_changes_of_settings(before, now, changes):
    assert list(find_changes(before, now).values()) == changes
    assert json.loads(json.dumps(before)) == before


def test_only_shared_settings_are_compared_on_request():
    assert find_changes({"a": 1, "b": 2}, {"b": 3, "c": 4}, shared=True) == {"b": "b=2 before, 3 now"}
