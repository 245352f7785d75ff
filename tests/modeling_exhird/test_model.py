"""The contract of every model class, for every encoder: saving, padding, initialisation, backbones, configuration."""

import copy

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModel, T5Config, T5ForConditionalGeneration

from modeling_exhird import ExhirdConfig, ExhirdEncoder, ExhirdForKeyphraseGeneration
from modeling_exhird.decoder_exhird import labels_by_phrase

from .conftest import KINDS, SIZES, each_kind, without_labels


@pytest.fixture(scope="module")
def saved_encoder(backbone_config, tiny_tokenizer, tmp_path_factory):
    """The folder of a tiny pretrained encoder."""
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(1)
    AutoModel.from_config(backbone_config("bert")).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return str(folder)


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# ---- the contract


@each_kind
def test_padding_of_labels_changes_nothing(kind, tiny_exhird, batch_for):
    model, batch = tiny_exhird(kind, exclusive_loss_coef=1.0).train(), batch_for(kind)
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
def test_bf16_generates_with_log_probabilities_in_float32(kind, tiny_exhird, batch_for):
    model, inputs = tiny_exhird(kind), without_labels(batch_for(kind))
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert half(**batch_for(kind)).log_probs.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model.generate_phrases(**inputs, num_beams=2)
    for rows in (half.generate_phrases(**inputs), half.generate_phrases(**inputs, num_beams=2), mixed):
        assert rows.log_probs.dtype == torch.float32 and (rows.log_probs <= 0).all() and (rows.log_probs > -1e4).all()


@each_kind
def test_a_configuration_that_wants_tuples_gets_them(kind, tiny_exhird, batch_for):
    model, batch = tiny_exhird(kind), batch_for(kind)
    with torch.no_grad():
        expected = model(**batch)
        assert torch.equal(model(**batch, return_dict=False)[1], expected.logits)
        model.config.return_dict = False
        loss, logits, log_probs, *_ = model(**batch)
        assert torch.equal(loss, expected.loss) and torch.equal(log_probs, expected.log_probs)
        assert torch.equal(model.generate(**batch), torch.cat([model.generate(**batch)]))
        assert model.generate_phrases(**without_labels(batch)).ids.shape[0] == 4


@each_kind
def test_documents_without_words_or_labels_do_not_change_others(kind, tiny_exhird, batch_for):
    model = tiny_exhird(kind, exclusive_loss_coef=1.0).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    batch = {name: x.clone() for name, x in batch_for(kind).items()}
    with torch.no_grad():
        expected = model(**batch).log_probs
    batch["attention_mask"][1], batch["input_ids"][1], batch["copy_ids"][1] = 0, 1, 1
    outputs = model(**batch)
    outputs.loss.backward()
    assert torch.isfinite(outputs.log_probs).all()
    assert all(torch.isfinite(grad).all() for grad in gradients(model).values())
    assert_close(outputs.log_probs[[0, 2, 3]], expected[[0, 2, 3]], rtol=0, atol=1e-5)
    rows = model.generate_phrases(**without_labels(batch), num_beams=2)
    assert torch.isfinite(rows.log_probs).all() and (rows.ids[1, 0] != 1).all()  # no padding is copied

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
def test_all_weights_are_drawn_from_the_same_range(kind, literal, tiny_exhird):
    model = tiny_exhird(kind, initializer_range=0.1, init_layer_norm=literal)
    modules = dict(model.named_modules())
    for name, p in model.named_parameters():
        if "backbone" in name:
            continue
        if isinstance(modules[name.rpartition(".")[0]], torch.nn.LayerNorm) and not literal:
            assert (p == float(name.endswith("weight"))).all(), name
        else:
            assert p.any() and p.abs().max() <= 0.1 and (p.numel() < 8 or abs(p.std() - 0.0577) < 0.03), name
    if kind == "pretrained":  # its own: normal, biases 0
        backbone = dict(model.encoder.word_encoder.backbone.named_parameters())
        words, norm = backbone["embeddings.word_embeddings.weight"], backbone["embeddings.LayerNorm.weight"]
        assert abs(words.std() - 0.02) < 0.002 and (norm == 1).all()
        assert not any(p.any() for name, p in backbone.items() if name.endswith("bias"))


