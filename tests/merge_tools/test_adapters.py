"""LoRA adapters as experts: the mixture is that of the models into which peft merges them."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model

from merge_tools import add, compose, extract, verify
from run_tools.errors import UserError

from .conftest import edit_json, edit_tensors, open_model, read_tensors, recipe_of, same_tensors, tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
WEIGHTS = "adapter_model.safetensors"
MLP, ATTENTION = ["gate_proj", "up_proj", "down_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"]
ADAPTERS = {
    "on the MLPs": {"target_modules": MLP},
    "of several ranks": {
        "target_modules": MLP + ATTENTION, "rank_pattern": {"q_proj": 2, r"layers.1.mlp.up_proj": 6}, "alpha_pattern": {"q_proj": 5}
    },
    "rslora": {"target_modules": MLP, "use_rslora": True},
    "dora": {"target_modules": MLP, "use_dora": True},
    "on the embeddings": {"target_modules": ["embed_tokens", "up_proj"]},
    "with a head of its own": {"target_modules": MLP, "modules_to_save": ["lm_head"]},
    "with embeddings of its own": {"target_modules": ["up_proj"], "modules_to_save": ["embed_tokens", "norm"]},
}  # fmt: skip


def adapt(base, folder, new_tokens=(), **options):
    """-> an adapter over a base as peft saves it, and the same merged by peft."""
    torch.manual_seed(0)
    model, tokenizer = open_model(base), tiny_tokenizer(new_tokens)
    if new_tokens:
        model.resize_token_embeddings(len(tokenizer))
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += torch.randn(p.shape) * 0.1
    model.save_pretrained(folder / "adapter")
    model.merge_and_unload().save_pretrained(folder / "merged")
    tokenizer.save_pretrained(folder / "merged")
    return folder / "adapter", folder / "merged"


def named(folder):
    return {"source_model": str(folder), "name": "adapted"}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_mixture_with_an_adapter_is_that_of_the_merged_model(kind, experts, tmp_path):
    base, other = experts(2)
    adapter, merged = adapt(base, tmp_path, **ADAPTERS[kind])
    made = compose(recipe_of([named(adapter), other], base_model=base, average="mean"), tmp_path / "out")
    compose(recipe_of([named(merged), other], base_model=base, average="mean"), tmp_path / "expected")
    assert same_tensors(tmp_path / "out", tmp_path / "expected")
    assert made["warnings"] == [] and verify(tmp_path / "out")["ok"]
    extract(tmp_path / "out", "adapted", tmp_path / "dense")
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(read_tensors(tmp_path / "dense")[name], read_tensors(merged)[name])
    edit_json(adapter / "adapter_config.json", lora_alpha=4)
    assert not verify(tmp_path / "out")["ok"]


def test_an_adapter_that_changes_no_mlp_is_a_warning(experts, tmp_path):
    base, other = experts(2)
    adapter, _ = adapt(base, tmp_path, target_modules=ATTENTION)
    recipe = recipe_of([named(adapter), other], base_model=base, average="base")
    (warning,) = compose(recipe, tmp_path / "out")["warnings"]
    assert "adapted" in warning and "average: base" in warning


def test_an_adapter_over_another_model_than_the_base_is_a_warning(experts, tmp_path):
    """A copy of the base is not another one, and a mean over whole experts has what each adapter was trained over."""
    base, other = experts(2)
    adapter, _ = adapt(base, tmp_path, target_modules=MLP)
    cases = ((shutil.copytree(base, tmp_path / "copy"), "base", 0), (other, "mean", 0), (other, "base", 1))
    for number, (folder, average, count) in enumerate(cases):
        recipe = recipe_of([named(adapter), other], base_model=folder, average=average)
        warnings = compose(recipe, tmp_path / str(number))["warnings"]
        assert len(warnings) == count and all("another model than base" in warning for warning in warnings)


def test_embeddings_that_were_resized_are_another_vocabulary(experts, tmp_path):
    base, other = experts(2)
    adapter, merged = adapt(base, tmp_path, ["<new>"], target_modules=MLP)
    with pytest.raises(UserError, match="adapted: its vocabulary has 46 rows.*tokenizer: base"):
        compose(recipe_of([named(adapter), other], base_model=base), tmp_path / "out")
    for origin, out in ((adapter, "out"), (merged, "expected")):
        recipe = recipe_of([named(origin), other], base_model=base, average="mean", tokenizer="base")
        assert not compose(recipe, tmp_path / out)["warnings"]
    assert same_tensors(tmp_path / "out", tmp_path / "expected")


def test_where_an_adapter_finds_its_base(experts, tmp_path, monkeypatch):
    """Beside it, or, if what it names does not exist, the recipe's base of that name; MODEL+ADAPTER as in mergekit."""
    base, other = experts(2)
    adapter, merged = adapt(base, tmp_path, target_modules=MLP)
    shutil.copytree(base, tmp_path / "beside")
    compose(recipe_of([named(merged), other], average="mean"), tmp_path / "expected")
    for number, (named_base, recipe_base, origin) in enumerate(
        (("beside", None, adapter), (f"gone/{base.name}", base, adapter), ("gone/else", None, f"{base}+{adapter}"))
    ):
        edit_json(adapter / "adapter_config.json", base_model_name_or_path=named_base)
        options = {"base_model": recipe_base} if recipe_base else {}
        compose(recipe_of([named(origin), other], average="mean", **options), tmp_path / str(number))
        assert same_tensors(tmp_path / str(number), tmp_path / "expected")
        monkeypatch.chdir(tmp_path / "expected")  # an adapter and its base are found from any place
        assert verify(tmp_path / str(number))["ok"]


