"""Options in which the authors' code differs from the paper, each against its formula with all gradients."""

import copy

import pytest
import torch
from torch.func import functional_call
from torch.testing import assert_close
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

from modeling_moesumm import MoeSummForConditionalGeneration
from modeling_moesumm.layers_moesumm import margin_losses, token_losses
from modeling_moesumm.routing_moesumm import RoutingContext
from tests.modeling_moesumm.conftest import BACKBONES, each_backbone, gradients, surer, tiny_moesumm, without

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")


def weighted_sum(values):
    return (values * torch.arange(values.numel()).view_as(values).sin()).sum()


# --- gate_position --------------------------------------------------------------------------------------------------


def layer_by_formula(layer, x, dataset, position, backbone):
    """A layer's part behind the attention, token by token; with the gate at the deputy MoeSumm, Eq. 4-7: (T, d) -> (T, d)."""
    experts, act, rows = layer.deputies.experts, layer.activation_fn, []
    for residual in x:
        a = residual if backbone == "bart" else layer.final_layer_norm(residual)
        W = layer.deputies.selectors.weight[dataset].T
        bias = 0 if layer.deputies.selectors.bias is None else layer.deputies.selectors.bias[dataset]
        G = (a @ W + bias).softmax(-1)
        p = int(G.argmax())
        g = {"deputy": (G[p], 1, 1), "ffn_output": (1, G[p], 1), "layer_output": (1, 1, G[p])}[position]
        H = act(
            torch.cat([a @ layer.fc1.weight.T + layer.fc1.bias, g[0] * (a @ experts.up_proj[p].T + experts.up_bias[p])])
        )
        X = g[1] * (H @ torch.cat([layer.fc2.weight.T, experts.down_proj[p]]) + layer.fc2.bias)
        rows.append(g[2] * (layer.final_layer_norm(residual + X) if backbone == "bart" else residual + X))
    return torch.stack(rows)


