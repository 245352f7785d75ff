"""`verify` finds each change of a mixture or its sources."""

import json
import shutil

import pytest
import torch

from merge_tools import compose, inspect, verify
from run_tools.errors import UserError

from .conftest import edit_json, edit_tensors, recipe_of, save_expert


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
    edit_tensors(folder, lambda tensors: tensors[name].view(-1)[3:4].add_(0.5))


def add_tensor(folder, name):
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(2)}))


def change_field(folder, name):
    edit_json(folder / name, num_experts_per_tok=1)


MOE = "model.layers.1.block_sparse_moe"
CHANGES = [  # what is done to which folder, and what a fault names
    (change_tensor, "out", f"{MOE}.experts.1.w2.weight", f"{MOE}.experts.1.w2.weight: 1 of 2,048"),
    (change_tensor, "out", "model.norm.weight", "model.norm.weight: 1 of 32"),
    (change_tensor, "out", f"{MOE}.gate.weight", f"{MOE}.gate.weight: 1 of 96"),
    (add_tensor, "out", "model.extra", "model.extra is not"),
    (change_tensor, "ships", "model.norm.weight", "ships: model.safetensors has changed"),
    (change_field, "out", "config.json", "num_experts_per_tok is 1"),
    (change_field, "out", "tokenizer_config.json", "tokenizer_config.json has changed"),
    (lambda folder, name: (folder / name).unlink(), "out", "tokenizer.json", "tokenizer.json is missing"),
]


@pytest.mark.parametrize("change, folder, name, fragment", CHANGES)
def test_a_change_is_found(change, folder, name, fragment, place):
    compared = {"experts": 18, "shared": 15, "gates": 2}
    assert verify(place / "out") == {"ok": True, "compared": compared, "faults": [], "notes": []}
    change(place / folder, name)
    found = verify(place / "out")
    assert not found["ok"] and any(fragment in fault for fault in found["faults"]), found["faults"]


def test_factors_of_low_rank_may_differ_a_little(place):
    for half in "AB":
        for factor, ok in ((1 + 1e-5, True), (1.1, False), (1 / 1.1, True)):
            name = f"{MOE}.experts.1.w2.{half}.weight"
            edit_tensors(place / "low", lambda tensors, name=name, factor=factor: tensors[name].mul_(factor))
            assert verify(place / "low")["ok"] == ok


def test_a_tensor_that_a_source_or_a_mixture_lacks_is_named(place):
    edit_tensors(place / "ships", lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight"))
    with pytest.raises(UserError, match="ships.*up_proj"):
        verify(place / "out")
    edit_tensors(place / "out", lambda tensors: tensors.pop(f"{MOE}.experts.2.w1.weight"))
    with pytest.raises(UserError, match="lacks tensors of tools"):
        inspect(place / "out")


def test_gates_that_were_tuned_or_made_from_prompts_are_not_compared(place):
    record = place / "out" / "merge_record.json"
    content = json.loads(record.read_text())
    record.write_text(json.dumps(content | {"tuned": {"steps": 3}}))
    change_tensor(place / "out", f"{MOE}.gate.weight")
    found = verify(place / "out")
    assert found["ok"] and found["compared"]["gates"] == 0 and "tuned" in found["notes"][0]
