"""What every model class keeps, for MoeSumm on three backbones; its loss, its datasets and its baselines."""

import copy
import json
import sys

import pytest
import torch
import torch.nn.functional as F
from peft import IA3Config, LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch.testing import assert_close
from transformers import (
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertModel,
    DynamicCache,
    T5Config,
    T5ForConditionalGeneration,
)

from modeling_moesumm import MoeSummConfig, MoeSummForConditionalGeneration, MoeSummOutput
from modeling_moesumm.experts_moesumm import Deputies
from tests.modeling_moesumm.conftest import (
    DATASETS,
    V,
    backbone_config,
    each_backbone,
    gradients,
    surer,
    tiny_backbone,
    tiny_moesumm,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing_enable`", "ignore:No dataset was given in training"
)


def without(batch, *names):
    return {name: value for name, value in batch.items() if name not in names}


# --- main expert and backbone ---------------------------------------------------------------------------------------


@each_backbone
@pytest.mark.parametrize(
    "way", [{}, {"dataset_ids": torch.full((4,), -1)}, {"main_expert_only": True}, {"dataset": None}]
)
def test_the_main_expert_alone_is_the_backbone_bit_for_bit(backbone, way, batch):
    stock, model, plain = tiny_backbone(backbone), tiny_moesumm(backbone), without(batch, "dataset_ids")
    with torch.no_grad():
        expected = stock(**plain)
        found = model(**plain, **way)
        assert torch.equal(found.logits, expected.logits)
        assert_close(found.generation_loss, expected.loss)
        assert torch.equal(found.encoder_last_hidden_state, expected.encoder_last_hidden_state)
        # negative control: with datasets the deputies speak
        assert not torch.allclose(model(**batch).logits, expected.logits, atol=1e-2)


@each_backbone
def test_a_new_model_starts_as_its_backbone(backbone, batch):
    """Silent deputies: also with datasets."""
    with torch.no_grad():
        expected = tiny_backbone(backbone)(**without(batch, "dataset_ids")).logits
        assert_close(tiny_moesumm(backbone, silent=True)(**batch).logits, expected, rtol=0, atol=1e-5)


@each_backbone
def test_padding_and_company_change_nothing(backbone, batch):
    """A row of a mixed batch is what it is alone, without its padding and among other datasets."""
    model = tiny_moesumm(backbone)
    with torch.no_grad():
        together = model(**batch).logits
        for row in range(4):
            source, target = int(batch["attention_mask"][row].sum()), int((batch["labels"][row] != -100).sum())
            # mBART's decoder starts with the last token of the labels, whatever their length
            alone = {
                "input_ids": batch["input_ids"][row : row + 1, :source],
                "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(batch["labels"])[
                    row : row + 1, :target
                ],
                "dataset_ids": batch["dataset_ids"][row : row + 1],
            }
            found = model(**alone).logits[0]
            assert_close(together[row, :target], found, rtol=0, atol=1e-5)
            other = model(**{**alone, "dataset_ids": (alone["dataset_ids"] + 2) % 3}).logits[0]
            assert not torch.allclose(found, other, atol=1e-3)  # negative control
        more = {name: F.pad(x, (0, 7)) if name in ("input_ids", "attention_mask") else x for name, x in batch.items()}
        assert_close(model(**more).logits, together, rtol=0, atol=1e-5)


@each_backbone
def test_a_later_token_changes_no_earlier_logits(backbone, texts):
    model, ids = tiny_moesumm(backbone), torch.randint(4, V, (4, 6), generator=torch.Generator().manual_seed(0))
    changed = torch.cat([ids[:, :-1], (ids[:, -1:] + 5) % V], dim=1)
    with torch.no_grad():
        first, second = (model(**texts, decoder_input_ids=x).logits for x in (ids, changed))
    assert_close(first[:, :-1], second[:, :-1], rtol=0, atol=1e-5)
    assert not torch.allclose(first[:, -1], second[:, -1], atol=1e-2)


@each_backbone
def test_two_eval_passes_agree_bit_for_bit(backbone, batch):
    model = tiny_moesumm(backbone, changes={"dropout": 0.2, "activation_dropout": 0.2})
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, model(**batch).logits)
        model.train()
        assert not torch.equal(model(**batch).logits, model(**batch).logits)


def test_a_copy_is_a_model_of_its_own(batch):
    model = tiny_moesumm()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
        assert not torch.allclose(model(**batch).logits, other(**batch).logits)
        assert (other(**batch).logits == 0).all()


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


@each_backbone
def test_the_loss_is_equations_8_and_9_with_all_gradients(backbone, batch):
    model, slow = (surer(tiny_moesumm(backbone, margin_loss_coef=0.7)).double().train() for _ in range(2))
    reading = {
        **without(batch, "labels"),
        "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(batch["labels"]),
    }
    full, main = slow(**reading).logits, slow(**without(reading, "dataset_ids")).logits
    # every other label is what the full model says, so that some margins are large
    sure = (batch["labels"] != -100) & (torch.arange(6) % 2 == 0)
    batch = {**reading, "labels": torch.where(sure, full.argmax(-1), batch["labels"])}
    output = model(**batch)
    output.loss.backward()
    count = (batch["labels"] != -100).sum()
    generation, margin = (total / count for total in equations_8_and_9(full, main, batch))
    assert_close(output.generation_loss, generation)
    assert_close(output.margin_loss, margin)
    assert_close(output.loss, generation + 0.7 * margin)
    (generation + 0.7 * margin).backward()
    for name, gradient in gradients(slow).items():
        assert_close(model.get_parameter(name).grad, gradient, msg=name)
    # negative control: gradients flow through the second pass as well
    slow.zero_grad()
    generation, margin = equations_8_and_9(slow(**reading).logits, main.detach(), batch)
    ((generation + 0.7 * margin) / count).backward()
    name = "backbone.model.decoder.layers.1.fc1.weight"
    assert not torch.allclose(model.get_parameter(name).grad, slow.get_parameter(name).grad, rtol=1e-3, atol=1e-5)


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


@pytest.mark.parametrize("coef", [0.0, 1.0])
def test_micro_batches_add_up_to_the_whole_batch(coef, batch):
    model = tiny_moesumm(margin_loss_coef=coef)
    items = (batch["labels"] != -100).sum()
    whole = model(**batch, num_items_in_batch=items)
    assert_close(whole.loss, model(**batch).loss)
    parts = [{name: value[rows] for name, value in batch.items()} for rows in (slice(0, 1), slice(1, 4))]
    assert_close(sum(model(**part, num_items_in_batch=items).loss for part in parts), whole.loss)
    assert not torch.allclose(sum(model(**part).loss for part in parts) / 2, whole.loss, rtol=1e-4)  # means of means


def test_a_batch_without_labels_to_learn_gives_zero(batch):
    output = tiny_moesumm().train()(**{**batch, "labels": torch.full_like(batch["labels"], -100)})
    assert output.loss == 0
    output.loss.backward()


def test_labels_with_encoder_outputs_need_the_texts_for_the_margin(batch):
    model = tiny_moesumm()
    states = model.get_encoder()(batch["input_ids"], batch["attention_mask"], dataset_ids=batch["dataset_ids"])
    given = without(batch, "input_ids")
    with pytest.raises(ValueError, match="labels with encoder_outputs.*Pass input_ids"):
        model(**given, encoder_outputs=states)
    with pytest.raises(ValueError, match="labels with past_key_values"):
        model(**batch, past_key_values=DynamicCache())
    model.config.margin_loss_coef = 0
    assert_close(model(**given, encoder_outputs=states).loss, model(**batch).loss)


# --- gradients ------------------------------------------------------------------------------------------------------


@each_backbone
@pytest.mark.parametrize("options", [{}, {"dataset_aware": False}, {"main_expert": False}, {"margin_loss_coef": 0}])
def test_every_trainable_parameter_gets_a_gradient(backbone, options, batch):
    model = tiny_moesumm(backbone, **options).train()
    for ids in (batch["dataset_ids"], torch.zeros(4, dtype=torch.long), torch.full((4,), -1)):
        model.zero_grad()
        model(**{**batch, "dataset_ids": ids}).loss.backward()
        assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
        spoken = any(g.abs().max() > 0 for name, g in gradients(model).items() if "selectors" in name)
        assert spoken == (bool((ids >= 0).any()) or not model.config.main_expert)


@each_backbone
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(backbone, reentrant, batch):
    plain, checkpointed = tiny_moesumm(backbone).train(), tiny_moesumm(backbone).train()
    checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    ran = []
    checkpointed.backbone.model.encoder.layers[0].fc1.register_forward_hook(lambda *_: ran.append(1))
    for model in (plain, checkpointed):
        model(**batch).loss.backward()
    assert len(ran) == 2  # it was on: the layer ran again in the backward pass
    for name, gradient in gradients(plain).items():
        assert_close(checkpointed.get_parameter(name).grad, gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_two_forward_passes_before_one_backward_pass_do_not_mix(reentrant, batch):
    other = {name: value[:2] for name, value in batch.items()} | {"dataset_ids": torch.tensor([1, -1])}
    found = []
    for together in (True, False):
        model = tiny_moesumm().train()
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if together:
            (model(**batch).loss + model(**other).loss + model(**without(batch, "dataset_ids")).loss).backward()
        else:
            for each in (batch, other, without(batch, "dataset_ids")):
                model(**each).loss.backward()
        found.append(gradients(model))
    for name, gradient in found[1].items():
        assert_close(found[0][name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("reentrant", [False, True])
def test_deputies_alone_learn_under_gradient_checkpointing(reentrant, batch):
    model = tiny_moesumm().train()
    model.train_deputies_only()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    model(**batch).loss.backward()
    assert all(("deputies" in name) == (p.grad is not None) for name, p in model.named_parameters())


# --- saving and loading ---------------------------------------------------------------------------------------------


@each_backbone
@pytest.mark.parametrize("options", [{}, {"dataset_aware": False}, {"main_expert": False}])
def test_saved_and_loaded_it_gives_the_same_logits(backbone, options, batch, tmp_path):
    model = tiny_moesumm(backbone, **options)
    model.save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert type(again) is MoeSummForConditionalGeneration and again.config.datasets == DATASETS
    with torch.no_grad():
        expected = model(**batch).logits
        assert_close(again(**batch).logits, expected, rtol=0, atol=1e-5)
        assert all(torch.equal(p, again.get_parameter(name)) for name, p in model.named_parameters())
        assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in model.parameters()]
        again.deputies()[0].experts.up_proj.add_(0.3)  # negative control
        assert not torch.allclose(expected, again(**batch).logits)


@each_backbone
def test_a_backbones_checkpoint_lacks_deputies_and_selectors_only_and_these_are_initialised(backbone, tmp_path, batch):
    tiny_backbone(backbone).save_pretrained(tmp_path)
    config = MoeSummConfig(
        text_config=backbone_config(backbone), datasets=DATASETS, deputy_size=64, deputy_output_std=0.1
    )
    model, report = MoeSummForConditionalGeneration.from_pretrained(tmp_path, config=config, output_loading_info=True)
    new = {name for name, _ in model.named_parameters() if ".deputies." in name}
    assert set(report["missing_keys"]) == new and not report["unexpected_keys"] and not report["mismatched_keys"]
    for name, p in model.named_parameters():
        assert torch.isfinite(p).all(), name
        if name in new:
            std = 0 if "bias" in name else 0.1 if "down" in name else 0.3
            assert abs(p.std().item() - std) < 0.2 * std + 1e-9, name
    with torch.no_grad():
        expected = tiny_backbone(backbone)(**without(batch, "dataset_ids")).logits
        assert_close(model(**without(batch, "dataset_ids")).logits, expected, rtol=0, atol=1e-6)


@each_backbone
def test_from_backbone_starts_from_the_pretrained_weights(backbone, batch, tmp_path):
    stock = tiny_backbone(backbone)
    stock.generation_config.num_beams = 3
    stock.to(torch.bfloat16).save_pretrained(tmp_path / "stock")
    torch.manual_seed(0)
    model = MoeSummForConditionalGeneration.from_backbone(
        tmp_path / "stock", DATASETS, deputy_size=8, margin_loss_coef=0
    )
    assert model.dtype == torch.float32 and not model.training and model.generation_config.num_beams == 3
    assert (model.config.datasets, model.config.deputy_size, model.config.margin_loss_coef) == (DATASETS, 8, 0)
    with torch.no_grad():
        expected = stock.float()(**without(batch, "dataset_ids")).logits
        assert_close(model(**batch).logits, expected, rtol=0, atol=1e-5)
    model.save_pretrained(tmp_path / "moesumm")
    assert str(tmp_path) not in (tmp_path / "moesumm" / "config.json").read_text()
    assert json.loads((tmp_path / "moesumm" / "generation_config.json").read_text())["num_beams"] == 3
    half = MoeSummForConditionalGeneration.from_backbone(tmp_path / "stock", DATASETS, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_what_is_no_backbone_is_refused(tmp_path):
    kind = MoeSummForConditionalGeneration
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(tmp_path / "t5")
    with pytest.raises(ValueError, match="backbone=T5ForConditionalGeneration"):
        kind.from_backbone(tmp_path / "t5", ["news"])
    marian = backbone_config().to_dict() | {"model_type": "marian", "pad_token_id": 1}
    with pytest.raises(ValueError, match="MarianDecoderLayer, MarianEncoderLayer cannot"):
        kind(MoeSummConfig(text_config=marian))
    small = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 32,
    }
    BertModel(BertConfig(**small)).save_pretrained(tmp_path / "bert")
    with pytest.raises(OSError, match="'bert' has no encoder with a decoder"):
        kind.from_backbone(tmp_path / "bert", ["news"])
    tiny_moesumm().save_pretrained(tmp_path / "moesumm")
    with pytest.raises(OSError, match="'moesumm' model already.*from_pretrained"):
        kind.from_backbone(tmp_path / "moesumm", ["news"])
    with pytest.raises(OSError, match="could not be opened as a backbone.*facebook/bart-large"):
        kind.from_backbone(tmp_path / "nothing", ["news"])
    tiny_backbone().save_pretrained(tmp_path / "bart")
    with pytest.raises(ValueError, match="'num_deputy'.*Did you mean 'num_deputies'"):
        kind.from_backbone(tmp_path / "bart", ["news"], num_deputy=3)
    with pytest.raises(ValueError, match=r"model_type='bart'.*from_backbone\(name_or_path"):
        kind.from_pretrained(tmp_path / "bart")
    with pytest.raises(RuntimeError, match=r"mismatch|size"):
        kind.from_pretrained(tmp_path / "bart", config=MoeSummConfig(text_config=backbone_config(d_model=32)))


def test_a_damaged_checkpoint_says_so(tmp_path):
    tiny_moesumm().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(OSError, match="truncated or damaged"):
        MoeSummForConditionalGeneration.from_pretrained(tmp_path)


def test_new_tokens_find_room_and_travel(batch, tmp_path):
    model = tiny_moesumm()
    with torch.no_grad():
        before = model(**batch).logits
        model.resize_token_embeddings(V + 3)
        assert model.vocab_size == model.config.vocab_size == V + 3
        assert_close(model(**batch).logits[..., :V], before)
    model.save_pretrained(tmp_path)
    assert MoeSummForConditionalGeneration.from_pretrained(tmp_path)(**batch).logits.shape[-1] == V + 3


# --- datasets -------------------------------------------------------------------------------------------------------


@each_backbone
@pytest.mark.parametrize("init", ["mean", "papers"])
def test_a_dataset_is_added_without_changing_what_there_is(backbone, init, batch, tmp_path):
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
    assert [d.selectors.weight.requires_grad for d in model.deputies()] == [False, True, True, True]
    model.save_pretrained(tmp_path)
    again = MoeSummForConditionalGeneration.from_pretrained(tmp_path)
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


def test_wrong_names_of_datasets_are_named_with_the_mend():
    model = tiny_moesumm()
    with pytest.raises(ValueError, match="names 'news' twice"):
        model.add_dataset("news")
    with pytest.raises(ValueError, match="empty name"):
        model.add_dataset("")
    with pytest.raises(ValueError, match="init='paper' is not known: Did you mean 'papers'"):
        model.add_dataset("radio", init="paper")
    with pytest.raises(ValueError, match="'radio' is not known, so it cannot be removed"):
        model.remove_dataset("radio")
    for name in ("letters", "papers"):
        model.remove_dataset(name)
    with pytest.raises(ValueError, match="'news' is the only dataset.*Add another one first"):
        model.remove_dataset("news")


def test_names_are_ids(texts):
    model, given = tiny_moesumm(), without(texts, "dataset_ids")
    with torch.no_grad():
        by_name = model(**given, dataset=["news", "papers", None, "letters"]).logits
        assert torch.equal(by_name, model(**texts).logits)
        assert torch.equal(
            model(**given, dataset="papers").logits, model(**given, dataset_ids=torch.full((4,), 2)).logits
        )
        assert not torch.allclose(by_name, model(**given, dataset="papers").logits)


@pytest.mark.parametrize(
    "given, message",
    [
        (
            {"dataset": "newz"},
            r"dataset='newz' is not known.*'news', 'letters', 'papers'.*Did you mean 'news'.*dataset=None",
        ),
        ({"dataset": ["news", "letters"]}, r"2 names for a batch of 4 rows"),
        (
            {"dataset_ids": torch.tensor([0, 1, 2, 3])},
            r"dataset_ids has 3, but the model knows 3 datasets: 0 is 'news'",
        ),
        ({"dataset_ids": torch.tensor([0, 1, -2, 0])}, r"dataset_ids has -2.*and -1 none of them"),
        ({"dataset_ids": torch.tensor([0, 1])}, r"the shape \(2,\).*one whole number a row, \(4,\)"),
        ({"dataset_ids": torch.rand(4)}, r"float32: pass one whole number a row"),
        ({"dataset": "news", "dataset_ids": torch.zeros(4).long()}, r"Both dataset and dataset_ids"),
        ({"force_deputy": 3}, r"force_deputy=3, but there are 3 deputies, counted from 0 to 2"),
        ({"force_deputy": 0, "main_expert_only": True}, r"exclude each other"),
    ],
)
def test_wrong_input_is_named_with_the_mend(given, message, texts):
    model, texts = tiny_moesumm(), without(texts, "dataset_ids")
    for call in (model, model.get_encoder(), lambda **inputs: model.generate(**inputs, max_new_tokens=3)):
        with pytest.raises(ValueError, match=message):
            call(**texts, **given)


def test_texts_and_summaries_that_are_too_long_or_empty_are_refused(batch):
    model = tiny_moesumm()
    with pytest.raises(ValueError, match=r"texts have 100000 tokens.*positions for 40.*truncation=True, max_length=40"):
        model(torch.full((1, 100_000), 5))
    with pytest.raises(ValueError, match=r"summaries have 41 tokens, and the decoder has positions for 40"):
        model(**without(batch, "labels"), labels=torch.full((4, 41), 5))
    with pytest.raises(ValueError, match="no tokens at all"):
        model(torch.empty(2, 0, dtype=torch.long))
    with pytest.raises(ValueError, match="Neither input_ids nor inputs_embeds"):
        model(decoder_input_ids=batch["labels"])


def test_training_without_datasets_warns_that_deputies_learn_nothing(batch):
    model = tiny_moesumm().train()
    with pytest.warns(UserWarning, match="main expert alone is trained. Pass dataset_ids"):
        model(**without(batch, "dataset_ids"))


# --- parts, analysis, baselines -------------------------------------------------------------------------------------


@each_backbone
def test_deputies_alone_are_trained_where_asked(backbone, batch):
    model = tiny_moesumm(backbone).train()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    left = model.train_deputies_only()
    assert left == sum(p.numel() for name, p in model.named_parameters() if ".deputies." in name)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(**batch).loss.backward()
    optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, start[name])}
    assert moved == {name for name in start if ".deputies." in name}


def test_the_deputies_of_every_token_can_be_looked_at(batch):
    model = tiny_moesumm()
    plain = model(**batch)
    assert plain.encoder_deputies is plain.decoder_gates is None
    output = model(**batch, output_deputies=True)
    assert isinstance(output, MoeSummOutput) and torch.equal(output.logits, plain.logits)
    for index, gate, length in (
        (output.encoder_deputies, output.encoder_gates, 9),
        (output.decoder_deputies, output.decoder_gates, 6),
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
    assert_close(output.encoder_gates[0][1], p)
    assert torch.equal(output.encoder_deputies[0][1], index)
    alone = model(**without(batch, "dataset_ids"), output_deputies=True)
    assert all((i == -1).all() for i in alone.encoder_deputies + alone.decoder_deputies)


def test_a_forced_deputy_is_taken_by_all_with_the_weight_one(batch):
    model, texts = tiny_moesumm(), without(batch, "dataset_ids", "labels")
    output = model(**texts, force_deputy=1, output_deputies=True)
    assert all((i == 1).all() for i in output.encoder_deputies) and all((g == 1).all() for g in output.decoder_gates)
    only = tiny_moesumm(num_deputies=1)
    with torch.no_grad():
        for deputies, mine in zip(model.deputies(), only.deputies(), strict=True):
            for name in ("up_proj", "up_bias", "down_proj"):
                getattr(mine.experts, name).copy_(getattr(deputies.experts, name)[1:2])
        # a softmax over one deputy is 1
        assert_close(only(**texts, dataset="news").logits, output.logits, rtol=0, atol=1e-5)
        assert not torch.allclose(model(**texts, force_deputy=2).logits, output.logits, atol=1e-2)


@each_backbone
def test_flat_moe_starts_as_its_backbone_and_knows_no_datasets(backbone, batch, tmp_path):
    stock = tiny_backbone(backbone)
    stock.save_pretrained(tmp_path)
    model = MoeSummForConditionalGeneration.from_backbone(tmp_path, DATASETS, num_deputies=2, main_expert=False)
    names = {name for name, _ in model.named_parameters()}
    assert not any(name.endswith(("fc1.weight", "fc1.bias", "fc2.weight")) for name in names)
    plain = without(batch, "dataset_ids")
    with torch.no_grad():
        expected = stock(**plain)
        output = model(**plain, output_deputies=True)
        assert_close(output.logits, expected.logits, rtol=0, atol=1e-5)
        assert_close(output.loss, expected.loss)
        assert torch.equal(model(**batch).logits, output.logits)  # datasets are nothing to it
        assert {int(i) for index in output.encoder_deputies for i in index.unique()} == {0, 1}
        for deputies in model.deputies():  # negative control
            deputies.experts.up_proj[1].add_(0.5)
        assert not torch.allclose(model(**plain).logits, expected.logits, atol=1e-2)
    with pytest.raises(ValueError, match="main_expert_only=True, but this model has no main expert"):
        model(**plain, main_expert_only=True)
    model.train()(**plain).loss.backward()
    assert all(d.selectors.weight.grad.abs().max() > 0 for d in model.deputies())


# --- ways of running ------------------------------------------------------------------------------------------------


@each_backbone
def test_in_bfloat16_it_trains_and_its_loss_is_float32(backbone, batch):
    model = tiny_moesumm(backbone).to(torch.bfloat16).train()
    output = model(**batch)
    output.loss.backward()
    assert output.logits.dtype == torch.bfloat16 and output.loss.dtype == output.margin_loss.dtype == torch.float32
    assert all(torch.isfinite(g).all() for g in gradients(model).values())
    exact = tiny_moesumm(backbone)(**batch)
    assert_close(output.loss, exact.loss, rtol=0.05, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = tiny_moesumm(backbone)(**batch)
    assert_close(mixed.loss.float(), exact.loss, rtol=0.05, atol=0)


@pytest.mark.skipif(sys.platform == "win32", reason="no compiler")
def test_compiled_it_gives_the_same_in_one_graph(batch):
    one_layer = {"encoder_layers": 1, "decoder_layers": 1}
    model, compiled_model = (tiny_moesumm(changes=one_layer).train() for _ in range(2))
    compiled = torch.compile(compiled_model, backend="aot_eager", fullgraph=True)
    expected, found = model(**batch), compiled(**batch)
    assert_close(found.logits, expected.logits, rtol=0, atol=1e-5)
    assert_close(found.loss, expected.loss)
    for loss in (expected.loss, found.loss):
        loss.backward()
    for name, gradient in gradients(model).items():
        assert_close(compiled_model.get_parameter(name).grad, gradient, rtol=1e-4, atol=1e-5, msg=name)
    assert not torch.allclose(model(**without(batch, "dataset_ids")).logits, found.logits, atol=1e-2)  # deputies spoke


def test_lora_on_the_main_expert_leaves_the_deputies_at_work(batch):
    model = tiny_moesumm()
    with torch.no_grad():
        before = model(**batch).logits
        lora = LoraConfig(r=2, target_modules=["fc1", "fc2"], modules_to_save=["deputies"], task_type="SEQ_2_SEQ_LM")
        adapted = get_peft_model(model, lora)
        assert_close(adapted(**batch).logits, before, rtol=0, atol=1e-5)
        kept = [m for m in adapted.modules() if isinstance(m, Deputies)]
        assert len(kept) == 8  # four layers: what was there, and what is trained
        for deputies in kept:
            deputies.experts.down_proj.zero_()
        assert not torch.allclose(adapted(**batch).logits, before, atol=1e-2)


@pytest.mark.parametrize(
    "adapter",
    [
        LoraConfig(r=2, target_modules=["fc1", "fc2"], init_lora_weights=False),
        LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["experts.up_proj"], init_lora_weights=False),
        IA3Config(target_modules=["k_proj", "fc2"], feedforward_modules=["fc2"], init_ia3_weights=False),
    ],
)
def test_merged_adapters_are_saved_and_open_again(adapter, batch, tmp_path):
    with torch.no_grad():
        torch.manual_seed(0)
        adapted = get_peft_model(tiny_moesumm(), copy.deepcopy(adapter))
        expected = adapted(**batch).logits
        assert not torch.allclose(expected, tiny_moesumm()(**batch).logits, atol=1e-2)
        merged = adapted.merge_and_unload()
        merged.save_pretrained(tmp_path)
        for model in (merged, MoeSummForConditionalGeneration.from_pretrained(tmp_path)):
            assert_close(model(**batch).logits, expected, rtol=1e-4, atol=1e-4)
    for model in (merged, tiny_backbone()):  # tied embeddings, which save_pretrained() knows and this does not
        with pytest.raises(RuntimeError, match="Some tensors share memory"):
            save_file(model.state_dict(), tmp_path / "x.safetensors")


def test_the_backbone_itself_is_not_to_be_called(texts):
    model, texts = tiny_moesumm(), without(texts, "dataset_ids")
    with pytest.raises(RuntimeError, match="called without routing.*Call the MoeSumm model"):
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
