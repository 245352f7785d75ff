"""What every model class keeps, for SEKE on three kinds of encoder."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import AutoConfig, AutoModel, AutoModelForTokenClassification, BertModel

from modeling_seke import SekeConfig, SekeForTokenClassification, SekeTokenClassifierOutput

BACKBONES = ("bert", "deberta-v2", "modernbert")
each_backbone = pytest.mark.parametrize("backbone", BACKBONES)


@pytest.fixture(scope="module")
def batch(tiny_tokenizer):
    texts = ["graph cuts in the network", "learning", "the problem of learning graph networks is the cut of a network"]
    return tiny_tokenizer(texts, padding=True, return_tensors="pt")


def parameters_without_noise(model):
    """All but the router's noise, which only training uses."""
    return [p for name, p in model.named_parameters() if ".noise." not in name]


def with_labels(batch):
    torch.manual_seed(1)
    labels = torch.randint(0, 3, batch["input_ids"].shape)
    return {**batch, "labels": labels.masked_fill(batch["attention_mask"] == 0, -100)}


@each_backbone
def test_saved_and_loaded_it_gives_the_same_logits(backbone, tiny_seke, batch, tmp_path):
    model = tiny_seke(backbone)
    model.save_pretrained(tmp_path)
    again = AutoModelForTokenClassification.from_pretrained(tmp_path)
    assert type(again) is SekeForTokenClassification
    with torch.no_grad():
        expected, found = model(**batch).logits, again(**batch).logits
        assert_close(found, expected, rtol=0, atol=1e-6)  # weights in a mapped file lie at other addresses
        assert all(torch.equal(p, again.get_parameter(name)) for name, p in model.named_parameters())
        again.classifier.weight.add_(0.1)  # negative control
        assert not torch.allclose(expected, again(**batch).logits)


@each_backbone
def test_two_eval_passes_agree_bit_for_bit(backbone, tiny_seke, batch):
    model = tiny_seke(backbone)
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, model(**batch).logits)
        model.train()
        assert not torch.equal(model(**batch).logits, model(**batch).logits)


@each_backbone
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("rnn_type", ["lstm", "gru"])
def test_padding_and_company_change_nothing(backbone, side, rnn_type, tiny_seke, tiny_tokenizer):
    model = tiny_seke(backbone, rnn_type=rnn_type)
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.padding_side = side
    texts = ["graph cuts in the network", "learning", "the problem of learning graph networks is the cut of a network"]
    batch = tokenizer(texts, padding="max_length", max_length=40, return_tensors="pt")
    if side == "left":  # absolute positions count from the first real token
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        together = model(**batch).logits
        for row, text in enumerate(texts):
            alone = model(**tokenizer(text, return_tensors="pt")).logits[0]
            inside = together[row, batch["attention_mask"][row].bool()]
            assert_close(inside, alone, rtol=0, atol=1e-5)
            assert torch.equal(inside.argmax(-1), alone.argmax(-1))
    assert (together[batch["attention_mask"] == 0] == 0).all()


@each_backbone
@pytest.mark.parametrize("head", [{}, {"use_moe": False}, {"use_rnn": False}, {"use_moe": False, "use_rnn": False}])
def test_every_trainable_parameter_gets_a_gradient(backbone, head, tiny_seke, batch):
    model = tiny_seke(backbone, **head).train()
    model(**with_labels(batch)).loss.backward()
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert without == []


def test_an_expert_that_nobody_chose_gets_zeros(tiny_seke, batch):
    model = tiny_seke()
    with torch.no_grad():
        model.moe.router.gate.bias[3] = -1e4
    model(**with_labels(batch)).loss.backward()
    assert model.moe.experts.up_proj.grad[3].abs().max() == 0
    assert model.moe.experts.up_proj.grad[:3].abs().amax(dim=(1, 2)).min() > 0


