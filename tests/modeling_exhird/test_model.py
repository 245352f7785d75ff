"""What every model class keeps, for every kind of encoder; decoder, words and pairs against slow versions of theirs."""

import copy
import json

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModel, AutoModelForSeq2SeqLM, BartConfig, T5Config, T5ForConditionalGeneration

from modeling_exhird import ExHirdCollator, ExHirdConfig, ExHirdEncoder, ExHirdForKeyphraseGeneration, encode
from modeling_exhird.decoder_exhird import HierarchicalDecoder, Memory, Step
from modeling_exhird.words_exhird import exclusive_pairs, label_rows

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


def seen(labels):
    return labels != -100


# ---- what every model class keeps


@each_kind
def test_saved_and_loaded_it_is_the_same_bit_for_bit(kind, tiny_exhird, batch_for, tmp_path):
    model, batch = tiny_exhird(kind), batch_for(kind)
    model.save_pretrained(tmp_path)
    # copies: weights that lie in a file's memory are not aligned, and an LSTM on them rounds otherwise
    again, encoder = (copy.deepcopy(kind.from_pretrained(tmp_path)) for kind in (AutoModelForSeq2SeqLM, AutoModel))
    assert type(again) is ExHirdForKeyphraseGeneration and type(encoder) is ExHirdEncoder
    with torch.no_grad():
        expected = model(**batch)
        assert torch.equal(again(**batch).log_probs, expected.log_probs)
        assert all(torch.equal(p, again.get_parameter(name)) for name, p in model.named_parameters())
        states = encoder(**{name: x for name, x in batch.items() if name not in ("labels", "copy_ids")})
        assert torch.equal(states.last_hidden_state, expected.encoder_last_hidden_state)
        again.decoder.word_attention.weight.mul_(1.5)  # negative control
        assert not torch.allclose(again(**batch).log_probs, expected.log_probs, atol=1e-4)


@each_kind
def test_two_eval_passes_agree_bit_for_bit(kind, tiny_exhird, batch_for):
    model, batch = tiny_exhird(kind, dropout=0.3), batch_for(kind)
    with torch.no_grad():
        assert torch.equal(model(**batch).log_probs, model(**batch).log_probs)
        model.train()
        assert not torch.equal(model(**batch).log_probs, model(**batch).log_probs)


@each_kind
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_and_company_change_nothing(kind, side, tiny_exhird, batch_for):
    model = tiny_exhird(kind)
    batch = batch_for(kind, padding_side=side, pad_to_multiple_of=32)
    if kind == "pretrained" and side == "left":  # a second tokenizer that pads on the left too
        padding = (batch["piece_mask"] == 0).sum(2).tolist()
        for name in ("piece_ids", "piece_words", "piece_mask"):
            batch[name] = torch.stack([row.roll(n[0], 1) for row, n in zip(batch[name], padding, strict=True)])
        assert not batch["piece_mask"][1, 0, 0]
    with torch.no_grad():
        together = model(**batch)
        for b, length in enumerate(batch["attention_mask"].sum(1).tolist()):
            one = batch_for(kind, only=[b])
            alone = model(**one)
            T = one["labels"].shape[1]
            assert_close(together.log_probs[b, :T], alone.log_probs[0], rtol=0, atol=1e-5)
            assert (together.log_probs[b][~seen(batch["labels"][b])] == 0).all()
            inside = batch["attention_mask"][b] == 1
            assert inside.sum() == length and (together.encoder_last_hidden_state[b, ~inside] == 0).all()
            assert_close(
                together.encoder_last_hidden_state[b, inside], alone.encoder_last_hidden_state[0], rtol=0, atol=1e-5
            )
    # the loss is the mean of the documents', so that a mean over batches is one over documents
    assert_close(together.loss, -together.log_probs.sum() / len(together.log_probs))


@each_kind
def test_padding_of_labels_changes_nothing(kind, tiny_exhird, batch_for):
    model, batch = tiny_exhird(kind, exclusive_loss_coef=1.0).train(), batch_for(kind)
    flat = batch["labels"]
    rows, _ = label_rows(flat, model.config.end_phrase_token_id)
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
@pytest.mark.parametrize(
    "options", [{}, {"exclusive_loss_coef": 1.0, "phrase_start": "mean"}, {"phrase_start": "zeros"}]
)
def test_every_trainable_parameter_gets_a_gradient(kind, options, tiny_exhird, batch_for):
    model = tiny_exhird(kind, **options).train()
    model(**batch_for(kind)).loss.backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
    # nothing is there for show: what is 0 is 0 for a reason
    silent = {name for name, grad in gradients(model).items() if not grad.any()}
    assert {name for name in silent if "backbone" not in name} <= {"decoder.phrase_input.weight"}
    assert all(torch.isfinite(grad).all() for grad in gradients(model).values())


