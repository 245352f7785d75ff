"""The hypernetwork's three heads on three kinds of encoder: loading, padding, gradients, precision, compilation, decoding."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from modeling_hypernet import HypernetConfig, HypernetForTokenClassification, HypernetModel
from modeling_hypernet.crf_hypernet import allowed_transitions

from .conftest import KINDS

BACKBONES = ("bert", "deberta-v2", "modernbert")
# every head once and every encoder once: they do not depend on each other
each_pair = pytest.mark.parametrize("kind, backbone", list(zip(KINDS, BACKBONES, strict=True)))


def first_output(outputs):
    return outputs.start_logits if "start_logits" in outputs else outputs.logits


def test_adapters_need_a_trained_backbone(tiny_hypernet):
    with pytest.raises(ValueError, match="freeze_backbone=True"):
        tiny_hypernet(freeze_backbone=True).lora_config()


def test_a_frozen_backbone_is_not_trained(tiny_hypernet, batch, target, saved_encoder):
    model = HypernetForTokenClassification.from_backbone(saved_encoder(), meta_embedding_size=4, hidden_size=8)
    model.train()
    assert not model.base_model.backbone.training and model.classifier.training
    model(**target("tags", batch)).loss.backward()
    touched = {name for name, p in model.named_parameters() if p.grad is not None}
    assert touched == {name for name, p in model.named_parameters() if p.requires_grad}
    assert not any(".backbone." in name for name in touched) and any("reader" in name for name in touched)
    model.base_model.backbone.get_input_embeddings().requires_grad_(True)
    with pytest.raises(ValueError, match="freeze_backbone=True, but 1 parameters"):
        model(**batch)
    again = HypernetForTokenClassification.from_pretrained(None, config=model.config, state_dict=model.state_dict())
    assert not any(p.requires_grad for p in again.base_model.backbone.parameters())


def test_precomputed_states_replace_the_backbone(tiny_hypernet, batch):
    model = tiny_hypernet(freeze_backbone=True)
    with torch.no_grad():
        expected = model(**batch).logits
        states = model.base_model.encode(**batch).last_hidden_state
        model.base_model.backbone = None
        assert torch.equal(model(**batch, encoder_hidden_states=states).logits, expected)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_from_backbone_scales_the_generators(backbone, normalize, saved_encoder, batch):
    options = {"hidden_size": 32, "normalize_meta_embedding": normalize}
    model = HypernetModel.from_backbone(saved_encoder(backbone), **options)
    assert (model.config.cls_token_id, model.config.sep_token_id) == (2, 3)
    with torch.no_grad():
        z = model(**batch).meta_embedding
        variance = model.reader.generators[0](z).hidden.var() * 32
    assert 0.2 < variance < 5  # 1 on average over random texts
    if normalize:
        lengths = z.norm(dim=-1)
        assert z.sum(-1).abs().max() < 1e-5 and lengths.min() > 0.5 and lengths.max() < 1 + 1e-5


def test_wrong_options_are_named(tiny_hypernet):
    for wrong, message in (
        ({"meta_embedding_size": 0}, "meta_embedding_size=0"),
        ({"meta_embedding_size": 1}, "meta_embedding_size=1.*normalize_meta_embedding=False"),
        ({"pooling": "max"}, "pooling='max'.*'mean'"),
        ({"classifier_dropout": 1.0}, "classifier_dropout=1.0"),
        ({"keyphrase_threshold": 2.0}, "keyphrase_threshold=2.0"),
        ({"lstm_implementation": "loop"}, "lstm_implementation='loop'.*'per_example'"),
    ):
        with pytest.raises(ValueError, match=message):
            HypernetConfig(**wrong)
    with pytest.raises(ValueError, match="model_type='bert'.*from_backbone"):
        HypernetConfig.from_dict({"model_type": "bert"})
    with pytest.raises(ValueError, match="input_ids, inputs_embeds or encoder_hidden_states"):
        tiny_hypernet()()


def test_logits_are_log_marginals_and_certain_outside_words(tiny_hypernet, batch):
    model = tiny_hypernet()
    main = (batch["token_type_ids"] == 1) & (batch["input_ids"] > 4)
    with torch.no_grad():
        logits = model(**batch, word_start_mask=main).logits
    assert_close(logits.exp().sum(-1), torch.ones(main.shape))
    assert torch.equal(logits.softmax(-1)[~main], torch.tensor([1.0, 0, 0]).expand((~main).sum(), 3))
    assert (logits[main].exp() > 1e-3).all() and torch.isfinite(logits).all()


def test_the_crf_runs_over_first_tokens_of_words(tiny_hypernet, batch):
    """Other tokens change nothing, and the path is that of the words."""
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
        unlabelled = torch.full(main.shape, -100)
        assert model(**batch, labels=unlabelled).loss == 0
        assert model(**batch, labels=unlabelled, num_items_in_batch=0).loss == 0  # as the Trainer counts


def test_constrained_decoding_follows_bio(tiny_hypernet, batch):
    starts, follows = allowed_transitions({0: "O", 1: "B-KEY", 2: "I-KEY", 3: "I-ORG"})
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


def test_a_title_changes_the_logits_of_its_text(tiny_hypernet, tiny_tokenizer):
    """With precomputed states, to exclude the backbone's attention to the title."""
    model = tiny_hypernet()
    one = tiny_tokenizer("graph", "learning the network", return_tensors="pt")
    states = torch.randn(1, one["input_ids"].shape[1], 32, generator=torch.Generator().manual_seed(0))
    other = states.clone()
    other[0, 1] += 1.0  # the title's token alone
    with torch.no_grad():
        assert not torch.allclose(
            model(**one, encoder_hidden_states=states).logits,
            model(**one, encoder_hidden_states=other).logits,
            atol=1e-4,
        )
        other[0, 1] -= 1.0
        other[0, 2] += 1.0  # the separator belongs to neither text
        assert_close(
            model(**one, encoder_hidden_states=states).logits, model(**one, encoder_hidden_states=other).logits
        )


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_texts_are_classified_by_their_last_or_mean_state(pooling, tiny_hypernet, batch):
    model = tiny_hypernet("classes", pooling=pooling)
    with torch.no_grad():
        outputs = model.base_model(**batch)
        rows = [outputs.last_hidden_state[i, mask] for i, mask in enumerate(outputs.main_mask)]
        expected = torch.stack([row[-1] if pooling == "last" else row.mean(0) for row in rows])
        assert_close(model(**batch).logits, model.classifier(expected))


