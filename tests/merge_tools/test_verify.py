"""`inspect`, whose numbers are counted again, and `verify`, which must find a single flipped bit anywhere."""

import hashlib
import importlib
import json
import re
import shutil

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from merge_tools import MergeError, add, compose, export, inspect, remove, verify
from merge_tools.tensor_files import read_header

from .conftest import edit_json, open_model, read_tensors, recipe_of

EXPERT = "model.layers.1.block_sparse_moe.experts.1.w2.weight"
SHARED = "model.layers.0.self_attn.k_proj.weight"
GATE = "model.layers.0.block_sparse_moe.gate.weight"
LINEARS = {"router_layers": ["v_proj", "gate_proj"]}
OPTIONS = {
    "mean": {},
    "weights": {"weights": [1, 2, 3]},
    "base": {"average": "base"},
    "zeros": {"gate_mode": "zeros"},
    "dtype": {"dtype": "bfloat16"},
    "linears": LINEARS,
    "one layer": {"router_layers_index": [0]},
    "domain": {"routing_policy": "domain"},
    "domain with a gate": {"routing_policy": "domain", "gate_mode": "random"},
}


@pytest.fixture
def own(experts, tmp_path):
    """own(count, **options of experts) -> folders of this test alone."""

    def make(count, **options):
        return [shutil.copytree(f, tmp_path / "sources" / f.name) for f in experts(count, **options)]

    return make


def recipe(folders, **options):
    based = {"base_model": str(folders[0])} if options.get("average") == "base" else {}
    return recipe_of(folders, **based, **options)


def composed(out, folders, **options):
    compose(recipe(folders, **options), out)
    return out


