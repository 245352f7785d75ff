"""The losses and their gradients, over every kind of backbone."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call
from torch.testing import assert_close
from transformers.trainer_pt_utils import LabelSmoother

from .conftest import BACKBONES, DECODERS, V, for_backbone, gradients, one_of_each, tiny_moesumm, without

pytestmark = pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing_enable`", "ignore:No dataset was given in training"
)
# with re-entrant checkpoints or not; tests/test_training_contract.py has the others
MARGINS = [(name, "model", None) for name in (*BACKBONES, *DECODERS)]
MARGINS += [(name, "last_layer", how) for name in ("bart", "llama") for how in (None, False, True)]


def surer(model):
    """Larger logits, and so larger margins."""
    decoder = model.get_decoder()
    norm = getattr(decoder, "norm", None) or getattr(decoder, "layer_norm", decoder.layers[-1].final_layer_norm)
    norm.weight.data.mul_(4)
    return model


def equations_8_and_9(full, main, labels):
    """MoeSumm, Eq. 8-9, token by token -> generation loss and margin loss, means over real tokens."""
    generation, margin, count = 0, 0, int((labels != -100).sum())
    for row, of_row in enumerate(labels.tolist()):
        for t, y in enumerate(of_row):
            if y == -100:
                continue
            p_full = (full[row, t] - full[row, t].logsumexp(0)).exp()[y]
            p_main = (main[row, t] - main[row, t].logsumexp(0)).exp()[y]
            generation = generation - p_full.log()
            margin = margin + (1 - p_full) * (1 - (p_full - p_main) ** 5) / 2
    return generation / count, margin / count


@pytest.mark.parametrize("backbone, margin_main, checkpointing", MARGINS)
def test_the_loss_is_equations_8_and_9_with_all_gradients(backbone, margin_main, checkpointing, batch):
    shift = int(backbone in DECODERS)
    options = {"margin_loss_coef": 0.7, "margin_main": margin_main} | ({"deputy_init_std": 1.0} if shift else {})
    model, slow = (surer(tiny_moesumm(backbone, **options)).double() for _ in range(2))
    batch, layer = for_backbone(batch, backbone), f"backbone.model.{'' if shift else 'decoder.'}layers.1"
    reading = without(batch, "labels")
    if not shift:
        reading["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    full, plain = slow(**reading).logits, without(reading, "dataset_ids")
    silent = f"{layer}.deputies.experts.down_proj"  # the last layer's deputies add nothing
    silent = {silent: torch.zeros_like(slow.get_parameter(silent))}
    main = (slow(**plain) if margin_main == "model" else functional_call(slow, silent, (), reading)).logits
    # every other label is what the full model says, so that some margins are large
    sure = (batch["labels"] != -100) & (torch.arange(batch["labels"].shape[1]) % 2 == 0)
    labels = torch.where(sure, full.argmax(-1).roll(shift, 1), batch["labels"])
    model.train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    sizes = []
    attention = model.get_submodule(layer).self_attn
    attention.register_forward_hook(lambda _, args, y: sizes.append(len(y[0])))
    output = model(**reading, labels=labels)
    assert set(sizes) == {8 if margin_main == "model" else 4}  # rows of one pass, no second
    output.loss.backward()
    targets = labels[:, shift:]  # of a decoder, the tokens after these positions
    generation, margin = equations_8_and_9(full, main, targets)
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
    (generation + 0.7 * margin).backward()
    name = f"{layer}.{'mlp.gate_proj' if shift else 'fc1'}.weight"
    apart = {"rtol": 1e-3, "atol": 1e-5} | close
    assert not torch.allclose(model.get_parameter(name).grad, slow.get_parameter(name).grad, **apart)


def test_the_last_layers_margin_takes_encoder_outputs_and_records_deputies(batch):
    model, plain = tiny_moesumm(margin_main="last_layer"), tiny_moesumm()
    whole, expected = (each(**batch, output_router_indices=True) for each in (model, plain))
    states = model.get_encoder()(batch["input_ids"], batch["attention_mask"], dataset_ids=batch["dataset_ids"])
    assert_close(model(**without(batch, "input_ids"), encoder_outputs=states).loss, whole.loss)
    for name in ("logits", "encoder_expert_indices", "decoder_expert_indices", "decoder_expert_weights"):
        assert_close(whole[name], expected[name])


def test_the_margin_is_off_with_a_coefficient_of_zero_and_zero_without_deputies(batch):
    off, model = tiny_moesumm(margin_loss_coef=0)(**batch), tiny_moesumm()
    assert off.margin_loss is None and torch.equal(off.loss, off.generation_loss)
    with pytest.warns(UserWarning, match="Pass dataset_ids"):
        model.train()(**without(batch, "dataset_ids"))
    alone = model.eval()(**without(batch, "dataset_ids"))
    p = (-F.cross_entropy(alone.logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")).exp()
    assert_close(alone.margin_loss, ((1 - p) / 2)[batch["labels"].flatten() != -100].mean())
    explicit = model(**{**batch, "dataset_ids": torch.full((4,), -1)})  # the same, by two passes or one
    assert_close(explicit.loss, alone.loss)
    assert not torch.allclose(model(**batch).margin_loss, alone.margin_loss)


def test_label_smoothing_is_the_trainers_and_leaves_the_margin_as_it_is(batch):
    plain, smooth = (tiny_moesumm(margin_loss_coef=2.0, label_smoothing=eps)(**batch) for eps in (0, 0.2))
    expected = LabelSmoother(epsilon=0.2)({"logits": plain.logits}, batch["labels"])
    assert_close(smooth.generation_loss, expected)
    assert torch.equal(smooth.margin_loss, plain.margin_loss) and torch.equal(smooth.logits, plain.logits)
    assert_close(smooth.loss, expected + 2 * plain.margin_loss)


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


@one_of_each
@pytest.mark.parametrize("options", [{}, {"dataset_aware": False}, {"main_expert": False}, {"margin_loss_coef": 0}])
@pytest.mark.parametrize("number", [0, -1])
def test_every_trainable_parameter_gets_a_gradient_whatever_the_datasets(backbone, options, number, batch):
    model, batch = tiny_moesumm(backbone, **options).train(), for_backbone(batch, backbone)
    model(**{**batch, "dataset_ids": torch.full((4,), number)}).loss.backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
    contributed = any(g.abs().max() > 0 for name, g in gradients(model).items() if "selectors" in name)
    assert contributed == (number == 0 or not model.config.main_expert)


@one_of_each
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_deputies_alone_get_the_gradients_that_they_get_with_the_main_expert(reentrant, backbone, batch):
    """Alone, the main expert's pass has no graph."""
    batch, found = for_backbone(batch, backbone), []
    for frozen in (False, True):
        model = surer(tiny_moesumm(backbone)).train()
        deputies = {name: p for name, p in model.named_parameters() if ".deputies." in name}
        assert not frozen or model.freeze_all_but_deputies() == sum(p.numel() for p in deputies.values())
        if frozen and reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            if reentrant:
                model.enable_input_require_grads()
        output = model(**batch)
        output.loss.backward()
        assert not frozen or gradients(model).keys() == deputies.keys()
        found.append((output.margin_loss, {name: p.grad for name, p in deputies.items()}))
    assert_close(found[0], found[1])


@pytest.mark.parametrize("backbone, margin_main", [("bart", "model"), ("llama", "model"), ("bart", "last_layer")])
def test_states_that_are_returned_keep_their_gradients(backbone, margin_main, batch):
    model, batch = surer(tiny_moesumm(backbone, margin_main=margin_main)).double(), for_backbone(batch, backbone)
    model.set_attn_implementation("eager")
    expected = model(**batch)
    expected.loss.backward()
    wanted = gradients(model)
    model.zero_grad()
    for name in ("output_hidden_states", "output_attentions"):  # as options of the call, which other tests pass
        setattr(model.config.text_config, name, True)
    output = model(**batch)
    assert_close(output.loss, expected.loss)
    states = [x for name in output if name.endswith(("hidden_states", "attentions")) for x in output[name]]
    for x in states:
        assert len(x) == 4
        x.retain_grad()
    output.loss.backward()
    assert len(states) >= 5 and all(x.grad is not None and x.grad.abs().max() > 0 for x in states)
    exact = {"rtol": 1e-8, "atol": 1e-11} if backbone in BACKBONES else {"rtol": 1e-4, "atol": 1e-5}
    assert_close(gradients(model), wanted, **exact)