@pytest.mark.parametrize(
    "options",
    [
        {"relative_attention": "separate", "use_top_k": False, "attention_implementation": "block"},
        {"relative_attention": "none", "scale_attention": False, "segment_length": 4},
        {"relative_attention": None, "use_lead": False, "use_window": False, "use_top_k": False},
        {"relative_attention": None, "segment_length": 4, "restart_positions": True},
        {"relative_attention": "shared", "attention_implementation": "dense", "dropout": 0.1},
    ],
)
def test_a_transformer_of_any_option_keeps_all_that(options, tiny_exhird, batch_for, tmp_path):
    model = tiny_exhird(**options)
    model.save_pretrained(tmp_path)
    again = copy.deepcopy(ExHirdForKeyphraseGeneration.from_pretrained(tmp_path))
    left, right = (batch_for(padding_side=side) for side in ("left", "right"))
    with torch.no_grad():
        expected = model(**right).log_probs
        assert torch.equal(again(**right).log_probs, expected)
        assert_close(model(**left).log_probs, expected, rtol=0, atol=1e-5)
        for b in range(4):
            one = batch_for(only=[b])
            T = one["labels"].shape[1]
            assert_close(model(**one).log_probs[0], expected[b, :T], rtol=0, atol=1e-5)
    again.train()(**right).loss.backward()
    assert [name for name, p in again.named_parameters() if p.grad is None] == []


@each_kind
def test_bf16_trains_generates_and_stays_near_float32(kind, tiny_exhird, batch_for, tmp_path):
    model, batch = tiny_exhird(kind), batch_for(kind)
    exact = model(**batch).loss
    model.save_pretrained(tmp_path)
    half = ExHirdForKeyphraseGeneration.from_pretrained(tmp_path, dtype=torch.bfloat16)
    rounded = half(**batch)
    rounded.loss.backward()
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16} and rounded.log_probs.dtype == torch.float32
    assert all(torch.isfinite(grad).all() for grad in gradients(half).values())
    assert_close(rounded.loss, exact, rtol=0.02, atol=0)
    for beams in (1, 2):
        rows = half.generate_rows(**without_labels(batch), num_beams=beams)
        assert rows.log_probs.dtype == torch.float32 and (rows.log_probs <= 0).all() and (rows.log_probs > -1e4).all()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model(**batch)
        rows = model.generate_rows(**without_labels(batch), num_beams=2)
    mixed.loss.backward()
    assert_close(mixed.loss, exact, rtol=0.02, atol=0)
    assert all(p.grad.dtype == torch.float32 for p in model.parameters()) and torch.isfinite(rows.log_probs).all()


@each_kind
def test_gradient_checkpointing_gives_the_same_gradients(kind, tiny_exhird, batch_for):
    found = []
    for checkpointing in (False, True):
        model = tiny_exhird(kind, dropout=0.1)
        if checkpointing:
            model.activation_checkpointing_enable()
            assert any(getattr(module, "gradient_checkpointing", False) for module in model.encoder.modules())
        torch.manual_seed(3)
        outputs = model.train()(**batch_for(kind))
        outputs.loss.backward()
        found.append((outputs.loss, gradients(model)))
    assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["transformer", "bigru"])
def test_torch_compile_changes_nothing(kind, tiny_exhird, batch_for):
    model, batch = tiny_exhird(kind, num_hidden_layers=1), batch_for(kind, only=[3])
    expected = model(**batch)
    torch._dynamo.reset()
    found = torch.compile(model, backend="aot_eager")(**batch)
    assert_close(found.log_probs, expected.log_probs, rtol=0, atol=1e-5)
    found.loss.backward()
    compiled = gradients(model)
    model.zero_grad()
    expected.loss.backward()
    assert_close(compiled, gradients(model), rtol=1e-4, atol=1e-5)


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
        assert model.generate_rows(**without_labels(batch)).ids.shape[0] == 4


@each_kind
def test_a_document_without_words_or_without_labels_disturbs_nobody(kind, tiny_exhird, batch_for):
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
    rows = model.generate_rows(**without_labels(batch), num_beams=2)
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
    model = tiny_exhird(kind, init_range=0.1, literal_init=literal)
    modules = dict(model.named_modules())
    for name, p in model.named_parameters():
        if "backbone" in name:
            continue
        if isinstance(modules[name.rpartition(".")[0]], torch.nn.LayerNorm) and not literal:
            assert (p == float(name.endswith("weight"))).all(), name
        else:
            assert p.any() and p.abs().max() <= 0.1 and (p.numel() < 8 or abs(p.std() - 0.0577) < 0.03), name
    if kind == "pretrained":  # its own: normal, biases 0
        backbone = dict(model.encoder.reader.backbone.named_parameters())
        words, norm = backbone["embeddings.word_embeddings.weight"], backbone["embeddings.LayerNorm.weight"]
        assert abs(words.std() - 0.02) < 0.002 and (norm == 1).all()
        assert not any(p.any() for name, p in backbone.items() if name.endswith("bias"))


