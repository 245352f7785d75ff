"""LoRA adapters as experts: composing them directly equals merging them with peft first."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoTokenizer

import merge_tools
from merge_tools import MergeError, add, compose, extract, load_experts, slices, verify
from merge_tools.checkpoints import open_source
from tests.loopback_hub import LoopbackHub, Repo

from .conftest import contents, edit_json, logits_of, open_model, read_tensors, recipe_of, run_python

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
IDS = torch.arange(3, 43).reshape(2, 20)
MLP, ATTENTION = ["gate_proj", "up_proj", "down_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"]
ADAPTERS = {
    "on the MLPs": {"target_modules": MLP},
    "on all linears": {"target_modules": MLP + ATTENTION},
    "of several ranks": {
        "target_modules": MLP + ATTENTION,
        "rank_pattern": {"q_proj": 2, r"layers.1.mlp.up_proj": 6},
        "alpha_pattern": {"down_proj": 3, "q_proj": 5},
    },
    "rslora": {"target_modules": MLP, "use_rslora": True, "rank_pattern": {"up_proj": 3}},
    "with a head of its own": {"target_modules": MLP, "modules_to_save": ["lm_head"]},
    "with embeddings and a norm of its own": {
        "target_modules": ["v_proj"],
        "modules_to_save": ["embed_tokens", "norm"],
    },
}


def adapt(base, folder, seed, **options) -> tuple[Path, Path]:
    """-> (an adapter over a base as peft saves it, the same merged by peft)."""
    torch.manual_seed(seed)
    model = get_peft_model(open_model(base), LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += torch.randn(p.shape) * 0.1
    model.save_pretrained(folder / "adapter")
    model.merge_and_unload().save_pretrained(folder / "merged")
    AutoTokenizer.from_pretrained(base).save_pretrained(folder / "merged")
    return folder / "adapter", folder / "merged"


def close_tensors(one, other, atol=1e-6, rtol=1e-6):
    """The tensors of two folders, which are equal."""
    ours, theirs = read_tensors(one), read_tensors(other)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert_close(ours[name], theirs[name], atol=atol, rtol=rtol)
    return ours, theirs


def named(folders):
    return [{"source_model": str(folder), "name": f"expert {i}"} for i, folder in enumerate(folders)]


@pytest.fixture
def pair(make_expert, tmp_path):
    """pair(dtype, rows, **options of LoraConfig) -> (base, two adapters over it, the same two merged by peft)."""

    def make(dtype="float32", rows=45, **options):
        base = make_expert(tmp_path / "base", seed=1, dtype=dtype, vocab_size=rows)
        both = [adapt(base, tmp_path / str(seed), seed, **options) for seed in range(2)]
        return base, [adapter for adapter, _ in both], [merged for _, merged in both]

    return make


@pytest.mark.parametrize("average", ["mean", "base"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_composed_adapters_equal_composed_merged_experts(pair, tmp_path, name, average):
    base, adapters, merged = pair(**ADAPTERS[name])
    options = {"base_model": str(base), "average": average}
    compose(recipe_of(named(adapters), **options), tmp_path / "adapters_out")
    compose(recipe_of(named(merged), **options), tmp_path / "merged_out")
    compose(recipe_of(named([base, base]), **options), tmp_path / "bases_out")
    ours, theirs, plain = (read_tensors(tmp_path / n) for n in ("adapters_out", "merged_out", "bases_out"))
    assert ours.keys() == theirs.keys()
    for tensor in ours:
        assert_close(ours[tensor], theirs[tensor], atol=1e-6, rtol=1e-6)
    differing = [tensor for tensor in ours if not torch.allclose(ours[tensor], plain[tensor], atol=1e-3)]
    assert differing or (average == "base" and "v_proj" in ADAPTERS[name]["target_modules"])  # negative control
    result, expected = (open_model(tmp_path / n) for n in ("adapters_out", "merged_out"))
    assert_close(logits_of(result, IDS), logits_of(expected, IDS), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [{"average": "dare"}, {"average": "ties", "density": 1}])
def test_task_vectors_of_adapters_are_those_of_merged_experts(pair, tmp_path, options):
    base, adapters, merged = pair(target_modules=["q_proj", "up_proj"])
    for name, folders in (("adapters_out", adapters), ("merged_out", merged)):
        compose(recipe_of(named(folders), base_model=str(base), **options), tmp_path / name)
    ours, theirs, plain = (
        read_tensors(folder) for folder in (tmp_path / "adapters_out", tmp_path / "merged_out", base)
    )
    for tensor in ours:
        assert_close(ours[tensor], theirs[tensor], atol=1e-5, rtol=1e-5)
    changed = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.allclose(ours[changed], plain[changed], atol=1e-3)  # negative control
    assert verify(tmp_path / "adapters_out")["ok"]


def test_average_base_warns_about_dropped_adapter_changes(pair):
    base, adapters, _ = pair(target_modules=["q_proj", "up_proj"])

    def warnings(**options):
        report = merge_tools.check(recipe_of(named(adapters), base_model=str(base), **options))
        return [finding.message for finding in report.warnings if finding.check == "adapter"]

    left_out = warnings(average="base")
    assert len(left_out) == 2 and all("q_proj" in text and "average: mean" in text for text in left_out)
    assert warnings(average="mean") == []
    assert warnings(average="base", router_layers=["q_proj", "up_proj"]) == []  # all that is changed is routed


def test_in_bf16_the_sum_is_rounded_once(pair, tmp_path):
    base, adapters, merged = pair("bfloat16", target_modules=["up_proj"])
    compose(recipe_of(named(adapters), base_model=str(base)), tmp_path / "out")
    ours = read_tensors(tmp_path / "out")
    for e in range(2):
        lora = load_file(adapters[e] / "adapter_model.safetensors")
        name = "model.layers.0.mlp.up_proj"
        a, b = (lora[f"base_model.model.{name}.lora_{half}.weight"].double() for half in "AB")
        weight, delta = read_tensors(base)[f"{name}.weight"], 2.0 * b @ a  # alpha / r = 2
        result = ours[f"model.layers.0.block_sparse_moe.experts.{e}.w3.weight"]
        assert torch.equal(result, (weight.double() + delta).bfloat16())
        assert torch.equal(result, read_tensors(merged[e])[f"{name}.weight"])
        assert not torch.equal(result, weight + delta.bfloat16())  # negative control: two roundings show


@pytest.mark.parametrize("chunk", [7, 97, 1000])
def test_blocks_of_any_size_make_the_same_mixture(pair, tmp_path, monkeypatch, chunk):
    base, adapters, _ = pair(target_modules=MLP + ATTENTION)
    recipe = recipe_of(named([*adapters, base]), base_model=str(base))
    compose(recipe, tmp_path / "whole")
    monkeypatch.setattr(slices, "CHUNK", chunk)
    compose(recipe, tmp_path / "blocks")
    close_tensors(tmp_path / "blocks", tmp_path / "whole")


def test_blocks_of_a_range_are_those_of_a_plain_tensor(pair):
    _, adapters, merged = pair(target_modules=MLP)
    adapted, plain = (open_source("birds", str(folder)) for folder in (adapters[0], merged[0]))
    name = "model.layers.0.mlp.up_proj.weight"
    whole = np.concatenate(list(plain.blocks(name)))
    for elements, start, stop in ((7, 0, None), (7, 3, None), (100, 50, 1001), (5000, 33, 34), (64, 64, 64)):
        ours, theirs = (list(source.blocks(name, elements, start, stop)) for source in (adapted, plain))
        assert [len(block) for block in ours] == [len(block) for block in theirs]
        found = np.concatenate([*ours, whole[:0]])
        assert_close(*(torch.from_numpy(x.view(np.float32)) for x in (found, whole[start:stop])), atol=1e-6, rtol=1e-6)


def test_gates_use_the_adapted_model_if_that_is_the_base(pair, tmp_path):
    base, adapters, merged = pair(target_modules=MLP + ATTENTION, modules_to_save=["embed_tokens"])
    prompts = [["the owl is a bird"], ["a sail and a mast"]]
    result = []
    for name, folders in (("adapters_out", adapters), ("merged_out", merged), ("bases_out", [base, adapters[0]])):
        specs = [{**e, "positive_prompts": texts} for e, texts in zip(named(folders), prompts, strict=True)]
        compose(recipe_of(specs, gate_mode="hidden"), tmp_path / name)
        result.append(read_tensors(tmp_path / name)["model.layers.1.block_sparse_moe.gate.weight"])
    assert_close(result[0], result[1], atol=1e-5, rtol=1e-5)
    assert (result[0] - result[2]).abs().max() > 0.01  # negative control: measured with the base itself


def test_load_experts_takes_adapters(pair, tmp_path):
    base, adapters, _ = pair(target_modules=MLP + ATTENTION)
    model = load_experts(named(adapters), base_model=base)
    compose(recipe_of(named(adapters), base_model=str(base), format="lexicon"), tmp_path / "out")
    written = open_model(tmp_path / "out")
    assert all(torch.equal(p, written.state_dict()[name]) for name, p in model.state_dict().items())


def test_extract_returns_the_merged_expert(pair, tmp_path):
    base, adapters, merged = pair(target_modules=MLP)
    compose(recipe_of(named(adapters), base_model=str(base), average="base"), tmp_path / "out")
    shared = extract(tmp_path / "out", "expert 1", tmp_path / "dense")["shared"]
    assert shared["equal"]
    ours, _ = close_tensors(tmp_path / "dense", merged[1])
    assert not torch.allclose(
        ours["model.layers.0.mlp.up_proj.weight"], read_tensors(base)["model.layers.0.mlp.up_proj.weight"], atol=1e-3
    )


def test_adding_an_adapter_equals_adding_the_merged_expert(pair, make_expert, tmp_path):
    base, adapters, merged = pair(target_modules=MLP)
    first = [base, make_expert(tmp_path / "other", seed=5)]
    compose(recipe_of(named(first), base_model=str(base), average="base"), tmp_path / "two")
    for name, folder in (("adapter", adapters[0]), ("merged", merged[0])):
        add(tmp_path / "two", {"source_model": str(folder), "name": "new"}, tmp_path / f"{name}_out")
    ours, _ = close_tensors(tmp_path / "adapter_out", tmp_path / "merged_out")
    assert verify(tmp_path / "adapter_out")["ok"]
    stranger = adapt(first[1], tmp_path / "stranger", 3, target_modules=MLP)[0]
    with pytest.raises(MergeError, match="is an adapter over"):
        add(tmp_path / "two", {"source_model": str(stranger), "name": "new"}, tmp_path / "out")
    compose(recipe_of(named(first)), tmp_path / "without base_model")
    edit_json(stranger / "adapter_config.json", base_model_name_or_path="/no/longer/there")
    with pytest.raises(MergeError, match="no/longer/there.* does not exist.*peft"):
        add(tmp_path / "without base_model", stranger, tmp_path / "out")


def test_verify_applies_adapters_and_finds_a_changed_one(pair, tmp_path):
    base, adapters, _ = pair(target_modules=MLP + ATTENTION)
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    (adapters[1] / "README.md").write_text("---\nlicense: mit\n---\n")
    before = [contents(folder) for folder in (base, *adapters)]
    compose(recipe_of(named(adapters), base_model=str(base)), tmp_path / "out")
    assert [contents(folder) for folder in (base, *adapters)] == before
    result = verify(tmp_path / "out")
    assert result["ok"] and result["compared"]["experts"] == 2 * 2 * 3
    record = json.loads((tmp_path / "out" / "merge_record.json").read_text())
    assert [file["name"] for file in record["experts"][0]["files"]] == [
        "model.safetensors",
        "adapter_model.safetensors",
    ]
    assert [expert["license"] for expert in record["experts"]] == ["apache-2.0", "mit"]
    assert {expert["adapter_over"] for expert in record["experts"]} == {str(base)}
    file = adapters[1] / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"][0, 0] += 1
    save_file(tensors, file)
    faults = verify(tmp_path / "out")["faults"]
    assert any("adapter_model.safetensors has changed since the merge" in fault for fault in faults)
    assert any("experts.1.w3.weight" in fault and "elements differ" in fault for fault in faults)
    assert not any("experts.0" in fault for fault in faults)


def test_a_moved_adapter_finds_its_base_in_the_recipe(pair, tmp_path):
    base, adapters, _ = pair(target_modules=MLP)
    compose(recipe_of(named(adapters), base_model=str(base)), tmp_path / "out")
    for adapter in adapters:
        edit_json(adapter / "adapter_config.json", base_model_name_or_path="/no/longer/there")
    compose(recipe_of(named(adapters), base_model=str(base)), tmp_path / "moved")
    close_tensors(tmp_path / "moved", tmp_path / "out", atol=0, rtol=0)


def test_adapters_on_attention_alone_need_routed_attention(pair, tmp_path):
    base, adapters, _ = pair(target_modules=["q_proj", "v_proj"])

    def equal(**options):
        report = merge_tools.check(recipe_of(named(adapters), base_model=str(base), average="mean", **options))
        assert report.ok
        return [(finding.subject, finding.message) for finding in report.warnings if finding.check == "experts"]

    ((subject, message),) = equal()
    assert subject == "expert 1" and "expert 0" in message and "attention: routed" in message
    assert equal(attention="routed") == []
    edit_json(adapters[1] / "adapter_config.json", alpha_pattern={"q_proj": 1})
    assert len(equal()) == 1 and equal(attention="routed") == []


def test_copies_of_an_adapter_are_equal_experts(pair, tmp_path):
    base, adapters, _ = pair(target_modules=MLP)
    shutil.copytree(adapters[0], tmp_path / "copy")
    recipe = recipe_of(named([adapters[0], tmp_path / "copy"]), base_model=str(base))
    assert [f.subject for f in merge_tools.check(recipe).warnings if f.check == "experts"] == ["expert 1"]
    edit_json(tmp_path / "copy" / "adapter_config.json", lora_alpha=3)
    assert [f for f in merge_tools.check(recipe).warnings if f.check == "experts"] == []


def test_an_adapter_that_overflows_its_float16_base_is_found_by_check(pair, tmp_path):
    base, adapters, _ = pair("float16", target_modules=["up_proj"])
    recipe = recipe_of(named(adapters), base_model=str(base))
    assert merge_tools.check(recipe).ok
    edit_json(adapters[1] / "adapter_config.json", lora_alpha=4_000_000)
    for options in ({}, {"dtype": "bfloat16"}):  # a changed weight is rounded to the base's dtype first
        (error,) = merge_tools.check(recipe, **options).errors
        assert error.subject == "expert 1" and "up_proj" in error.message and "65,504" in error.message
    with pytest.raises(MergeError, match="65,504"):
        compose(recipe, tmp_path / "out")


def test_an_adapter_over_a_revision_of_a_model_of_the_hub(pair, make_expert, tmp_path):
    """The Hub cache holds links to its blobs, which are followed."""
    base, adapters, _ = pair(target_modules=MLP)
    compose(recipe_of(named(adapters), base_model=str(base)), tmp_path / "local")
    other = make_expert(tmp_path / "other", seed=5)
    with LoopbackHub() as hub:
        hub.repos["model", "tester/base"] = repository = Repo("tester/base", "model")
        for branch, folder in (("main", other), ("v1", base)):
            repository.commit(branch, branch, {name: (content, None) for name, content in contents(folder).items()})
        for adapter in adapters:
            edit_json(adapter / "adapter_config.json", base_model_name_or_path="tester/base", revision="v1")
        (tmp_path / "recipe.json").write_text(json.dumps(recipe_of(named(adapters))))
        environment = {**os.environ, **hub.env, "HF_HOME": str(tmp_path / "cache")}
        run_python("-m", "lexperts", "merge", "compose", tmp_path / "recipe.json", tmp_path / "out", env=environment)
    (stored,) = (tmp_path / "cache").rglob("model.safetensors")
    assert stored.is_symlink()
    close_tensors(tmp_path / "out", tmp_path / "local", atol=0, rtol=0)


@pytest.mark.parametrize("rows", [45, 50])  # 50: after the row of the new token, those without a token are merged again
def test_an_adapter_of_the_head_next_to_an_expert_with_more_tokens(rows, pair, make_expert, tmp_path, monkeypatch):
    monkeypatch.setattr(slices, "CHUNK", 100)
    base, adapters, merged = pair(rows=rows, target_modules=[*MLP, *ATTENTION, "lm_head"])
    longer = make_expert(tmp_path / "longer", seed=5, extra_tokens=("<owl>",), vocab_size=max(rows, 46))
    for name, first in (("adapter", adapters[0]), ("merged", merged[0])):
        recipe = recipe_of(named([first, longer]), base_model=str(base), average="mean")
        compose(recipe, tmp_path / f"{name}_out", allow=["vocab"])
    ours, _ = close_tensors(tmp_path / "adapter_out", tmp_path / "merged_out")
    assert ours["lm_head.weight"].shape[0] == max(rows, 46)
    assert verify(tmp_path / "adapter_out")["ok"]