@pytest.mark.parametrize("name", ["deberta-v2", "modernbert", "t5"])
def test_any_encoder_can_be_the_backbone(name, backbone_config, tokenizer_for, batch_for, tmp_path):
    """T5 without its decoder, and with embeddings that are one under two names."""
    torch.manual_seed(1)
    tokenizer = tokenizer_for("pretrained")
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "pad_token_id": 0}
    if name == "t5":
        stock = T5ForConditionalGeneration(T5Config(vocab_size=len(tokenizer.subword_tokenizer), **sizes))
    else:
        stock = AutoModel.from_config(backbone_config(name))
    stock.save_pretrained(tmp_path / "backbone")
    model = ExhirdForKeyphraseGeneration.from_backbone(str(tmp_path / "backbone"), tokenizer, hidden_size=8)
    model.save_pretrained(tmp_path / "model")
    loading = {"output_loading_info": True}
    again, info = ExhirdForKeyphraseGeneration.from_pretrained(tmp_path / "model", **loading)
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    encoder, _ = ExhirdEncoder.from_pretrained(tmp_path / "model", **loading)
    batch = batch_for("pretrained")
    with torch.no_grad():
        expected = model(**batch)
        assert_close(again(**batch).log_probs, expected.log_probs, rtol=0, atol=1e-6)
        given = {n: x for n, x in batch.items() if n not in ("labels", "copy_ids")}
        assert_close(encoder(**given).last_hidden_state, expected.encoder_last_hidden_state, rtol=0, atol=1e-6)
        one = batch_for("pretrained", only=[1])
        T = one["labels"].shape[1]
        assert_close(again(**one).log_probs[0], expected.log_probs[1, :T], rtol=0, atol=1e-5)
    again.train()(**batch).loss.backward()
    assert [n for n, p in again.named_parameters() if p.grad is None] == []


def test_a_frozen_backbone_does_not_change(saved_encoder, tokenizer_for, batch_for, tmp_path):
    model = ExhirdForKeyphraseGeneration.from_backbone(
        saved_encoder, tokenizer_for("pretrained"), hidden_size=8, freeze_backbone=True
    )
    model.save_pretrained(tmp_path)
    batch, found = batch_for("pretrained"), []
    for one in (model, ExhirdForKeyphraseGeneration.from_pretrained(tmp_path)):
        one.train()
        assert one.decoder.training and not any(
            module.training for module in one.encoder.word_encoder.backbone.modules()
        )
        one(**batch).loss.backward()
        touched = set(gradients(one))
        assert touched == {name for name, p in one.named_parameters() if p.requires_grad}
        assert (
            not any(".backbone." in name for name in touched)
            and "encoder.word_encoder.no_subword_embedding.weight" in touched
        )
        found.append(one(**batch).log_probs)
    assert torch.equal(*found)  # no dropout in a frozen backbone
    encoder = ExhirdEncoder.from_pretrained(tmp_path)
    assert (
        not any(p.requires_grad for p in encoder.word_encoder.backbone.parameters())
        and encoder.embeddings.weight.requires_grad
    )


