"""What every model class keeps, for the hypernetwork's three heads on three kinds of encoder."""

import copy

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from modeling_hypernet import HypernetConfig, HypernetForTokenClassification, HypernetModel
from modeling_hypernet.labels_hypernet import allowed_steps

from .conftest import KINDS, TEXTS, TITLES

AUTO = {
    "tags": AutoModelForTokenClassification,
    "classes": AutoModelForSequenceClassification,
    "answers": AutoModelForQuestionAnswering,
}
BACKBONES = ("bert", "deberta-v2", "modernbert")
# every head once, every encoder once: what they do has nothing to do with each other
each_pair = pytest.mark.parametrize("kind, backbone", list(zip(KINDS, BACKBONES, strict=True)))


def first_output(outputs):
    return outputs.start_logits if "start_logits" in outputs else outputs.logits


@each_pair
def test_saved_and_loaded_it_gives_the_same(kind, backbone, tiny_hypernet, batch, tmp_path):
    model = tiny_hypernet(kind, backbone)
    model.save_pretrained(tmp_path)
    again = AUTO[kind].from_pretrained(tmp_path)
    assert type(again) is KINDS[kind]
    with torch.no_grad():
        expected, found = first_output(model(**batch)), first_output(again(**batch))
        assert_close(found, expected, rtol=0, atol=1e-6)
        assert all(torch.equal(p, again.get_parameter(name)) for name, p in model.named_parameters())
        again.base_model.reader.generators[0].input.mul_(1.5)  # negative control
        assert not torch.allclose(expected, first_output(again(**batch)), atol=1e-4)
    assert type(AutoModel.from_pretrained(tmp_path)) is HypernetModel


@each_pair
def test_two_eval_passes_agree_bit_for_bit(kind, backbone, tiny_hypernet, batch):
    model = tiny_hypernet(kind, backbone)
    with torch.no_grad():
        assert torch.equal(first_output(model(**batch)), first_output(model(**batch)))
        model.train()
        assert not torch.equal(first_output(model(**batch)), first_output(model(**batch)))


@each_pair
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_and_company_change_nothing(kind, backbone, side, tiny_hypernet, tiny_tokenizer):
    model = tiny_hypernet(kind, backbone, bidirectional=True)
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.padding_side = side
    batch = tokenizer(TITLES, TEXTS, padding="max_length", max_length=50, return_tensors="pt")
    if side == "left":  # absolute positions count from the first real token
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        together = first_output(model(**batch))
        for row, pair in enumerate(zip(TITLES, TEXTS, strict=True)):
            alone = first_output(model(**tokenizer(*pair, return_tensors="pt")))[0]
            found = together[row] if kind == "classes" else together[row][batch["attention_mask"][row].bool()]
            assert_close(found, alone, rtol=0, atol=1e-5)


@each_pair
@pytest.mark.parametrize(
    "options", [{}, {"bidirectional": True, "meta_hidden_size": None}, {"normalize_meta": False, "base_weights": True}]
)
def test_every_trainable_parameter_gets_a_gradient(kind, backbone, options, tiny_hypernet, batch, target):
    model = tiny_hypernet(kind, backbone, **options).train()
    model(**target(kind, batch)).loss.backward()
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert without == []