BAD = {
    "a changed base": (lambda a: edit_json(a / "adapter_config.json", init_lora_weights="pissa_niter_4"), "pissa"),
    "another kind": (lambda a: edit_json(a / "adapter_config.json", peft_type="PREFIX_TUNING"), "adapter"),
    "half a pair": (lambda a: edit_tensors(a, lambda t: t.pop(min(t)), WEIGHTS), "lora_A"),
    "over an adapter": (
        lambda a: edit_json(a / "adapter_config.json", base_model_name_or_path=str(shutil.copytree(a, f"{a}-first"))),
        "which is an adapter too. Merge it",
    ),
    "no base": (lambda a: edit_json(a / "adapter_config.json", base_model_name_or_path="gone/else"), "gone/else"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_merged_is_named_and_nothing_is_written(case, experts, tmp_path):
    base, other = experts(2)
    adapter, _ = adapt(base, tmp_path, target_modules=MLP)
    change, fragment = BAD[case]
    change(adapter)
    with pytest.raises(UserError) as error:
        compose(recipe_of([named(adapter), other], base_model=base), tmp_path / "out")
    assert fragment in str(error.value) and "\n" not in str(error.value) and not list(tmp_path.glob("out*"))


def test_an_adapter_is_added_from_the_hub(experts, tmp_path, monkeypatch):
    """An adapter of the Hub over a base of the Hub."""
    base, other = experts(2)
    adapter, merged = adapt(base, tmp_path, target_modules=MLP)
    edit_json(adapter / "adapter_config.json", base_model_name_or_path="tester/base")
    compose(recipe_of([base, other], base_model=base, average="base", gate_mode="random"), tmp_path / "two")
    hub = {"tester/base": base, "tester/adapted": adapter}
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(hub[name]))
    add(tmp_path / "two", "tester/adapted", tmp_path / "three")
    record = json.loads((tmp_path / "three" / "merge_record.json").read_text())
    assert record["experts"][2]["source"] == "tester/adapted" and "path" not in record["experts"][2]
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    expected = read_tensors(merged)["model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(read_tensors(tmp_path / "three")[name], expected)