@each_backbone
def test_bf16_trains_and_stays_near_float32(backbone, tiny_seke, batch):
    model = tiny_seke(backbone)
    exact = model(**with_labels(batch))
    half = copy.deepcopy(model).to(torch.bfloat16)
    rounded = half(**with_labels(batch))
    rounded.loss.backward()
    assert rounded.logits.dtype == torch.bfloat16
    assert all(torch.isfinite(p.grad).all() for p in parameters_without_noise(half))
    assert_close(rounded.loss.float(), exact.loss, rtol=0.05, atol=0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model(**with_labels(batch))
    mixed.loss.backward()
    assert_close(mixed.loss, exact.loss, rtol=0.05, atol=0.05)


@each_backbone
def test_torch_compile_changes_nothing(backbone, tiny_seke, batch):
    model = tiny_seke(backbone)
    expected = model(**with_labels(batch))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    found = compiled(**with_labels(batch))
    assert_close(found.logits, expected.logits, rtol=0, atol=1e-5)
    assert_close(found.loss, expected.loss, rtol=0, atol=1e-5)
    found.loss.backward()
    assert all(p.grad is not None for p in parameters_without_noise(model))


@each_backbone
def test_what_a_checkpoint_lacks_is_initialised(backbone, tiny_seke, tmp_path):
    """Raw parameters that no initialiser knows stay memory garbage after from_pretrained."""
    full = tiny_seke(backbone)
    full.save_pretrained(tmp_path)
    kept = {name: p for name, p in full.state_dict().items() if name.startswith("backbone.")}
    loaded = SekeForTokenClassification.from_pretrained(None, config=full.config, state_dict=kept)
    for name, p in loaded.named_parameters():
        assert torch.isfinite(p).all() and p.abs().max() < 10, name
        if "bias" not in name and "norm" not in name.lower():
            assert p.std() > 1e-4, name
    assert torch.equal(loaded.backbone.get_input_embeddings().weight, full.backbone.get_input_embeddings().weight)


def test_new_experts_hand_states_on_each_with_a_little_of_its_own(tiny_seke):
    x = torch.randn(200, 32)
    model = tiny_seke(expert_init="identity").moe.experts
    outputs = torch.stack([model.one_expert(x, weights) for weights in model.weights_by_expert()])  # (E, 200, d)
    own = outputs - x
    assert 0.01 < own.std() < 0.3 and own[0].std() > 0.01
    assert (own[0] - own[1]).std() > own[0].std()  # no two alike, so that the router has something to choose from
    with torch.no_grad():
        model.up_proj[:, 64:] = 0
        model.up_bias[:, 64:] = 0
    outputs = torch.stack([model.one_expert(x, weights) for weights in model.weights_by_expert()])
    assert_close(outputs, x.expand_as(outputs))
    other = tiny_seke(expert_init="uniform").moe.experts  # negative control
    assert (other.one_expert(x, other.weights_by_expert()[0]) - x).std() > 0.9


@each_backbone
def test_gradient_checkpointing_gives_the_same_gradients(backbone, tiny_seke, batch):
    plain, checkpointed = tiny_seke(backbone), tiny_seke(backbone)
    checkpointed.gradient_checkpointing_enable()
    for model in (
        plain,
        checkpointed,
    ):  # checkpointing acts in training only, where dropout and noise would hide equality
        set_dropout_to_zero(model)
        model.train()
        model.moe.router.eval()
        model(**with_labels(batch)).loss.backward()
    layers = [module for module in checkpointed.modules() if getattr(module, "gradient_checkpointing", False)]
    assert layers  # it was on
    for a, b in zip(parameters_without_noise(plain), parameters_without_noise(checkpointed), strict=True):
        assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


def set_dropout_to_zero(model):
    for module in model.modules():
        for name in ("p", "dropout", "drop_prob", "attention_dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


@each_backbone
def test_embeddings_can_be_resized_and_saved(backbone, tiny_seke, tmp_path):
    model = tiny_seke(backbone)
    size = model.config.text_config.vocab_size + 8
    model.resize_token_embeddings(size)
    model.save_pretrained(tmp_path)
    again = SekeForTokenClassification.from_pretrained(tmp_path)
    assert again.get_input_embeddings().weight.shape[0] == size == again.config.text_config.vocab_size


@each_backbone
def test_from_backbone_computes_what_the_encoder_computes(backbone, backbone_config, batch, tmp_path):
    torch.manual_seed(3)
    encoder = AutoModel.from_config(backbone_config(backbone)).eval()
    encoder.save_pretrained(tmp_path)
    model = SekeForTokenClassification.from_backbone(tmp_path, num_experts=3)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        expected = encoder(**inputs).last_hidden_state
        found = model(**inputs, output_hidden_states=True)
        real = inputs["attention_mask"].bool()
        assert_close(model.backbone(**inputs).last_hidden_state[real], expected[real], rtol=0, atol=1e-6)
    assert len(found.hidden_states) >= 2 and found.router_logits.shape[-1] == 3
    assert not model.training and model.config.text_config.name_or_path == ""


def test_the_ablations_leave_out_what_they_say(tiny_seke, batch):
    names = {}
    for use_moe in (True, False):
        for use_rnn in (True, False):
            model = tiny_seke(use_moe=use_moe, use_rnn=use_rnn)
            names[use_moe, use_rnn] = {name.split(".")[0] for name, _ in model.named_parameters()}
            output = model(**batch)
            assert (output.router_logits is not None) == (output.expert_index is not None) == use_moe
    assert names[False, False] == {"backbone", "classifier"}
    assert names[True, False] == {"backbone", "classifier", "moe"}
    assert names[False, True] == {"backbone", "classifier", "rnn"}


def test_the_output_holds_router_and_choices_token_by_token(tiny_seke, batch):
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


def test_the_loss_is_cross_entropy_plus_what_the_router_owes(tiny_seke, batch):
    labelled = with_labels(batch)
    plain = tiny_seke()(**labelled)
    expected = nn.functional.cross_entropy(plain.logits.flatten(0, 1), labelled["labels"].flatten())
    assert_close(plain.loss, expected)
    smoothed = tiny_seke(label_smoothing=0.2)(**labelled).loss
    assert_close(
        smoothed,
        nn.functional.cross_entropy(plain.logits.flatten(0, 1), labelled["labels"].flatten(), label_smoothing=0.2),
    )
    from modeling_seke.head_seke import load_balancing_loss, router_z_loss

    real = batch["attention_mask"].bool()  # masked: padding is not routed
    logits, index = plain.router_logits[real], plain.expert_index[real]
    owing = tiny_seke(router_aux_loss_coef=0.1, router_z_loss_coef=0.01)(**labelled).loss
    assert_close(owing, plain.loss + 0.1 * load_balancing_loss(logits, index) + 0.01 * router_z_loss(logits))


def test_a_batch_without_labels_to_learn_costs_nothing(tiny_seke, batch):
    loss = tiny_seke()(**batch, labels=torch.full_like(batch["input_ids"], -100)).loss
    assert loss == 0 and torch.isfinite(loss)


@pytest.mark.parametrize("aux", [0.0, 0.5])
def test_micro_batches_add_up_to_the_whole_batch(aux, tiny_seke, batch):
    """num_items_in_batch, as the Trainer passes it: the parts of a step sum to the step."""
    labelled = with_labels(batch)
    items = (labelled["labels"] != -100).sum()
    model = tiny_seke(router_aux_loss_coef=aux)
    whole = model(**labelled, num_items_in_batch=items).loss
    parts = [{name: value[i : i + 1] for name, value in labelled.items()} for i in range(3)]
    summed = sum(model(**part, num_items_in_batch=items).loss for part in parts)
    # the balance loss is a product of two averages and so not additive: near, not equal
    assert_close(summed, whole, rtol=1e-5 if aux == 0 else 0.05, atol=1e-6)


def test_no_mask_means_that_every_token_is_real(tiny_seke, batch):
    model, inputs = tiny_seke(), batch["input_ids"][2:]
    with torch.no_grad():
        assert torch.equal(model(inputs).logits, model(inputs, attention_mask=torch.ones_like(inputs)).logits)


def test_a_mask_of_another_shape_is_refused(tiny_seke, batch):
    model = tiny_seke()
    square = batch["attention_mask"][:, None, None, :].expand(-1, 1, batch["input_ids"].shape[1], -1)
    with pytest.raises(ValueError, match=r"attention_mask has 4 dimensions.*\(batch, length\)"):
        model(input_ids=batch["input_ids"], attention_mask=square)


# --- what goes wrong at loading -------------------------------------------------------------------------------------


def test_an_unknown_backbone_is_named_with_an_example():
    with pytest.raises(OSError, match=r"'no/such-encoder' could not be opened as a backbone.*deberta-v3-base"):
        SekeForTokenClassification.from_backbone("no/such-encoder")


def test_a_misspelt_option_is_named_with_the_nearest(tmp_path, backbone_config):
    BertModel(backbone_config()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'num_expert'.*Did you mean 'num_experts'"):
        SekeForTokenClassification.from_backbone(tmp_path, num_expert=8)


def test_from_pretrained_on_an_encoders_folder_names_from_backbone(tmp_path, backbone_config):
    BertModel(backbone_config()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="from_backbone"):
        SekeForTokenClassification.from_pretrained(tmp_path)


def test_from_backbone_on_a_seke_folder_names_from_pretrained(tmp_path, tiny_seke):
    tiny_seke().save_pretrained(tmp_path)
    with pytest.raises(OSError, match="'seke' model already.*from_pretrained"):
        SekeForTokenClassification.from_backbone(tmp_path)


def test_a_weights_file_cut_short_is_named(tmp_path, tiny_seke):
    tiny_seke().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(OSError, match="truncated or damaged"):
        SekeForTokenClassification.from_pretrained(tmp_path)
    with pytest.raises(OSError, match="truncated or damaged"):
        AutoModelForTokenClassification.from_pretrained(tmp_path)


def test_nesting_a_live_encoders_configuration_leaves_the_encoder_as_it_was(backbone_config, tmp_path, batch):
    encoder = BertModel(backbone_config()).eval()
    encoder.save_pretrained(tmp_path)
    before = encoder.config._attn_implementation
    SekeForTokenClassification.from_backbone(tmp_path)
    assert encoder.config._attn_implementation == before
    assert SekeConfig(text_config=AutoConfig.from_pretrained(tmp_path)).text_config.hidden_size == 32