def flip(folder, name, element=5, bit=0):
    """One bit of one element of a tensor in model.safetensors."""
    file = folder / "model.safetensors"
    entry = next(entry for entry in read_header(file) if entry.name == name)
    content = bytearray(file.read_bytes())
    content[entry.start + element * (entry.nbytes // int(np.prod(entry.shape)))] ^= 1 << bit
    file.write_bytes(content)


@pytest.mark.parametrize("name", OPTIONS)
def test_verify_accepts_an_unchanged_mixture(experts, tmp_path, name):
    folder = composed(tmp_path / "out", experts(3, dtype="float32"), **OPTIONS[name])
    result = verify(folder)
    assert result["ok"] and result["faults"] == result["notes"] == []
    assert sum(result["compared"].values()) == len(read_tensors(folder))


@pytest.mark.parametrize("name, kind", [(EXPERT, "experts"), (SHARED, "shared"), (GATE, "gates")])
@pytest.mark.parametrize("average", ["mean", "base"])
def test_verify_finds_one_flipped_bit(experts, tmp_path, name, kind, average):
    folder = composed(tmp_path / "out", experts(3, dtype="bfloat16"), average=average)
    assert verify(folder)["ok"]
    flip(folder, name)
    result = verify(folder)
    assert not result["ok"]
    size = read_tensors(folder)[name].numel()
    assert result["faults"] == [f"{name}: 1 of {size:,} elements differ, starting at element 5."]
    flip(folder, name)
    assert verify(folder)["ok"]


def test_verify_reads_in_blocks_of_any_size(own, tmp_path, monkeypatch):
    folder = composed(tmp_path / "out", own(3))
    monkeypatch.setattr(importlib.import_module("merge_tools.verify"), "PIECE", 100)
    assert verify(folder)["ok"]
    for element in (250, 299, 300, 1023):
        flip(folder, EXPERT, element)
    assert verify(folder)["faults"] == [f"{EXPERT}: 4 of 2,048 elements differ, starting at element 250."]


def test_verify_finds_a_changed_source_even_if_the_change_is_not_used(own, tmp_path):
    """With average: base no attention weight of an expert is in the mixture, but its file has changed."""
    folders = own(3)
    folder = composed(tmp_path / "out", folders, average="base")
    flip(folders[2], SHARED)
    result = verify(folder)
    assert result["faults"] == [f"tools: {folders[2] / 'model.safetensors'} has changed since the merge."]
    flip(folders[2], SHARED)
    assert verify(folder)["ok"]


def test_verify_finds_a_changed_source_and_what_it_changes(own, tmp_path):
    folders = own(3)
    folder = composed(tmp_path / "out", folders)
    flip(folders[1], "model.layers.1.mlp.down_proj.weight", bit=7)
    faults = verify(folder)["faults"]
    assert faults == [
        f"ships: {folders[1] / 'model.safetensors'} has changed since the merge.",
        f"{EXPERT}: 1 of 2,048 elements differ, starting at element 5.",
    ]


@pytest.mark.parametrize("change", ["fewer tensors", "another shape"])
def test_verify_names_a_source_that_is_no_longer_compatible(own, tmp_path, change):
    folders = own(3)
    folder = composed(tmp_path / "out", folders)
    file, name = folders[1] / "model.safetensors", "model.layers.0.mlp.down_proj.weight"
    tensors = load_file(file)
    tensors[name] = tensors[name][:, :8].contiguous()
    if change == "fewer tensors":
        del tensors[name]
    save_file(tensors, file)
    result = verify(folder)
    assert not result["ok"] and len(result["faults"]) == 2
    assert result["faults"][1] == f"ships: '{name}' is missing or has an incompatible shape."


def test_verify_names_what_is_missing(own, tmp_path):
    folders = own(2)
    folder = composed(tmp_path / "out", folders)
    shutil.rmtree(folders[1])
    with pytest.raises(MergeError, match="ships' does not exist"):
        verify(folder)
    with pytest.raises(MergeError, match="has no merge_record.json"):
        verify(folders[0])
    with pytest.raises(MergeError, match="nowhere' does not exist"):
        verify(tmp_path / "nowhere")


@pytest.mark.parametrize("average", ["mean", "base"])
def test_verify_holds_after_add_without_recompose(experts, tmp_path, average):
    folders = experts(4)
    composed(tmp_path / "three", folders[:3], average=average)
    add(tmp_path / "three", folders[3], tmp_path / "four")
    result = verify(tmp_path / "four")
    assert result["ok"] and result["notes"] == [] and result["compared"] == {"experts": 24, "shared": 15, "gates": 2}
    flip(tmp_path / "four", SHARED)
    assert [fault.split(":")[0] for fault in verify(tmp_path / "four")["faults"]] == [SHARED]


def test_verify_notes_that_a_mean_with_a_removed_expert_is_not_compared(experts, tmp_path):
    folders = experts(3)
    composed(tmp_path / "three", folders)
    remove(tmp_path / "three", "birds", tmp_path / "two")
    result = verify(tmp_path / "two")
    assert result["ok"] and result["compared"] == {"experts": 12, "shared": 0, "gates": 2}
    assert len(result["notes"]) == 1 and "birds (removed), ships, tools" in result["notes"][0]
    add(tmp_path / "two", {"source_model": str(experts(4)[3]), "name": "birds"}, tmp_path / "other birds")
    result = verify(tmp_path / "other birds")
    assert result["ok"] and result["compared"]["shared"] == 0
    composed(tmp_path / "base", folders, average="base")  # one base's weights stay whoever is removed
    remove(tmp_path / "base", "birds", tmp_path / "ships and tools")
    assert verify(tmp_path / "ships and tools")["compared"] == {"experts": 12, "shared": 15, "gates": 2}


def test_verify_does_not_count_gates_that_it_cannot_recompute(experts, tmp_path):
    prompted = [{"source_model": str(f), "positive_prompts": [f.name]} for f in experts(2)]
    compose(recipe_of(prompted, gate_mode="hidden"), tmp_path / "out")
    result = verify(tmp_path / "out")
    assert result["ok"] and result["compared"]["gates"] == 0
    assert len(result["notes"]) == 1 and "gate_mode=hidden" in result["notes"][0]


def test_verify_compares_centroids(experts, tmp_path):
    file = tmp_path / "centroids.safetensors"
    save_file({"centroids": torch.randn(2, 5)}, file)
    compose(recipe_of(experts(2), routing_policy="domain", centroids=str(file)), tmp_path / "out")
    assert verify(tmp_path / "out")["ok"]
    flip(tmp_path / "out", "domain_centroids")
    assert verify(tmp_path / "out")["faults"] == ["domain_centroids: 1 of 10 elements differ, starting at element 5."]
    file.unlink()
    result = verify(tmp_path / "out")
    assert result["ok"] and "Centroids were not compared" in result["notes"][0]


# inspect


@pytest.mark.parametrize(
    "options, active",
    [
        ({}, 2),
        ({"experts_per_token": 1}, 1),
        ({"average": "base"}, 2),
        ({"routing_policy": "sequence_soft"}, 3),
        ({"routing_policy": "sequence_hard", "router_layers": ["mlp", "q_proj"]}, 1),
        ({"routing_policy": "domain", "router_layers_index": [1]}, 1),
        (LINEARS, 2),
    ],
)
def test_inspect_counts_parameters(experts, tmp_path, options, active):
    folder = tmp_path / "out"
    done = compose(recipe(experts(3, dtype="bfloat16", rope="llama3", tied=True), **options), folder)
    result, tensors = inspect(folder), read_tensors(folder)
    assert all(done[key] == result[key] for key in ("parameters", "active_parameters", "bytes", "format"))
    assert done["tensors"] == len(tensors) and done["experts"] == ["birds", "ships", "tools"]
    expert = [tensor.numel() for name, tensor in tensors.items() if ".experts." in name]
    total = sum(tensor.numel() for tensor in tensors.values())
    assert result["parameters"] == total == sum(p.numel() for p in open_model(folder).parameters())
    assert result["parameters_per_expert"] == sum(expert) // 3
    assert result["active_parameters"] == total - sum(expert) + active * sum(expert) // 3
    assert result["bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    assert result["tied"] and result["rope"]["rope_type"] == "llama3" and result["rope"]["rope_theta"] == 500000
    assert result["routing_policy"] == options.get("routing_policy", "token")
    assert result["experts_per_token"] == options.get("experts_per_token", 2)
    assert len(result["gates"]) == sum(name.endswith(".gate.weight") for name in tensors)


def test_inspect_measures_gates(experts, tmp_path):
    folder = composed(tmp_path / "out", experts(3))
    for layer, facts in enumerate(inspect(folder)["gates"]):
        gate = read_tensors(folder)[f"model.layers.{layer}.block_sparse_moe.gate.weight"].double().numpy()
        assert facts["condition_number"] == round(np.linalg.cond(gate), 3)
        assert facts["row_norms"] == [round(float(np.sqrt((row * row).sum())), 4) for row in gate]
        assert (facts["layer"], facts["part"]) == (layer, "mlp")
    zeros = composed(tmp_path / "zeros", experts(3), gate_mode="zeros")
    assert [facts["condition_number"] for facts in inspect(zeros)["gates"]] == [None, None]


def test_inspect_names_every_source_with_its_hash_and_licence(own, tmp_path):
    folders = own(3)
    (folders[1] / "README.md").write_text("---\nlibrary_name: x\nlicense: apache-2.0\n---\n# Ships\n")
    folder = tmp_path / "out"
    compose(recipe(folders, average="base"), folder, sha256=True)
    result = inspect(folder)
    for folder_of, record in zip([folders[0], *folders], [result["base"], *result["experts"]], strict=True):
        content = (folder_of / "model.safetensors").read_bytes()
        noted = {"name": "model.safetensors", "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        xxh3 = record["files"][0].pop("xxh3")
        assert len(xxh3) == 32 and record["files"] == [noted] and record["source"] == str(folder_of)
    assert [record.get("license") for record in result["experts"]] == [None, "apache-2.0", None]
    assert result["shared"] == f"copied from the base ({folders[0]})"
    card = (folder / "README.md").read_text()
    assert str(folders[1].parent) not in card  # which may be published
    assert f"| ships | ships | apache-2.0 | sha256 `{result['experts'][1]['files'][0]['sha256'][:16]}` |" in card
    assert "license:" not in card.split("---")[1]  # the sources' licences differ


def test_a_common_licence_is_that_of_the_mixture(own, tmp_path):
    folders = own(2)
    for folder in folders:
        (folder / "README.md").write_text("---\nlicense: 'mit'\n---\n")
    card = (composed(tmp_path / "out", folders) / "README.md").read_text()
    assert "license: mit" in card.split("---")[1].splitlines()


@pytest.mark.parametrize(
    "written, licence",
    [("a: b", "a: b"), ('"#1 of them"', "#1 of them"), ("mit  # the base's", "mit"), ("'a | b'", "a | b"), ("é", "é")],
)
def test_any_licence_text_leaves_the_card_valid(written, licence, own, tmp_path):
    folders = own(2)
    for folder in folders:
        (folder / "README.md").write_text(f"---\nlicense: {written}\n---\n", encoding="utf-8")
    card = ModelCard.load(composed(tmp_path / "out", folders) / "README.md")
    assert card.data.license == licence and card.data.tags == ["merge", "moe", "lexperts"]
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "text-generation"
    rows = [line for line in card.text.splitlines() if line.startswith("| birds ")]
    assert rows and rows[0].replace("\\|", "").count("|") == 5  # a cell holds no bare |


def test_inspect_reports_a_damaged_mixture(experts, tmp_path):
    folder = composed(tmp_path / "out", experts(2))
    tensors = read_tensors(folder)
    save_file({name: t for name, t in tensors.items() if name != EXPERT}, folder / "model.safetensors")
    with pytest.raises(MergeError, match=f"missing the tensor '{EXPERT}'"):
        inspect(folder)
    save_file(tensors, folder / "model.safetensors")
    assert inspect(folder)["parameters"]
    (folder / "merge_record.json").write_text("{")
    with pytest.raises(MergeError, match="merge_record.json cannot be read"):
        inspect(folder)


def test_exported_and_composed_mixtures_have_the_same_facts(experts, tmp_path):
    folder = composed(tmp_path / "out", experts(2))
    export(folder, tmp_path / "lexicon", "lexicon")
    one, other = inspect(folder), inspect(tmp_path / "lexicon")
    assert {key for key in one if one[key] != other[key]} == {"folder", "format"}
    assert json.loads((tmp_path / "lexicon" / "config.json").read_text())["expert_names"] == ["birds", "ships"]


@pytest.mark.parametrize("key, value", [("num_experts_per_tok", 1), ("rms_norm_eps", 1e-3)])
def test_verify_finds_a_changed_configuration(experts, tmp_path, key, value):
    folder = composed(tmp_path / "out", experts(2))
    edit_json(folder / "config.json", rope_theta=5e5)
    with pytest.raises(MergeError, match="rope_theta in config.json is 500000"):  # and another one in rope_parameters
        verify(folder)
    edit_json(folder / "config.json", rope_theta=1e4, **{key: value})
    faults = verify(folder)["faults"]
    assert len(faults) == 1 and faults[0].startswith(f"config.json: {key} is {value}")


def test_verify_finds_a_deleted_and_a_changed_tokenizer_file(experts, tmp_path):
    folder = composed(tmp_path / "out", experts(2))
    edit_json(folder / "config.json", transformers_version="5.0", problem_type="x")
    result = verify(folder)
    assert result["ok"] and len(result["notes"]) == 1
    assert re.fullmatch("config.json .* not write: problem_type.", result["notes"][0])
    (folder / "tokenizer.json").unlink()
    edit_json(folder / "tokenizer_config.json", padding_side="right")
    missing, changed = verify(folder)["faults"]
    assert missing.startswith("tokenizer.json is missing") and changed.startswith("tokenizer_config.json has changed")


def test_sources_that_were_not_verified_are_noted(own, tmp_path):
    folders = own(2)
    compose(recipe(folders), tmp_path / "out", verify=False)
    assert composed(tmp_path / "verified", folders).is_dir()
    assert read_header(tmp_path / "out" / "model.safetensors")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        tmp_path / "verified" / "model.safetensors"
    ).read_bytes()
    result = verify(tmp_path / "out", sha256=True)
    assert result["ok"] and len(result["notes"]) == 3 and "was not hashed" in result["notes"][0]
    content = (folders[1] / "model.safetensors").read_bytes()
    assert result["files"]["ships"] == {"model.safetensors": hashlib.sha256(content).hexdigest()}