@each_pair
def test_bf16_trains_and_stays_near_float32(kind, backbone, tiny_hypernet, batch, target):
    model = tiny_hypernet(kind, backbone)
    exact = model(**target(kind, batch))
    half = copy.deepcopy(model).to(torch.bfloat16)
    rounded = half(**target(kind, batch))
    rounded.loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in half.parameters() if p.grad is not None)
    assert_close(rounded.loss.float(), exact.loss, rtol=0.05, atol=0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model(**target(kind, batch))
    assert mixed.meta_embedding.dtype == torch.float32  # the recurrence's state too: it is made of these
    mixed.loss.backward()
    assert_close(mixed.loss.float(), exact.loss, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("kind", ["tags", "answers"])
def test_torch_compile_changes_nothing(kind, tiny_hypernet, batch, target):
    model = tiny_hypernet(kind)
    expected = model(**target(kind, batch))
    torch._dynamo.reset()
    found = torch.compile(model, backend="aot_eager")(**target(kind, batch))
    assert_close(first_output(found), first_output(expected), rtol=0, atol=1e-5)
    assert_close(found.loss, expected.loss, rtol=0, atol=1e-5)
    found.loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@each_pair
def test_what_a_checkpoint_lacks_is_initialised(kind, backbone, tiny_hypernet):
    """Raw parameters that no initialiser knows stay memory garbage after from_pretrained."""
    full = tiny_hypernet(kind, backbone)
    kept = {name: p for name, p in full.state_dict().items() if ".backbone." in name}
    loaded = KINDS[kind].from_pretrained(None, config=full.config, state_dict=kept)
    for name, p in loaded.named_parameters():
        assert torch.isfinite(p).all() and p.abs().max() < 10, name
        if not name.rpartition(".")[2].startswith("bias") and "norm" not in name.lower():
            assert p.std() > 1e-4, name
    assert torch.equal(loaded.get_input_embeddings().weight, full.get_input_embeddings().weight)


@each_pair
def test_gradient_checkpointing_gives_the_same_gradients(kind, backbone, tiny_hypernet, batch, target):
    gradients = []
    for checkpointing in (False, True):
        model = tiny_hypernet(kind, backbone)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(3)
        model.train()(**target(kind, batch)).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-7, msg=name)


def test_a_frozen_backbone_stays_as_it_is(tiny_hypernet, batch, target, saved_encoder):
    model = HypernetForTokenClassification.from_backbone(saved_encoder(), meta_size=4, hidden_size=8)
    model.train()
    assert not model.base_model.backbone.training and model.classifier.training
    model(**target("tags", batch)).loss.backward()
    touched = {name for name, p in model.named_parameters() if p.grad is not None}
    assert touched == {name for name, p in model.named_parameters() if p.requires_grad}
    assert not any(".backbone." in name for name in touched) and any("reader" in name for name in touched)
    model.base_model.backbone.get_input_embeddings().requires_grad_(True)
    with pytest.raises(ValueError, match="freeze_backbone=True, but 1 parameters of the backbone are to be trained"):
        model(**batch)
    again = HypernetForTokenClassification.from_pretrained(None, config=model.config, state_dict=model.state_dict())
    assert not any(p.requires_grad for p in again.base_model.backbone.parameters())


def test_backbone_states_may_be_given(tiny_hypernet, batch):
    model = tiny_hypernet(freeze_backbone=True)
    with torch.no_grad():
        expected = model(**batch).logits
        states = model.base_model.encode(**batch).last_hidden_state
        model.base_model.backbone = None
        assert torch.equal(model(**batch, backbone_states=states).logits, expected)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_from_backbone_takes_over_the_weights_and_scales_what_it_writes(
    backbone, normalize, saved_encoder, batch, tiny_tokenizer
):
    model = HypernetModel.from_backbone(
        saved_encoder(backbone), hidden_size=32, normalize_meta=normalize, attention_dropout=0.25
    )
    of_encoder = model.backbone.config.to_dict()
    assert 0.25 in (of_encoder.get("attention_dropout"), of_encoder.get("attention_probs_dropout_prob"))
    encoder = AutoModel.from_pretrained(saved_encoder(backbone))
    for name, p in encoder.state_dict().items():
        if "pooler" not in name:
            assert torch.equal(model.backbone.state_dict()[name], p)
    assert (model.config.cls_token_id, model.config.sep_token_id) == (2, 3)
    assert model.config.text_config.name_or_path == ""
    with torch.no_grad():
        z = model(**batch).meta_embedding
        variance = model.reader.generators[0](z).hidden.var() * 32
    assert 0.2 < variance < 5  # 1 on average over random texts
    if normalize:
        lengths = z.norm(dim=-1)
        assert z.sum(-1).abs().max() < 1e-5 and lengths.min() > 0.5 and lengths.max() < 1 + 1e-5


def test_a_wrong_backbone_and_wrong_options_are_named(saved_encoder, tiny_hypernet, tmp_path):
    with pytest.raises(OSError, match="'nowhere/at-all' could not be opened as a backbone"):
        HypernetModel.from_backbone("nowhere/at-all")
    with pytest.raises(ValueError, match="'meta_sise'.*Did you mean 'meta_size'"):
        HypernetModel.from_backbone(saved_encoder(), meta_sise=3)
    tiny_hypernet().save_pretrained(tmp_path)
    with pytest.raises(OSError, match="'hypernet' model already"):
        HypernetModel.from_backbone(str(tmp_path))
    for wrong, message in (
        ({"meta_size": 0}, "meta_size=0 must be"),
        ({"meta_size": 1}, "meta_size=1: normalize_meta would make it 0"),
        ({"readout": "max"}, "readout='max' is not known"),
        ({"head_dropout": 1.0}, "head_dropout=1.0 must be"),
        ({"keyphrase_threshold": 2.0}, "keyphrase_threshold=2.0 must be"),
    ):
        with pytest.raises(ValueError, match=message):
            HypernetConfig(**wrong)
    with pytest.raises(ValueError, match="model_type='bert'.*from_backbone"):
        HypernetConfig.from_dict({"model_type": "bert"})
    with pytest.raises(ValueError, match="There is nothing to read"):
        tiny_hypernet()()


def test_logits_are_log_marginals_and_certain_outside(tiny_hypernet, batch):
    model = tiny_hypernet()
    main = (batch["token_type_ids"] == 1) & (batch["input_ids"] > 4)
    with torch.no_grad():
        logits = model(**batch, word_start_mask=main).logits
    assert_close(logits.exp().sum(-1), torch.ones(main.shape))
    assert torch.equal(logits.softmax(-1)[~main], torch.tensor([1.0, 0, 0]).expand((~main).sum(), 3))
    assert (logits[main].exp() > 1e-3).all() and torch.isfinite(logits).all()


def test_words_take_part_by_their_first_tokens(tiny_hypernet, batch):
    """What stands between words changes nothing for the CRF, and the path is that of the words alone."""
    model = tiny_hypernet()
    main = (batch["token_type_ids"] == 1) & (batch["input_ids"] > 4)
    starts = main & (torch.arange(main.shape[1]) % 2 == 0)
    with torch.no_grad():
        logits, path = model(**batch, word_start_mask=starts).logits, model.decode(**batch, word_start_mask=starts)
        scores, _ = model._scores(**batch)
        for row in range(len(main)):
            inside = scores[row, starts[row]][None]
            whole = torch.ones(inside.shape[:2], dtype=torch.bool)
            assert_close(logits[row, starts[row]], model.crf.log_marginals(inside, whole)[0])
            assert torch.equal(path[row, starts[row]], model.crf.viterbi(inside, whole)[0][0])
    assert (path[~starts] == -1).all() and (logits[~starts].argmax(-1) == 0).all()
    with torch.no_grad():
        nothing = torch.full(main.shape, -100)
        assert model(**batch, labels=nothing).loss == 0
        assert model(**batch, labels=nothing, num_items_in_batch=0).loss == 0  # as the Trainer counts


def test_constrained_decoding_follows_bio(tiny_hypernet, batch):
    starts, follows = allowed_steps({0: "O", 1: "B-KEY", 2: "I-KEY", 3: "I-ORG"})
    assert starts.tolist() == [True, True, False, False]
    assert follows.int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    free, bound = tiny_hypernet(), tiny_hypernet(constrained_decoding=True)
    for model in (free, bound):
        with torch.no_grad():
            model.classifier.bias[2] += 3.0
    assert (free.decode(**batch) == 2).any() and (free.decode(**batch) != 1).all()
    for row in bound.decode(**batch).tolist():
        tags = [tag for tag in row if tag >= 0]
        assert tags[0] != 2 and all(not (a == 0 and b == 2) for a, b in zip(tags, tags[1:], strict=False))


def test_a_title_changes_how_a_text_is_read(tiny_hypernet, tiny_tokenizer):
    """Cached states, so that the backbone's own attention to the title has no part in it."""
    model = tiny_hypernet()
    one = tiny_tokenizer("graph", "learning the network", return_tensors="pt")
    states = torch.randn(1, one["input_ids"].shape[1], 32, generator=torch.Generator().manual_seed(0))
    other = states.clone()
    other[0, 1] += 1.0  # the title's token alone
    with torch.no_grad():
        assert not torch.allclose(
            model(**one, backbone_states=states).logits, model(**one, backbone_states=other).logits, atol=1e-4
        )
        other[0, 1] -= 1.0
        other[0, 2] += 1.0  # the separator belongs to nobody
        assert_close(model(**one, backbone_states=states).logits, model(**one, backbone_states=other).logits)


@pytest.mark.parametrize("readout", ["last", "mean"])
def test_texts_are_classified_by_their_last_state_or_the_mean(readout, tiny_hypernet, batch):
    model = tiny_hypernet("classes", readout=readout)
    with torch.no_grad():
        outputs = model.base_model(**batch)
        rows = [outputs.last_hidden_state[i, mask] for i, mask in enumerate(outputs.main_mask)]
        expected = torch.stack([row[-1] if readout == "last" else row.mean(0) for row in rows])
        assert_close(model(**batch).logits, model.classifier(expected))


def test_classes_may_be_several_or_numbers(tiny_hypernet, batch):
    several = tiny_hypernet("classes", problem_type="multi_label_classification")
    assert several(**batch, labels=torch.rand(3, 4).round()).loss > 0
    number = tiny_hypernet("classes", num_labels=1)
    outputs = number(**batch, labels=torch.tensor([0.0, 1.0, 2.0]))
    assert_close(outputs.loss, (outputs.logits[:, 0] - torch.tensor([0.0, 1.0, 2.0])).square().mean())


def test_no_answer_stands_at_the_first_token(tiny_hypernet, batch):
    model = tiny_hypernet("answers")
    outputs = model(**batch)
    main = (batch["token_type_ids"] == 1) & (batch["input_ids"] > 4)
    main[:, 0] = True
    for logits in (outputs.start_logits, outputs.end_logits):
        assert (logits[~main] == -1e4).all() and (logits[main] > -100).all()
    with torch.no_grad():  # the first token is read before the text: its state is that of one step
        states = model.base_model(**batch, first_in_main=True).last_hidden_state
        without = model.base_model(**batch).last_hidden_state
    assert (states[:, 0] != 0).any() and (without[:, 0] == 0).all()
    null = torch.zeros(3, dtype=torch.long)
    loss = model(**batch, start_positions=null, end_positions=null).loss
    expected = -(outputs.start_logits.log_softmax(-1) + outputs.end_logits.log_softmax(-1))[:, 0].mean()
    assert_close(loss, expected)
