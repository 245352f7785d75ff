"""The output of `compose`: bytes, names, configuration, and reproducibility."""

import json
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.testing import assert_close
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, MixtralForCausalLM

from merge_tools import compose, slices
from modeling_lexicon import LexiconForCausalLM

from .conftest import (
    ROPES,
    contents,
    edit_json,
    logits_of,
    old_spelling,
    open_model,
    read_tensors,
    recipe_of,
    save_expert,
)

IDS = torch.arange(3, 43).reshape(2, 20)
EXPERT = "model.layers.{}.block_sparse_moe.experts.{}.{}.weight"
PLACES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def shared_names(tensors):
    return [name for name in tensors if "block_sparse_moe" not in name]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_shared_weights_are_the_float64_mean_rounded_once(experts, tmp_path, count, dtype):
    folders = experts(count, dtype=dtype)
    compose(recipe_of(folders), tmp_path / "out")
    mixture, dense = read_tensors(tmp_path / "out"), [read_tensors(folder) for folder in folders]
    names = shared_names(mixture)
    assert len(names) == 2 * 6 + 3  # four linears and two norms a layer; embeddings, last norm, head
    rounded_twice = 0
    for name in names:
        mean = sum(tensors[name].double() for tensors in dense) / count
        assert torch.equal(mixture[name], mean.to(mixture[name].dtype))
        running = dense[0][name].clone()
        for tensors in dense[1:]:
            running += tensors[name]
        rounded_twice += int((running / count != mixture[name]).sum())
    assert rounded_twice or count == 2  # negative control: a running sum in the dtype itself


def test_experts_are_the_sources_bytes(experts, tmp_path):
    folders = experts(3, dtype="bfloat16")
    compose(recipe_of(folders), tmp_path / "out")
    mixture = read_tensors(tmp_path / "out")
    for e, folder in enumerate(folders):
        dense = read_tensors(folder)
        for layer in range(2):
            for name, root in PLACES.items():
                result = mixture[EXPERT.format(layer, e, root)].view(torch.int16)
                assert torch.equal(result, dense[f"model.layers.{layer}.mlp.{name}.weight"].view(torch.int16))
                assert not torch.equal(result, mixture[EXPERT.format(layer, (e + 1) % 3, root)].view(torch.int16))
    assert len(mixture) == 15 + 2 * (1 + 3 * 3)


def test_routed_linear_layers_are_the_sources_bytes(experts, tmp_path):
    folders = experts(2, attention_bias=True)
    compose(recipe_of(folders, router_layers=["q_proj", "down_proj"], router_layers_index=[1]), tmp_path / "out")
    mixture, dense = read_tensors(tmp_path / "out"), [read_tensors(folder) for folder in folders]
    for e in range(2):
        for kind in ("weight", "bias"):
            name = f"model.layers.1.self_attn.q_proj.{kind}"
            assert torch.equal(mixture[f"model.layers.1.self_attn.q_proj.experts.{e}.{kind}"], dense[e][name])
            assert name not in mixture
        assert torch.equal(
            mixture[f"model.layers.1.mlp.down_proj.experts.{e}.weight"], dense[e]["model.layers.1.mlp.down_proj.weight"]
        )
    for name in ("model.layers.0.self_attn.q_proj.bias", "model.layers.1.mlp.up_proj.weight"):
        assert_close(mixture[name], (dense[0][name] + dense[1][name]) / 2)
    assert mixture["model.layers.1.mlp.down_proj.gate.weight"].shape == (2, 64)  # it reads the MLP's inner size


def test_weights_change_only_the_mean(experts, tmp_path):
    folders = experts(3)
    compose(recipe_of(folders), tmp_path / "even")
    compose(recipe_of(folders, weights=[2, 1, 1]), tmp_path / "shifted")
    compose(recipe_of(folders, weights=[3, 0, 0]), tmp_path / "one")
    even, shifted, one = (read_tensors(tmp_path / name) for name in ("even", "shifted", "one"))
    dense = [read_tensors(folder) for folder in folders]
    for name in even:
        if "block_sparse_moe" in name:
            assert torch.equal(even[name], shifted[name])
            continue
        expected = sum(w * d[name].double() for w, d in zip((0.5, 0.25, 0.25), dense, strict=True)).float()
        assert torch.equal(shifted[name], expected)
        assert torch.equal(one[name], dense[0][name])
        assert not torch.equal(even[name], shifted[name])


