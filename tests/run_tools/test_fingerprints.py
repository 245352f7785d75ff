"""Fingerprints are equal for equal content only, and differences of settings are named."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from run_tools.fingerprints import differences, fingerprint, hash_weights, parse_named_path


@pytest.fixture
def model(tmp_path):
    for name in ("config.json", "model.safetensors", "onnx/model.onnx", "checkpoint-5/config.json", "results.json"):
        (tmp_path / "model" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / name).write_text(name)
    return tmp_path / "model"


def test_a_model_is_the_same_wherever_it_is_and_whatever_lies_beside_it(model):
    before = fingerprint(model)
    for name in ("results.json", "checkpoint-5/config.json", "README.md", ".cache"):
        (model / name).write_text("new")
    copied = model.rename(model.with_name("copy"))
    assert not differences({"model": before}, {"model": fingerprint(copied)})


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "onnx/model.onnx", "new.json"])
def test_another_content_is_another_model(model, name):
    before = fingerprint(model), fingerprint(model / "config.json")
    (model / name).write_text("new")
    assert "model (" in differences({"model": before[0]}, {"model": fingerprint(model)})
    assert bool(differences({"a": before[1]}, {"a": fingerprint(model / "config.json")})) == (name == "config.json")


def test_a_repository_is_known_by_its_commit_once_it_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    found = [fingerprint("owner/name")]
    for commit in ("1" * 40, "2" * 40):
        (tmp_path / "models--owner--name" / "refs").mkdir(parents=True, exist_ok=True)
        (tmp_path / "models--owner--name" / "refs" / "main").write_text(commit)
        found.append(fingerprint("owner/name"))
    changes = [differences({"model": before}, {"model": now}) for before, now in zip(found, found[1:], strict=False)]
    assert changes == ["", "model=owner/name (11111111) before, owner/name (22222222) now"]


SETTINGS = st.dictionaries(st.sampled_from("abc"), st.integers(0, 2) | st.none())


@given(SETTINGS, SETTINGS)
def test_each_setting_that_differs_is_named(before, now):
    names = [name for name in "abc" if before.get(name) != now.get(name)]
    found = differences(before, now)
    inner = differences({"x": before}, {"x": now})
    assert [change.removeprefix("x.") for change in inner.split("; ")] == found.split("; ")
    assert sorted(change.partition("=")[0] for change in found.split("; ") if change) == names
    assert all(f"{name}={before.get(name)} before, {now.get(name)} now" in found for name in names)


def test_a_file_may_have_a_name(tmp_path):
    (tmp_path / "a=b").touch()
    assert [parse_named_path(one) for one in ("x", "y=x", f"{tmp_path}/a=b")] == [
        ("", "x"),
        ("y", "x"),
        ("", f"{tmp_path}/a=b"),
    ]


def test_names_shapes_types_and_values_are_part_of_the_hash_of_weights():
    model = torch.nn.Linear(200, 200)
    torch.nn.init.zeros_(model.weight)
    other = copy.deepcopy(model)
    other.weight.data[100, 100] = 0.05  # in the middle, which the repr of a large tensor leaves out
    others = [torch.nn.Sequential(model), other, copy.deepcopy(model).to(torch.bfloat16)]
    assert len({hash_weights(one) for one in [model, *others]}) == 4
    assert hash_weights(model) == hash_weights(copy.deepcopy(model))
