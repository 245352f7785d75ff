"""What transformers expects of a sequence-to-sequence model: logits, hidden states, attentions, checkpointing."""

import inspect

import pytest
import torch
from torch.testing import assert_close

from modeling_exhird import ExhirdForKeyphraseGeneration
from modeling_exhird.decoder_exhird import labels_by_phrase

from .conftest import each_kind, without_labels

SHOW = {"output_attentions": True, "output_hidden_states": True}


def test_forward_names_what_a_sequence_to_sequence_model_reads(tiny_exhird):
    names = list(inspect.signature(ExhirdForKeyphraseGeneration.forward).parameters)[1:]
    assert names[:2] == ["input_ids", "attention_mask"] and "kwargs" not in names
    assert {"decoder_input_ids", "encoder_outputs", "cache", "use_cache", "labels", *SHOW} <= set(names)
    model = tiny_exhird("bigru")
    assert model.can_generate() and model.config.is_encoder_decoder and model.get_encoder() is model.encoder


@each_kind
def test_logits_are_there_with_and_without_labels_and_the_same(kind, tiny_exhird, batch_for):
    model, batch = tiny_exhird(kind).double(), batch_for(kind)
    labels, given = batch["labels"], without_labels(batch)
    ids = torch.cat([torch.full((4, 1), 2), labels[:, :-1].masked_fill(labels[:, :-1] == -100, 1)], 1)
    V, extra, there = model.config.vocab_size, 5, labels != -100
    with torch.no_grad():
        taught, read = model(**batch), model(**given, decoder_input_ids=ids)
        assert taught.logits.shape == read.logits.shape == (*labels.shape, V + extra)
        assert_close(read.logits[there], taught.logits[there], rtol=0, atol=1e-9)
        assert (taught.logits[~there] == 0).all()
        assert_close(taught.logits[there].exp().sum(-1), torch.ones(int(there.sum())).double())
        chosen = taught.logits.gather(2, labels.clamp(min=0)[..., None]).squeeze(2)
        assert_close(chosen[there], taught.log_probs[there])
        assert_close(taught.loss, -chosen[there].sum() / 4)
        without = model(**batch, output_logits=False)
        assert without.logits is None
        assert_close(without.log_probs, taught.log_probs)
        rows, _ = labels_by_phrase(labels, model.config.end_phrase_token_id)
        assert_close(model(**{**batch, "labels": rows}).logits[rows != -100], taught.logits[there])
        first = model(**given)  # `<s>` alone
        assert_close(first.logits, read.logits[:, :1])
        model.train()
        assert model(**batch).logits is None
        assert model(**batch, output_logits=True).logits.shape == taught.logits.shape
    with pytest.raises(ValueError, match="labels and decoder_input_ids"):
        model(**batch, decoder_input_ids=ids)


def test_gradients_are_the_same_through_logits(tiny_exhird, batch_for):
    """The loss of all words' logits, and of a step at a time, against the fast one."""
    found, batch = [], batch_for("bigru")
    labels, there = batch["labels"], batch["labels"] != -100
    ids = torch.cat([torch.full((4, 1), 2), labels[:, :-1].masked_fill(labels[:, :-1] == -100, 1)], 1)
    for way in ("fast", "logits", "steps"):
        model = tiny_exhird("bigru").double().train()
        given = {**without_labels(batch), "decoder_input_ids": ids} if way == "steps" else batch
        outputs = model(**given, output_logits=way == "logits")
        if way == "steps":
            loss = -outputs.logits.gather(2, labels.clamp(min=0)[..., None])[there].sum() / 4
        else:
            loss = outputs.loss
        loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert_close(found[1], found[0], rtol=0, atol=1e-9)
    assert_close(found[2], found[0], rtol=0, atol=1e-9)