@each_backbone
@pytest.mark.parametrize("part", ["encoder", "decoder"])
@pytest.mark.parametrize("position", ["deputy", "ffn_output", "layer_output"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_is_its_formula_with_the_gate_in_each_place(backbone, part, position, bias):
    model = tiny_moesumm(backbone, gate_position=position, selector_bias=bias).double().backbone.model
    layer = getattr(model, part).layers[1]
    if bias:
        layer.deputies.selectors.bias.data.normal_()
    layer.self_attn.out_proj.weight.data.zero_()  # so that A is known: the attention adds its bias alone
    slow = copy.deepcopy(layer)
    x, ids = torch.randn(4, 5, 16, dtype=torch.float64), torch.tensor([2, 0, -1, 2])
    y = layer(x, None, routing=RoutingContext(True, ids, rows=torch.tensor([0, 1, 3])))
    A = x + slow.self_attn.out_proj.bias
    A = slow.self_attn_layer_norm(A) if backbone == "bart" else A
    expected = torch.stack([layer_by_formula(slow, A[i], int(ids[i]), position, backbone) for i in (0, 1, 3)])
    assert_close(y[[0, 1, 3]], expected)
    assert_close(y, layer(x, None, routing=RoutingContext(True, ids)))  # by all rows, those without a dataset too
    assert torch.equal(y[2], layer(x, None, routing=RoutingContext(False))[2])  # the main expert alone is the backbone
    weighted_sum(y[[0, 1, 3]]).backward()
    weighted_sum(expected).backward()
    for name, gradient in gradients(slow).items():
        assert_close(layer.get_parameter(name).grad, gradient, msg=name)
    other = {"deputy": "ffn_output"}.get(position, "deputy")  # negative control
    assert not torch.allclose(expected[0], layer_by_formula(slow, A[0], 2, other, backbone), atol=1e-3)


# --- margin_main ----------------------------------------------------------------------------------------------------


def last_layer_by_formula(model, batch):
    """Eq. 8-9 with the margin over a model whose decoder's last layer has deputies that add nothing."""
    given = without(batch, "labels")
    name = "backbone.model.decoder.layers.1.deputies.experts.down_proj"
    silent = {name: torch.zeros_like(model.get_parameter(name))}
    labels = batch["labels"].flatten()
    full = token_losses(model(**given).logits.flatten(0, 1), labels)
    main = token_losses(functional_call(model, silent, (), given).logits.flatten(0, 1), labels)
    return (full + model.config.margin_loss_coef * margin_losses(full, main)).sum() / (labels != -100).sum()


@each_backbone
@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_the_last_layers_margin_is_its_formula_with_all_gradients(backbone, checkpointing, batch):
    options = {"margin_loss_coef": 3.0, "margin_main": "last_layer"}
    model, slow = (surer(tiny_moesumm(backbone, **options)).double() for _ in range(2))
    sure = (batch["labels"] != -100) & (torch.arange(6) % 2 == 0)  # every other label is what the model says
    batch = {**batch, "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(batch["labels"])}
    batch["labels"] = torch.where(sure, model(**batch).logits.argmax(-1), batch["labels"])
    model.train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    sizes = []
    for layer in (model.backbone.model.encoder.layers[1], model.backbone.model.decoder.layers[1].self_attn):
        layer.register_forward_hook(
            lambda module, args, output: sizes.append(len(output[0]) if isinstance(output, tuple) else len(output))
        )
    output = model(**batch)
    assert set(sizes) == {4}  # no second pass
    expected = last_layer_by_formula(slow, batch)
    assert_close(output.loss, expected)
    assert not torch.allclose(output.loss, surer(tiny_moesumm(backbone, margin_loss_coef=3.0)).double()(**batch).loss)
    output.loss.backward()
    expected.backward()
    for name, gradient in gradients(slow).items():
        assert_close(model.get_parameter(name).grad, gradient, msg=name)
    assert model.backbone.model.encoder.layers[0].deputies.experts.up_proj.grad.abs().max() > 0


def test_the_last_layers_margin_takes_encoder_outputs_and_records_deputies(batch):
    model = tiny_moesumm(margin_main="last_layer")
    whole = model(**batch, output_router_indices=True)
    states = model.get_encoder()(batch["input_ids"], batch["attention_mask"], dataset_ids=batch["dataset_ids"])
    assert_close(model(**without(batch, "input_ids"), encoder_outputs=states).loss, whole.loss)
    expected = tiny_moesumm()(**batch, output_router_indices=True)
    for part in (
        "encoder_expert_indices",
        "decoder_expert_indices",
        "encoder_expert_weights",
        "decoder_expert_weights",
    ):
        assert len(whole[part]) == 2
        for found, wanted in zip(whole[part], expected[part], strict=True):
            assert torch.equal(found, wanted)
    assert torch.equal(
        whole.logits,
        model(
            **without(batch, "labels"), decoder_input_ids=model.prepare_decoder_input_ids_from_labels(batch["labels"])
        ).logits,
    )


# --- label smoothing ------------------------------------------------------------------------------------------------


def test_label_smoothing_is_the_trainers_and_leaves_the_margin_as_it_is(batch):
    plain, smooth = tiny_moesumm(margin_loss_coef=2.0), tiny_moesumm(margin_loss_coef=2.0, label_smoothing=0.2)
    before, after = plain(**batch), smooth(**batch)
    expected = LabelSmoother(epsilon=0.2)({"logits": before.logits}, batch["labels"])
    assert_close(after.generation_loss, expected)
    assert torch.equal(after.margin_loss, before.margin_loss) and torch.equal(after.logits, before.logits)
    assert_close(after.loss, expected + 2 * before.margin_loss)
    assert not torch.allclose(after.generation_loss, before.generation_loss, rtol=1e-2)
    halves = [{name: x[rows] for name, x in batch.items()} for rows in (slice(0, 2), slice(2, 4))]
    items = (batch["labels"] != -100).sum()
    assert_close(sum(smooth(**half, num_items_in_batch=items).loss for half in halves), after.loss)


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
    with pytest.raises(ValueError, match="pass decoder_input_ids"):  # the decoder would read the source
        train(tiny_moesumm(margin_loss_coef=0), batch, tmp_path, label_smoothing_factor=0.1)
    model = tiny_moesumm(label_smoothing=0.1)
    assert abs(train(model, batch, tmp_path) - model(**batch).loss.item()) < 1e-5
    # without a margin loss nothing is lost
    off = tiny_moesumm(margin_loss_coef=0)
    given = {**batch, "decoder_input_ids": off.prepare_decoder_input_ids_from_labels(batch["labels"])}
    wanted = tiny_moesumm(margin_loss_coef=0, label_smoothing=0.1)(**batch).loss.item()
    assert abs(train(off, given, tmp_path, label_smoothing_factor=0.1) - wanted) < 1e-5


# --- selector_bias --------------------------------------------------------------------------------------------------


@each_backbone
def test_selector_biases_are_saved_and_come_and_go_with_their_datasets(backbone, batch, tmp_path):
    model = tiny_moesumm(backbone, selector_bias=True)
    assert all((d.selectors.bias == 0).all() for d in model.deputies())
    assert not any(name.endswith("selectors.bias") for name in tiny_moesumm(backbone).state_dict())
    with torch.no_grad():
        before = model(**batch).logits
        assert torch.equal(before, tiny_moesumm(backbone)(**batch).logits)
        for deputies in model.deputies():
            deputies.selectors.bias.normal_()
        moved = model(**batch).logits
        assert not torch.allclose(moved, before, atol=1e-2)
        model.save_pretrained(tmp_path)
        again = MoeSummForConditionalGeneration.from_pretrained(tmp_path)
        assert_close(again(**batch).logits, moved, rtol=0, atol=1e-5)
        again.add_dataset("radio", init="papers")
        assert all(torch.equal(d.selectors.bias[3], d.selectors.bias[2]) for d in again.deputies())
        again.remove_dataset("radio")
        assert_close(again(**batch).logits, moved, rtol=0, atol=1e-5)


def test_new_biases_are_zero_where_a_checkpoint_has_none(tmp_path):
    tiny_moesumm().save_pretrained(tmp_path)
    again = MoeSummForConditionalGeneration.from_pretrained(tmp_path, selector_bias=True)
    assert all((d.selectors.bias == 0).all() for d in again.deputies())


# --- states in the loss's graph -------------------------------------------------------------------------------------


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("margin_main", ["model", "last_layer"])
@pytest.mark.parametrize("how", ["call", "configuration"])
def test_states_that_are_returned_keep_their_gradients(backbone, margin_main, how, batch):
    model = tiny_moesumm(backbone, margin_main=margin_main)
    model.set_attn_implementation("eager")
    requested = {"output_hidden_states": True, "output_attentions": True}
    expected = model(**batch)
    if how == "configuration":
        for name, value in requested.items():
            setattr(model.config.text_config, name, value)
    output = model(**batch, **(requested if how == "call" else {}))
    assert_close(output.loss, expected.loss)
    names = ("encoder_hidden_states", "decoder_hidden_states", "encoder_attentions", "cross_attentions")
    states = [x for name in (*names, "decoder_attentions") for x in output[name]]
    for x in states:
        assert len(x) == 4
        x.retain_grad()
    output.loss.backward()
    assert all(x.grad is not None and x.grad.abs().max() > 0 for x in states)