def test_tied_embeddings_stay_tied_and_are_stored_once(experts, tmp_path):
    compose(recipe_of(experts(2, tied=True)), tmp_path / "tied")
    compose(recipe_of(experts(2)), tmp_path / "untied")
    tied, untied = read_tensors(tmp_path / "tied"), read_tensors(tmp_path / "untied")
    assert "lm_head.weight" not in tied and "lm_head.weight" in untied
    for folder, options in ((tmp_path / "tied", {}), (tmp_path / "tied", {"trust_remote_code": True})):
        model = open_model(folder, **options)
        assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    model = open_model(tmp_path / "untied")
    assert model.lm_head.weight.data_ptr() != model.get_input_embeddings().weight.data_ptr()
    compose(recipe_of(experts(2, tied=True), format="lexicon"), tmp_path / "lexicon")
    model = open_model(tmp_path / "lexicon")
    assert "lm_head.weight" not in read_tensors(tmp_path / "lexicon")
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()


@pytest.mark.parametrize("format", ["mixtral", "lexicon"])
@pytest.mark.parametrize("spelling", ["of transformers 5", "of transformers 4"])
@pytest.mark.parametrize("rope", ROPES)
def test_all_rope_settings_are_kept(tmp_path, rope, spelling, format):
    folders = [save_expert(tmp_path / name, seed, rope=rope) for seed, name in enumerate("ab")]
    expected = open_model(folders[0]).model.rotary_emb.inv_freq
    if spelling == "of transformers 4":
        for folder in folders:
            old_spelling(folder)
    compose(recipe_of(folders, format=format), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["rope_parameters"] == ROPES[rope]
    scaling = {key: value for key, value in ROPES[rope].items() if key != "rope_theta"}
    assert written["rope_theta"] == ROPES[rope]["rope_theta"]
    assert written["rope_scaling"] == (None if rope == "default" else scaling)
    assert AutoConfig.from_pretrained(tmp_path / "out").rope_parameters == ROPES[rope]
    models = [kind.from_pretrained(tmp_path / "out").eval() for kind in (AutoModel, AutoModelForCausalLM)]
    assert all(torch.equal(model.base_model.rotary_emb.inv_freq, expected) for model in models)
    with torch.no_grad():
        assert torch.equal(models[0](IDS).last_hidden_state, models[1].model(IDS).last_hidden_state)
    others = [open_model(save_expert(tmp_path / o, 0, rope=o)).model.rotary_emb.inv_freq for o in ROPES if o != rope]
    assert not any(torch.equal(other, expected) for other in others)  # negative control


def test_missing_fields_have_llamas_defaults(experts, tmp_path):
    """Mixtral has other defaults: 1e-5 in the norms, and another max_position_embeddings."""
    folders = [save_expert(tmp_path / name, 0) for name in "ab"]
    for folder in folders:
        edit_json(folder / "config.json", rms_norm_eps=None, max_position_embeddings=None)
    compose(recipe_of(folders), tmp_path / "out")
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-6, 2048)


def test_special_tokens_and_other_fields_are_copied(experts, tmp_path):
    settings = {"eos_token_id": [2, 5], "rms_norm_eps": 1e-3, "attention_dropout": 0.25, "initializer_range": 0.5}
    folders = experts(2, num_key_value_heads=4, head_dim=16, **settings)
    for format in ("mixtral", "lexicon"):
        compose(recipe_of(folders, format=format), tmp_path / format)
        config, model = AutoConfig.from_pretrained(tmp_path / format), open_model(tmp_path / format)
        for key, value in {**settings, "num_key_value_heads": 4, "head_dim": 16, "pad_token_id": 0}.items():
            assert getattr(config, key) == value
        assert model.generation_config.eos_token_id == [2, 5]
        assert logits_of(model, IDS).isfinite().all()


@pytest.mark.parametrize("source, written", [("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float16")])
def test_dtypes_are_converted_with_one_rounding(experts, tmp_path, source, written):
    folders = experts(3, dtype=source)
    compose(recipe_of(folders, dtype=written), tmp_path / "out")
    mixture, dense = read_tensors(tmp_path / "out"), [read_tensors(folder) for folder in folders]
    kind = getattr(torch, written)
    assert {tensor.dtype for tensor in mixture.values()} == {kind}
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(mixture[name], (sum(d[name].double() for d in dense) / 3).to(kind))
    for e in range(3):
        expected = dense[e]["model.layers.1.mlp.up_proj.weight"].to(kind)
        assert torch.equal(mixture[EXPERT.format(1, e, "w3")], expected)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == written
    assert open_model(tmp_path / "out").dtype == kind


def test_experts_of_several_dtypes_are_written_in_the_bases(experts, tmp_path):
    folders = [experts(1, dtype="bfloat16")[0], experts(2, dtype="float32")[1]]
    compose(recipe_of(folders), tmp_path / "out")
    mixture, dense = read_tensors(tmp_path / "out"), [read_tensors(folder) for folder in folders]
    assert {tensor.dtype for tensor in mixture.values()} == {torch.bfloat16}
    name = "model.layers.0.self_attn.o_proj.weight"
    assert torch.equal(mixture[name], ((dense[0][name].double() + dense[1][name].double()) / 2).bfloat16())


