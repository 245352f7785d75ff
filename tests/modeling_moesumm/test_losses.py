"""The losses and their gradients, over every kind of backbone."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call
from torch.testing import assert_close
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

from modeling_moesumm.layers_moesumm import margin_losses, token_losses
from tests.modeling_moesumm.conftest import (
    BACKBONES,
    DECODERS,
    V,
    each_kind,
    for_backbone,
    gradients,
    surer,
    tiny_moesumm,
    without,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing_enable`", "ignore:No dataset was given in training"
)
one_of_each = pytest.mark.parametrize("backbone", ["bart", "llama"])


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


def last_layer_by_formula(model, batch, last):
    """Eq. 8-9 with the margin over a model whose last layer has deputies that add nothing."""
    given, shift = without(batch, "labels"), int("decoder" not in last)
    silent = {last: torch.zeros_like(model.get_parameter(last))}
    labels = F.pad(batch["labels"], (0, shift), value=-100)[:, shift:].flatten()
    full = token_losses(model(**given).logits.flatten(0, 1), labels)
    main = token_losses(functional_call(model, silent, (), given).logits.flatten(0, 1), labels)
    return (full + model.config.margin_loss_coef * margin_losses(full, main)).sum() / (labels != -100).sum()


@pytest.mark.parametrize("backbone", [*BACKBONES, "llama"])
@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_the_last_layers_margin_is_its_formula_with_all_gradients(backbone, checkpointing, batch):
    options = {"margin_loss_coef": 3.0, "margin_main": "last_layer"}
    model, slow = (surer(tiny_moesumm(backbone, **options)).double() for _ in range(2))
    batch, last = for_backbone(batch, backbone), f"{'' if backbone in DECODERS else 'decoder.'}layers.1"
    reading = without(batch, "labels")
    if backbone in BACKBONES:
        reading["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    sure = (batch["labels"] != -100) & (
        torch.arange(batch["labels"].shape[1]) % 2 == 0
    )  # every other label is what the model says
    predicted = model(**reading).logits.argmax(-1).roll(int(backbone in DECODERS), 1)
    batch = {**reading, "labels": torch.where(sure, predicted, batch["labels"])}
    model.train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    sizes = []
    model.get_submodule(f"backbone.model.{last}").self_attn.register_forward_hook(
        lambda _, args, y: sizes.append(len(y[0]))
    )
    output = model(**batch)
    assert set(sizes) == {4}  # no second pass
    expected = last_layer_by_formula(slow, batch, f"backbone.model.{last}.deputies.experts.down_proj")
    close = {"rtol": 1e-4, "atol": 1e-6} if backbone in DECODERS else {}
    assert_close(output.loss, expected, **close)
    assert not torch.allclose(output.loss, surer(tiny_moesumm(backbone, margin_loss_coef=3.0)).double()(**batch).loss)
    output.loss.backward()
    expected.backward()
    for name, gradient in gradients(slow).items():
        assert_close(model.get_parameter(name).grad, gradient, msg=name, **close)


def test_the_last_layers_margin_takes_encoder_outputs_and_records_deputies(batch):
    model = tiny_moesumm(margin_main="last_layer")
    whole = model(**batch, output_router_indices=True)
    states = model.get_encoder()(batch["input_ids"], batch["attention_mask"], dataset_ids=batch["dataset_ids"])
    assert_close(model(**without(batch, "input_ids"), encoder_outputs=states).loss, whole.loss)
    expected = tiny_moesumm()(**batch, output_router_indices=True)
    for name in ("logits", "encoder_expert_indices", "decoder_expert_indices", "decoder_expert_weights"):
        assert_close(whole[name], expected[name])


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


def test_label_smoothing_is_the_trainers_and_leaves_the_margin_as_it_is(batch):
    plain, smooth = tiny_moesumm(margin_loss_coef=2.0), tiny_moesumm(margin_loss_coef=2.0, label_smoothing=0.2)
    before, after = plain(**batch), smooth(**batch)
    expected = LabelSmoother(epsilon=0.2)({"logits": before.logits}, batch["labels"])
    assert_close(after.generation_loss, expected)
    assert torch.equal(after.margin_loss, before.margin_loss) and torch.equal(after.logits, before.logits)
    assert_close(after.loss, expected + 2 * before.margin_loss)
    halves = [{name: x[rows] for name, x in batch.items()} for rows in (slice(0, 2), slice(2, 4))]
    items = (batch["labels"] != -100).sum()
    assert_close(sum(smooth(**half, num_items_in_batch=items).loss for half in halves), after.loss)


@pytest.mark.parametrize("margin_main", ["model", "last_layer"])
def test_the_last_positions_alone_give_the_same_losses_and_gradients(margin_main, batch):
    rows, K, found = for_backbone(batch, "llama", "left"), 6, []  # the longest summary
    for kept in ({}, {"labels": rows["labels"][:, -K - 1 :], "logits_to_keep": K + 1}):
        model = tiny_moesumm("llama", margin_main=margin_main).train()
        output = model(**{**rows, **kept})
        output.loss.backward()
        found.append((output.generation_loss, output.margin_loss, gradients(model)))
    assert output.logits.shape == (4, K + 1, V)
    assert_close(found[0], found[1])


# --- gradients ---


@one_of_each
@pytest.mark.parametrize("options", [{}, {"dataset_aware": False}, {"main_expert": False}, {"margin_loss_coef": 0}])
def test_every_trainable_parameter_gets_a_gradient_whatever_the_datasets(backbone, options, batch):
    batch = for_backbone(batch, backbone)
    model = tiny_moesumm(backbone, **options).train()
    for ids in (torch.zeros(4, dtype=torch.long), torch.full((4,), -1)):
        model.zero_grad()
        model(**{**batch, "dataset_ids": ids}).loss.backward()
        assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
        contributed = any(g.abs().max() > 0 for name, g in gradients(model).items() if "selectors" in name)
        assert contributed == (bool((ids >= 0).any()) or not model.config.main_expert)


@one_of_each
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_deputies_alone_get_the_gradients_that_they_get_with_the_main_expert(reentrant, backbone, batch):
    """Alone, the main expert's pass has no graph."""
    batch, found = for_backbone(batch, backbone), []
    for frozen in (False, True):
        model = surer(tiny_moesumm(backbone)).train()
        if frozen:
            model.freeze_all_but_deputies()
        if frozen and reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            if reentrant:
                model.enable_input_require_grads()
        output = model(**batch)
        output.loss.backward()
        assert not frozen or all(("deputies" in name) == (p.grad is not None) for name, p in model.named_parameters())
        named = gradients(model).items()
        found.append((output.margin_loss, {name: g for name, g in named if ".deputies." in name}))
    assert_close(found[0], found[1])