@each_kind
def test_what_a_checkpoint_lacks_is_initialised(kind, tiny_exhird, batch_for):
    """Raw parameters that no initialiser knows stay memory garbage after from_pretrained."""
    full = tiny_exhird(kind)
    kept = {name: p for name, p in full.state_dict().items() if name == "encoder.embeddings.weight"}
    loaded = ExHirdForKeyphraseGeneration.from_pretrained(None, config=full.config, state_dict=kept)
    for name, p in loaded.named_parameters():
        assert torch.isfinite(p).all() and p.abs().max() <= (1 if "norm" in name.lower() else 0.5), name
        if "norm" not in name.lower() and not ("backbone" in name and name.endswith("bias")) and p.numel() > 1:
            assert p.std() > 1e-3, name
    assert torch.equal(loaded.encoder.embeddings.weight, full.encoder.embeddings.weight)
    assert torch.isfinite(loaded(**batch_for(kind)).loss)


def test_a_damaged_weights_file_is_named_with_the_mend(tiny_exhird, tmp_path):
    tiny_exhird("bigru").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    for kind in (ExHirdForKeyphraseGeneration, AutoModelForSeq2SeqLM, ExHirdEncoder):
        with pytest.raises(OSError, match="cannot be read .* truncated or damaged"):
            kind.from_pretrained(tmp_path)


