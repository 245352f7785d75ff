"""Generation phrase by phrase: probabilities, forbidden words, exclusion, limits, and beams."""

import itertools

import pytest
import torch
from torch.testing import assert_close
from transformers import pipeline

from modeling_exhird import ExhirdConfig, ExhirdForKeyphraseGeneration
from modeling_exhird.search_exhird import DecodingConstraints, beam_search_phrase, greedy_phrase

from .conftest import DOCUMENTS, each_kind, generate_keyphrases, without_labels

UNK, PAD, START, STOP, END, PRESENT, ABSENT = range(7)
each_number_of_beams = pytest.mark.parametrize("beams", [1, 3])


def biased(model, **biases):
    """The model with something added to the logits of words, by their ids; `copy` is the switch's."""
    with torch.no_grad():
        for name, bias in biases.items():
            if name == "copy":
                model.generator.copy.bias.fill_(bias)
            else:
                model.generator.vocabulary.bias[int(name.removeprefix("w"))] += bias
    return model


@pytest.fixture
def stopping(tiny_exhird):
    """stopping(kind) -> a model whose documents end after unlike numbers of phrases, of unlike lengths."""

    def make(kind="transformer", **options):
        model = tiny_exhird(kind, initializer_range=0.7, **options).double()
        return biased(model, w3=4.0 if kind in ("bigru", "cnn") else 3.0, w4=3.0, w5=1.0, copy=-1.0)

    return make


def phrases(rows, b):
    """A document's phrases as lists of ids."""
    found = [[i for i in row if i != PAD] for row in rows.ids[b].tolist()]
    return [row for row in found if row]


def as_labels(rows):
    return rows.ids.masked_fill(rows.ids == PAD, -100)


@each_kind
@each_number_of_beams
def test_a_document_of_a_batch_is_written_as_alone(kind, beams, stopping, batch_for):
    model = stopping(kind)
    together = model.generate_phrases(**without_labels(batch_for(kind, pad_to_multiple_of=32)), num_beams=beams)
    left = model.generate_phrases(**without_labels(batch_for(kind, padding_side="left")), num_beams=beams)
    written = []
    for b in range(4):
        alone = model.generate_phrases(**without_labels(batch_for(kind, only=[b])), num_beams=beams)
        written.append(phrases(alone, 0))
        assert phrases(together, b) == phrases(left, b) == written[-1]
        n = alone.ids.shape[1]
        assert_close(together.log_probs[b, :n], alone.log_probs[0], rtol=0, atol=1e-5)
        assert (together.log_probs[b, n:] == 0).all()
    # negative control: documents differ, and not all end together
    assert written[0] != written[1] and (beams > 1 or len(set(map(len, written))) > 1)


@each_kind
@each_number_of_beams
def test_what_is_generated_has_the_probability_that_the_loss_gives_it(kind, beams, stopping, batch_for):
    """Copied words too, phrases cut at the limit, and what follows them."""
    model, batch = stopping(kind), without_labels(batch_for(kind))
    rows = model.generate_phrases(**batch, num_beams=beams)
    with torch.no_grad():
        again = model(**batch, labels=as_labels(rows))
        assert_close(again.log_probs.sum(2), rows.log_probs, rtol=0, atol=1e-6)
        other = model(**batch, labels=as_labels(rows).roll(1, dims=0))  # negative control: another's rows
        assert not torch.allclose(other.log_probs.sum(2), rows.log_probs, atol=1e-2)
    lengths = {len(phrase) for b in range(4) for phrase in phrases(rows, b)}
    assert {1, 5} < lengths or len(lengths) > 2
    assert (rows.ids >= model.config.vocab_size).any()


def test_documents_that_end_leave_the_batch(stopping, batch_for, monkeypatch):
    model, batch, sizes = stopping(), without_labels(batch_for()), []
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


@each_number_of_beams
@pytest.mark.parametrize("wanted", ["end", "stop", "pad", "all"])
def test_forbidden_tokens_are_not_generated(wanted, beams, tiny_exhird, batch_for):
    """No `;` where a phrase begins, no `</s>` elsewhere nor in the first phrase, no padding anywhere."""
    biases = {"end": {"w4": 40.0}, "stop": {"w3": 40.0}, "pad": {"w1": 40.0}}
    biases["all"] = {name: bias for one in biases.values() for name, bias in one.items()}
    model = biased(tiny_exhird("bigru"), copy=-5.0, **biases[wanted])
    rows = model.generate_phrases(**without_labels(batch_for("bigru")), exclusion_window=0, num_beams=beams)
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


def test_other_tokens_are_allowed(tiny_exhird, batch_for):
    """A plain word or `<unk>` where a phrase begins, starts within it, as in the reference."""
    batch = without_labels(batch_for("bigru"))
    for word in (UNK, START, PRESENT, ABSENT, 20):
        rows = biased(tiny_exhird("bigru"), copy=-5.0, **{f"w{word}": 40.0}).generate_phrases(
            **batch, exclusion_window=0
        )
        assert (rows.ids == word).all()