@one_of_each
@pytest.mark.parametrize("margin_main", ["model", "last_layer"])
@pytest.mark.parametrize("how", ["call", "configuration"])
def test_states_that_are_returned_keep_their_gradients(backbone, margin_main, how, batch):
    model, batch = tiny_moesumm(backbone, margin_main=margin_main), for_backbone(batch, backbone)
    model.set_attn_implementation("eager")
    requested = {"output_hidden_states": True, "output_attentions": True}
    expected = model(**batch)
    if how == "configuration":
        for name, value in requested.items():
            setattr(model.config.text_config, name, value)
    output = model(**batch, **(requested if how == "call" else {}))
    assert_close(output.loss, expected.loss)
    names = (
        "encoder_hidden_states",
        "decoder_hidden_states",
        "encoder_attentions",
        "cross_attentions",
        "decoder_attentions",
    )
    states = [x for name in (("hidden_states", "attentions") if backbone in DECODERS else names) for x in output[name]]
    for x in states:
        assert len(x) == 4
        x.retain_grad()
    output.loss.backward()
    assert all(x.grad is not None and x.grad.abs().max() > 0 for x in states)


# --- in the Trainer ---


def train(model, batch, folder, **options):
    rows = [{name: x[i] for name, x in batch.items()} for i in range(4)]
    arguments = {"max_steps": 1, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    arguments = Seq2SeqTrainingArguments(str(folder), learning_rate=0.0, **arguments, **options)
    trainer = Seq2SeqTrainer(model, arguments, train_dataset=rows)
    trainer.train()
    return trainer.state.log_history[-1]["train_loss"]


def test_the_trainers_own_label_smoothing_is_refused_where_it_would_drop_the_margin(batch, tmp_path):
    with pytest.raises(ValueError, match="labels=None.*margin_loss_coef=1"):
        train(tiny_moesumm(), batch, tmp_path, label_smoothing_factor=0.1)
    off = tiny_moesumm(margin_loss_coef=0)
    with pytest.raises(ValueError, match="decoder_input_ids"):  # the decoder would read the source
        train(off, batch, tmp_path, label_smoothing_factor=0.1)
    model = tiny_moesumm(label_smoothing=0.1)
    assert abs(train(model, batch, tmp_path) - model(**batch).loss.item()) < 1e-5
    given = {**batch, "decoder_input_ids": off.prepare_decoder_input_ids_from_labels(batch["labels"])}
    wanted = tiny_moesumm(margin_loss_coef=0, label_smoothing=0.1)(**batch).loss.item()  # nothing is lost
    assert abs(train(off, given, tmp_path, label_smoothing_factor=0.1) - wanted) < 1e-5