def test_from_backbone_takes_over_the_weights(saved_encoder, tokenizer_for, batch_for, tmp_path):
    tokenizer = tokenizer_for("pretrained")
    model = ExHirdForKeyphraseGeneration.from_backbone(saved_encoder, tokenizer, hidden_size=8, max_phrases=3)
    stock = AutoModel.from_pretrained(saved_encoder)
    backbone = model.encoder.reader.backbone
    assert backbone.pooler is None and not model.training
    for name, p in stock.state_dict().items():
        if "pooler" not in name:
            assert torch.equal(backbone.state_dict()[name], p)
    batch = batch_for("pretrained")
    given = {"input_ids": batch["piece_ids"][:, 0], "attention_mask": batch["piece_mask"][:, 0]}
    with torch.no_grad():  # its attention and its masks are at work
        assert torch.equal(backbone(**given).last_hidden_state, stock(**given).last_hidden_state)
    assert (model.config.hidden_size, model.config.max_phrases) == (8, 3)
    assert model.config.text_config.name_or_path == "" and model.config.vocab_size == len(tokenizer)
    model.save_pretrained(tmp_path)
    assert saved_encoder not in (tmp_path / "config.json").read_text()
    assert torch.isfinite(model(**batch).loss) and all(p.requires_grad for p in backbone.parameters())
    half = ExHirdForKeyphraseGeneration.from_backbone(
        saved_encoder, tokenizer, dtype=torch.bfloat16, attention_dropout=0.25
    )
    assert half.config.text_config.attention_probs_dropout_prob == 0.25
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["deberta-v2", "modernbert", "t5"])
def test_any_encoder_can_be_the_backbone(name, backbone_config, tokenizer_for, batch_for, tmp_path):
    """T5 without its decoder, and with embeddings that are one under two names."""
    torch.manual_seed(1)
    tokenizer = tokenizer_for("pretrained")
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "pad_token_id": 0}
    if name == "t5":
        stock = T5ForConditionalGeneration(T5Config(vocab_size=len(tokenizer.pieces), **sizes))
    else:
        stock = AutoModel.from_config(backbone_config(name))
    stock.save_pretrained(tmp_path / "backbone")
    model = ExHirdForKeyphraseGeneration.from_backbone(str(tmp_path / "backbone"), tokenizer, hidden_size=8)
    model.save_pretrained(tmp_path / "model")
    loading = {"output_loading_info": True}
    again, told = ExHirdForKeyphraseGeneration.from_pretrained(tmp_path / "model", **loading)
    assert not any(told[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    encoder, _ = ExHirdEncoder.from_pretrained(tmp_path / "model", **loading)
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


def test_a_frozen_backbone_stays_as_it_is(saved_encoder, tokenizer_for, batch_for, tmp_path):
    model = ExHirdForKeyphraseGeneration.from_backbone(
        saved_encoder, tokenizer_for("pretrained"), hidden_size=8, freeze_backbone=True
    )
    model.save_pretrained(tmp_path)
    batch, found = batch_for("pretrained"), []
    for one in (model, ExHirdForKeyphraseGeneration.from_pretrained(tmp_path)):
        one.train()
        assert one.decoder.training and not any(module.training for module in one.encoder.reader.backbone.modules())
        one(**batch).loss.backward()
        touched = set(gradients(one))
        assert touched == {name for name, p in one.named_parameters() if p.requires_grad}
        assert not any(".backbone." in name for name in touched) and "encoder.reader.nothing.weight" in touched
        found.append(one(**batch).log_probs)
    assert torch.equal(*found)  # no dropout in what is as it is
    encoder = ExHirdEncoder.from_pretrained(tmp_path)
    assert (
        not any(p.requires_grad for p in encoder.reader.backbone.parameters())
        and encoder.embeddings.weight.requires_grad
    )


def test_the_vocabulary_keeps_its_size(tiny_exhird):
    model = tiny_exhird("bigru")
    V = model.config.vocab_size
    assert model.resize_token_embeddings(V) is model.get_input_embeddings() is model.resize_token_embeddings()
    with pytest.raises(ValueError, match=f"A vocabulary of {V:,} words cannot become one of {V + 1:,}: ids beyond it"):
        model.resize_token_embeddings(V + 1)


def test_what_cannot_be_a_backbone_is_named(saved_encoder, tokenizer_for, tiny_exhird, batch_for, tmp_path):
    tokenizer, make = tokenizer_for("pretrained"), ExHirdForKeyphraseGeneration.from_backbone
    with pytest.raises(OSError, match="'nowhere/at-all' could not be opened as a backbone"):
        make("nowhere/at-all", tokenizer)
    with pytest.raises(ValueError, match="'hiden_size'.*Did you mean 'hidden_size'"):
        make(saved_encoder, tokenizer, hiden_size=3)
    with pytest.raises(ValueError, match=r"for_tokenizer\(\) .*'hiden_size'.* Did you mean 'hidden_size'"):
        ExHirdConfig.for_tokenizer(tokenizer, hiden_size=3)
    with pytest.raises(ValueError, match="encoder_type and text_config cannot be set"):
        make(saved_encoder, tokenizer, encoder_type="bigru")
    tiny_exhird("bigru").save_pretrained(tmp_path / "exhird")
    with pytest.raises(OSError, match="'exhird' model already"):
        make(str(tmp_path / "exhird"), tokenizer)
    BartConfig(d_model=8).save_pretrained(tmp_path / "bart")
    with pytest.raises(OSError, match="'bart' is an encoder with a decoder"):
        make(str(tmp_path / "bart"), tokenizer)
    with pytest.raises(ValueError, match="model_type='bert'.*from_backbone"):
        ExHirdForKeyphraseGeneration.from_pretrained(saved_encoder)
    without = {name: x for name, x in batch_for("pretrained").items() if "piece" not in name}
    with pytest.raises(ValueError, match="The encoder reads sub-words, and there are none. Give the tokenizer"):
        tiny_exhird("pretrained")(**without)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"encoder_type": "gru"}, "encoder_type='gru' is not known"),
        ({"relative_attention": "both"}, "relative_attention='both' is not known. Use one of .*'none', None"),
        ({"phrase_start": "first"}, "phrase_start='first' is not known"),
        ({"attention_implementation": "flash"}, "attention_implementation='flash' is not known"),
        ({"hidden_size": 0}, "hidden_size=0 must be"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be"),
        ({"max_phrases": 0}, "max_phrases=0 must be"),
        ({"segment_length": 0}, "segment_length=0 must be"),
        ({"window_size": -1}, "window_size=-1 must be"),
        ({"exclusive_loss_coef": -0.5}, "exclusive_loss_coef=-0.5 must be"),
        ({"dropout": 1.5}, "dropout=1.5 must be"),
        ({"max_phrase_length": 2}, "max_phrase_length=2 must be at least 3"),
        ({"exclusion_window": -2}, "exclusion_window=-2: use -1 for all phrases before"),
        ({"exclusive_loss_window": -2}, "exclusive_loss_window=-2: use -1"),
        ({"encoder_type": "bigru", "hidden_size": 15}, "hidden_size=15 is odd, and half of it reads either way"),
        ({"phrase_start": "last"}, "phrase_start='last' needs a recurrent encoder, not 'transformer'. Use 'mean'"),
        ({"num_attention_heads": 3}, "hidden_size=16 is not divisible by num_attention_heads=3"),
        ({"embedding_size": 8}, "embedding_size=8 with a Transformer of hidden_size=16"),
        ({"attention_implementation": "block"}, "attention_implementation='block' never makes .* use_top_k=False"),
    ],
)
def test_what_a_configuration_cannot_be_is_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        ExHirdConfig(**{**SIZES, "num_attention_heads": 2, **wrong})


