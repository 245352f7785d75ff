"""SEKE's models on three kinds of encoder: loading, padding, gradients, precision, compilation, outputs, losses."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import AutoModel

from modeling_seke import SekeForTokenClassification, SekeModel, SekeTokenClassifierOutput
from modeling_seke.layers_seke import EXPERTS_IMPLEMENTATIONS, load_balancing_loss, router_z_loss

BACKBONES = ("bert", "deberta-v2", "modernbert")
each_backbone = pytest.mark.parametrize("backbone", BACKBONES)


@pytest.fixture(scope="module")
def batch(tiny_tokenizer):
    texts = ["graph cuts in the network", "learning", "the problem of learning graph networks is the cut of a network"]
    return tiny_tokenizer(texts, padding=True, return_tensors="pt")


def with_labels(batch):
    torch.manual_seed(1)
    labels = torch.randint(0, 3, batch["input_ids"].shape)
    return {**batch, "labels": labels.masked_fill(batch["attention_mask"] == 0, -100)}


@each_backbone
def test_automodel_opens_it_without_the_classifier(backbone, tiny_seke, batch, tmp_path):
    model = tiny_seke(backbone)
    model.save_pretrained(tmp_path / "tagger")
    bare, info = AutoModel.from_pretrained(tmp_path / "tagger", output_loading_info=True)
    assert type(bare) is SekeModel and not info["missing_keys"] and not info["unexpected_keys"]
    assert set(model.state_dict()) - set(bare.state_dict()) == {"classifier.weight", "classifier.bias"}
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        expected, outputs = model(**batch), bare(**batch, output_hidden_states=True)
        assert_close(model.classifier(outputs.last_hidden_state)[real], expected.logits[real], rtol=0, atol=1e-6)
    assert (outputs.last_hidden_state[~real] == 0).all() and torch.equal(outputs.expert_index, expected.expert_index)
    assert outputs.hidden_states[-1].shape == outputs.last_hidden_state.shape
    bare.save_pretrained(tmp_path / "bare")
    again, info = SekeForTokenClassification.from_pretrained(tmp_path / "bare", output_loading_info=True)
    assert info["missing_keys"] == {"classifier.weight", "classifier.bias"} and not info["unexpected_keys"]
    assert all(torch.equal(p, again.get_parameter(name)) for name, p in bare.named_parameters())
    assert bare.lora_config(r=2).modules_to_save == ["moe", "rnn"] and bare.lora_config().task_type is None


def test_position_ids_reach_the_backbone(tiny_seke, batch):
    model, ids = tiny_seke(), torch.arange(batch["input_ids"].shape[1])[None]
    with torch.no_grad():
        logits, same, other = (
            model(**batch, **of).logits for of in ({}, {"position_ids": ids}, {"position_ids": ids + 3})
        )
    assert torch.equal(logits, same) and not torch.allclose(logits, other, atol=1e-3)


def test_new_experts_start_near_the_identity_and_differ(tiny_seke):
    x = torch.randn(200, 32)
    model = tiny_seke(expert_init="identity").moe.experts
    outputs = torch.stack([model.expert_forward(x, weights) for weights in model.unbind_experts()])  # (E, 200, d)
    rest = outputs - x
    assert 0.01 < rest.std() < 0.3 and rest[0].std() > 0.01
    assert (rest[0] - rest[1]).std() > rest[0].std()  # no two experts are alike, or routing would make no difference
    with torch.no_grad():
        model.up_proj[:, 64:] = 0
        model.up_bias[:, 64:] = 0
    outputs = torch.stack([model.expert_forward(x, weights) for weights in model.unbind_experts()])
    assert_close(outputs, x.expand_as(outputs))
    other = tiny_seke(expert_init="uniform").moe.experts  # negative control
    assert (other.expert_forward(x, other.unbind_experts()[0]) - x).std() > 0.9


def test_ablations_leave_out_their_modules(tiny_seke, batch, monkeypatch):
    names, ran, grouped = {}, [], EXPERTS_IMPLEMENTATIONS["grouped_mm"]
    monkeypatch.setitem(EXPERTS_IMPLEMENTATIONS, "grouped_mm", lambda *args: ran.append(1) or grouped(*args))
    for use_moe in (True, False):
        for use_rnn in (True, False):
            model = tiny_seke(use_moe=use_moe, use_rnn=use_rnn)
            names[use_moe, use_rnn] = {name.split(".")[0] for name, _ in model.named_parameters()}
            output = model(**batch)
            assert (output.router_logits is not None) == (output.expert_index is not None) == use_moe
            assert model.get_experts_implementation()[""] == "eager"
            model.set_experts_implementation("grouped_mm")
            assert_close(model(**batch).logits, output.logits, rtol=0, atol=1e-5 if use_moe else 0)
            assert len(ran) == use_moe
            ran.clear()
    assert names[False, False] == {"backbone", "classifier"}
    assert names[True, False] == {"backbone", "classifier", "moe"}
    assert names[False, True] == {"backbone", "classifier", "rnn"}


def test_outputs_have_router_logits_and_experts_per_token(tiny_seke, batch):
    model = tiny_seke()
    output = model(**batch, output_attentions=True, output_hidden_states=True)
    assert isinstance(output, SekeTokenClassifierOutput)
    rows, length = batch["input_ids"].shape
    assert output.logits.shape == (rows, length, 3)
    assert output.router_logits.shape == (rows, length, 4) and output.expert_index.shape == (rows, length, 2)
    real = batch["attention_mask"].bool()
    assert torch.equal(output.expert_index[real], output.router_logits[real].topk(2).indices)
    assert (output.expert_index[~real] == -1).all()
    as_tuple = model(**batch, return_dict=False)
    assert isinstance(as_tuple, tuple) and torch.equal(as_tuple[0], output.logits)


def test_the_loss_is_cross_entropy_plus_router_losses(tiny_seke, batch):
    labelled = with_labels(batch)
    plain = tiny_seke()(**labelled)
    flat = plain.logits.flatten(0, 1), labelled["labels"].flatten()
    assert_close(plain.loss, nn.functional.cross_entropy(*flat))
    smoothed = tiny_seke(label_smoothing=0.2)(**labelled).loss
    assert_close(smoothed, nn.functional.cross_entropy(*flat, label_smoothing=0.2))
    real = batch["attention_mask"].bool()  # masked: padding is not routed
    logits, index = plain.router_logits[real], plain.expert_index[real]
    regularised = tiny_seke(router_aux_loss_coef=0.1, router_z_loss_coef=0.01)(**labelled).loss
    assert_close(regularised, plain.loss + 0.1 * load_balancing_loss(logits, index) + 0.01 * router_z_loss(logits))


def test_without_a_mask_every_token_is_real_and_one_of_another_shape_is_refused(tiny_seke, batch):
    model, inputs = tiny_seke(), batch["input_ids"][2:]
    with torch.no_grad():
        assert torch.equal(model(inputs).logits, model(inputs, attention_mask=torch.ones_like(inputs)).logits)
    with pytest.raises(ValueError, match=r"\(1, 1, "):
        model(inputs, attention_mask=torch.ones_like(inputs)[None])


def test_lora_targets_fit_encoders_by_their_own_names(tiny_seke):
    targets = {name: tiny_seke(name).lora_config().target_modules for name in BACKBONES}
    assert targets == {"bert": {"query", "value"}, "deberta-v2": {"query_proj", "value_proj"}, "modernbert": {"Wqkv"}}
    assert tiny_seke().lora_config().r == tiny_seke().lora_config().lora_alpha == 16
    assert tiny_seke(use_rnn=False).lora_config(r=2).modules_to_save == ["moe", "classifier"]
    assert tiny_seke().lora_config(target_modules=["dense"]).target_modules == {"dense"}
