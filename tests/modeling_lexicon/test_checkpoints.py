"""Checkpoints: one tensor an expert on disk, exact round trips, and Mixtral both ways."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
)

from modeling_lexicon import LexiconForCausalLM, LexiconForSequenceClassification, LexiconModel
from tests.modeling_lexicon.conftest import LAYER_CHOICES, SIZES, each_layers, each_policy, tiny_lexicon, tiny_llama

E = 4


def tensors(folder):
    return {name: p for file in sorted(folder.glob("*.safetensors")) for name, p in load_file(file).items()}


def same(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(p, b[name]) for name, p in a.items())


@each_layers
@pytest.mark.parametrize("shards, dtype", [(None, torch.float32), ("20KB", torch.bfloat16)])
def test_saved_and_loaded_every_tensor_is_the_same_bit_for_bit(layers, shards, dtype, tmp_path):
    model = tiny_lexicon(layers=layers, expert_names=["a", "b", "c", "d"]).to(dtype)
    model.save_pretrained(tmp_path, **({"max_shard_size": shards} if shards else {}))
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or not shards
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert type(again) is LexiconForCausalLM and same(again, model)
    assert not same(again, tiny_lexicon(seed=1, layers=layers).to(dtype))  # negative control
    again.save_pretrained(tmp_path / "twice")
    first, second = tensors(tmp_path), tensors(tmp_path / "twice")
    assert first.keys() == second.keys() and all(torch.equal(p, second[name]) for name, p in first.items())


@each_layers
def test_each_expert_lies_by_itself_and_the_rest_as_in_a_llama(layers, tmp_path):
    """Names and shapes: a dense model's, with every routed one replaced by its gate and one tensor an expert."""
    model = tiny_lexicon(layers=layers)
    model.save_pretrained(tmp_path)
    dense = tiny_llama(**{name: v for name, v in LAYER_CHOICES[layers].items() if name.endswith("bias")})
    expected = {name: p.shape for name, p in dense.state_dict().items()}
    mixtral_names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for layer, routed in model.config.routed_modules():
        start = f"model.layers.{layer}."
        for name in [name for name in expected if name.startswith(start) and f".{routed}." in name]:
            shape, (module, part) = expected.pop(name), name.rsplit(".", 1)
            if routed == "mlp":
                block, leaf = f"{start}block_sparse_moe", mixtral_names[module.rsplit(".", 1)[1]]
                names = [f"{block}.experts.{e}.{leaf}.weight" for e in range(E)]
            else:
                block, names = module, [f"{module}.experts.{e}.{part}" for e in range(E)]
            expected.update(dict.fromkeys(names, shape))
            inputs = 40 if routed == "down_proj" else 32
            expected[f"{block}.gate.weight"] = torch.Size([E, inputs])
    assert {name: p.shape for name, p in tensors(tmp_path).items()} == expected


@pytest.mark.parametrize(
    "kind, auto", [(LexiconModel, AutoModel), (LexiconForSequenceClassification, AutoModelForSequenceClassification)]
)
def test_other_heads_and_none_round_trip_and_start_from_a_causal_model(kind, auto, tmp_path):
    model = tiny_lexicon(kind, layers="attention and mlp")
    model.save_pretrained(tmp_path / "own")
    again = auto.from_pretrained(tmp_path / "own")
    assert type(again) is kind and same(again, model)
    causal = tiny_lexicon(seed=1, layers="attention and mlp", centroid_size=3)
    causal.save_pretrained(tmp_path / "causal")
    started = kind.from_pretrained(tmp_path / "causal")
    base = started if kind is LexiconModel else started.model
    assert same(base, causal.model)
    base.save_pretrained(tmp_path / "base")
    assert same(LexiconForCausalLM.from_pretrained(tmp_path / "base").model, causal.model)


def mixtral(folder):
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=E, router_aux_loss_coef=0.0)).eval()
    model.save_pretrained(folder)
    return model


def test_a_mixtral_checkpoint_opens_as_ours_by_its_type_alone(tmp_path, prompts):
    expected = mixtral(tmp_path)(**prompts).logits
    assert_close(LexiconForCausalLM.from_pretrained(tmp_path)(**prompts).logits, expected, rtol=0, atol=1e-5)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "lexicon"}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model) is LexiconForCausalLM
    assert_close(model(**prompts).logits, expected, rtol=0, atol=1e-5)


def test_a_token_routed_checkpoint_opens_as_a_mixtral_by_its_type_alone(tmp_path, prompts):
    model = tiny_lexicon()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "mixtral"}))
    opened, report = MixtralForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert_close(opened(**prompts).logits, model(**prompts).logits, rtol=0, atol=1e-5)


@each_layers
def test_what_a_checkpoint_lacks_is_initialised_and_then_saved_expert_by_expert(layers, tmp_path):
    """Raw parameters that no initialiser knows stay memory garbage after from_pretrained."""
    model = tiny_lexicon(layers=layers, centroid_size=3)
    model.save_pretrained(tmp_path / "full")
    kept = {name: p for name, p in tensors(tmp_path / "full").items() if "experts" not in name and "gate." not in name}
    kept.pop("domain_centroids")
    (tmp_path / "less").mkdir()
    save_file(kept, tmp_path / "less" / "model.safetensors", {"format": "pt"})
    model.config.save_pretrained(tmp_path / "less")
    loaded = LexiconForCausalLM.from_pretrained(tmp_path / "less")
    for name, p in loaded.named_parameters():
        if ".experts." in name or ".gate." in name:
            assert torch.isfinite(p).all()
            assert (p == 0).all() if "bias" in name else 0.1 < p.std() < 0.3, name  # initializer_range is 0.2
    assert (loaded.domain_centroids == 0).all()
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    loaded.save_pretrained(tmp_path / "again")
    assert tensors(tmp_path / "again").keys() == tensors(tmp_path / "full").keys()


@each_policy
@pytest.mark.parametrize("layers", ["mlp", "two linears"])
def test_another_policy_is_chosen_when_loading(policy, layers, tmp_path, prompts):
    source = tiny_lexicon(layers=layers, domain_gate=False)
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
    model = tiny_lexicon(layers="attention and mlp")
    model.save_pretrained(tmp_path)
    on_disk = tensors(tmp_path)
    for layout in (on_disk, model.state_dict()):
        other = tiny_lexicon(seed=1, layers="attention and mlp")
        other.load_state_dict(layout)
        assert same(other, model)
    lacking = {name: p for name, p in on_disk.items() if "experts.2." not in name}
    with pytest.raises(RuntimeError, match=r"Missing key.*mlp.experts.gate_up_proj"):
        model.load_state_dict(lacking)
    other = tiny_lexicon(seed=1, layers="attention and mlp")
    own = other.model.layers[0].mlp.experts.down_proj.clone()
    other.load_state_dict(lacking, strict=False)
    found, given = other.model.layers[0].mlp.experts.down_proj, model.model.layers[0].mlp.experts.down_proj
    assert torch.equal(found[[0, 1, 3]], given[[0, 1, 3]]) and torch.equal(found[2], own[2])


@pytest.mark.parametrize("layers", ["mlp", "two linears"])
def test_the_layout_on_disk_is_assigned_to_a_model_without_weights(layers, tmp_path):
    model = tiny_lexicon(layers=layers).to(torch.bfloat16)
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