def test_a_configuration_has_the_tokenizers_ids(tokenizer_for, tmp_path):
    tokenizer = tokenizer_for()
    config = ExHirdConfig.for_tokenizer(tokenizer, hidden_size=32, num_attention_heads=2)
    assert config.vocab_size == len(tokenizer) and config.hidden_size == 32
    for name, word in {
        "unk": "<unk>",
        "pad": "<blank>",
        "bos": "<s>",
        "eos": "</s>",
        "end_phrase": ";",
        "present": "<p_start>",
        "absent": "<a_start>",
        "title_end": "<eot>",
    }.items():
        assert getattr(config, f"{name}_token_id") == tokenizer.convert_tokens_to_ids(word)
    config.save_pretrained(tmp_path)
    again = ExHirdConfig.from_pretrained(tmp_path)
    assert again.to_dict() == config.to_dict() and again.text_config is None
    assert [ExHirdConfig(encoder_type=kind).starts_from for kind in KINDS] == ["mean", "last", "last", "mean", "mean"]
    assert [ExHirdConfig(encoder_type=kind).word_size for kind in KINDS] == [300, 100, 100, 100, 100]
    assert ExHirdConfig(encoder_type="pretrained").text_config.model_type == "bert"


def test_another_pipeline_is_named_only_where_its_file_is(tiny_exhird, tmp_path):
    model = tiny_exhird("bigru")
    promised = {"keyphrase-generation": {"impl": "pipeline_x.Some", "pt": ["AutoModelForSeq2SeqLM"], "type": "text"}}
    model.config.custom_pipelines = promised
    model.save_pretrained(tmp_path / "plain")
    impl = json.loads((tmp_path / "plain" / "config.json").read_text())["custom_pipelines"]["keyphrase-generation"][
        "impl"
    ]
    assert impl == "pipeline_keyphrase_generation.KeyphraseGenerationPipeline"
    assert model.config.custom_pipelines == promised
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "pipeline_x.py").touch()
    model.save_pretrained(tmp_path / "whole")
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["custom_pipelines"] == promised


# ---- what reads the words, and where the decoder starts


