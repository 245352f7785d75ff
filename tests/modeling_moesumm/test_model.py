"""What every model class keeps, for MoeSumm on every kind of backbone; its loss, its datasets and its baselines."""

import json

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch.testing import assert_close
from transformers import AutoModel, AutoModelForSeq2SeqLM, DynamicCache, T5Config, T5ForConditionalGeneration

from modeling_moesumm import MoeSummConfig, MoeSummForConditionalGeneration, MoeSummModel, MoeSummSeq2SeqLMOutput
from modeling_moesumm.experts_moesumm import DeputyFeedForward
from tests.modeling_moesumm.conftest import (
    DATASETS,
    DECODERS,
    V,
    backbone_config,
    class_for,
    each_backbone,
    each_kind,
    for_backbone,
    gradients,
    surer,
    tiny_backbone,
    tiny_moesumm,
    without,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing_enable`", "ignore:No dataset was given in training"
)


# --- main expert and backbone ---------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize(
    "way", [{}, {"dataset_ids": torch.full((4,), -1)}, {"main_expert_only": True}, {"dataset": None}]
)
def test_the_main_expert_alone_is_the_backbone_bit_for_bit(backbone, way, batch):
    stock, model, batch = tiny_backbone(backbone), tiny_moesumm(backbone), for_backbone(batch, backbone)
    plain = without(batch, "dataset_ids")
    with torch.no_grad():
        expected = stock(**plain)
        found = model(**plain, **way)
        assert torch.equal(found.logits, expected.logits)
        assert_close(found.generation_loss, expected.loss)
        if backbone not in DECODERS:
            assert torch.equal(found.encoder_last_hidden_state, expected.encoder_last_hidden_state)
        # negative control: with datasets the deputies contribute
        assert not torch.allclose(model(**batch).logits, expected.logits, atol=1e-2)


@each_backbone
def test_a_later_token_changes_no_earlier_logits(backbone, texts):
    model, ids = tiny_moesumm(backbone), torch.randint(4, V, (4, 6), generator=torch.Generator().manual_seed(0))
    changed = torch.cat([ids[:, :-1], (ids[:, -1:] + 5) % V], dim=1)
    with torch.no_grad():
        first, second = (model(**texts, decoder_input_ids=x).logits for x in (ids, changed))
    assert_close(first[:, :-1], second[:, :-1], rtol=0, atol=1e-5)
    assert not torch.allclose(first[:, -1], second[:, -1], atol=1e-2)


# --- the loss -------------------------------------------------------------------------------------------------------


def equations_8_and_9(full, main, batch):
    """MoeSumm, Eq. 8-9, token by token -> generation loss and margin loss, both summed over real tokens."""
    generation, margin = 0, 0
    for row, labels in enumerate(batch["labels"].tolist()):
        for t, y in enumerate(labels):
            if y == -100:
                continue
            p_full = (full[row, t] - full[row, t].logsumexp(0)).exp()[y]
            p_main = (main[row, t] - main[row, t].logsumexp(0)).exp()[y]
            m = p_full - p_main
            generation = generation - p_full.log()
            margin = margin + (1 - p_full) * (1 - m**5) / 2
    return generation, margin


@each_kind
def test_the_loss_is_equations_8_and_9_with_all_gradients(backbone, batch):
    options = {"margin_loss_coef": 0.7} | ({"deputy_init_std": 1.0} if backbone in DECODERS else {})
    model, slow = (surer(tiny_moesumm(backbone, **options)).double().train() for _ in range(2))
    batch, shift = for_backbone(batch, backbone), int(backbone in DECODERS)
    reading = without(batch, "labels")
    if not shift:
        reading["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    full, main = slow(**reading).logits, slow(**without(reading, "dataset_ids")).logits
    # every other label is what the full model says, so that some margins are large
    sure = (batch["labels"] != -100) & (torch.arange(batch["labels"].shape[1]) % 2 == 0)
    batch = {**reading, "labels": torch.where(sure, full.argmax(-1).roll(shift, 1), batch["labels"])}
    output = model(**batch)
    output.loss.backward()
    count = (batch["labels"] != -100).sum()
    targets = {"labels": batch["labels"][:, shift:]}  # of a decoder, the tokens after these positions
    generation, margin = (total / count for total in equations_8_and_9(full, main, targets))
    close = {"rtol": 1e-4, "atol": 1e-6} if shift else {}  # RMSNorm rounds to float32
    assert_close(output.generation_loss, generation, **close)
    assert_close(output.margin_loss, margin, **close)
    assert_close(output.loss, generation + 0.7 * margin, **close)
    (generation + 0.7 * margin).backward()
    for name, gradient in gradients(slow).items():
        assert_close(model.get_parameter(name).grad, gradient, msg=name, **close)
    # negative control: gradients flow through the second pass as well
    slow.zero_grad()
    generation, margin = equations_8_and_9(slow(**reading).logits, main.detach(), targets)
    ((generation + 0.7 * margin) / count).backward()
    name = f"backbone.model.{'layers.1.mlp.gate_proj' if shift else 'decoder.layers.1.fc1'}.weight"
    apart = {"rtol": 1e-3, "atol": 1e-5} | close
    assert not torch.allclose(model.get_parameter(name).grad, slow.get_parameter(name).grad, **apart)


def test_the_margin_is_off_with_a_coefficient_of_zero_and_zero_without_deputies(batch):
    off = tiny_moesumm(margin_loss_coef=0)(**batch)
    assert off.margin_loss is None and torch.equal(off.loss, off.generation_loss)
    model = tiny_moesumm()
    alone = model(**without(batch, "dataset_ids"))
    p = (-F.cross_entropy(alone.logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")).exp()
    real = batch["labels"].flatten() != -100
    assert_close(alone.margin_loss, ((1 - p) / 2)[real].mean())
    explicit = model(**{**batch, "dataset_ids": torch.full((4,), -1)})  # the same, by two passes or one
    assert_close(explicit.loss, alone.loss)
    assert not torch.allclose(model(**batch).margin_loss, alone.margin_loss)


def test_labels_with_encoder_outputs_need_the_texts_for_the_margin(batch):
    model = tiny_moesumm()
    states = model.get_encoder()(batch["input_ids"], batch["attention_mask"], dataset_ids=batch["dataset_ids"])
    given = without(batch, "input_ids")
    with pytest.raises(ValueError, match="labels with encoder_outputs.*Pass input_ids"):
        model(**given, encoder_outputs=states)
    with pytest.raises(ValueError, match="labels with cache"):
        model(**batch, cache=DynamicCache())
    model.config.margin_loss_coef = 0
    assert_close(model(**given, encoder_outputs=states).loss, model(**batch).loss)


# --- gradients ------------------------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("options", [{}, {"dataset_aware": False}, {"main_expert": False}, {"margin_loss_coef": 0}])
def test_every_trainable_parameter_gets_a_gradient(backbone, options, batch):
    batch = for_backbone(batch, backbone)
    model = tiny_moesumm(backbone, **options).train()
    for ids in (batch["dataset_ids"], torch.zeros(4, dtype=torch.long), torch.full((4,), -1)):
        model.zero_grad()
        model(**{**batch, "dataset_ids": ids}).loss.backward()
        assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
        contributed = any(g.abs().max() > 0 for name, g in gradients(model).items() if "selectors" in name)
        assert contributed == (bool((ids >= 0).any()) or not model.config.main_expert)


@pytest.mark.parametrize("backbone", ["bart", "llama"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_deputies_alone_learn_under_gradient_checkpointing(reentrant, backbone, batch):
    model, batch = tiny_moesumm(backbone).train(), for_backbone(batch, backbone)
    model.freeze_all_but_deputies()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    model(**batch).loss.backward()
    assert all(("deputies" in name) == (p.grad is not None) for name, p in model.named_parameters())


@pytest.mark.parametrize("backbone", ["bart", "llama"])
def test_deputies_alone_get_the_gradients_that_they_get_with_the_main_expert(backbone, batch):
    """Alone, the main expert's pass has no graph."""
    batch, found = for_backbone(batch, backbone), []
    for frozen in (False, True):
        model = surer(tiny_moesumm(backbone)).train()
        if frozen:
            model.freeze_all_but_deputies()
        output = model(**batch)
        output.loss.backward()
        named = gradients(model).items()
        found.append((output.margin_loss, {name: g for name, g in named if ".deputies." in name}))
    assert_close(found[0], found[1])


# --- saving and loading ---------------------------------------------------------------------------------------------


@each_kind
def test_a_backbones_checkpoint_lacks_deputies_and_selectors_only_and_these_are_initialised(backbone, tmp_path, batch):
    tiny_backbone(backbone).save_pretrained(tmp_path)
    config = MoeSummConfig(
        text_config=backbone_config(backbone), datasets=DATASETS, deputy_intermediate_size=64, deputy_init_std=0.1
    )
    load = class_for(backbone).from_pretrained
    names = {"key_mapping": {r"^model\.": "backbone.model.", r"^lm_head\.": "backbone.lm_head."}}
    model, report = load(tmp_path, config=config, output_loading_info=True, **names if backbone in DECODERS else {})
    batch, initial = for_backbone(batch, backbone), 0.2 if backbone in DECODERS else 0.3
    new = {name for name, _ in model.named_parameters() if ".deputies." in name}
    assert set(report["missing_keys"]) == new and not report["unexpected_keys"] and not report["mismatched_keys"]
    for name, p in model.named_parameters():
        assert torch.isfinite(p).all(), name
        if name in new:
            std = 0 if "bias" in name else 0.1 if "down" in name else initial
            assert abs(p.std().item() - std) < 0.2 * std + 1e-9, name
    with torch.no_grad():
        expected = tiny_backbone(backbone)(**without(batch, "dataset_ids")).logits
        assert_close(model(**without(batch, "dataset_ids")).logits, expected, rtol=0, atol=1e-6)


@each_kind
def test_from_backbone_starts_as_the_backbone_and_takes_its_generation_config(backbone, batch, tmp_path):
    stock = tiny_backbone(backbone)
    stock.generation_config.num_beams = 3
    stock.save_pretrained(tmp_path / "stock")
    options, batch = {"deputy_intermediate_size": 8, "margin_loss_coef": 0}, for_backbone(batch, backbone)
    model = class_for(backbone).from_backbone(tmp_path / "stock", DATASETS, **options)
    assert model.config.datasets == DATASETS and model.generation_config.num_beams == 3
    assert {name: getattr(model.config, name) for name in options} == options
    with torch.no_grad():
        expected = stock(**without(batch, "dataset_ids")).logits
        assert_close(model(**batch).logits, expected, rtol=0, atol=1e-5)
    model.save_pretrained(tmp_path / "moesumm")
    assert json.loads((tmp_path / "moesumm" / "generation_config.json").read_text())["num_beams"] == 3


def test_what_is_no_backbone_is_refused(tmp_path):
    kind = MoeSummForConditionalGeneration
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(tmp_path / "t5")
    with pytest.raises(OSError, match="backbone=T5ForConditionalGeneration"):
        kind.from_backbone(tmp_path / "t5", ["news"])
    marian = backbone_config().to_dict() | {"model_type": "marian", "pad_token_id": 1}
    with pytest.raises(ValueError, match="MarianDecoderLayer, MarianEncoderLayer"):
        kind(MoeSummConfig(text_config=marian))
    tiny_backbone().save_pretrained(tmp_path / "bart")
    with pytest.raises((RuntimeError, ValueError, OSError), match=r"mismatch|size"):
        kind.from_pretrained(tmp_path / "bart", config=MoeSummConfig(text_config=backbone_config(d_model=32)))


@each_backbone
def test_the_model_without_a_head_opens_the_same_checkpoints(backbone, batch, tmp_path):
    lm = tiny_moesumm(backbone)
    lm.save_pretrained(tmp_path / "lm")
    model = AutoModel.from_pretrained(tmp_path / "lm")
    assert type(model) is MoeSummModel and set(model.state_dict()) == set(lm.state_dict())
    assert model.lora_config().task_type == "FEATURE_EXTRACTION"
    config = lm.lora_config(r=4)
    assert (config.r, config.task_type, config.target_modules) == (4, "SEQ_2_SEQ_LM", {"q_proj", "v_proj"})
    assert config.modules_to_save == ["deputies"]
    reading = without(batch, "labels") | {
        "decoder_input_ids": lm.prepare_decoder_input_ids_from_labels(batch["labels"])
    }
    with torch.no_grad():
        output = model(**reading, output_router_indices=True, output_hidden_states=True)
        expected = lm(**reading, output_router_indices=True, output_hidden_states=True)
        assert_close(lm._lm_logits(output.last_hidden_state), expected.logits)
        for name in ("encoder_last_hidden_state", "encoder_hidden_states", "decoder_hidden_states"):
            assert_close(output[name], expected[name])
        for name in ("encoder_expert_indices", "decoder_expert_indices", "decoder_expert_weights"):
            assert_close(output[name], expected[name])
        alone = model(**without(reading, "dataset_ids")).last_hidden_state
        assert not torch.allclose(alone, output.last_hidden_state, atol=1e-2)  # negative control
        model.save_pretrained(tmp_path / "base")
        assert "AutoModel" in json.loads((tmp_path / "base" / "config.json").read_text())["auto_map"]
        again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "base")
        assert_close(again(**reading).logits, expected.logits)
    model.train()(**reading).last_hidden_state.sum().backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []


@pytest.mark.parametrize("tied", [True, False])
def test_the_model_without_a_head_starts_from_a_backbone_and_trains(tied, batch, tmp_path):
    stock = tiny_backbone(tie_word_embeddings=tied)
    stock.save_pretrained(tmp_path)
    model = MoeSummModel.from_backbone(tmp_path, DATASETS, deputy_intermediate_size=8).train()
    reading = without(batch, "labels", "dataset_ids") | {"decoder_input_ids": batch["input_ids"]}
    output = model(**reading, dataset="news")
    assert_close(output.last_hidden_state, stock.base_model(**reading).last_hidden_state)
    output.last_hidden_state.sum().backward()
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert unused == ([] if tied else ["backbone.model.shared.weight"])  # which an untied BART does not use either


# --- datasets -------------------------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("init", ["mean", "papers"])
def test_a_dataset_is_added_without_changing_what_there_is(backbone, init, batch, tmp_path):
    batch = for_backbone(batch, backbone)
    model = tiny_moesumm(backbone)
    model.deputies()[0].selectors.weight.requires_grad_(False)
    with torch.no_grad():
        before = model(**batch)
        assert model.add_dataset("radio", init=init) == 3
        after = model(**batch)
        assert torch.equal(before.logits, after.logits) and torch.equal(before.loss, after.loss)
        new = model(**{**batch, "dataset_ids": torch.full((4,), 3)}).logits
        old = model(**{**batch, "dataset_ids": torch.full((4,), 2)}).logits
        assert torch.equal(new, old) == (init == "papers")
        for deputies in model.deputies():
            W = deputies.selectors.weight
            assert_close(W[3], W[:3].mean(0) if init == "mean" else W[2])
    assert [d.selectors.weight.requires_grad for d in model.deputies()] == [i > 0 for i in range(model.num_layers)]
    model.save_pretrained(tmp_path)
    again = class_for(backbone).from_pretrained(tmp_path)
    assert again.config.datasets == [*DATASETS, "radio"]
    assert_close(
        again(**without(batch, "dataset_ids"), dataset="radio").logits,
        model(**{**batch, "dataset_ids": [3] * 4}).logits,
    )


def test_a_dataset_is_removed_and_the_later_ones_move_up(batch):
    model = tiny_moesumm()
    given = without(batch, "dataset_ids", "labels")
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
        assert not torch.allclose(
            model(**{**batch, "dataset_ids": ids * 0}).logits, before
        )  # -1 is still the main expert


def test_wrong_names_of_datasets_are_refused():
    model = tiny_moesumm()
    with pytest.raises(ValueError, match="'news' twice"):
        model.add_dataset("news")
    with pytest.raises(ValueError, match="empty name"):
        model.add_dataset("")
    with pytest.raises(ValueError, match="init='paper'.*'papers'"):
        model.add_dataset("radio", init="paper")
    with pytest.raises(ValueError, match="dataset='radio' cannot be removed"):
        model.remove_dataset("radio")
    for name in ("letters", "papers"):
        model.remove_dataset(name)
    with pytest.raises(ValueError, match="dataset='news' is the only dataset"):
        model.remove_dataset("news")


@pytest.mark.parametrize(
    "given, message",
    [
        ({"dataset": "newz"}, r"dataset='newz'.*'news', 'letters', 'papers'.*Did you mean 'news'.*dataset=None"),
        ({"dataset": ["news", "letters"]}, r"2 names for a batch of 4 rows"),
        ({"dataset_ids": torch.tensor([0, 1, 2, 3])}, r"dataset_ids contains 3.*0 for 'news'"),
        ({"dataset_ids": torch.tensor([0, 1, -2, 0])}, r"dataset_ids contains -2.*-1"),
        ({"dataset_ids": torch.tensor([0, 1])}, r"shape \(2,\).*\(4,\)"),
        ({"dataset_ids": torch.rand(4)}, r"dataset_ids.*float32"),
        ({"dataset": "news", "dataset_ids": torch.zeros(4).long()}, r"Both dataset and dataset_ids"),
        ({"deputy_id": 3}, r"deputy_id=3.*0 to 2"),
        ({"deputy_id": 0, "main_expert_only": True}, r"exclude each other"),
    ],
)
def test_wrong_input_is_refused(given, message, texts):
    model, texts = tiny_moesumm(), without(texts, "dataset_ids")
    for call in (model, model.get_encoder(), lambda **inputs: model.generate(**inputs, max_new_tokens=3)):
        with pytest.raises(ValueError, match=message):
            call(**texts, **given)


def test_texts_and_summaries_that_are_too_long_or_empty_are_refused(batch):
    model = tiny_moesumm()
    with pytest.raises(ValueError, match=r"100000 tokens.*40 positions.*truncation=True, max_length=40"):
        model(torch.full((1, 100_000), 5))
    with pytest.raises(ValueError, match=r"41 tokens.*40 positions"):
        model(**without(batch, "labels"), labels=torch.full((4, 41), 5))
    with pytest.raises(ValueError, match="no tokens"):
        model(torch.empty(2, 0, dtype=torch.long))
    with pytest.raises(ValueError, match="input_ids, inputs_embeds and encoder_outputs"):
        model(decoder_input_ids=batch["labels"])


def test_training_without_datasets_warns_that_deputies_learn_nothing(batch):
    model = tiny_moesumm().train()
    with pytest.warns(UserWarning, match="Pass dataset_ids"):
        model(**without(batch, "dataset_ids"))


# --- parts, analysis, baselines -------------------------------------------------------------------------------------


def test_the_deputies_of_every_token_can_be_looked_at(batch):
    model = tiny_moesumm()
    plain = model(**batch)
    assert plain.encoder_expert_indices is plain.decoder_expert_weights is None
    output = model(**batch, output_router_indices=True)
    assert isinstance(output, MoeSummSeq2SeqLMOutput) and torch.equal(output.logits, plain.logits)
    for index, gate, length in (
        (output.encoder_expert_indices, output.encoder_expert_weights, 9),
        (output.decoder_expert_indices, output.decoder_expert_weights, 6),
    ):
        assert len(index) == len(gate) == 2
        for i, g in zip(index, gate, strict=True):
            assert i.shape == g.shape == (4, length) and g.dtype == torch.float32
            assert (i[2] == -1).all() and (g[2] == 0).all()  # the row without a dataset
            others = [0, 1, 3]
            assert (i[others] >= 0).all() and (g[others] >= 1 / 3).all() and (g[others] <= 1).all()
    # the first layer's, by hand
    layer, seen = model.backbone.model.encoder.layers[0], []
    hook = layer.fc1.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model(**without(batch, "labels"))
    hook.remove()
    p, index = (seen[0][1] @ layer.deputies.selectors.weight[2].T).softmax(-1).max(-1)
    assert_close(output.encoder_expert_weights[0][1], p)
    assert torch.equal(output.encoder_expert_indices[0][1], index)
    alone = model(**without(batch, "dataset_ids"), output_router_indices=True)
    assert all((i == -1).all() for i in alone.encoder_expert_indices + alone.decoder_expert_indices)


def test_a_forced_deputy_is_taken_by_all_with_the_weight_one(batch):
    model, texts = tiny_moesumm(), without(batch, "dataset_ids", "labels")
    output = model(**texts, deputy_id=1, output_router_indices=True)
    assert all((i == 1).all() for i in output.encoder_expert_indices) and all(
        (g == 1).all() for g in output.decoder_expert_weights
    )
    only = tiny_moesumm(num_deputies=1)
    with torch.no_grad():
        for deputies, mine in zip(model.deputies(), only.deputies(), strict=True):
            for name in ("up_proj", "up_bias", "down_proj"):
                getattr(mine.experts, name).copy_(getattr(deputies.experts, name)[1:2])
        # a softmax over one deputy is 1
        assert_close(only(**texts, dataset="news").logits, output.logits, rtol=0, atol=1e-5)
        assert not torch.allclose(model(**texts, deputy_id=2).logits, output.logits, atol=1e-2)


@each_kind
def test_flat_moe_starts_as_its_backbone_and_knows_no_datasets(backbone, batch, tmp_path):
    stock = tiny_backbone(backbone)
    stock.save_pretrained(tmp_path)
    model = class_for(backbone).from_backbone(tmp_path, DATASETS, num_deputies=2, main_expert=False)
    batch = for_backbone(batch, backbone)
    names = {name for name, _ in model.named_parameters()}
    assert not any(
        name.endswith(("fc1.weight", "fc1.bias", "fc2.weight", "_proj.weight")) for name in names if "attn" not in name
    )
    plain = without(batch, "dataset_ids")
    with torch.no_grad():
        expected = stock(**plain)
        output = model(**plain, output_router_indices=True)
        assert_close(output.logits, expected.logits, rtol=0, atol=1e-5)
        assert_close(output.loss, expected.loss)
        assert torch.equal(model(**batch).logits, output.logits)  # datasets are nothing to it
        indices = output.expert_indices if backbone in DECODERS else output.encoder_expert_indices
        assert {int(i) for index in indices for i in index.unique()} == {0, 1}
        for deputies in model.deputies():  # negative control
            deputies.experts.up_proj[1].add_(0.5)
        assert not torch.allclose(model(**plain).logits, expected.logits, atol=1e-2)
    with pytest.raises(ValueError, match="main_expert_only=True, but this model has no main expert"):
        model(**plain, main_expert_only=True)
    model.train()(**plain).loss.backward()
    assert all(d.selectors.weight.grad.abs().max() > 0 for d in model.deputies())


# --- ways of running ------------------------------------------------------------------------------------------------


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


def test_the_backbone_itself_is_not_to_be_called(texts):
    model, texts = tiny_moesumm(), without(texts, "dataset_ids")
    with pytest.raises(RuntimeError, match="called without routing"):
        model.backbone(**texts)


def test_states_and_attentions_come_out_as_of_the_backbone(batch):
    wanted = {"output_hidden_states": True, "output_attentions": True}
    model, stock = tiny_moesumm(), tiny_backbone()
    for each in (model, stock):
        each.set_attn_implementation("eager")
    plain = without(batch, "dataset_ids")
    with torch.no_grad():
        expected, found = stock(**plain, **wanted), model(**plain, **wanted)
        for name in ("encoder_hidden_states", "decoder_hidden_states", "encoder_attentions", "cross_attentions"):
            for a, b in zip(expected[name], found[name], strict=True):
                assert torch.equal(a, b)
        doubled = model(**batch, **wanted)
        assert all(len(x) == 4 for x in doubled.decoder_attentions + doubled.encoder_hidden_states)
        as_tuple = model(**batch, return_dict=False)
    assert torch.equal(as_tuple[0], doubled.loss) and torch.equal(as_tuple[1], doubled.logits)
