"""Generation phrase by phrase: probabilities, forbidden words, exclusion, limits; and flat sequences."""

import pytest
import torch
from torch.testing import assert_close
from transformers import pipeline

from modeling_exhird import ExhirdConfig

from .conftest import DOCUMENTS, each_kind, generate_keyphrases, make_batch, tiny_exhird, without_labels, word_tokenizer

UNK, PAD, START, STOP, END, PRESENT, ABSENT = range(7)


def biased(model, **biases):
    """The model with something added to the logits of words, by their ids; `copy` is the switch's."""
    with torch.no_grad():
        for name, bias in biases.items():
            if name == "copy":
                model.generator.copy.bias.fill_(bias)
            else:
                model.generator.vocabulary.bias[int(name.removeprefix("w"))] += bias
    return model


def stopping(kind="transformer", **options):
    """A model whose documents end after unlike numbers of phrases, of unlike lengths."""
    model = tiny_exhird(kind, initializer_range=0.7, **options).double()
    return biased(model, w3=4.0 if kind == "bigru" else 3.0, w4=3.0, w5=1.0, copy=-1.0)


def phrases(rows, b):
    """A document's phrases as lists of ids."""
    found = [[i for i in row if i != PAD] for row in rows.ids[b].tolist()]
    return [row for row in found if row]


def as_labels(rows):
    return rows.ids.masked_fill(rows.ids == PAD, -100)


@each_kind
def test_a_document_of_a_batch_is_written_as_alone(kind):
    model = stopping(kind)
    together = model.generate_phrases(**without_labels(make_batch(pad_to_multiple_of=32)))
    left = model.generate_phrases(**without_labels(make_batch(padding_side="left")))
    written = []
    for b in range(4):
        alone = model.generate_phrases(**without_labels(make_batch(only=[b])))
        written.append(phrases(alone, 0))
        assert phrases(together, b) == phrases(left, b) == written[-1]
        n = alone.ids.shape[1]
        assert_close(together.log_probs[b, :n], alone.log_probs[0], rtol=0, atol=1e-5)
        assert (together.log_probs[b, n:] == 0).all()
    # negative control: documents differ, and not all end together
    assert written[0] != written[1] and len(set(map(len, written))) > 1


@each_kind
def test_what_is_generated_has_the_probability_that_the_loss_gives_it(kind):
    """Copied words too, phrases cut at the limit, and what follows them."""
    model, batch = stopping(kind), without_labels(make_batch())
    rows = model.generate_phrases(**batch)
    with torch.no_grad():
        again = model(**batch, labels=as_labels(rows))
        assert_close(again.log_probs.sum(2), rows.log_probs, rtol=0, atol=1e-6)
        other = model(**batch, labels=as_labels(rows).roll(1, dims=0))  # negative control: another's rows
        assert not torch.allclose(other.log_probs.sum(2), rows.log_probs, atol=1e-2)
    lengths = {len(phrase) for b in range(4) for phrase in phrases(rows, b)}
    assert {1, 5} < lengths or len(lengths) > 2
    assert (rows.ids >= model.config.vocab_size).any()


def test_documents_that_end_leave_the_batch(monkeypatch):
    model, batch, sizes = stopping(), without_labels(make_batch()), []
    step = model.decoder.next_phrase
    monkeypatch.setattr(model.decoder, "next_phrase", lambda ended, h: sizes.append(len(h)) or step(ended, h))
    rows = model.generate_phrases(**batch)
    numbers = [len(phrases(rows, b)) for b in range(4)]
    assert sizes == [sum(n > i for n in numbers) for i in range(max(numbers))] and len(set(sizes)) > 1
    for b, n in enumerate(numbers):
        last = phrases(rows, b)[-1]
        assert last == [STOP] or n == 5
        assert (rows.ids[b, n:] == PAD).all() and (rows.log_probs[b, n:] == 0).all()


# ---- constraints


@pytest.mark.parametrize("wanted", ["end", "stop", "pad", "all"])
def test_forbidden_tokens_are_not_generated(wanted):
    """No `;` where a phrase begins, no `</s>` elsewhere nor in the first phrase, no padding anywhere."""
    biases = {"end": {"w4": 40.0}, "stop": {"w3": 40.0}, "pad": {"w1": 40.0}}
    biases["all"] = {name: bias for one in biases.values() for name, bias in one.items()}
    model = biased(tiny_exhird("bigru"), copy=-5.0, **biases[wanted])
    rows = model.generate_phrases(**without_labels(make_batch()), exclusion_window=0)
    for b in range(4):
        written = phrases(rows, b)
        assert END not in [phrase[0] for phrase in written] and written[0][0] != STOP
        assert not any(STOP in phrase[1:] for phrase in written)
        whole = [row[: len(phrase)] for row, phrase in zip(rows.ids[b].tolist(), written, strict=False)]
        assert whole == written  # padding is behind
        if wanted == "end":  # `;` at once is an empty phrase, which is allowed
            assert len(written) == 5 and all(len(phrase) == 2 and phrase[1] == END for phrase in written)
        if wanted == "stop":
            assert len(written) == 2 and written[1] == [STOP] and len(written[0]) == 5
        if wanted == "all":
            assert len(written) == 2 and written[1] == [STOP] and written[0][1:] == [END]


def test_other_tokens_are_allowed():
    """A plain word or `<unk>` where a phrase begins, starts within it, as in the reference."""
    batch = without_labels(make_batch())
    for word in (UNK, START, PRESENT, ABSENT, 20):
        rows = biased(tiny_exhird("bigru"), copy=-5.0, **{f"w{word}": 40.0}).generate_phrases(
            **batch, exclusion_window=0
        )
        assert (rows.ids == word).all()


