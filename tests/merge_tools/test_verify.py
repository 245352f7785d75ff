"""`verify` finds each change of a mixture or its sources."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from merge_tools import compose, inspect, verify
from run_tools.errors import UserError

from .conftest import edit_json, recipe_of, save_expert


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with sources and mixtures of them, to be copied."""
    root = tmp_path_factory.mktemp("made")
    folders = [save_expert(root / name, seed) for seed, name in enumerate(("birds", "ships", "tools"))]
    compose(recipe_of(folders), root / "out")
    compose(recipe_of(folders, base_model=folders[0], rank=4), root / "low")
    return root


@pytest.fixture
def place(made, tmp_path):
    return shutil.copytree(made, tmp_path / "made")


def change_tensor(folder, name):
    """Adds to one element, so that the last bit of few others could be meant."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[3] += 0.5
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def add_tensor(folder, name):
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, name: tensors["model.norm.weight"].clone()}, folder / "model.safetensors", {"format": "pt"})


MOE = "model.layers.1.block_sparse_moe"
CHANGES = {
    "an expert": (
        lambda root: change_tensor(root / "out", f"{MOE}.experts.1.w2.weight"),
        ("experts.1.w2", "1 of 2,048"),
    ),
    "a mean": (lambda root: change_tensor(root / "out", "model.norm.weight"), ("model.norm.weight", "1 of 32")),
    "a gate": (lambda root: change_tensor(root / "out", f"{MOE}.gate.weight"), (f"{MOE}.gate.weight", "1 of 96")),
    "an extra tensor": (lambda root: add_tensor(root / "out", "model.extra"), ("model.extra is not",)),
    "a source": (
        lambda root: change_tensor(root / "ships", "model.norm.weight"),
        ("ships: model.safetensors has changed",),
    ),
    "a field": (
        lambda root: edit_json(root / "out" / "config.json", num_experts_per_tok=1),
        ("num_experts_per_tok is 1",),
    ),
    "a tokenizer": (
        lambda root: edit_json(root / "out" / "tokenizer_config.json", pad_token="x"),
        ("tokenizer_config.json",),
    ),
    "a missing file": (lambda root: (root / "out" / "tokenizer.json").unlink(), ("tokenizer.json is missing",)),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_is_found(case, place):
    change, fragments = CHANGES[case]
    assert verify(place / "out") == {
        "ok": True, "compared": {"experts": 18, "shared": 15, "gates": 2}, "faults": [], "notes": []
    }  # fmt: skip
    change(place)
    found = verify(place / "out")
    assert not found["ok"] and all(any(fragment in fault for fault in found["faults"]) for fragment in fragments), (
        found["faults"]
    )


@pytest.mark.parametrize("half", ["A", "B"])
def test_factors_of_low_rank_may_differ_a_little(half, place):
    name, low = f"{MOE}.experts.1.w2.{half}.weight", place / "low"
    tensors = load_file(low / "model.safetensors")
    original = tensors[name].clone()
    for factor, ok in ((1 + 1e-5, True), (1.1, False)):
        tensors[name] = original * factor
        save_file(tensors, low / "model.safetensors", {"format": "pt"})
        assert verify(low)["ok"] == ok


def test_a_source_that_lacks_a_tensor_cannot_be_compared(place):
    tensors = load_file(place / "ships" / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, place / "ships" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="ships.*up_proj"):
        verify(place / "out")


def test_a_mixture_that_lacks_a_tensor_is_named(place):
    tensors = load_file(place / "out" / "model.safetensors")
    del tensors[f"{MOE}.experts.2.w1.weight"]
    save_file(tensors, place / "out" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="lacks tensors of tools"):
        inspect(place / "out")


def test_gates_that_were_tuned_or_made_from_prompts_are_not_compared(place):
    record = place / "out" / "merge_record.json"
    content = json.loads(record.read_text())
    record.write_text(json.dumps(content | {"tuned": {"steps": 3}}))
    change_tensor(place / "out", f"{MOE}.gate.weight")
    found = verify(place / "out")
    assert found["ok"] and found["compared"]["gates"] == 0 and "tuned" in found["notes"][0]
