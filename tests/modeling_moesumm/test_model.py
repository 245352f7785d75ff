"""The model classes on every kind of backbone: the main expert, saving, datasets, what comes out, the baseline."""

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoConfig, AutoModel

from modeling_moesumm import MoeSummConfig, MoeSummModel
from tests.modeling_moesumm.conftest import (
    DATASETS,
    DECODERS,
    backbone_config,
    class_for,
    each_kind,
    for_backbone,
    one_of_each,
    tiny_backbone,
    tiny_moesumm,
    without,
)


def reading_of(batch, backbone):
    """Inputs without labels."""
    given = without(for_backbone(batch, backbone), "labels")
    return given if backbone in DECODERS else given | {"decoder_input_ids": batch["input_ids"][:, :6]}


def test_defaults_are_those_of_the_paper():
    config = MoeSummConfig(datasets=["cnn_dm", "pubmed", "wikihow"])
    assert (config.num_deputies, config.deputy_intermediate_size, config.margin_loss_coef) == (3, 512, 1.0)
    assert config.main_expert and config.dataset_aware and config.num_selectors == 3
    assert MoeSummConfig(datasets=["a", "b"], dataset_aware=False).num_selectors == 1
    flat = MoeSummConfig(main_expert=False)
    assert (flat.deputy_intermediate_size, flat.margin_loss_coef, flat.dataset_aware) == (None, 0.0, False)
    assert MoeSummConfig.from_dict(flat.to_dict()).to_dict() == flat.to_dict()


@one_of_each
def test_sizes_and_special_tokens_are_the_backbones_and_are_kept_in_one_place(backbone, tmp_path):
    config = MoeSummConfig(text_config=backbone_config(backbone), datasets=["news"])
    for name in ("vocab_size", "hidden_size", "pad_token_id", "eos_token_id", "is_encoder_decoder"):
        assert getattr(config, name) == getattr(config.text_config, name)
    config.pad_token_id = 3
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is MoeSummConfig and type(again.text_config) is type(config.text_config)
    assert (again.text_config.pad_token_id, again.datasets) == (3, ["news"])


@each_kind
@pytest.mark.parametrize("way", [{}, {"dataset_ids": torch.full((4,), -1)}, {"main_expert_only": True}])
def test_the_main_expert_alone_is_the_backbone_with_its_states_bit_for_bit(backbone, way, batch):
    stock, model, batch = tiny_backbone(backbone), tiny_moesumm(backbone), for_backbone(batch, backbone)
    for each in (model, stock):
        each.set_attn_implementation("eager")
    wanted, plain = {"output_hidden_states": True, "output_attentions": True}, without(batch, "dataset_ids")
    with torch.no_grad():
        expected, found, doubled = stock(**plain, **wanted), model(**plain, **way, **wanted), model(**batch, **wanted)
        assert torch.equal(found.logits, expected.logits)
        assert_close(found.generation_loss, expected.loss)
        names = [name for name in expected if name.endswith(("states", "attentions"))]
        for name in names:
            assert all(map(torch.equal, expected[name], found[name])) and all(len(x) == 4 for x in doubled[name])
        as_tuple = model(**batch, return_dict=False)
    assert len(names) >= 2 and torch.equal(as_tuple[0], doubled.loss) and torch.equal(as_tuple[1], doubled.logits)
    assert not torch.allclose(doubled.logits, expected.logits, atol=1e-2)  # negative control: deputies contribute


@one_of_each
def test_a_backbones_checkpoint_lacks_deputies_and_selectors_only_and_these_are_initialised(backbone, tmp_path, batch):
    stock, given = tiny_backbone(backbone), reading_of(batch, backbone)
    stock.generation_config.num_beams = 3
    stock.save_pretrained(tmp_path)
    options = {"deputy_intermediate_size": 64, "deputy_init_std": 0.1}
    model = class_for(backbone).from_backbone(tmp_path, DATASETS, **options)
    for name, p in model.named_parameters():
        if ".deputies." in name:
            std = 0 if "bias" in name else 0.1 if "down" in name else 0.2 if backbone in DECODERS else 0.3
            assert abs(p.std().item() - std) < 0.2 * std + 1e-9, name
    assert model.config.datasets == DATASETS and model.generation_config.num_beams == 3
    made = class_for(backbone).from_backbone(tmp_path, DATASETS, deputy_intermediate_size=8)  # starts as the backbone
    with torch.no_grad():
        expected = stock(**without(given, "dataset_ids")).logits
        assert_close(made(**given).logits, expected, rtol=0, atol=1e-5)
        assert not torch.allclose(model(**given).logits, expected, atol=1e-3)


@one_of_each
def test_the_model_without_a_head_opens_the_same_checkpoints(backbone, batch, tmp_path):
    lm, given = tiny_moesumm(backbone), reading_of(batch, backbone)
    lm.save_pretrained(tmp_path / "lm")
    model = AutoModel.from_pretrained(tmp_path / "lm")
    assert type(model) is MoeSummModel and set(model.state_dict()) == set(lm.state_dict())
    config = lm.lora_config(r=4)
    assert (config.r, config.target_modules, config.modules_to_save) == (4, {"q_proj", "v_proj"}, ["deputies"])
    assert (config.task_type, model.lora_config().task_type) == (lm.lora_task, "FEATURE_EXTRACTION")
    wanted = {"output_router_indices": True, "output_hidden_states": True}
    with torch.no_grad():
        output, expected = model(**given, **wanted), lm(**given, **wanted)
        close = {"rtol": 0, "atol": 1e-5}  # weights in a mapped file have other addresses
        assert_close(lm._lm_logits(output.last_hidden_state), expected.logits, **close)
        for name in set(output) & set(expected) - {"cache", "past_key_values"}:
            assert_close(output[name], expected[name], **close)
        model.save_pretrained(tmp_path / "base")
        assert_close(type(lm).from_pretrained(tmp_path / "base")(**given).logits, expected.logits, **close)