@pytest.mark.parametrize("kind", ["bigru", "bilstm"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_recurrent_encoder_ends_at_each_documents_own_ends(kind, side, tiny_exhird, batch_for):
    """Its states are PyTorch's of the words alone; the decoder starts from the top layer's last ones, an LSTM's h."""
    model, batch = tiny_exhird(kind), batch_for(kind, padding_side=side)
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        encoded = model.encoder(**given)
        for b, inside in enumerate(given["attention_mask"].bool()):
            words = model.encoder.embeddings(given["input_ids"][b, inside])
            alone = model.encoder.reader.rnn(words[None])[0][0]  # (L, d)
            assert_close(encoded.last_hidden_state[b, inside], alone, rtol=0, atol=1e-6)
            assert_close(encoded.phrase_start[b], torch.cat([alone[-1, :8], alone[0, 8:]]), rtol=0, atol=1e-6)


@each_kind
def test_the_decoder_starts_from_the_mean_or_from_nothing_where_it_is_told_to(kind, tiny_exhird, batch_for):
    batch = {name: x for name, x in batch_for(kind).items() if name not in ("labels", "copy_ids")}
    with torch.no_grad():
        assert (tiny_exhird(kind, phrase_start="zeros").encoder(**batch).phrase_start == 0).all()
        model = tiny_exhird(kind, phrase_start="mean")
        encoded = model.encoder(**batch)
        for b, inside in enumerate(batch["attention_mask"].bool()):
            expected = model.encoder.start.project(encoded.last_hidden_state[b, inside].mean(0)).tanh()
            assert_close(encoded.phrase_start[b], expected, rtol=0, atol=1e-6)


def test_a_words_state_is_the_mean_of_its_sub_words(tiny_exhird, batch_for):
    """And that of the mark after a title, which has none, is a vector of its own."""
    model, batch = tiny_exhird("pretrained"), batch_for("pretrained")
    reader, given = model.encoder.reader, {n: x for n, x in batch.items() if n not in ("labels", "copy_ids")}
    with torch.no_grad():
        memory = model.encoder(**given).last_hidden_state
        windows = {name: batch[name].squeeze(1) for name in ("piece_ids", "piece_mask", "piece_words")}
        states = reader.backbone(windows["piece_ids"], attention_mask=windows["piece_mask"]).last_hidden_state
        without = []
        for b, length in enumerate(batch["attention_mask"].sum(1).tolist()):
            for l in range(length):
                own = states[b, windows["piece_words"][b] == l]
                without += [] if len(own) else [(b, int(batch["input_ids"][b, l]))]
                expected = reader.project(own.mean(0) if len(own) else reader.nothing.weight[0])
                assert_close(memory[b, l], expected, rtol=0, atol=1e-6)
    mark = model.config.title_end_token_id
    assert without == [(0, mark), (2, mark)]


def test_what_no_window_holds_is_read_in_several(tiny_exhird, tokenizer_for, batch_for):
    """Each after the title; a word of two windows has the mean of its states in both, and company changes nothing."""
    tokenizer = tokenizer_for("pretrained")
    collate, limit = ExHirdCollator(tokenizer), tokenizer.pieces.model_max_length
    document = {"title": ["graph cuts"], "text": ["the graph of the network " * 40]}
    long, short = (
        encode(row, tokenizer, keyphrases_column=None, max_source=None)
        for row in (document, {"title": ["graph"], "text": ["the network"]})
    )
    long, short = ({name: values[0] for name, values in row.items()} for row in (long, short))
    model = tiny_exhird("pretrained").eval()
    reader, batch = model.encoder.reader, collate([long, short])
    N = len(long["piece_ids"])
    assert N > 3 and batch["piece_ids"].shape == (2, N, limit)
    assert not batch["piece_mask"][1, 1:].any()
    with torch.no_grad():
        memory = model.encoder(**batch).last_hidden_state
        assert_close(memory[:1], model.encoder(**collate([long])).last_hidden_state, rtol=0, atol=1e-6)
        alone = model.encoder(**collate([short])).last_hidden_state
        assert_close(memory[1:, : alone.shape[1]], alone, rtol=0, atol=1e-6)
        read = [reader.backbone(torch.tensor([ids])).last_hidden_state[0] for ids in long["piece_ids"]]
    for word in range(len(long["input_ids"])):
        own = [
            state
            for states, words in zip(read, long["piece_words"], strict=True)
            for state, w in zip(states, words, strict=True)
            if w == word
        ]
        expected = reader.project(torch.stack(own).mean(0) if own else reader.nothing.weight[0])
        assert_close(memory[0, word], expected, rtol=0, atol=1e-5)


def test_windows_beyond_the_encoders_positions_are_refused(tiny_exhird, batch_for):
    model, batch = tiny_exhird("pretrained"), batch_for("pretrained")
    limit = model.config.text_config.max_position_embeddings
    for name in ("piece_ids", "piece_mask", "piece_words"):
        batch[name] = batch[name][..., :1].expand(-1, -1, limit + 1)
    with pytest.raises(ValueError, match=f"has {limit + 1:,} sub-words, and the encoder {limit:,} positions. Set"):
        model(**batch)


def test_positions_begin_anew_in_each_segment_where_they_are_told_to(tiny_exhird):
    """Two like segments are then read alike; documents' positions tell them apart."""
    off = dict.fromkeys(("use_lead", "use_window", "use_top_k"), False)
    for restart in (True, False):
        model = tiny_exhird(relative_attention=None, segment_length=4, restart_positions=restart, **off)
        with torch.no_grad():
            memory = model.encoder(torch.tensor([[11, 17, 20, 28] * 2])).last_hidden_state[0]
        assert torch.allclose(memory[:4], memory[4:], atol=1e-5) == restart


# ---- the decoder, the words and the pairs, slowly


def slow_decoder(decoder, embedded, labels, start, states, mask, end_ids):
    """Chen et al. 2020 a document, a phrase and a word at a time: two softmaxes, and their product made to sum to 1."""
    word_weights = torch.cat([decoder.word_input.weight, decoder.word_feedback.weight], 1)
    word_gates = word_weights, decoder.word_state.weight, decoder.word_input.bias, decoder.word_state.bias
    phrase_gates = (
        decoder.phrase_input.weight,
        decoder.phrase_state.weight,
        decoder.phrase_input.bias,
        decoder.phrase_state.bias,
    )
    vectors, attention = {}, {}
    for b in range(len(labels)):
        m = states[b][mask[b]]  # its own words
        h, f = start[b : b + 1], torch.zeros_like(start[:1])
        for i in range(labels.shape[1]):
            row = [word for word in labels[b, i].tolist() if word != -100]
            if not row:
                break
            h = torch.gru_cell(f, h, *phrase_gates)
            beta = (m @ decoder.phrase_attention.weight @ h[0]).softmax(0)
            s, a, f = h, torch.zeros_like(h), None
            for j, word in enumerate(row):
                s = torch.gru_cell(torch.cat([embedded[b, i, j][None], a], 1), s, *word_gates)
                alpha = (m @ decoder.word_attention.weight @ s[0]).softmax(0) * beta
                alpha = alpha / alpha.sum()
                a = torch.cat([alpha @ m, s[0]])[None] @ decoder.output.weight.T
                a = a.tanh()
                vectors[b, i, j], attention[b, i, j] = a[0], alpha
                if f is None and (word in end_ids or j == len(row) - 1):
                    f = a
    return vectors, attention


def random_labels(lengths, J, ends):
    """Rows of the given lengths; some end with `;`, and some are cut before it."""
    labels = torch.full((len(lengths), max(map(len, lengths)), J), -100)
    for b, document in enumerate(lengths):
        for i, n in enumerate(document):
            labels[b, i, :n] = torch.randint(9, 20, (n,))
            if (b + i) % 3:
                labels[b, i, n - 1] = ends[i == len(document) - 1]
    return labels


@pytest.mark.parametrize("lengths", [[[3, 1]], [[2, 5, 1], [4], [1, 1, 3, 2], [5, 5, 5]], [[1], [], [2, 2]]])
def test_the_decoder_equals_a_loop_over_documents_phrases_and_words(lengths):
    torch.manual_seed(0)
    B, L, d, E, J, ends = len(lengths), 7, 6, 4, 6, (4, 3)
    labels = random_labels(lengths, J, ends)
    decoder = HierarchicalDecoder(E, d).double()
    given = [torch.randn(B, labels.shape[1], J, E), torch.randn(B, d), torch.randn(B, L, d)]
    embedded, start, states = (x.double().requires_grad_() for x in given)
    mask = torch.arange(L) < torch.tensor([7, 2, 5, 1])[:B, None]
    bias = torch.zeros(B, L).double().masked_fill(~mask, torch.finfo(torch.float64).min / 2)
    memory = Memory(states, bias, torch.zeros(B, L, dtype=torch.long))
    a, alpha = decoder(embedded, labels, start, memory, ends)
    vectors, attention = slow_decoder(decoder, embedded, labels, start, states, mask, ends)

    places = list(vectors)
    assert sorted(map(list, places)) == seen(labels).nonzero().tolist()
    slow = torch.stack([vectors[place] for place in places])
    fast = torch.stack([a[place] for place in places])
    assert_close(fast, slow, rtol=0, atol=1e-12)
    for place in places:
        b = place[0]
        assert_close(alpha[place][mask[b]], attention[place], rtol=0, atol=1e-12)
        assert (alpha[place][~mask[b]] == 0).all()
    silent = ~seen(labels).any(2)
    assert (a[silent] == 0).all() and (alpha[silent] == 0).all()

    weights = torch.randn_like(fast)
    inputs = [embedded, start, states, *decoder.parameters()]
    found = torch.autograd.grad((fast * weights).sum(), inputs, allow_unused=True)
    expected = torch.autograd.grad((slow * weights).sum(), inputs, allow_unused=True)
    for one, other, x in zip(found, expected, inputs, strict=True):
        zero = torch.zeros_like(x)
        assert_close(zero if one is None else one, zero if other is None else other, rtol=0, atol=1e-11)
    # negative control: feedback from another step gives another answer
    if len(lengths) == 4:
        other, _ = slow_decoder(decoder, embedded, labels, start, states, mask, tuple(range(30)))
        assert not torch.allclose(torch.stack([other[place] for place in places]), slow, atol=1e-4)


def test_the_rescaled_attention_is_one_softmax(tiny_exhird, batch_for):
    """`phrase_weights` times the words' own attention, made to sum to 1, is what a step reads."""
    model, batch = tiny_exhird("bigru").double(), batch_for("bigru")
    memory, h = model.memorise(batch["input_ids"], batch["attention_mask"], batch["copy_ids"])
    decoder, kept = model.decoder, []
    decoder.word_attention.register_forward_hook(lambda module, args, out: kept.append(out))
    read = model.read_words(torch.full((4,), 2))
    query = decoder.phrase_attention(h)
    alpha = decoder.step(read, Step(h, torch.zeros_like(h), None), query, memory).attention
    own = (torch.einsum("bd,bld->bl", kept[0], memory.states) + memory.bias).softmax(-1)
    product = own * decoder.phrase_weights(h, memory)
    assert_close(alpha, product / product.sum(-1, keepdim=True))
    assert not torch.allclose(alpha, own, atol=1e-3)


@each_kind
def test_words_have_one_distribution_that_sums_to_one(kind, tiny_exhird, batch_for):
    """And the few words whose P the loss needs have the same P as among all words."""
    model, batch = tiny_exhird(kind), batch_for(kind)
    config, V, copy_ids = model.config, model.config.vocab_size, batch["copy_ids"]
    extra = int(copy_ids.max()) + 1 - V
    torch.manual_seed(1)
    a = torch.randn(4, config.hidden_size)
    alpha = torch.rand(copy_ids.shape) * batch["attention_mask"]
    alpha = alpha / alpha.sum(1, keepdim=True)
    with torch.no_grad():
        p = model.mixture.probabilities(a, alpha, copy_ids, extra)
        assert p.shape == (4, V + extra) and extra == 5
        assert_close(p.sum(1), torch.ones(4))
        assert (p[:, config.pad_token_id] == 0).all()
        rows, words = (x.flatten() for x in torch.meshgrid(torch.arange(4), torch.arange(V + extra), indexing="ij"))
        assert_close(model.mixture(a, alpha, copy_ids, rows, words).view_as(p), p, rtol=0, atol=1e-7)
        g = model.mixture.copy(a).sigmoid()[:, 0]
    # a word outside the vocabulary is copied or not said at all; two documents' are not each other's
    for b in range(4):
        for k in range(extra):
            assert_close(p[b, V + k], g[b] * alpha[b][copy_ids[b] == V + k].sum(), rtol=0, atol=1e-7)
    assert (p[0, V:] > 0).all() and p[1, V] > 0 and (p[1, V + 1 :] == 0).all() and (p[3, V:] == 0).all()


def slow_pairs(labels, V, unk, window):
    """For each phrase row, each earlier row in the window: its first word, unless it is missing or the same word."""
    pairs = []
    for b, document in enumerate(labels.tolist()):
        firsts = [row[1] if len(row) > 1 else -100 for row in document]
        for i, own in enumerate(firsts):
            reach = i if window < 0 else min(window, i)
            for k in range(i - reach, i):
                if -100 in (own, firsts[k]):
                    continue
                vocabulary_ids = [unk if word >= V else word for word in (own, firsts[k])]
                if vocabulary_ids[0] != vocabulary_ids[1]:
                    pairs.append((b, i, firsts[k]))
    return sorted(pairs)


@pytest.mark.parametrize("window", [0, 1, 2, 4, -1])
def test_exclusive_pairs_equal_a_loop(window):
    torch.manual_seed(2)
    V, sizes = 12, set()
    for _ in range(20):
        labels = torch.randint(6, 15, (3, 7, 4))  # 12, 13, 14 are outside the vocabulary, and one and the same here
        labels[:, :, 0] = 5
        for b, phrases in enumerate(torch.randint(0, 7, (3,)).tolist()):
            labels[b, phrases:] = -100
            labels[b, phrases, 0] = 3
        found = exclusive_pairs(labels, V, 0, window)
        expected = slow_pairs(labels, V, 0, window)
        assert sorted(zip(*(x.tolist() for x in found), strict=True)) == expected
        sizes.add(len(expected))
    assert sizes == {0} if window == 0 else len(sizes) > 3
    assert all(len(x) == 0 for x in exclusive_pairs(torch.tensor([[[3]]]), V, 0, window))  # rows of one step


@pytest.mark.parametrize("window", [0, 2, -1])
def test_the_exclusive_loss_is_that_of_its_pairs(window, tiny_exhird, batch_for):
    """-log(1 - P_i(y_k)), P_i of the step after the phrase's start, whatever else is in the batch."""
    batch = batch_for("bigru")
    model = tiny_exhird("bigru", exclusive_loss_coef=0.7, exclusive_loss_window=window).double().train()
    outputs = model(**batch)
    (labels, _), V, expected = (
        label_rows(batch["labels"], model.config.end_phrase_token_id),
        model.config.vocab_size,
        0.0,
    )
    with torch.no_grad():
        for b, i, word in slow_pairs(labels, V, 0, window):
            instead = labels.clone()
            instead[b, i, 1] = word
            expected -= torch.log1p(-model(**{**batch, "labels": instead}).log_probs[b, i, 1].exp())
    assert outputs.exclusive_loss.item() == pytest.approx(float(expected) / 4, rel=1e-6)
    assert (outputs.exclusive_loss > 0) == (window != 0)
    assert_close(outputs.loss, outputs.generation_loss + 0.7 * outputs.exclusive_loss)
    assert_close(model.eval()(**batch).loss, outputs.generation_loss)  # what evaluation compares is the likelihood