def test_small_shards_hold_the_same_tensors(experts, tmp_path):
    recipe = recipe_of(experts(3, dtype="bfloat16"), gate_mode="random")
    compose(recipe, tmp_path / "whole")
    compose(recipe, tmp_path / "parts", shard_bytes=30_000)
    shards = sorted((tmp_path / "parts").glob("*.safetensors"))
    assert len(shards) > 3
    assert all(shard.stat().st_size < 33_000 for shard in shards)
    assert [shard.name for shard in shards] == [
        f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))
    ]
    whole, parts = read_tensors(tmp_path / "whole"), read_tensors(tmp_path / "parts")
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == whole.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    for shard in shards:
        (length,) = struct.unpack("<Q", shard.read_bytes()[:8])
        header = json.loads(shard.read_bytes()[8 : 8 + length])
        assert {n for n, f in index["weight_map"].items() if f == shard.name} == header.keys() - {"__metadata__"}
    models = [open_model(tmp_path / name) for name in ("whole", "parts")]
    assert torch.equal(*(logits_of(model, IDS) for model in models))


def test_router_layers_index_routes_these_layers_and_averages_the_others(experts, tmp_path):
    folders = experts(2, num_hidden_layers=3)
    compose(recipe_of(folders, router_layers_index=[2, 0]), tmp_path / "out")
    mixture, dense = read_tensors(tmp_path / "out"), [read_tensors(folder) for folder in folders]
    gates = sorted(name for name in mixture if name.endswith("gate.weight"))
    assert gates == [f"model.layers.{layer}.block_sparse_moe.gate.weight" for layer in (0, 2)]
    name = "model.layers.1.mlp.down_proj.weight"
    assert_close(mixture[name], (dense[0][name] + dense[1][name]) / 2)
    model = open_model(tmp_path / "out")
    assert isinstance(model, LexiconForCausalLM)
    with torch.no_grad():
        assert len(model(IDS, output_router_logits=True).router_logits) == 2


@pytest.mark.parametrize("format, policy", [("mixtral", "token"), ("lexicon", "sequence_soft")])
def test_two_runs_write_the_same_bytes(experts, tmp_path, format, policy):
    recipe = recipe_of(experts(3, dtype="bfloat16"), format=format, routing_policy=policy)
    compose(recipe, tmp_path / "once")
    compose(recipe, tmp_path / "again")
    compose({**recipe, "seed": 43}, tmp_path / "other")
    once, again, other = (contents(tmp_path / name) for name in ("once", "again", "other"))
    assert once == again
    assert once["model.safetensors"] != other["model.safetensors"]  # negative control: another seed


def test_blocks_of_any_size_make_the_same_mixture(experts, tmp_path, monkeypatch):
    recipe = recipe_of(experts(3, dtype="bfloat16"), weights=[1, 2, 3], dtype="float32")
    compose(recipe, tmp_path / "whole")
    monkeypatch.setattr(slices, "CHUNK", 97)
    compose(recipe, tmp_path / "blocks")
    assert contents(tmp_path / "whole") == contents(tmp_path / "blocks")


def test_tokenizer_and_generation_config_are_copied(experts, tmp_path):
    folders = experts(2)
    compose(recipe_of(folders), tmp_path / "out")
    text = "the tools of a bird"
    ours, theirs = (AutoTokenizer.from_pretrained(folder)(text).input_ids for folder in (tmp_path / "out", folders[0]))
    assert ours == theirs and ours[0] == 1
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folders[0] / name).read_bytes()


def test_a_stock_mixtral_opens_with_every_weight_in_its_place(experts, tmp_path):
    compose(recipe_of(experts(3)), tmp_path / "out")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(model) is MixtralForCausalLM
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert sum(p.numel() for p in model.parameters()) == sum(t.numel() for t in read_tensors(tmp_path / "out").values())


def test_centroids_are_saved_and_assign_domains(experts, tmp_path):
    centroids = torch.nn.functional.normalize(torch.randn(3, 5, generator=torch.Generator().manual_seed(0)), dim=1)
    save_file({"centroids": centroids}, tmp_path / "centroids.safetensors")
    recipe = recipe_of(experts(3), routing_policy="domain", centroids=str(tmp_path / "centroids.safetensors"))
    compose(recipe, tmp_path / "out")
    model = open_model(tmp_path / "out")
    assert torch.equal(model.domain_centroids, centroids) and model.config.expert_names == ["birds", "ships", "tools"]
    texts = {"one": 2, "two": 0, "three": 1}
    assert model.assign_domains(list(texts), lambda t: 3 * np.stack([centroids[texts[x]] for x in t])).tolist() == [
        2,
        0,
        1,
    ]
