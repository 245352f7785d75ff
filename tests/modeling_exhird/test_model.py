"""The model with either encoder: padding, empty documents, precision, initialisation, configuration."""

import torch
from torch.testing import assert_close

from modeling_exhird import ExhirdConfig, ExhirdForKeyphraseGeneration
from modeling_exhird.decoder_exhird import labels_by_phrase

from .conftest import each_kind, make_batch, tiny_exhird, without_labels, word_tokenizer


@each_kind
def test_padding_of_labels_changes_nothing(kind):
    model, batch = tiny_exhird(kind, exclusive_loss_coef=1.0).train(), make_batch()
    flat = batch["labels"]
    rows, _ = labels_by_phrase(flat, model.config.end_phrase_token_id)
    wide = torch.nn.functional.pad(rows, (0, 2, 0, 3), value=-100)
    longer = torch.nn.functional.pad(flat, (3, 2), value=-100)
    found = []
    for labels in (flat, longer, rows, wide):
        outputs = model(**{**batch, "labels": labels})
        found.append((outputs.loss, outputs.exclusive_loss, outputs.log_probs[labels != -100]))
        assert outputs.log_probs.shape == labels.shape and (outputs.log_probs[labels == -100] == 0).all()
    for other in found[1:]:
        assert_close(other, found[0], rtol=1e-6, atol=1e-6)
    assert found[0][1] > 0 and model(**without_labels(batch)).loss is None


@each_kind
def test_bf16_generates_with_log_probabilities_in_float32(kind):
    model, inputs = tiny_exhird(kind), without_labels(make_batch())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model.generate_phrases(**inputs).log_probs
    for log_probs in (mixed, model.to(torch.bfloat16).generate_phrases(**inputs).log_probs):
        assert log_probs.dtype == torch.float32 and (log_probs <= 0).all() and (log_probs > -1e4).all()


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
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert_close(outputs.log_probs[[0, 2, 3]], expected[[0, 2, 3]], rtol=0, atol=1e-5)
    rows = model.generate_phrases(**without_labels(batch))
    assert torch.isfinite(rows.log_probs).all() and (rows.ids[1, :, 0] != 1).all()  # no padding is copied
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        low = model(**batch).log_probs
    assert low.isfinite().all()
    assert_close(low[[0, 2, 3]], expected[[0, 2, 3]], rtol=1e-1, atol=1e-1)

    batch["labels"][2] = -100
    log_probs = model(**batch).log_probs
    assert (log_probs[2] == 0).all()
    assert_close(log_probs[[0, 3]], expected[[0, 3]], rtol=0, atol=1e-5)


@each_kind
def test_all_weights_are_drawn_from_the_same_range(kind):
    model = tiny_exhird(kind, initializer_range=0.1)
    modules = dict(model.named_modules())
    for name, p in model.named_parameters():
        if isinstance(modules[name.rpartition(".")[0]], torch.nn.LayerNorm):
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
    assert ids == tokenizer.convert_tokens_to_ids(list(words)) and config.decoder_start_token_id == 2
    assert [ExhirdConfig(encoder_type=kind).word_size for kind in ("transformer", "bigru")] == [300, 100]
    model = ExhirdForKeyphraseGeneration(ExhirdConfig.from_tokenizer(tokenizer, encoder_type="bigru"))
    assert model.generation_config.max_length == 2 + 20 * 7  # Seq2SeqTrainer would write 20 into it
