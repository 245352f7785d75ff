"""Checkpoints: one tensor an expert on disk, exact round trips, and Mixtral both ways."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
)

from modeling_lexicon import LexiconForCausalLM, LexiconForSequenceClassification, LexiconModel
from tests.modeling_lexicon.conftest import SIZES, E, each_policy, tiny_dense, tiny_lexicon


def tensors(folder):
    return {name: p for file in sorted(folder.glob("*.safetensors")) for name, p in load_file(file).items()}


def same(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(p, b[name]) for name, p in a.items())


@pytest.mark.parametrize("shards, dtype", [(None, torch.float32), ("20KB", torch.bfloat16)])
def test_saved_and_loaded_every_tensor_is_the_same_bit_for_bit(shards, dtype, tmp_path):
    model = tiny_lexicon(expert_names=["a", "b", "c", "d"], qkv_bias=True, qk_norm=True).to(dtype)
    model.save_pretrained(tmp_path, **({"max_shard_size": shards} if shards else {}))
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or not shards
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert type(again) is LexiconForCausalLM and same(again, model)
    assert not same(again, tiny_lexicon(seed=1, qkv_bias=True, qk_norm=True).to(dtype))  # negative control
    again.save_pretrained(tmp_path / "twice")
    first, second = tensors(tmp_path), tensors(tmp_path / "twice")
    assert first.keys() == second.keys() and all(torch.equal(p, second[name]) for name, p in first.items())


def test_each_expert_is_saved_by_itself_and_the_rest_as_in_a_llama(tmp_path):
    """Names and shapes: a dense model's, with every MLP replaced by its gate and the tensors of each expert."""
    tiny_lexicon().save_pretrained(tmp_path)
    expected = {name: p.shape for name, p in tiny_dense().state_dict().items()}
    mixtral_names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for name in [name for name in expected if ".mlp." in name]:
        shape, (start, part, _) = expected.pop(name), name.replace(".mlp.", ".block_sparse_moe.").rsplit(".", 2)
        expected |= {f"{start}.experts.{e}.{mixtral_names[part]}.weight": shape for e in range(E)}
        expected[f"{start}.gate.weight"] = torch.Size([E, 32])
    assert {name: p.shape for name, p in tensors(tmp_path).items()} == expected


@pytest.mark.parametrize(
    "kind, auto", [(LexiconModel, AutoModel), (LexiconForSequenceClassification, AutoModelForSequenceClassification)]
)
def test_other_heads_and_none_round_trip_and_start_from_a_causal_model(kind, auto, tmp_path):
    model = tiny_lexicon(kind)
    model.save_pretrained(tmp_path / "own")
    again = auto.from_pretrained(tmp_path / "own")
    assert type(again) is kind and same(again, model)
    causal = tiny_lexicon(seed=1, centroid_size=3)
    causal.save_pretrained(tmp_path / "causal")
    started = kind.from_pretrained(tmp_path / "causal")
    base = started if kind is LexiconModel else started.model
    assert same(base, causal.model)
    base.save_pretrained(tmp_path / "base")
    assert same(LexiconForCausalLM.from_pretrained(tmp_path / "base").model, causal.model)


def retype(folder, model_type):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type}))


def test_a_mixtral_checkpoint_opens_as_ours_and_ours_as_a_mixtral_by_its_type_alone(tmp_path, prompts):
    torch.manual_seed(0)
    mixtral = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=E)).eval()
    mixtral.save_pretrained(tmp_path)
    expected = mixtral(**prompts).logits
    model = LexiconForCausalLM.from_pretrained(tmp_path)
    assert_close(model(**prompts).logits, expected, rtol=0, atol=1e-5)
    retype(tmp_path, "lexicon")
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is LexiconForCausalLM
    model.save_pretrained(tmp_path / "ours")
    retype(tmp_path / "ours", "mixtral")
    opened, report = MixtralForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert_close(opened(**prompts).logits, expected, rtol=0, atol=1e-5)


@each_policy
def test_another_policy_is_chosen_when_loading(policy, tmp_path, prompts):
    source = tiny_lexicon(domain_gate=False)
    source.save_pretrained(tmp_path)
    model, report = LexiconForCausalLM.from_pretrained(tmp_path, routing_policy=policy, output_loading_info=True)
    assert model.config.routing_policy == policy
    assert not report["missing_keys"] and not report["unexpected_keys"]  # gates that a domain needs not are no surprise
    for a, b in zip(model.routed_modules(), source.routed_modules(), strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a.experts.parameters(), b.experts.parameters(), strict=True))
    given = {"domain_ids": torch.tensor([0, 3, 1])} if policy == "domain" else {}
    with torch.no_grad():
        logits = model(**prompts, **given).logits
        assert torch.allclose(logits, source(**prompts).logits, atol=1e-5) == (policy == "token")


def test_state_dicts_of_both_layouts_load_and_lacks_are_named(tmp_path):
    model = tiny_lexicon()
    model.save_pretrained(tmp_path)
    on_disk = tensors(tmp_path)
    for layout in (on_disk, model.state_dict()):
        other = tiny_lexicon(seed=1)
        other.load_state_dict(layout)
        assert same(other, model)
    lacking = {name: p for name, p in on_disk.items() if "experts.2." not in name}
    with pytest.raises(RuntimeError, match=r"Missing key.*mlp.experts.gate_up_proj"):
        model.load_state_dict(lacking)
    other = tiny_lexicon(seed=1)
    own = other.model.layers[0].mlp.experts.down_proj.clone()
    other.load_state_dict(lacking, strict=False)
    found, given = other.model.layers[0].mlp.experts.down_proj, model.model.layers[0].mlp.experts.down_proj
    assert torch.equal(found[[0, 1, 3]], given[[0, 1, 3]]) and torch.equal(found[2], own[2])


def test_the_layout_on_disk_is_assigned_to_a_model_without_weights(tmp_path):
    model = tiny_lexicon().to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    on_disk = load_file(tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = type(model)(model.config)
    empty.load_state_dict(on_disk, assign=True)
    found = dict(empty.named_parameters())
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, weight in model.named_parameters():
        assert found[name].dtype == torch.bfloat16 and torch.equal(found[name], weight)
    key = next(key for key in on_disk if ".experts." in key)
    with torch.device("meta"):
        empty = type(model)(model.config)
    with pytest.raises(RuntimeError, match="Missing key"):
        empty.load_state_dict({name: weight for name, weight in on_disk.items() if name != key}, assign=True)
