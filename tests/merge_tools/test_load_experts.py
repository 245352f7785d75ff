"""`load_experts` builds the same mixture in memory that `compose` writes."""

import tempfile

import pytest
import torch
from safetensors.torch import save_file

from merge_tools import MergeError, compose, load_experts
from modeling_lexicon import LexiconForCausalLM

from .conftest import contents, logits_of, open_model, recipe_of

PROMPTS = {"birds": ["the owl is a bird"], "ships": ["a sail and a mast"], "tools": ["the saw cuts"]}
RECIPES = {
    "as little as possible": {},
    "hidden gates, top 1": {"gate_mode": "hidden", "experts_per_token": 1},
    "two linears of one layer": {"router_layers": ["q_proj", "down_proj"], "router_layers_index": [1]},
    "sequence_soft, weights": {"routing_policy": "sequence_soft", "weights": [3, 1, 0]},
    "sequence_hard": {"routing_policy": "sequence_hard", "gate_mode": "hidden"},
    "domain with a gate": {"routing_policy": "domain", "gate_mode": "cheap_embed"},
    "another dtype": {"dtype": "bfloat16", "gate_mode": "zeros"},
    "seeded": {"seed": 7},
}
IDS = torch.arange(3, 43).reshape(2, 20)


def as_experts(folders):
    return [{"source_model": str(folder), "positive_prompts": PROMPTS[folder.name]} for folder in folders]


def same(model, other):
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name])
    assert not model.training


@pytest.mark.parametrize("name", RECIPES)
def test_load_experts_is_compose_and_from_pretrained(experts, tmp_path, name):
    specs, options = as_experts(experts(3)), RECIPES[name]
    model = load_experts(specs, **options)
    compose(recipe_of(specs, format="lexicon"), tmp_path / "out", **options)
    written = open_model(tmp_path / "out")
    assert type(model) is type(written) is LexiconForCausalLM
    same(model, written)
    left_out = ("_name_or_path", "architectures", "auto_map", "transformers_version")
    ours, theirs = ({k: v for k, v in m.config.to_dict().items() if k not in left_out} for m in (model, written))
    assert ours == theirs
    domains = {"domain_ids": torch.tensor([0, 2])} if options.get("routing_policy") == "domain" else {}
    assert torch.equal(logits_of(model, IDS, **domains), logits_of(written, IDS, **domains))
    other = load_experts(specs[::-1], **options)  # negative control: experts in another order
    assert not torch.equal(logits_of(other, IDS, **domains), logits_of(model, IDS, **domains))


@pytest.mark.parametrize("rope", ["default", "linear", "llama3"])
def test_it_keeps_ties_rotary_settings_and_the_base(experts, make_expert, tmp_path, rope):
    folders = experts(2, rope=rope, tied=True, dtype="bfloat16")
    base = make_expert(tmp_path / "base", seed=1, rope=rope, tied=True, dtype="bfloat16")
    model = load_experts(folders, base_model=base, average="base")
    compose(recipe_of(folders, base_model=str(base), average="base", format="lexicon"), tmp_path / "out")
    same(model, open_model(tmp_path / "out"))
    dense = open_model(base)
    assert torch.equal(model.model.rotary_emb.inv_freq, dense.model.rotary_emb.inv_freq)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert torch.equal(model.lm_head.weight, dense.lm_head.weight)


def test_it_takes_centroids(experts, tmp_path):
    centroids = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    save_file({"centroids": centroids}, tmp_path / "centroids.safetensors")
    options = {"routing_policy": "domain", "centroids": str(tmp_path / "centroids.safetensors")}
    model = load_experts(experts(2, dtype="bfloat16"), **options)
    assert torch.equal(model.domain_centroids, centroids) and model.domain_centroids.dtype == torch.float32


def test_it_writes_nothing(experts, tmp_path, monkeypatch):
    folders = experts(3)
    before = [contents(folder) for folder in folders]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    load_experts(folders)
    assert list(tmp_path.iterdir()) == []
    assert [contents(folder) for folder in folders] == before


def test_it_can_be_saved_and_loaded(experts, tmp_path):
    model = load_experts(experts(3), router_layers=["mlp", "k_proj"])
    model.save_pretrained(tmp_path / "saved")
    same(model, open_model(tmp_path / "saved"))


def test_it_raises_the_same_errors_as_compose(experts):
    with pytest.raises(MergeError, match="positive_prompts .*'birds'"):
        load_experts(experts(2), gate_mode="hidden")
    with pytest.raises(MergeError, match=r"experts_per_token=3 .* \(2\)"):
        load_experts(experts(2), experts_per_token=3)