@each_number_of_beams
def test_first_words_are_excluded_within_the_window(beams, tiny_exhird, batch_for):
    """Three words are far more probable than all others at every step."""
    model = biased(tiny_exhird("bigru"), copy=-200.0, w20=24.0, w21=18.0, w22=12.0)
    batch = without_labels(batch_for("bigru"))

    def firsts(window):
        rows = model.generate_phrases(**batch, exclusion_window=window, max_phrases=6, num_beams=beams)
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
    rows = model.generate_phrases(**batch, exclusion_window=1, num_beams=beams)
    assert (rows.ids[:, :, 2:] == 20).all()  # elsewhere in a phrase nothing is excluded
    assert model.generate_phrases(**batch).ids[:, :, 1].tolist() == [[20, 21, 20, 21, 20]] * 4  # the configuration's


def test_words_outside_the_vocabulary_are_excluded_each_by_itself(tiny_exhird, batch_for):
    model = biased(tiny_exhird("bigru"), copy=40.0)  # only what the source says
    rows = model.generate_phrases(**without_labels(batch_for("bigru")), exclusion_window=-1)
    V, first = model.config.vocab_size, rows.ids[:, :, 1]
    assert all(len(set(row)) == 5 for row in first[[0, 2, 3]].tolist())
    assert (first[0] >= V).any()
    # the second document is one such word: where it is excluded, anything is as likely as nothing
    assert (rows.ids[1, :, 0] == V).all() and first[1].tolist().count(V) == 1


@each_number_of_beams
def test_max_words_per_phrase_counts_words_only(beams, tiny_exhird, batch_for):
    """Words only: a start comes before them, and a `;` after fewer words. The default is the reference's 6 tokens."""
    assert ExhirdConfig().max_words_per_phrase == 5
    never_ending = biased(tiny_exhird("bigru"), w3=-40.0, w4=-40.0, copy=-5.0)
    batch = without_labels(batch_for("bigru"))
    for n in (1, 2, 5):
        rows = never_ending.generate_phrases(**batch, max_words_per_phrase=n, num_beams=beams)
        assert rows.ids.shape[2] == 1 + n and (rows.ids > END).all()
        flat = never_ending.generate(**batch, max_words_per_phrase=n)
        assert ((flat == END).nonzero()[:, 1].view(4, 5) == torch.arange(1, 6) * (n + 2)).all()


# ---- beams


@pytest.fixture(scope="module")
def smallest():
    """smallest(seed) -> a model of 9 words, and a document of two, one of which they lack."""

    def make(seed, initializer_range=2.0, length=3, vocab_size=9, max_phrases=1):
        torch.manual_seed(seed)
        sizes = {"encoder_type": "bigru", "num_hidden_layers": 1, "hidden_size": 8, "embedding_size": 4}
        limits = {"max_words_per_phrase": length - 1, "max_phrases": max_phrases}
        config = ExhirdConfig(vocab_size=vocab_size, initializer_range=initializer_range, **limits, **sizes)
        document = {"input_ids": torch.tensor([[8, 0]]), "copy_ids": torch.tensor([[8, 9]])}
        return ExhirdForKeyphraseGeneration(config).eval(), document

    return make


def every_phrase(words, length):
    """All rows that a first phrase may be."""
    starts = [word for word in words if word not in (PAD, END, STOP)]
    inner = [word for word in words if word not in (PAD, STOP)]
    for row in itertools.product(starts, *[inner] * (length - 1)):
        if END in row:
            row = row[: row.index(END) + 1]
        yield row


def slow_beams(model, document, beams, length, by_mean=True):
    """One hypothesis at a time: the best n by mean log-probability, including finished ones."""
    kept = [((), 0.0)]
    for step in range(length):
        grown = []
        for row, total in kept:
            if row and row[-1] == END:
                grown.append((total / len(row) if by_mean else total, row, total))
                continue
            words = [word for word in range(10) if word not in (PAD, STOP) and (step or word != END)]
            labels = torch.tensor([[[*row, word]] for word in words])
            with torch.no_grad():
                given = {name: x.expand(len(words), -1) for name, x in document.items()}
                log_p = model(**given, labels=labels).log_probs[:, 0, step].tolist()
            n = step + 1 if by_mean else 1
            grown += [((total + p) / n, (*row, word), total + p) for word, p in zip(words, log_p, strict=True)]
        kept = [(row, total) for _, row, total in sorted(grown, reverse=True)[:beams]]
    return max(kept, key=lambda one: one[1] / len(one[0]))


