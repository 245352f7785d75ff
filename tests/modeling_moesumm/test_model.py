"""The model classes on every kind of backbone: the main expert, saving, datasets, what comes out, baselines, training."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from modeling_moesumm import MoeSummConfig, MoeSummForCausalLM, MoeSummModel
from modeling_moesumm.experts_moesumm import DeputyFeedForward
from tests import tiny_models
from tests.modeling_moesumm.conftest import (
    DATASETS,
    DECODERS,
    backbone_config,
    class_for,
    each_kind,
    for_backbone,
    tiny_backbone,
    tiny_moesumm,
    without,
)

one_of_each = pytest.mark.parametrize("backbone", ["bart", "llama"])


def reading_of(batch, backbone):
    """Inputs without labels."""
    given = without(for_backbone(batch, backbone), "labels")
    return given if backbone in DECODERS else given | {"decoder_input_ids": batch["input_ids"][:, :6]}


# --- configuration ---


def test_defaults_are_those_of_the_paper():
    config = MoeSummConfig(datasets=["cnn_dm", "pubmed", "wikihow"])
    assert config.text_config.model_type == "bart" and config.hidden_size == 1024
    assert (config.num_deputies, config.deputy_intermediate_size, config.margin_loss_coef) == (3, 512, 1.0)
    assert config.main_expert and config.dataset_aware and config.num_selectors == 3
    assert MoeSummConfig(datasets=["a", "b"], dataset_aware=False).num_selectors == 1
    flat = MoeSummConfig(main_expert=False)
    assert (flat.deputy_intermediate_size, flat.margin_loss_coef, flat.dataset_aware) == (None, 0.0, False)
    assert MoeSummConfig.from_dict(flat.to_dict()).to_dict() == flat.to_dict()


@each_kind
def test_sizes_and_special_tokens_are_the_backbones_and_are_kept_in_one_place(backbone, tmp_path):
    config = MoeSummConfig(text_config=backbone_config(backbone), datasets=["news"], experts_implementation="eager")
    for name in ("vocab_size", "hidden_size", "pad_token_id", "eos_token_id"):
        assert getattr(config, name) == getattr(config.text_config, name)
    assert config.is_encoder_decoder == (backbone not in DECODERS)
    assert config._experts_implementation == "eager" and config.text_config._experts_implementation is None
    config.pad_token_id = 3
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is MoeSummConfig and type(again.text_config) is type(config.text_config)
    assert (
        again.text_config.pad_token_id == 3
        and again.datasets == ["news"]
        and "eager" not in json.dumps(again.to_dict())
    )
    assert type(MoeSummConfig(text_config={"d_model": 32}).text_config) is BartConfig


# --- main expert and backbone ---


@each_kind
@pytest.mark.parametrize("way", [{}, {"dataset_ids": torch.full((4,), -1)}, {"main_expert_only": True}])
def test_the_main_expert_alone_is_the_backbone_bit_for_bit(backbone, way, batch):
    stock, model, batch = tiny_backbone(backbone), tiny_moesumm(backbone), for_backbone(batch, backbone)
    plain = without(batch, "dataset_ids")
    with torch.no_grad():
        expected, found = stock(**plain), model(**plain, **way)
        assert torch.equal(found.logits, expected.logits)
        assert_close(found.generation_loss, expected.loss)
        # negative control: with datasets the deputies contribute
        assert not torch.allclose(model(**batch).logits, expected.logits, atol=1e-2)


# --- saving and loading ---


@each_kind
def test_a_backbones_checkpoint_lacks_deputies_and_selectors_only_and_these_are_initialised(backbone, tmp_path, batch):
    stock = tiny_backbone(backbone)
    stock.generation_config.num_beams = 3
    stock.save_pretrained(tmp_path)
    options = {"deputy_intermediate_size": 64, "deputy_init_std": 0.1}
    config = MoeSummConfig(text_config=backbone_config(backbone), datasets=DATASETS, **options)
    names = {"key_mapping": {r"^model\.": "backbone.model.", r"^lm_head\.": "backbone.lm_head."}}
    load, names = class_for(backbone).from_pretrained, names if backbone in DECODERS else {}
    model, report = load(tmp_path, config=config, output_loading_info=True, **names)
    initial = 0.2 if backbone in DECODERS else 0.3
    new = {name for name, _ in model.named_parameters() if ".deputies." in name}
    assert set(report["missing_keys"]) == new and not report["unexpected_keys"] and not report["mismatched_keys"]
    for name in new:
        std = 0 if "bias" in name else 0.1 if "down" in name else initial
        assert abs(model.get_parameter(name).std().item() - std) < 0.2 * std + 1e-9, name
    made = class_for(backbone).from_backbone(tmp_path, DATASETS, deputy_intermediate_size=8)  # starts as the backbone
    assert made.config.datasets == DATASETS and made.generation_config.num_beams == 3
    given = reading_of(batch, backbone)
    with torch.no_grad():
        expected = stock(**without(given, "dataset_ids")).logits
        assert_close(made(**given).logits, expected, rtol=0, atol=1e-5)
        assert_close(model(**without(given, "dataset_ids")).logits, expected, rtol=0, atol=1e-6)


def test_a_checkpoint_shares_its_backbones_file(batch, tmp_path):
    """A folder of the backbone's own file and one of deputies, joined by an index and a `key_mapping`."""
    model, rows = tiny_moesumm("llama"), for_backbone(batch, "llama")
    model.save_pretrained(tmp_path / "whole")
    tiny_backbone("llama").save_pretrained(tmp_path / "stock")
    shared, whole = tmp_path / "shared", load_file(tmp_path / "whole" / "model.safetensors")
    shared.mkdir()
    new = {name: tensor for name, tensor in whole.items() if ".deputies." in name}
    save_file(new, shared / "deputies.safetensors", metadata={"format": "pt"})
    shutil.copy(tmp_path / "stock" / "model.safetensors", shared / "backbone.safetensors")
    shutil.copy(tmp_path / "whole" / "config.json", shared)
    places = dict.fromkeys(load_file(shared / "backbone.safetensors"), "backbone.safetensors")
    assert {f"backbone.{name}" for name in places} == set(whole) - set(new)
    index = {"metadata": {"total_size": 0}, "weight_map": places | dict.fromkeys(new, "deputies.safetensors")}
    (shared / "model.safetensors.index.json").write_text(json.dumps(index))
    mapping = {r"^(?=model\.|lm_head\.)": "backbone."}
    again, info = MoeSummForCausalLM.from_pretrained(shared, key_mapping=mapping, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.no_grad():
        expected = model(**rows).logits
        assert torch.equal(again(**rows).logits, expected)
        again.save_pretrained(tmp_path / "again")  # with its own names
        assert set(load_file(tmp_path / "again" / "model.safetensors")) == set(whole)
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "again")(**rows).logits, expected)


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
    auto = AutoModelForCausalLM if backbone in DECODERS else AutoModelForSeq2SeqLM
    with torch.no_grad():
        output, expected = model(**given, **wanted), lm(**given, **wanted)
        close = {"rtol": 0, "atol": 1e-5}  # weights in a mapped file have other addresses
        assert_close(lm._lm_logits(output.last_hidden_state), expected.logits, **close)
        for name in set(output) & set(expected) - {"cache", "past_key_values"}:
            assert_close(output[name], expected[name], **close)
        alone = model(**without(given, "dataset_ids")).last_hidden_state
        assert not torch.allclose(alone, output.last_hidden_state, atol=1e-2)  # negative control
        model.save_pretrained(tmp_path / "base")
        assert "AutoModel" in json.loads((tmp_path / "base" / "config.json").read_text())["auto_map"]
        assert_close(auto.from_pretrained(tmp_path / "base")(**given).logits, expected.logits, **close)
    model.train()(**given).last_hidden_state.sum().backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []


def test_an_untied_head_is_frozen_in_the_model_without_one(batch, tmp_path):
    stock = tiny_backbone(tie_word_embeddings=False)
    stock.save_pretrained(tmp_path)
    model, given = (
        MoeSummModel.from_backbone(tmp_path, DATASETS, deputy_intermediate_size=8).train(),
        reading_of(batch, "bart"),
    )
    output = model(**given)
    assert_close(output.last_hidden_state, stock.base_model(**without(given, "dataset_ids")).last_hidden_state)
    output.last_hidden_state.sum().backward()
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert unused == ["backbone.model.shared.weight"]  # which an untied BART does not use either


# --- datasets ---


@one_of_each
@pytest.mark.parametrize("init", ["mean", "papers"])
@pytest.mark.parametrize("bias", [False, True])
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
    again.remove_dataset("radio")
    assert_close(again(**given).logits, before, rtol=0, atol=1e-5)


def test_a_dataset_is_removed_and_the_later_ones_move_up(batch):
    model, given = tiny_moesumm(), without(reading_of(batch, "bart"), "dataset_ids")
    with torch.no_grad():
        before = {name: model(**given, dataset=name).logits for name in DATASETS}
        model.remove_dataset("letters")
        assert model.config.datasets == ["news", "papers"]
        for name in model.config.datasets:
            assert torch.equal(model(**given, dataset=name).logits, before[name])
        assert torch.equal(model(**given, dataset_ids=torch.ones(4).long()).logits, before["papers"])


