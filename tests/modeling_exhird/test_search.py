"""Generation phrase by phrase: probabilities, forbidden words, exclusion, limits; and flat sequences."""

import pytest
import torch
from torch.testing import assert_close

from .conftest import each_kind, make_batch, tiny_exhird, without_labels

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


def log_p_of(model, batch, ids):
    """The log-probability of each generated phrase, by the loss."""
    with torch.no_grad():
        return model(**batch, labels=ids.masked_fill(ids == PAD, -100)).log_probs.sum(2)


@each_kind
def test_a_document_of_a_batch_is_written_as_alone_with_the_probability_that_the_loss_gives_it(kind):
    """Copied words too, phrases cut at the limit, and what follows them. Documents that end leave the batch."""
    model, batch, sizes = stopping(kind), without_labels(make_batch()), []
    step = model.decoder.next_phrase
    model.decoder.next_phrase = lambda ended, h: sizes.append(len(h)) or step(ended, h)
    together = model.generate_phrases(**batch)
    numbers = [len(phrases(together, b)) for b in range(4)]
    assert sizes == [sum(n > i for n in numbers) for i in range(max(numbers))] and len(set(sizes)) > 1
    assert_close(log_p_of(model, batch, together.ids), together.log_probs, rtol=0, atol=1e-6)
    others = log_p_of(model, batch, together.ids.roll(1, dims=0))  # negative control: another's rows
    assert not torch.allclose(others, together.log_probs, atol=1e-2)
    left = model.generate_phrases(**without_labels(make_batch(padding_side="left")))
    for b, n in enumerate(numbers):
        alone = model.generate_phrases(**without_labels(make_batch(only=[b])))
        assert phrases(together, b) == phrases(left, b) == phrases(alone, 0)
        assert_close(together.log_probs[b, :n], alone.log_probs[0], rtol=0, atol=1e-5)
        assert (together.log_probs[b, n:] == 0).all() and (together.ids[b, n:] == PAD).all()
        assert phrases(together, b)[-1] == [STOP] or n == 5
    assert len({len(phrase) for b in range(4) for phrase in phrases(together, b)}) > 2
    assert (together.ids >= model.config.vocab_size).any()


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
    later = biased(tiny_exhird("bigru"), copy=-5.0, w3=40.0).generate_phrases(
        **without_labels(make_batch()), min_phrases=3
    )
    assert [phrases(later, b)[3:] for b in range(4)] == [[[STOP]]] * 4


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
    assert torch.equal(whole, model.generate(**batch, exclusion_window=model.config.exclusion_window))
    assert not torch.equal(whole, model.generate(**batch, exclusion_window=-1))
    assert torch.equal(model.generate(**batch, max_length=6), whole[:, :6])
    assert torch.equal(model.generate(*batch.values(), max_new_tokens=6), whole[:, :7])