def test_invalid_arguments_are_named(saved_encoder, tokenizer_for, tiny_exhird, batch_for):
    tokenizer = tokenizer_for("pretrained")
    with pytest.raises(ValueError, match=r"from_tokenizer\(\) .*'hiden_size'.* Did you mean 'hidden_size'"):
        ExhirdConfig.from_tokenizer(tokenizer, hiden_size=3)
    with pytest.raises(ValueError, match="encoder_type.*text_config"):
        ExhirdForKeyphraseGeneration.from_backbone(saved_encoder, tokenizer, encoder_type="bigru")
    without = {name: x for name, x in batch_for("pretrained").items() if "subword" not in name}
    with pytest.raises(ValueError, match="subword_ids=None"):
        tiny_exhird("pretrained")(**without)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"encoder_type": "gru"}, "encoder_type='gru' is not known"),
        ({"relative_attention": "both"}, "relative_attention='both' is not known. Use one of .*'none', None"),
        ({"decoder_init": "first"}, "decoder_init='first' is not known"),
        ({"sparse_attention_implementation": "flash"}, "sparse_attention_implementation='flash' is not known"),
        ({"hidden_size": 0}, "hidden_size=0 must be"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be"),
        ({"max_phrases": 0}, "max_phrases=0 must be"),
        ({"segment_length": 0}, "segment_length=0 must be"),
        ({"window_size": -1}, "window_size=-1 must be"),
        ({"exclusive_loss_coef": -0.5}, "exclusive_loss_coef=-0.5 must be"),
        ({"dropout": 1.5}, "dropout=1.5 must be"),
        ({"max_words_per_phrase": 0}, "max_words_per_phrase=0 must be"),
        ({"exclusion_window": -2}, "exclusion_window=-2"),
        ({"exclusive_loss_window": -2}, "exclusive_loss_window=-2"),
        ({"encoder_type": "bigru", "hidden_size": 15}, "hidden_size=15 is odd"),
        ({"decoder_init": "last"}, "decoder_init='last' needs .* not 'transformer'"),
        ({"num_attention_heads": 3}, "hidden_size=16 is not divisible by num_attention_heads=3"),
        ({"embedding_size": 8}, "embedding_size=8 .* hidden_size=16"),
        ({"sparse_attention_implementation": "block"}, "sparse_attention_implementation='block' .* use_top_k=False"),
        ({"pad_token_id": None}, "pad_token_id=None"),
        ({"eos_token_id": [3, 4]}, r"eos_token_id=\[3, 4\]"),
        ({"end_phrase_token_id": 50004}, "end_phrase_token_id=50004"),
        ({"present_token_id": -1}, "present_token_id=-1"),
        ({"vocab_size": 7}, "title_end_token_id=7"),
        ({"unk_token_id": 1}, "unk_token_id=1 is also pad_token_id"),
        ({"decoder_start_token_id": 5}, "decoder_start_token_id=5"),
        ({"freeze_backbone": True}, "freeze_backbone"),
        ({"encoder_type": "bigru", "text_config": {"model_type": "bert"}}, "text_config"),
        ({"attention_top_k": 0}, "attention_top_k=0"),
        ({"lead_size": 0, "use_window": False, "use_top_k": False}, "lead_size=0"),
        ({"hidden_size": 15, "num_attention_heads": 3}, "hidden_size is 15"),
        ({"hidden_size": 18, "num_attention_heads": 6, "relative_attention": "none"}, "the head size is 3"),
        ({"initializer_range": float("nan")}, "initializer_range=nan"),
        ({"exclusive_loss_coef": float("inf")}, "exclusive_loss_coef=inf"),
        ({"dropout": float("nan")}, "dropout=nan"),
    ],
)
def test_invalid_configurations_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        ExhirdConfig(**{**SIZES, "num_attention_heads": 2, **wrong})


@pytest.mark.parametrize(
    "options",
    [
        {"lead_size": 0},
        {"lead_size": 0, "window_size": 0, "attention_top_k": 0, "use_lead": False, "use_top_k": False},
        {"hidden_size": 18, "num_attention_heads": 6},  # heads of an odd size, without sinusoids of their own
    ],
)
def test_what_a_pattern_does_not_need_may_be_anything(options):
    ExhirdConfig(**{**SIZES, "num_attention_heads": 2, **options})


def test_a_configuration_has_the_tokenizers_ids(tokenizer_for, tmp_path):
    tokenizer = tokenizer_for()
    config = ExhirdConfig.from_tokenizer(tokenizer, hidden_size=32, num_attention_heads=2)
    assert config.vocab_size == len(tokenizer) and config.hidden_size == 32
    names = ("unk", "pad", "bos", "eos", "end_phrase", "present", "absent", "title_end")
    words = ("<unk>", "<blank>", "<s>", "</s>", ";", "<p_start>", "<a_start>", "<eot>")
    ids = [getattr(config, f"{name}_token_id") for name in names]
    assert ids == tokenizer.convert_tokens_to_ids(list(words))
    kept = config.to_dict()
    config.save_pretrained(tmp_path)
    again = ExhirdConfig.from_pretrained(tmp_path)
    assert again.to_dict() == kept and again.text_config is None
    configs = [ExhirdConfig(encoder_type=kind) for kind in KINDS]
    assert [config.resolved_decoder_init for config in configs] == ["mean", "last", "last", "mean", "mean"]
    assert [config.word_size for config in configs] == [300, 100, 100, 100, 100]
    assert ExhirdConfig(encoder_type="pretrained").text_config.model_type == "bert"


@each_kind
def test_a_row_of_padding_changes_no_other_under_float16_autocast(kind, tiny_exhird, batch_for):
    model, batch = tiny_exhird(kind), batch_for(kind)
    empty = {**batch, "attention_mask": batch["attention_mask"].clone()}
    empty["attention_mask"][0] = 0
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        expected, found = model(**batch).log_probs, model(**empty).log_probs
    assert found.isfinite().all()
    assert_close(found[1:], expected[1:], rtol=1e-2, atol=1e-2)