def test_without_dataset_information_names_come_and_go_and_nothing_else(batch):
    model = tiny_moesumm(dataset_aware=False)
    with torch.no_grad():
        before = model(**batch).logits
        model.add_dataset("radio")
        model.remove_dataset("news")
        assert all(d.selectors.weight.shape == (1, 3, 16) for d in model.deputies())
        ids = batch["dataset_ids"]
        assert_close(model(**{**batch, "dataset_ids": torch.where(ids < 0, ids, 2 - ids)}).logits, before)
        # -1 is still the main expert
        assert not torch.allclose(model(**{**batch, "dataset_ids": ids * 0}).logits, before)


def test_a_new_dataset_is_learnt_by_deputies_and_selectors_alone(tmp_path):
    model, rows = tiny_moesumm(), tiny_models.trainable_moesumm("bart", None).rows
    model.add_dataset("radio")
    trained = model.freeze_all_but_deputies()
    assert trained == sum(p.numel() for name, p in model.named_parameters() if ".deputies." in name)
    start, kinds = tiny_models.weights(model), {"trainer": Seq2SeqTrainer, "arguments": Seq2SeqTrainingArguments}
    options = {"max_steps": 3, "learning_rate": 1e-2, "predict_with_generate": True, "generation_max_length": 5}
    trainer = tiny_models.make_trainer(model, [{**row, "dataset_ids": 3} for row in rows], tmp_path, **kinds, **options)
    trainer.train()
    moved = {name for name, p in tiny_models.weights(model).items() if not torch.equal(p, start[name])}
    assert moved == {name for name in start if ".deputies." in name}
    written = torch.tensor(trainer.predict(rows[:4]).predictions)
    ids, names = (
        torch.stack([row["input_ids"] for row in rows[:4]]),
        torch.tensor([row["dataset_ids"] for row in rows[:4]]),
    )
    wanted = model.generate(ids, dataset_ids=names, max_length=5)
    assert torch.equal(written[:, : wanted.shape[1]], wanted)


def test_training_without_datasets_warns_that_deputies_learn_nothing(batch):
    with pytest.warns(UserWarning, match="Pass dataset_ids"):
        tiny_moesumm().train()(**without(batch, "dataset_ids"))


# --- what comes out ---