@pytest.mark.parametrize("beams", [1, 2, 3, 5])
def test_beams_equal_a_slow_search(beams, smallest):
    ended, otherwise = 0, 0
    for seed in range(5, 10):
        model, document = smallest(seed, initializer_range=1.0, length=5)
        model = biased(model.double(), w4=1.0)
        row, total = slow_beams(model, document, beams, 5)
        otherwise += row != slow_beams(model, document, beams, 5, by_mean=False)[0]
        found = model.generate_phrases(**document, num_beams=beams)
        assert tuple(phrases(found, 0)[0]) == row
        assert found.log_probs.item() == pytest.approx(total, abs=1e-6)
        ended += row[-1] == END
    assert 0 < ended < 5  # some end, some are cut
    assert otherwise or beams != 3  # negative control: kept by the sum of their words, others win


def test_beams_of_a_batch_do_not_mix(stopping, batch_for):
    """As many beams as there are words, of documents with unlike numbers of words of their own."""
    model = stopping("cnn")
    together = model.generate_phrases(**without_labels(batch_for("cnn")), num_beams=60, max_phrases=2)
    for b in range(4):
        alone = model.generate_phrases(**without_labels(batch_for("cnn", only=[b])), num_beams=60, max_phrases=2)
        assert phrases(together, b) == phrases(alone, 0)
        assert all(i < model.config.vocab_size + 5 for phrase in phrases(together, b) for i in phrase)


# ---- keyphrases


def test_out_of_vocabulary_words_are_copied_as_written(tiny_exhird, tokenizer_for):
    """If everything is copied, each phrase contains only words of its own text."""
    model, tokenizer = biased(tiny_exhird("bigru"), copy=40.0), tokenizer_for("bigru")
    texts = ["Zeta-Potentials!", "omega", "the Kappa of Zeta, zeta omega"]
    found = generate_keyphrases(model, tokenizer, texts, exclusion_window=0)
    for text, phrases_ in zip(texts, found, strict=True):
        words = {word for phrase in phrases_ for word, _, _ in tokenizer.split_words(phrase["keyphrase"])}
        assert words and words <= {word for word, _, _ in tokenizer.split_words(text)}
        assert set(map(tokenizer.convert_tokens_to_ids, words - {"the", "of", ","})) <= {UNK}


def test_a_model_in_training_is_put_back_to_it(tiny_exhird, tokenizer_for):
    model = tiny_exhird("transformer", dropout=0.5)
    texts, tokenizer = DOCUMENTS["text"], tokenizer_for()
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
    with pytest.raises(ValueError, match="num_beams=0"):
        generate(texts, num_beams=0)
    assert model.training and not model.decoder.training


@each_kind
def test_one_beam_is_greedy(kind, stopping, batch_for):
    model, batch = stopping(kind), without_labels(batch_for(kind))
    config = model.config
    with torch.no_grad():
        memory, h = model.encode(batch["input_ids"], batch["attention_mask"], batch.pop("copy_ids"), **subwords(batch))
        constraints = DecodingConstraints(config, 5, 4, 1, num_beams=1)
        firsts = [torch.tensor([20, -1, 11, 4])]
        for phrase in (0, 1):
            greedy = greedy_phrase(model, memory, h, 5, constraints, phrase, firsts[:phrase])
            beam = beam_search_phrase(model, memory, h, 5, constraints, phrase, firsts[:phrase])
            assert torch.equal(greedy[0], beam[0])
            assert_close(greedy[1:], beam[1:], rtol=0, atol=1e-5)


def subwords(batch):
    return {name: x for name, x in batch.items() if name.startswith("subword")}


def test_enough_beams_find_the_most_probable_phrase(smallest):
    """The one with the highest mean log-probability; greedy search often misses it."""
    rows = sorted(set(every_phrase(range(10), 3)))
    labels = torch.full((len(rows), 1, 3), -100)
    for row, label in zip(rows, labels, strict=True):
        label[0, : len(row)] = torch.tensor(row)
    lengths, missed, ended = (labels != -100).sum((1, 2)), 0, 0
    for seed in range(12):
        model, document = smallest(seed)
        with torch.no_grad():
            log_p = model(**{name: x.expand(len(rows), -1) for name, x in document.items()}, labels=labels).log_probs
        mean = log_p.sum((1, 2)) / lengths
        best = int(mean.argmax())
        found = model.generate_phrases(**document, num_beams=100)
        assert tuple(phrases(found, 0)[0]) == rows[best]
        assert_close(found.log_probs[0, 0], log_p[best].sum(), rtol=1e-4, atol=1e-4)
        greedy = model.generate_phrases(**document)
        missed += not torch.equal(greedy.ids, found.ids)
        ended += len(rows[best]) < 3
        assert greedy.log_probs[0, 0] / len(phrases(greedy, 0)[0]) <= mean[best] + 1e-5
    assert missed > 0
