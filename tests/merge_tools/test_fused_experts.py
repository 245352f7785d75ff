"""Mixtures as mergekit 0.1.5 writes them, with fused experts, get the tensor names of stock files."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from merge_tools import MergeError, compose, split_fused_experts
from merge_tools.families import FAMILIES, MIXTURES

from .conftest import contents, edit_json, logits_of, open_model, read_tensors, recipe_of
from .corruptions import MODEL
from .test_families import MODELS, save

IDS = torch.arange(3, 43).reshape(2, 20)


@pytest.fixture(params=[name for name in MODELS if FAMILIES[MODELS[name][0]].mixture in ("mixtral", "qwen3_moe")])
def fused(request, tmp_path):
    """A mixture, and the same with the fused tensors that a model of transformers has in memory."""
    folders = [
        save(tmp_path / name, request.param, seed, torch.bfloat16) for seed, name in enumerate(("birds", "ships"))
    ]
    compose(recipe_of(folders), tmp_path / "good")
    (tmp_path / "fused").mkdir()
    state = {name: tensor.clone() for name, tensor in open_model(tmp_path / "good", dtype="auto").state_dict().items()}
    if "lm_head.weight" not in read_tensors(tmp_path / "good"):
        del state["lm_head.weight"]
    assert "model.layers.0.mlp.experts.gate_up_proj" in state
    save_file(state, tmp_path / "fused" / MODEL, metadata={"format": "pt"})
    for name, content in contents(tmp_path / "good").items():
        if name not in (MODEL, "merge_record.json", "README.md"):
            (tmp_path / "fused" / name).write_bytes(content)
    AutoConfig.from_pretrained(tmp_path / "good").save_pretrained(tmp_path / "fused")  # its spelling of num_experts
    return tmp_path


def test_a_repaired_mixture_has_the_tensors_of_a_stock_one(fused):
    split_fused_experts(fused / "fused", fused / "repaired")
    good, repaired = read_tensors(fused / "good"), read_tensors(fused / "repaired")
    assert good.keys() == repaired.keys()
    assert all(torch.equal(good[name], repaired[name]) for name in good)
    assert torch.equal(logits_of(open_model(fused / "repaired"), IDS), logits_of(open_model(fused / "good"), IDS))
    assert (fused / "repaired" / "tokenizer.json").is_file()
    config = json.loads((fused / "repaired" / "config.json").read_text())
    assert config["rope_theta"] == 10000.0  # the spelling of transformers 4, whose default is another
    assert [config[name] for name in MIXTURES[config["model_type"]].counts] == [2] * len(
        MIXTURES[config["model_type"]].counts
    )


def test_what_is_not_fused_is_refused(fused):
    with pytest.raises(MergeError, match="nothing to split"):
        split_fused_experts(fused / "good", fused / "repaired")
    with pytest.raises(MergeError, match="Give a mixture"):
        split_fused_experts(fused / "birds", fused / "repaired")
    config = json.loads((fused / "fused" / "config.json").read_text())
    mixture = MIXTURES[config["model_type"]]
    edit_json(fused / "fused" / "config.json", **dict.fromkeys(mixture.counts, 3))
    with pytest.raises(MergeError, match=r"_proj. has shape .* requires \[3, "):
        split_fused_experts(fused / "fused", fused / "repaired")
    assert not (fused / "repaired").exists()