@one_of_each
def test_the_deputies_of_every_token_can_be_looked_at(backbone, batch):
    model, batch = tiny_moesumm(backbone), for_backbone(batch, backbone)
    wanted = {"output_router_indices": True}
    plain, output = model(**batch), model(**batch, **wanted)
    assert torch.equal(output.logits, plain.logits)
    lengths = {"": 15} if backbone in DECODERS else {"encoder_": 9, "decoder_": 6}
    alone, forced = model(**without(batch, "dataset_ids"), **wanted), model(**batch, **wanted, deputy_id=1)
    for part, length in lengths.items():
        assert f"{part}expert_indices" not in plain
        pairs = list(zip(output[f"{part}expert_indices"], output[f"{part}expert_weights"], strict=True))
        assert len(pairs) == 2
        for i, g in pairs:
            assert i.shape == g.shape == (4, length) and g.dtype == torch.float32
            assert (i[2] == -1).all() and (g[2] == 0).all()  # the row without a dataset
            assert (i[[0, 1, 3]] >= 0).all() and (g[[0, 1, 3]] >= 1 / 3).all() and (g <= 1).all()
        assert all((i == -1).all() for i in alone[f"{part}expert_indices"])
        assert all((i == 1).all() for i in forced[f"{part}expert_indices"])
        assert all((g == 1).all() for g in forced[f"{part}expert_weights"])
    if backbone in DECODERS:
        return
    layer, seen = model.backbone.model.encoder.layers[0], []  # the first layer's, by hand
    hook = layer.fc1.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model(**without(batch, "labels"))
    hook.remove()
    p, index = (seen[0][1] @ layer.deputies.selectors.weight[2].T).softmax(-1).max(-1)
    assert_close(output.encoder_expert_weights[0][1], p)
    assert torch.equal(output.encoder_expert_indices[0][1], index)


def test_a_forced_deputy_is_one_that_is_alone(batch):
    model, only, texts = tiny_moesumm(), tiny_moesumm(num_deputies=1), without(batch, "dataset_ids", "labels")
    with torch.no_grad():
        for deputies, mine in zip(model.deputies(), only.deputies(), strict=True):
            for name in ("up_proj", "up_bias", "down_proj"):
                getattr(mine.experts, name).copy_(getattr(deputies.experts, name)[1:2])
        # a softmax over one deputy is 1
        expected = only(**texts, dataset="news").logits
        assert_close(model(**texts, deputy_id=1).logits, expected, rtol=0, atol=1e-5)
        assert not torch.allclose(model(**texts, deputy_id=2).logits, expected, atol=1e-2)


@one_of_each
def test_states_and_attentions_come_out_as_of_the_backbone(backbone, batch):
    wanted, batch = {"output_hidden_states": True, "output_attentions": True}, for_backbone(batch, backbone)
    model, stock = tiny_moesumm(backbone), tiny_backbone(backbone)
    for each in (model, stock):
        each.set_attn_implementation("eager")
    plain = without(batch, "dataset_ids")
    with torch.no_grad():
        expected, found, doubled = stock(**plain, **wanted), model(**plain, **wanted), model(**batch, **wanted)
        names = [name for name in expected if name.endswith(("states", "attentions"))]
        for name in names:
            assert all(map(torch.equal, expected[name], found[name]))
            assert all(len(x) == 4 for x in doubled[name])
        as_tuple = model(**batch, return_dict=False)
    assert len(names) >= 2 and torch.equal(as_tuple[0], doubled.loss) and torch.equal(as_tuple[1], doubled.logits)


# --- baselines, adapters ---


@each_kind
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


def test_lora_on_the_main_expert_leaves_the_deputies_at_work(batch):
    model = tiny_moesumm()
    with torch.no_grad():
        before = model(**batch).logits
        lora = LoraConfig(r=2, target_modules=["fc1", "fc2"], modules_to_save=["deputies"], task_type="SEQ_2_SEQ_LM")
        adapted = get_peft_model(model, lora)
        assert_close(adapted(**batch).logits, before, rtol=0, atol=1e-5)
        kept = [m for m in adapted.modules() if isinstance(m, DeputyFeedForward)]
        assert len(kept) == 8  # four layers: what was there, and what is trained
        for deputies in kept:
            deputies.experts.down_proj.zero_()
        assert not torch.allclose(adapted(**batch).logits, before, atol=1e-2)
