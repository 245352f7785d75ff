"""Configurations and checkpoints: one tensor an expert on disk, exact round trips, and Mixtral both ways."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    MixtralConfig,
    MixtralForCausalLM,
)

from modeling_lexicon import LexiconConfig, LexiconForCausalLM, LexiconForSequenceClassification, LexiconModel
from tests.modeling_lexicon.conftest import SIZES, E, each_policy, tiny_dense, tiny_lexicon
from tests.tiny_models import make_trainer, trainable_lexicon


def tensors(folder):
    return {name: p for file in sorted(folder.glob("*.safetensors")) for name, p in load_file(file).items()}


def same(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(p, b[name]) for name, p in a.items())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok=3 exceeds num_local_experts=2"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok=0"),
        ({"routing_policy": "sequence-hard"}, "routing_policy='sequence-hard'.*'sequence_hard'"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"qkv_bias": True, "attention_bias": True}, "qkv_bias=True and attention_bias=True"),
        ({"router_aux_loss_coef": -0.1}, "router_aux_loss_coef=-0.1"),
        ({"expert_names": ["a", "b"]}, r"\['a', 'b'\].*num_local_experts=4"),
        ({"sliding_window": 16}, "sliding_window=16"),
        ({"expert_rank": 33}, "expert_rank=33 exceeds that of the matrices, 32"),
        ({"router_layers": ["q_proj", "up_proj"]}, r"router_layers=\['q_proj', 'up_proj'\]"),
        ({"router_layers_index": [1]}, r"router_layers_index=\[1\]"),
    ],
)
def test_a_value_out_of_range_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        LexiconConfig(**{**SIZES, **options})
    config = LexiconConfig(**SIZES, router_layers=["mlp"], router_layers_index=None)  # as older checkpoints have them
    for name, value in options.items():  # set afterwards
        setattr(config, name, value)
    with pytest.raises(ValueError, match=message):
        LexiconForCausalLM(config)


def test_defaults_are_top_two_of_four_and_a_configuration_survives_saving(tmp_path):
    config = LexiconConfig()
    assert (config.num_local_experts, config.num_experts_per_tok, config.routing_policy) == (4, 2, "token")
    assert config.num_experts == 4 and LexiconConfig(num_experts=8).num_local_experts == 8
    assert config.router_aux_loss_coef == 0 and not config.output_router_logits and not config.domain_gate
    own = {"num_local_experts": 3, "routing_policy": "domain", "expert_names": ["a", "b", "c"], "embedder": "some/one"}
    config = LexiconConfig(**SIZES, **own)
    kept = config.to_dict()
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is LexiconConfig and {**again.to_dict(), "_name_or_path": ""} == kept
    LlamaConfig(**SIZES).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model_type='llama'.*Merge"):
        LexiconConfig.from_pretrained(tmp_path)


def test_saved_and_loaded_every_tensor_is_the_same_bit_for_bit(tmp_path):
    model = tiny_lexicon(qkv_bias=True, qk_norm=True).bfloat16()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert type(again) is LexiconForCausalLM and same(again, model)
    assert not same(again, tiny_lexicon(seed=1, qkv_bias=True, qk_norm=True).bfloat16())  # negative control
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
    model, causal = tiny_lexicon(kind), tiny_lexicon(seed=1, centroid_size=3, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "own")
    again = auto.from_pretrained(tmp_path / "own")
    assert type(again) is kind and same(again, model)
    assert causal.lm_head.weight is causal.model.embed_tokens.weight
    causal.save_pretrained(tmp_path / "causal")
    started = kind.from_pretrained(tmp_path / "causal")
    base = started if kind is LexiconModel else started.model
    assert same(base, causal.model)
    base.save_pretrained(tmp_path / "base")
    opened = LexiconForCausalLM.from_pretrained(tmp_path / "base")
    assert same(opened.model, causal.model) and opened.lm_head.weight is opened.model.embed_tokens.weight


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


@pytest.mark.parametrize("rank", [None, 8])
def test_a_state_dict_as_on_disk_loads_and_lacks_are_named(rank, tmp_path):
    model, lacking = tiny_lexicon(expert_rank=rank), f"experts.2.w2{'.A' if rank else ''}.weight"
    name = f"mlp.experts.{'down_a' if rank else 'down_proj'}"
    model.save_pretrained(tmp_path)
    on_disk = tensors(tmp_path)
    other = tiny_lexicon(seed=1, expert_rank=rank)
    other.load_state_dict(on_disk)
    assert same(other, model)
    part = {key: p for key, p in on_disk.items() if lacking not in key}
    assert len(part) == len(on_disk) - 2
    with pytest.raises(RuntimeError, match=rf"Missing key.*{name}"):
        model.load_state_dict(part)
    other = tiny_lexicon(seed=1, expert_rank=rank)
    own, given = (each.get_parameter(f"model.layers.0.{name}").detach().clone() for each in (other, model))
    other.load_state_dict(part, strict=False)
    found = other.get_parameter(f"model.layers.0.{name}")
    assert torch.equal(found[[0, 1, 3]], given[[0, 1, 3]]) and torch.equal(found[2], own[2])
    with torch.device("meta"):
        empty = type(model)(model.config)
    with pytest.raises(RuntimeError, match="Missing key"):
        empty.load_state_dict(part, assign=True)
    empty.load_state_dict(on_disk, assign=True)
    assert same(empty, model)


def test_a_run_takes_up_the_best_of_its_checkpoints_in_several_files(tmp_path):
    """Experts of one layer lie in different files, which the Trainer loads one after the other."""
    model, rows = tiny_lexicon(), trainable_lexicon("token", None).rows
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    worse = [{**row, "labels": row["labels"].clamp(max=3)} for row in rows[:4]]  # what training unlearns
    options |= {"learning_rate": 1e-2, "load_best_model_at_end": True}
    trainer = make_trainer(model, rows, tmp_path, parts={"eval_dataset": worse}, **options)
    save = model.save_pretrained
    model.save_pretrained = lambda *args, **more: save(*args, **{**more, "max_shard_size": "30KB"})
    trainer.train()
    best = trainer.state.best_model_checkpoint
    assert best.endswith("checkpoint-2") and len(list((tmp_path / "checkpoint-2").glob("model-*.safetensors"))) > 2
    assert same(LexiconForCausalLM.from_pretrained(best), model)
    assert not same(LexiconForCausalLM.from_pretrained(tmp_path / "checkpoint-4"), model)


@pytest.mark.xfail(strict=True, reason="transformers 5.24: take the warning out of docs/merging.md once it passes")
def test_a_stock_mixtral_resumes_with_its_experts(tmp_path):
    torch.manual_seed(0)
    rows, found = trainable_lexicon("token", None).rows, []
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3}
    for resume in (None, str(tmp_path / "checkpoint-2")):
        model = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=E))
        make_trainer(model, rows, tmp_path, **options).train(resume_from_checkpoint=resume)
        found.append(model)
    assert same(*found)