def test_an_untied_head_is_frozen_in_the_model_without_one(batch):
    model = MoeSummModel(MoeSummConfig(text_config=backbone_config(tie_word_embeddings=False), datasets=DATASETS))
    model.train()(**reading_of(batch, "bart")).last_hidden_state.sum().backward()
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert unused == ["backbone.model.shared.weight"]  # which an untied BART does not use either


@pytest.mark.parametrize(
    "backbone, init, bias", [("bart", "mean", False), ("bart", "papers", True), ("llama", "papers", False)]
)
def test_a_dataset_is_added_without_changing_what_there_is(backbone, init, bias, batch, tmp_path):
    given = reading_of(batch, backbone)
    tiny_moesumm(backbone).save_pretrained(tmp_path / "plain")
    model = class_for(backbone).from_pretrained(tmp_path / "plain", selector_bias=bias)  # a new bias is zero
    model.deputies()[0].selectors.weight.requires_grad_(False)
    with torch.no_grad():
        assert_close(model(**given).logits, tiny_moesumm(backbone)(**given).logits, rtol=0, atol=1e-5)
        for deputies in model.deputies() if bias else ():
            deputies.selectors.bias.normal_()
        before = model(**given).logits
        assert model.add_dataset("radio", init=init) == 3 and torch.equal(model(**given).logits, before)
        new, old = (model(**{**given, "dataset_ids": torch.full((4,), i)}).logits for i in (3, 2))
        assert torch.equal(new, old) == (init == "papers")
        for W in (weight for deputies in model.deputies() for weight in deputies.selectors.parameters()):
            assert_close(W[3], W[:3].mean(0) if init == "mean" else W[2])
    assert [d.selectors.weight.requires_grad for d in model.deputies()] == [i > 0 for i in range(model.num_layers)]
    model.save_pretrained(tmp_path / "more")
    again = class_for(backbone).from_pretrained(tmp_path / "more")
    assert again.config.datasets == [*DATASETS, "radio"]
    assert_close(again(**without(given, "dataset_ids"), dataset="radio").logits, new, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dataset_aware", [True, False])
def test_a_dataset_is_removed_and_the_later_ones_move_up(dataset_aware, batch):
    model, given = tiny_moesumm(dataset_aware=dataset_aware), without(reading_of(batch, "bart"), "dataset_ids")
    with torch.no_grad():
        before = {name: model(**given, dataset=name).logits for name in (*DATASETS, None)}
        model.remove_dataset("letters")
        for name, number in (("news", 0), ("papers", 1), (None, -1)):
            assert torch.equal(model(**given, dataset=name).logits, before[name])
            assert torch.equal(model(**given, dataset_ids=torch.full((4,), number)).logits, before[name])
    assert torch.equal(before["news"], before["papers"]) != dataset_aware
    assert not torch.allclose(before["news"], before[None], atol=1e-2)


@one_of_each
def test_the_deputies_of_every_token_can_be_looked_at(backbone, batch):
    model, batch, wanted = tiny_moesumm(backbone), for_backbone(batch, backbone), {"output_router_indices": True}
    plain, output, alone = model(**batch), model(**batch, **wanted), model(**without(batch, "dataset_ids"), **wanted)
    assert torch.equal(output.logits, plain.logits)
    for part, length in ({"": 15} if backbone in DECODERS else {"encoder_": 9, "decoder_": 6}).items():
        assert f"{part}expert_indices" not in plain
        pairs = list(zip(output[f"{part}expert_indices"], output[f"{part}expert_weights"], strict=True))
        assert len(pairs) == 2
        for i, g in pairs:
            assert i.shape == g.shape == (4, length) and g.dtype == torch.float32
            assert (i[2] == -1).all() and (g[2] == 0).all()  # the row without a dataset
            assert (i[[0, 1, 3]] >= 0).all() and (g[[0, 1, 3]] >= 1 / 3).all() and (g <= 1).all()
        assert all((i == -1).all() for i in alone[f"{part}expert_indices"])


@one_of_each
def test_flat_moe_starts_as_its_backbone_and_knows_no_datasets(backbone, batch, tmp_path):
    stock = tiny_backbone(backbone)
    stock.save_pretrained(tmp_path)
    model = class_for(backbone).from_backbone(tmp_path, DATASETS, num_deputies=2, main_expert=False)
    batch = for_backbone(batch, backbone)
    ends = ("fc1.weight", "fc1.bias", "fc2.weight", "mlp.gate_proj.weight", "mlp.down_proj.weight")
    assert not any(name.endswith(ends) for name, _ in model.named_parameters())
    plain = without(batch, "dataset_ids")
    with torch.no_grad():
        expected, output = stock(**plain), model(**plain, output_router_indices=True)
        assert_close(output.logits, expected.logits, rtol=0, atol=1e-5)
        assert_close(output.loss, expected.loss)
        assert torch.equal(model(**batch).logits, output.logits)  # datasets are nothing to it
        indices = output.expert_indices if backbone in DECODERS else output.encoder_expert_indices
        assert {int(i) for index in indices for i in index.unique()} == {0, 1}
        for deputies in model.deputies():  # negative control
            deputies.experts.up_proj[1].add_(0.5)
        assert not torch.allclose(model(**plain).logits, expected.logits, atol=1e-2)
    model.train()(**plain).loss.backward()
    assert all(d.selectors.weight.grad.abs().max() > 0 for d in model.deputies())
