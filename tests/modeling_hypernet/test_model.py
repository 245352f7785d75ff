"""The hypernetwork's three heads on three kinds of encoder: freezing, logits, losses, decoding."""

import pytest
import torch
import torch.nn.functional as F
from peft import get_peft_model
from torch.testing import assert_close
from transformers import pipeline

from modeling_hypernet import HypernetForTokenClassification
from modeling_hypernet.crf_hypernet import allowed_transitions


def words_of(batch):
    """The main text's tokens."""
    return (batch["token_type_ids"] == 1) & (batch["input_ids"] > 4)


def test_a_frozen_backbone_is_not_trained(batch, target, tiny_hypernet, tiny_tokenizer, tmp_path):
    for part in (tiny_hypernet().base_model.backbone, tiny_tokenizer):
        part.save_pretrained(tmp_path)
    model = HypernetForTokenClassification.from_backbone(tmp_path, meta_embedding_size=4, hidden_size=8).train()
    assert (model.config.cls_token_id, model.config.sep_token_id) == (2, 3)
    assert not model.base_model.backbone.training and model.classifier.training
    model(**target("tags", batch)).loss.backward()
    touched = {name for name, p in model.named_parameters() if p.grad is not None}
    assert touched == {name for name, p in model.named_parameters() if p.requires_grad}
    assert not any(".backbone." in name for name in touched) and any("reader" in name for name in touched)
    again = HypernetForTokenClassification.from_pretrained(None, config=model.config, state_dict=model.state_dict())
    assert not any(p.requires_grad for p in again.base_model.backbone.parameters())


@pytest.mark.filterwarnings("ignore:An adapter records")
def test_an_adapter_in_a_frozen_backbone_is_trained(tiny_hypernet, batch, target):
    model = tiny_hypernet(freeze_backbone=True)
    adapted = get_peft_model(model, model.lora_config()).train()
    adapted(**target("tags", batch)).loss.backward()
    touched = {name for name, p in adapted.named_parameters() if p.grad is not None and p.grad.any()}
    assert any("lora_B" in name for name in touched) and all("lora" in x or "to_save" in x for x in touched)


def test_precomputed_states_replace_the_backbone(tiny_hypernet, batch):
    model = tiny_hypernet(freeze_backbone=True)
    with torch.no_grad():
        expected = model(**batch).logits
        states = model.base_model.backbone(**batch).last_hidden_state
        model.base_model.backbone = None
        assert torch.equal(model(**batch, encoder_hidden_states=states).logits, expected)


def test_generated_weights_of_a_new_model_have_variance_1_over_N_h(tiny_hypernet, batch):
    model = tiny_hypernet(hidden_size=32).base_model
    with torch.no_grad():
        z = model(**batch).meta_embedding
        variance = model.reader.generators[0](z).hidden.var() * 32
    assert 0.2 < variance < 5  # 1 on average over random texts
    assert z.sum(-1).abs().max() < 1e-5 and z.norm(dim=-1).min() > 0.5 and z.norm(dim=-1).max() < 1 + 1e-5


def test_logits_are_log_marginals_certain_outside_words_and_the_same_with_labels(tiny_hypernet, batch, target):
    model, main = tiny_hypernet(classifier_dropout=0.0), words_of(batch)
    with torch.no_grad():
        logits = model(**batch, word_start_mask=main).logits
        assert torch.equal(model(**target("tags", batch), word_start_mask=main).logits, logits)
        assert torch.equal(model(**batch).logits, logits)  # by default all tokens of the main text
    assert_close(logits.exp().sum(-1), torch.ones(main.shape))
    assert torch.equal(logits.softmax(-1)[~main], torch.tensor([1.0, 0, 0]).expand((~main).sum(), 3))
    assert (logits[main].exp() > 1e-3).all() and torch.isfinite(logits).all()


def test_the_crf_runs_over_first_tokens_of_words(tiny_hypernet, batch):
    """Other tokens change nothing, and the path is that of the words."""
    model, main = tiny_hypernet(), words_of(batch)
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
        unlabelled = torch.full(main.shape, -100)
        for count in (None, 0):  # as the Trainer counts
            assert model(**batch, labels=unlabelled, num_items_in_batch=count).loss == 0


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


@pytest.mark.parametrize("strategy", ["simple", "first"])
def test_the_stock_pipeline_joins_the_sub_tokens_of_a_phrase(strategy, tiny_hypernet, tiny_tokenizer):
    model = tiny_hypernet()
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(torch.tensor([0.0, 0.0, 2.0]))
        model.crf.start.copy_(torch.tensor([0.0, 5.0, -5.0]))
    stock = pipeline("token-classification", model=model, tokenizer=tiny_tokenizer, aggregation_strategy=strategy)
    assert [(entry["start"], entry["end"]) for entry in stock("yaks in zebras")] == [(0, 14)]


def test_a_title_changes_the_logits_of_its_text(tiny_hypernet, tiny_tokenizer):
    """With precomputed states, to exclude the backbone's attention to the title."""
    model = tiny_hypernet()
    one = tiny_tokenizer("graph", "learning the network", return_tensors="pt")
    states = torch.randn(1, one["input_ids"].shape[1], 32, generator=torch.Generator().manual_seed(0))
    found = []
    for place in (None, 1, 2):  # the title's token, the separator that belongs to neither text
        other = states.clone()
        if place:
            other[0, place] += 1.0
        with torch.no_grad():
            found.append(model(**one, encoder_hidden_states=other).logits)
    assert not torch.allclose(found[0], found[1], atol=1e-4)
    assert_close(found[0], found[2])


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_texts_are_classified_by_their_last_or_mean_state(pooling, tiny_hypernet, batch):
    model = tiny_hypernet("classes", pooling=pooling)
    with torch.no_grad():
        outputs = model.base_model(**batch)
        rows = [outputs.last_hidden_state[i, mask] for i, mask in enumerate(outputs.main_mask)]
        expected = torch.stack([row[-1] if pooling == "last" else row.mean(0) for row in rows])
        assert_close(model(**batch).logits, model.classifier(expected))


PROBLEMS = [("regression", 1), (None, 1), ("multi_label_classification", 3), (None, 3)]


@pytest.mark.parametrize("problem, labels", PROBLEMS)
def test_labels_may_be_numbers_or_several_classes(problem, labels, tiny_hypernet, batch):
    """In float64 to its last digits."""
    model = tiny_hypernet("classes", problem_type=problem, num_labels=labels).double()
    target = torch.rand(3, labels, dtype=torch.float64)
    outputs = model(**batch, labels=target.squeeze(-1) if labels == 1 else target)
    loss = torch.nn.MSELoss() if labels == 1 else torch.nn.BCEWithLogitsLoss()
    assert outputs.loss.dtype == torch.float64
    assert_close(outputs.loss, loss(outputs.logits, target), rtol=1e-14, atol=0)


def test_classes_that_are_not_known_are_not_counted(tiny_hypernet, batch):
    found = tiny_hypernet("classes")(**batch, labels=torch.tensor([-100, 1, -100]))
    assert_close(found.loss, F.cross_entropy(found.logits[1:2], torch.tensor([1])))


def test_no_answer_is_the_first_token(tiny_hypernet, batch):
    model, main = tiny_hypernet("answers"), words_of(batch)
    outputs = model(**batch)
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


def test_the_recurrence_is_in_float32_or_float64(tiny_hypernet, batch):
    assert tiny_hypernet().double().base_model(**batch).last_hidden_state.dtype == torch.float64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tiny_hypernet().base_model(**batch).last_hidden_state.dtype == torch.float32