def test_labels_may_be_multi_label_or_numbers(tiny_hypernet, batch):
    several = tiny_hypernet("classes", problem_type="multi_label_classification")
    assert several(**batch, labels=torch.rand(3, 4).round()).loss > 0
    number = tiny_hypernet("classes", num_labels=1)
    outputs = number(**batch, labels=torch.tensor([0.0, 1.0, 2.0]))
    assert_close(outputs.loss, (outputs.logits[:, 0] - torch.tensor([0.0, 1.0, 2.0])).square().mean())


def test_no_answer_is_the_first_token(tiny_hypernet, batch):
    model = tiny_hypernet("answers")
    outputs = model(**batch)
    main = (batch["token_type_ids"] == 1) & (batch["input_ids"] > 4)
    main[:, 0] = True
    for logits in (outputs.start_logits, outputs.end_logits):
        assert (logits[~main] == -1e4).all() and (logits[main] > -100).all()
    with torch.no_grad():  # the first token is encoded before the text
        states = model.base_model(**batch, prepend_cls_to_main=True).last_hidden_state
        without = model.base_model(**batch).last_hidden_state
    assert (states[:, 0] != 0).any() and (without[:, 0] == 0).all()
    null = torch.zeros(3, dtype=torch.long)
    loss = model(**batch, start_positions=null, end_positions=null).loss
    expected = -(outputs.start_logits.log_softmax(-1) + outputs.end_logits.log_softmax(-1))[:, 0].mean()
    assert_close(loss, expected)


def test_the_meta_embedding_has_the_precision_of_the_recurrence(tiny_hypernet, batch):
    assert tiny_hypernet().double()(**batch).meta_embedding.dtype == torch.float64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tiny_hypernet()(**batch).meta_embedding.dtype == torch.float32


@pytest.mark.parametrize("problem, labels", [("regression", 1), ("multi_label_classification", 3)])
def test_every_loss_of_classes_is_in_float64(problem, labels, tiny_hypernet, batch):
    model = tiny_hypernet("classes", problem_type=problem, num_labels=labels).double()
    target = torch.rand(3, labels, dtype=torch.float64)
    outputs = model(**batch, labels=target.squeeze(-1) if labels == 1 else target)
    loss = torch.nn.MSELoss() if labels == 1 else torch.nn.BCEWithLogitsLoss(reduction="sum")
    expected = loss(outputs.logits, target) / (1 if labels == 1 else target.numel())
    assert outputs.loss.dtype == torch.float64
    assert_close(outputs.loss, expected, rtol=1e-14, atol=0)


def test_classes_that_are_not_known_are_not_counted(tiny_hypernet, batch):
    model = tiny_hypernet("classes")
    with torch.no_grad():
        found = model(**batch, labels=torch.tensor([-100, 1, -100]))
        assert_close(found.loss, F.cross_entropy(found.logits[1:2], torch.tensor([1])))
        assert model(**batch, labels=torch.full((3,), -100)).loss == 0
