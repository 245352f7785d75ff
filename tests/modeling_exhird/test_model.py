"""The model with either encoder: padding, empty documents, precision, initialisation, configuration."""

import copy

import pytest
import torch
from torch.testing import assert_close

from modeling_exhird import ExhirdConfig
from modeling_exhird.decoder_exhird import labels_by_phrase

from .conftest import KINDS, each_kind, make_batch, tiny_exhird, without_labels, word_tokenizer


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# ---- the contract


@each_kind
def test_padding_of_labels_changes_nothing(kind):
    model, batch = tiny_exhird(kind, exclusive_loss_coef=1.0).train(), make_batch()
    flat = batch["labels"]
    rows, _ = labels_by_phrase(flat, model.config.end_phrase_token_id)
    B, I, J = rows.shape
    wide = torch.full((B, I + 3, J + 2), -100)
    wide[:, :I, :J] = rows
    longer = torch.cat([torch.full((B, 3), -100), flat, torch.full((B, 2), -100)], 1)
    found = []
    for labels in (flat, longer, rows, wide):
        torch.manual_seed(0)
        outputs = model(**{**batch, "labels": labels})
        found.append((outputs.loss, outputs.exclusive_loss, outputs.log_probs[labels != -100]))
        assert outputs.log_probs.shape == labels.shape and (outputs.log_probs[labels == -100] == 0).all()
    for other in found[1:]:
        assert_close(other, found[0], rtol=1e-6, atol=1e-6)
    assert found[0][1] > 0


@each_kind
def test_bf16_generates_with_log_probabilities_in_float32(kind):
    model, inputs = tiny_exhird(kind), without_labels(make_batch())
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert half(**make_batch()).log_probs.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model.generate_phrases(**inputs)
    for rows in (half.generate_phrases(**inputs), mixed):
        assert rows.log_probs.dtype == torch.float32 and (rows.log_probs <= 0).all() and (rows.log_probs > -1e4).all()


@each_kind
def test_documents_without_words_or_labels_do_not_change_others(kind):
    model = tiny_exhird(kind, exclusive_loss_coef=1.0).train()
    batch = {name: x.clone() for name, x in make_batch().items()}
    with torch.no_grad():
        expected = model(**batch).log_probs
    batch["attention_mask"][1], batch["input_ids"][1], batch["copy_ids"][1] = 0, 1, 1
    outputs = model(**batch)
    outputs.loss.backward()
    assert torch.isfinite(outputs.log_probs).all()
    assert all(torch.isfinite(grad).all() for grad in gradients(model).values())
    assert_close(outputs.log_probs[[0, 2, 3]], expected[[0, 2, 3]], rtol=0, atol=1e-5)
    rows = model.generate_phrases(**without_labels(batch))
    assert torch.isfinite(rows.log_probs).all() and (rows.ids[1, :, 0] != 1).all()  # no padding is copied

    batch["labels"][2] = -100
    log_probs = model(**batch).log_probs
    assert (log_probs[2] == 0).all()
    assert_close(log_probs[[0, 3]], expected[[0, 3]], rtol=0, atol=1e-5)
    model.zero_grad()
    outputs = model(**{**batch, "labels": torch.full_like(batch["labels"], -100)})
    outputs.loss.backward()
    assert outputs.loss == 0 and not any(grad.any() for grad in gradients(model).values())


# ---- weights


@each_kind
@pytest.mark.parametrize("literal", [False, True])
def test_all_weights_are_drawn_from_the_same_range(kind, literal):
    model = tiny_exhird(kind, initializer_range=0.1, init_layer_norm=literal)
    modules = dict(model.named_modules())
    for name, p in model.named_parameters():
        if isinstance(modules[name.rpartition(".")[0]], torch.nn.LayerNorm) and not literal:
            assert (p == float(name.endswith("weight"))).all(), name
        else:
            assert p.any() and p.abs().max() <= 0.1 and (p.numel() < 8 or abs(p.std() - 0.0577) < 0.03), name


def test_a_configuration_has_the_tokenizers_ids(tmp_path):
    tokenizer = word_tokenizer()
    config = ExhirdConfig.from_tokenizer(tokenizer, hidden_size=32, num_attention_heads=2)
    assert config.vocab_size == len(tokenizer) and config.hidden_size == 32
    names = ("unk", "pad", "bos", "eos", "end_phrase", "present", "absent", "title_end")
    words = ("<unk>", "<blank>", "<s>", "</s>", ";", "<p_start>", "<a_start>", "<eot>")
    ids = [getattr(config, f"{name}_token_id") for name in names]
    assert ids == tokenizer.convert_tokens_to_ids(list(words))
    kept = config.to_dict()
    config.save_pretrained(tmp_path)
    assert ExhirdConfig.from_pretrained(tmp_path).to_dict() == kept
    configs = [ExhirdConfig(encoder_type=kind) for kind in KINDS]
    assert [config.resolved_decoder_init for config in configs] == ["mean", "last"]
    assert [config.word_size for config in configs] == [300, 100]


@each_kind
def test_a_row_of_padding_changes_no_other_under_float16_autocast(kind):
    model, batch = tiny_exhird(kind), make_batch()
    empty = {**batch, "attention_mask": batch["attention_mask"].clone()}
    empty["attention_mask"][0] = 0
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        expected, found = model(**batch).log_probs, model(**empty).log_probs
    assert found.isfinite().all()
    assert_close(found[1:], expected[1:], rtol=1e-2, atol=1e-2)