def test_first_words_are_excluded_within_the_window():
    """Three words are far more probable than all others at every step."""
    model = biased(tiny_exhird("bigru"), copy=-200.0, w20=24.0, w21=18.0, w22=12.0)
    batch = without_labels(make_batch())

    def firsts(window):
        rows = model.generate_phrases(**batch, exclusion_window=window, max_phrases=6)
        assert rows.ids.shape == (4, 6, 5)
        with torch.no_grad():  # what is forbidden is left out, and nothing else is made likelier by it
            again = model(**batch, labels=as_labels(rows)).log_probs.sum(2)
        assert_close(rows.log_probs, again, rtol=1e-4, atol=1e-3)
        return rows.ids[:, :, 1].tolist()

    assert firsts(0) == [[20] * 6] * 4
    assert firsts(1) == [[20, 21, 20, 21, 20, 21]] * 4
    assert firsts(2) == [[20, 21, 22, 20, 21, 22]] * 4
    assert all(len(set(first)) == 6 and first[:3] == [20, 21, 22] for first in firsts(-1))
    assert firsts(-1) == firsts(5) == firsts(99)
    rows = model.generate_phrases(**batch, exclusion_window=1)
    assert (rows.ids[:, :, 2:] == 20).all()  # elsewhere in a phrase nothing is excluded
    assert model.generate_phrases(**batch).ids[:, :, 1].tolist() == [[20, 21, 20, 21, 20]] * 4  # the configuration's


def test_words_outside_the_vocabulary_are_excluded_each_by_itself():
    model = biased(tiny_exhird("bigru"), copy=40.0)  # only what the source says
    rows = model.generate_phrases(**without_labels(make_batch()), exclusion_window=-1)
    V, first = model.config.vocab_size, rows.ids[:, :, 1]
    assert all(len(set(row)) == 5 for row in first[[0, 2, 3]].tolist())
    assert (first[0] >= V).any()
    # the second document is one such word: where it is excluded, anything is as likely as nothing
    assert (rows.ids[1, :, 0] == V).all() and first[1].tolist().count(V) == 1


def test_max_words_per_phrase_counts_words_only():
    """Words only: a start comes before them, and a `;` after fewer words. The default is the reference's 6 tokens."""
    assert ExhirdConfig().max_words_per_phrase == 5
    never_ending = biased(tiny_exhird("bigru"), w3=-40.0, w4=-40.0, copy=-5.0)
    batch = without_labels(make_batch())
    for n in (1, 2, 5):
        rows = never_ending.generate_phrases(**batch, max_words_per_phrase=n)
        assert rows.ids.shape[2] == 1 + n and (rows.ids > END).all()
        flat = never_ending.generate(**batch, max_words_per_phrase=n)
        assert ((flat == END).nonzero()[:, 1].view(4, 5) == torch.arange(1, 6) * (n + 2)).all()


# ---- flat sequences


@each_kind
def test_generate_flattens_the_phrases(kind):
    """With `;` after phrases that reached the limit, and `</s>` at the end."""
    model, batch = stopping(kind), without_labels(make_batch())
    for limits in ({}, {"exclusion_window": -1, "max_words_per_phrase": 2}, {"max_phrases": 2}, {"min_phrases": 4}):
        rows, flat = model.generate_phrases(**batch, **limits), model.generate(**batch, **limits)
        assert flat.shape[1] <= model.generation_config.max_length
        for b, sequence in enumerate(flat.tolist()):
            expected = [START]
            for phrase in phrases(rows, b):
                expected += phrase if phrase[-1] in (END, STOP) else [*phrase, END]
            expected += [] if expected[-1] == STOP else [STOP]
            assert sequence == expected + [PAD] * (len(sequence) - len(expected))
    whole = model.generate(**batch)
    assert torch.equal(model.generate(**batch, max_length=6), whole[:, :6])
    assert torch.equal(
        model.generate(batch["input_ids"], **dict(list(batch.items())[1:]), max_new_tokens=6), whole[:, :7]
    )
    with pytest.raises(TypeError, match="num_beams"):
        model.generate(**batch, num_beams=2)


# ---- keyphrases


def test_out_of_vocabulary_words_are_copied_as_written():
    """If everything is copied, each phrase contains only words of its own text."""
    model, tokenizer = biased(tiny_exhird("bigru"), copy=40.0), word_tokenizer()
    texts = ["Zeta-Potentials!", "omega", "the Kappa of Zeta, zeta omega"]
    found = generate_keyphrases(model, tokenizer, texts, exclusion_window=0)
    for text, phrases_ in zip(texts, found, strict=True):
        words = {word for phrase in phrases_ for word, _, _ in tokenizer.split_words(phrase["keyphrase"])}
        assert words and words <= {word for word, _, _ in tokenizer.split_words(text)}
        assert set(map(tokenizer.convert_tokens_to_ids, words - {"the", "of", ","})) <= {UNK}


def test_a_model_in_training_is_put_back_to_it():
    model = tiny_exhird("transformer", dropout=0.5)
    texts, tokenizer = DOCUMENTS["text"], word_tokenizer()
    expected = generate_keyphrases(model, tokenizer, texts)
    generate = pipeline("keyphrase-generation", model=model, tokenizer=tokenizer, device="cpu")
    model.train()
    model.decoder.eval()
    assert generate(texts) == expected  # no dropout
    assert model.training and model.encoder.word_encoder.layers[0].dropout.training and not model.decoder.training
    with pytest.raises(TypeError, match="Document 1 is 3"):
        generate([texts[0], 3])
    with pytest.raises(TypeError, match="max_phrase"):
        generate(texts, max_phrase=3)
    with pytest.raises(ValueError, match="max_phrases=0"):
        generate(texts, max_phrases=0)
    assert model.training and not model.decoder.training