@each_kind
@pytest.mark.parametrize("side", ["right", "left"])
def test_hidden_states_and_attentions_have_their_shapes_and_are_part_of_the_graph(kind, side, tiny_exhird, batch_for):
    options = {"dropout": 0.0} if kind == "pretrained" else {}
    model, batch = tiny_exhird(kind, **options), batch_for(kind, padding_side=side)
    if kind == "pretrained":
        model.encoder.word_encoder.backbone.set_attn_implementation("eager")
    labels, (B, L) = batch["labels"], batch["input_ids"].shape
    T, d, layers = labels.shape[1], 16, model.config.num_hidden_layers
    plain, shown = model(**batch), model(**batch, **SHOW)
    assert_close(shown.loss, plain.loss)
    assert plain.cross_attentions is plain.encoder_attentions is plain.encoder_hidden_states is None
    assert [x.shape for x in shown.cross_attentions] == [(B, 1, T, L)]
    assert [x.shape for x in shown.decoder_hidden_states] == [(B, T, d)] and shown.decoder_attentions is None
    alpha, there = shown.cross_attentions[0][:, 0], labels != -100
    assert_close(alpha.sum(-1), there.float())
    assert (alpha * (batch["attention_mask"] == 0)[:, None] == 0).all()
    states = shown.encoder_hidden_states
    assert torch.equal(states[-1], shown.encoder_last_hidden_state) and all(x.shape[:2] == (B, L) for x in states)
    assert len(states) == {"bigru": 2, "bilstm": 2, "pretrained": 2 + model.config.text_config.num_hidden_layers if kind == "pretrained" else 0}.get(kind, 1 + layers)  # fmt: skip
    weights = shown.encoder_attentions
    if kind == "transformer":
        assert [x.shape for x in weights] == [(B, 2, L, L)] * layers
        mask = (batch["attention_mask"] == 1).float()
        for x in weights:
            assert_close(x.sum(-1), mask[:, None].expand(-1, 2, -1))
            assert (x * (1 - mask)[:, None, None] == 0).all()
        assert (weights[0][0] == 0).sum() > L  # sparse
    elif kind == "pretrained":
        assert len(weights) == model.config.text_config.num_hidden_layers and weights[0].shape[0] == B
    else:
        assert weights == ()
    kept = [shown.cross_attentions[0], shown.decoder_hidden_states[0], states[-1]]
    kept += [] if kind == "pretrained" else [states[0], *weights]
    for x in kept:
        x.retain_grad()
    shown.loss.backward()
    assert all(x.grad is not None and x.grad.any() for x in kept[:3])
    assert all(x.grad is not None for x in kept)
    # without labels they are there too
    bare = model(**without_labels(batch), **SHOW)
    assert bare.cross_attentions[0].shape == (B, 1, 1, L) and bare.decoder_hidden_states[0].shape == (B, 1, d)
    assert len(bare.encoder_hidden_states) == len(states) and len(bare.encoder_attentions) == len(weights)


@pytest.mark.parametrize("options", [{}, {"use_top_k": False, "sparse_attention_implementation": "block"}, {"relative_attention": None}])  # fmt: skip
def test_attentions_of_either_padding_are_the_same(options, tiny_exhird, batch_for):
    model = tiny_exhird(**options)
    with torch.no_grad():
        right, left = (model(**batch_for(padding_side=side), **SHOW) for side in ("right", "left"))
    for b, n in enumerate(batch_for()["attention_mask"].sum(1).tolist()):
        for x, y in zip(right.encoder_attentions, left.encoder_attentions, strict=True):
            assert_close(x[b, :, :n, :n], y[b, :, -n:, -n:])
        for x, y in zip(right.encoder_hidden_states[1:], left.encoder_hidden_states[1:], strict=True):
            assert_close(x[b, :n], y[b, -n:], rtol=0, atol=1e-5)


def test_left_padding_is_checked_once_per_forward_pass(tiny_exhird, batch_for, monkeypatch):
    """The check synchronises with the device."""
    from modeling_exhird import encoders_exhird

    calls, left_padding_lengths = [], encoders_exhird.left_padding_lengths
    count = lambda mask: calls.append(1) or left_padding_lengths(mask)  # noqa: E731
    monkeypatch.setattr(encoders_exhird, "left_padding_lengths", count)
    tiny_exhird(num_hidden_layers=3)(**batch_for())
    assert len(calls) == 1


@pytest.mark.parametrize("kind", ["transformer", "bigru", "bilstm", "cnn"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_recomputes_an_encoder(kind, reentrant, tiny_exhird, batch_for):
    """Equal gradients, with dropout, and a layer (of recurrent encoders all) runs a second time in the backward pass."""
    found, calls = [], []
    for checkpointing in (False, True):
        model, count = tiny_exhird(kind, dropout=0.2), []
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        encoder = model.encoder.word_encoder
        *_, inner = getattr(encoder, "layers", [encoder])[0].modules()
        inner.register_forward_pre_hook(lambda *_, count=count: count.append(1))
        torch.manual_seed(3)
        model.train()(**batch_for(kind)).loss.backward()
        calls.append(len(count))
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert calls[1] == 2 * calls[0] > 0
    assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
