"""`generate` of transformers: greedy, beams, sampling, limits, padding, arguments; and the logits that it reads."""

import itertools

import pytest
import torch
from torch.testing import assert_close
from transformers import GenerationConfig
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput, GenerateEncoderDecoderOutput

from modeling_exhird import (
    DataCollatorForKeyphraseGeneration,
    ExhirdConfig,
    ExhirdForKeyphraseGeneration,
    tokenize_documents,
)
from modeling_exhird.cache_exhird import CACHE
from modeling_exhird.generation_exhird import UNSUPPORTED, KeyphraseGenerator

from .conftest import DOCUMENTS, each_kind, without_labels
from .test_search import END, PAD, START, STOP, biased, every_phrase, smallest, stopping  # noqa: F401  (fixtures)


def rows_as_sequences(rows):
    """The flat sequences of `generate_phrases`: with `;` after phrases that reached the limit, and `</s>` at the end."""
    sequences = []
    for document in rows.ids.tolist():
        flat = [START]
        for row in document:
            row = [i for i in row if i != PAD]
            flat += row + ([END] if row and row[-1] not in (END, STOP) else [])
        sequences.append(flat if flat[-1] == STOP else [*flat, STOP])
    return padded(sequences)


def labels_of(sequences):
    return sequences[:, 1:].masked_fill(sequences[:, 1:] == PAD, -100)


def forced_stop(labels, phrases=5):
    """Where `</s>` follows the last phrase allowed."""
    return (labels == STOP) & ((labels == END).sum(1) == phrases)[:, None]


def padded(sequences):
    longest = max(map(len, sequences))
    return torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in sequences])


# ---- greedy search


@each_kind
@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_search_writes_what_it_writes_phrase_by_phrase(kind, use_cache, stopping, batch_for):  # noqa: F811
    """Documents that end at unlike times, phrases that are cut, words that the vocabulary lacks, every window."""
    model, batch = stopping(kind), without_labels(batch_for(kind))
    cut, ended, new = 0, set(), 0
    for limits in (
        {},
        {"exclusion_window": 0},
        {"exclusion_window": 2},
        {"exclusion_window": -1, "max_words_per_phrase": 2},
        {"max_phrases": 2},
        {"min_phrases": 4},
    ):
        rows = model.generate_phrases(**batch, **limits)
        found = model.generate(**batch, **limits, use_cache=use_cache)
        assert torch.equal(found, rows_as_sequences(rows))
        cut += int(((rows.ids[..., -1] != PAD) & (rows.ids[..., -1] != END)).sum())
        ended |= set((found != PAD).sum(1).tolist())
        new += int((found >= model.config.vocab_size).sum())
    assert cut and len(ended) > 2 and new


@each_kind
def test_a_document_alone_and_padding_on_either_side_change_nothing(kind, stopping, batch_for):  # noqa: F811
    """Of beams: greedy search writes what is written phrase by phrase, which is tested there."""
    model, options = stopping(kind), {"num_beams": 3}
    together = model.generate(**without_labels(batch_for(kind, pad_to_multiple_of=32)), **options)
    left = model.generate(**without_labels(batch_for(kind, padding_side="left")), **options)
    assert torch.equal(together, left)
    for b in range(4):
        alone = model.generate(**without_labels(batch_for(kind, only=[b])), **options)[0]
        assert torch.equal(together[b, : len(alone)], alone) and (together[b, len(alone) :] == PAD).all()
    assert len({tuple(row) for row in together.tolist()}) > 1  # negative control


@each_kind
def test_what_is_generated_has_the_probability_that_the_loss_gives_it(kind, stopping, batch_for):  # noqa: F811
    model, batch = stopping(kind), without_labels(batch_for(kind))
    limit = model.config.max_words_per_phrase + 1
    found = model.generate(**batch, return_dict_in_generate=True, output_scores=True, output_logits=True)
    assert isinstance(found, GenerateEncoderDecoderOutput)
    scores = model.compute_transition_scores(found.sequences, found.scores)
    labels = labels_of(found.sequences)
    with torch.no_grad():
        again = model(**batch, labels=labels, max_tokens_per_phrase=limit)
        read = model(**batch, decoder_input_ids=found.sequences[:, :-1], max_tokens_per_phrase=limit)
    scored = (again.log_probs != 0) & ~forced_stop(labels)
    assert_close(scores[scored].double(), again.log_probs[scored], rtol=0, atol=1e-5)
    assert (scores[~scored & (labels != -100)] == 0).all()  # what had to follow
    assert kind == "bilstm" or (~scored & (labels == END)).any() or forced_stop(labels).any()
    assert_close(read.logits[scored], again.logits[scored], rtol=0, atol=1e-6)
    assert_close(torch.stack(found.logits, 1)[scored].double(), again.logits[scored], rtol=0, atol=1e-5)
    normal = model.compute_transition_scores(found.sequences, found.scores, normalize_logits=True)
    assert (normal[scored] >= scores[scored] - 1e-6).all()  # what is excluded is left out


def test_a_prompt_is_continued(stopping, batch_for):  # noqa: F811
    model, batch = stopping(), without_labels(batch_for(only=[1, 2, 3]))
    whole = model.generate(**batch)
    for length in (2, 4, 7):
        prompt = whole[:, :length]
        assert torch.equal(model.generate(**batch, decoder_input_ids=prompt), whole)
        assert torch.equal(model.generate(**batch, decoder_input_ids=prompt[:, 1:]), whole)  # `<s>` is put before it
        padded_prompt = torch.cat([torch.full((3, 2), PAD), prompt], 1)
        found = model(**batch, decoder_input_ids=padded_prompt, max_tokens_per_phrase=5).logits[:, -1]
        assert_close(found, model(**batch, decoder_input_ids=prompt, max_tokens_per_phrase=5).logits[:, -1])
        assert model.generate(**batch, decoder_input_ids=prompt, max_new_tokens=2).shape == (3, length + 2)


def test_steps_with_a_state_are_those_of_the_whole_prefix(stopping, batch_for):  # noqa: F811
    model, batch = stopping("bigru"), without_labels(batch_for("bigru"))
    ids = model.generate(**batch)[:, :9]
    with torch.no_grad():
        whole = model(**batch, decoder_input_ids=ids)
        state, found = None, []
        for part in ids.split([1, 3, 1, 4], 1):
            outputs = model(**batch, decoder_input_ids=part, cache=state)
            state = outputs[CACHE]
            found.append(outputs.logits)
        assert_close(torch.cat(found, 1), whole.logits)
        assert state.get_seq_length() == 9
        assert torch.equal(model(**batch, decoder_input_ids=ids, logits_to_keep=2).logits, whole.logits[:, -2:])
        assert model(**batch, decoder_input_ids=ids, use_cache=False).get(CACHE) is None
        encoded = model.encoder(batch["input_ids"], batch["attention_mask"])
        given = {"encoder_outputs": encoded, **{name: batch[name] for name in ("attention_mask", "copy_ids")}}
        assert torch.equal(model(**given, decoder_input_ids=ids).logits, whole.logits)
    with pytest.raises(ValueError, match="input_ids=None.*encoder_outputs with copy_ids"):
        model(decoder_input_ids=ids, encoder_outputs=encoded)


# ---- beam search


def every_sequence(words, phrases, length):
    """All sequences that a document may be given."""

    def grow(prefix, left):
        if not left:
            yield (*prefix, STOP)
            return
        if prefix:
            yield (*prefix, STOP)
        for row in set(every_phrase(words, length)):
            row = row if row[-1] == END else (*row, END)
            yield from grow((*prefix, *row), left - 1)

    yield from set(grow((), phrases))


@pytest.mark.parametrize("penalty", [1.0, 0.0])
@pytest.mark.parametrize("phrases, left_out", [(1, []), (2, [0, 2, 5, 7])])
def test_enough_beams_find_the_best_sequence_of_all(phrases, left_out, penalty, smallest):  # noqa: F811
    """By the sum of its words' log-probabilities over its length to the power of the penalty."""
    missed = 0
    sequences = list(every_sequence([word for word in range(10) if word not in left_out], phrases, 3))
    labels = padded(sequences)
    lengths, labels = (labels != PAD).sum(1), labels.masked_fill(labels == PAD, -100)
    # the exclusion, window 1: no phrase begins like the one before
    firsts = [[row[1] for row in split(sequence)] for sequence in sequences]
    excluded = [any(a == b for a, b in itertools.pairwise(first)) for first in firsts]
    assert any(excluded) == (phrases > 1)
    for seed in range(8):
        model, document = smallest(seed, length=3, max_phrases=phrases)
        with torch.no_grad():
            batch = {name: x.expand(len(labels), -1) for name, x in document.items()}
            log_p = model(**batch, labels=labels, max_tokens_per_phrase=3).log_probs
        score = log_p.masked_fill(forced_stop(labels, phrases), 0).sum(1) / lengths.float() ** penalty
        best = score.masked_fill(torch.tensor(excluded), -torch.inf).topk(3)
        options = {"num_beams": 420, "length_penalty": penalty, "early_stopping": "never", "num_return_sequences": 3}
        options |= {"return_dict_in_generate": True, "output_scores": True}
        found = model.generate(**document, **options, suppress_tokens=left_out)
        assert isinstance(found, GenerateBeamEncoderDecoderOutput) and len(found.sequences) == 3
        assert_close(found.sequences_scores, best.values, rtol=1e-4, atol=1e-4)
        expected = [(START, *sequences[i]) for i in best.indices]
        assert [tuple(row[row != PAD].tolist()) for row in found.sequences] == expected
        transition = model.compute_transition_scores(found.sequences, found.scores, found.beam_indices)
        n = (found.sequences[:, 1:] != PAD).sum(1)
        assert_close(transition.sum(1) / n.float() ** penalty, found.sequences_scores, rtol=1e-4, atol=1e-4)
        greedy = model.generate(**document, suppress_tokens=left_out)[0]
        missed += tuple(greedy[greedy != PAD].tolist()) != expected[0]
    assert missed  # negative control: greedy search does not find them all


def split(sequence):
    """A flat sequence -> its phrases."""
    phrases, row = [], []
    for word in sequence:
        row.append(word)
        if word == END:
            phrases.append(row)
            row = []
    return phrases


@each_kind
def test_one_beam_is_greedy_and_sequences_come_best_first(kind, stopping, batch_for):  # noqa: F811
    model, batch = stopping(kind), without_labels(batch_for(kind))
    assert torch.equal(model.generate(**batch, num_beams=1), model.generate(**batch))

    def log_p(sequences):
        labels = labels_of(sequences)
        every = {name: x.repeat_interleave(len(labels) // 4, 0) for name, x in batch.items()}
        with torch.no_grad():
            found = model(**every, labels=labels, max_tokens_per_phrase=5).log_probs
        return found.masked_fill(forced_stop(labels), 0).sum(1)

    greedy = log_p(model.generate(**batch))
    options = {"num_beams": 8, "num_return_sequences": 8, "length_penalty": 0.0, "early_stopping": "never"}
    several = model.generate(**batch, **options)
    assert len(several) == 32 and torch.equal(several, model.generate(**batch, **options))
    best = log_p(several).view(4, 8)
    assert (best[:, :-1] >= best[:, 1:] - 1e-5).all() and (best[:, 0] > greedy).any()


# ---- sampling, limits and arguments


def test_samples_keep_the_limits_and_follow_the_seed(stopping, batch_for):  # noqa: F811
    model, batch = stopping(), without_labels(batch_for())
    options = {"do_sample": True, "temperature": 1.5, "top_k": 20, "top_p": 0.95, "num_return_sequences": 6}

    def sample(seed, **more):
        torch.manual_seed(seed)
        return model.generate(**batch, **{**options, **more})

    found = sample(0)
    assert len(found) == 24 and torch.equal(found, sample(0)) and not torch.equal(found, sample(1)[:, : found.shape[1]])
    for row in found.tolist():
        assert_within_limits(row)
    cold = sample(0, temperature=1e-3, num_return_sequences=1)
    assert torch.equal(cold, model.generate(**batch))


def assert_within_limits(row, phrases=5, length=5, window=1):
    """Checks a flat sequence against the constraints."""
    row = [i for i in row if i != PAD]
    assert row[0] == START and row[-1] == STOP and row.count(STOP) == 1
    found = split(row[1:])
    assert 1 <= len(found) <= phrases and all(2 <= len(phrase) <= length + 1 for phrase in found)
    for before, phrase in itertools.pairwise(found):
        assert not window or before[1] != phrase[1]


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True}])
def test_limits_come_from_the_call_the_generation_config_or_the_configuration(options, tiny_exhird, batch_for):
    """No phrase or document ends before a limit, so lengths show the limits."""
    model = biased(tiny_exhird("bigru"), w3=-40.0, w4=-40.0, copy=-5.0)
    batch = without_labels(batch_for("bigru"))

    def length(**more):
        found = model.generate(**batch, **options, **more)
        assert (found[:, -1] == STOP).all()
        return found.shape[1]

    assert length() == 2 + 5 * 6
    assert length(max_phrases=2) == 2 + 2 * 6
    assert length(max_phrases=7, max_words_per_phrase=2) == 2 + 7 * 4  # more than the configuration has room for
    model.generation_config.max_phrases = 3
    assert length() == 2 + 3 * 6 and length(max_phrases=1) == 2 + 6
    given = GenerationConfig(
        max_phrases=4, max_words_per_phrase=2, decoder_start_token_id=2, eos_token_id=3, pad_token_id=1
    )
    if not options:
        assert model.generate(**batch, generation_config=given).shape[1] == 2 + 4 * 4
        assert given.max_length is None


@each_kind
def test_limits_in_the_generation_config_are_those_of_the_call(kind, stopping, batch_for):  # noqa: F811
    """Also in what the decoder reads after a phrase that reached the limit."""
    model, batch = stopping(kind), without_labels(batch_for(kind))
    expected = model.generate(**batch, max_words_per_phrase=2)
    assert not torch.equal(model.generate(**batch), expected)
    model.generation_config.max_words_per_phrase = 2
    assert torch.equal(model.generate(**batch), expected)
    assert torch.equal(expected, rows_as_sequences(model.generate_phrases(**batch, max_words_per_phrase=2)))


def test_standard_arguments_do_what_they_do_elsewhere(stopping, batch_for):  # noqa: F811
    model, batch = stopping(), without_labels(batch_for())
    whole = model.generate(**batch)
    assert torch.equal(
        model.generate(batch["input_ids"], **{n: x for n, x in batch.items() if n != "input_ids"}), whole
    )
    assert torch.equal(model.generate(**batch, max_length=6), whole[:, :6])
    assert torch.equal(model.generate(**batch, max_new_tokens=6), whole[:, :7])
    assert torch.equal(model.generate(**batch, generation_config=GenerationConfig(max_new_tokens=6)), whole[:, :7])
    model.generation_config.max_length = 6
    assert torch.equal(model.generate(**batch), whole[:, :6])
    model.generation_config.max_length = 32
    lengths = (whole != PAD).sum(1)
    longer = model.generate(**batch, min_length=int(lengths.max()))
    full = (longer == END).sum(1) == 5  # no phrase may follow
    assert (((longer != PAD).sum(1) >= lengths.max()) | full).all() and lengths.min() < lengths.max()
    for row in longer.tolist():
        assert_within_limits(row)
    banned = int(whole[1, 2])
    assert not (model.generate(**batch, bad_words_ids=[[banned]]) == banned).any()
    assert not (model.generate(**batch, suppress_tokens=[banned]) == banned).any()
    forced = model.generate(**batch, max_length=5, forced_eos_token_id=STOP)
    assert ((forced == STOP).sum(1) == 1).all()  # in the middle of a phrase, as requested
    assert not torch.equal(model.generate(**batch, repetition_penalty=5.0)[:, :7], whole[:, :7])
    shown = model.generate(**batch, return_dict_in_generate=True, output_attentions=True, output_hidden_states=True)
    T = shown.sequences.shape[1] - 1
    assert len(shown.cross_attentions) == len(shown.decoder_hidden_states) == T
    assert shown.cross_attentions[0][0].shape == (4, 1, 1, batch["input_ids"].shape[1])
    assert shown.decoder_hidden_states[0][0].shape == (4, 1, 16) and len(shown.encoder_hidden_states) == 3
    assert shown.encoder_attentions[0].shape == (4, 2, *[batch["input_ids"].shape[1]] * 2)


def test_arguments_are_not_modified(stopping, batch_for):  # noqa: F811
    model, batch = stopping(), without_labels(batch_for())
    before, processors = model.generation_config.to_dict(), []
    model.generate(**batch, logits_processor=processors, num_beams=2, max_new_tokens=3)
    assert model.generation_config.to_dict() == before and processors == []


def test_another_end_of_documents_is_refused(tiny_exhird, batch_for):
    model, batch = tiny_exhird("bigru"), without_labels(batch_for("bigru"))
    for end in (None, 7, [3, 7]):
        with pytest.raises(ValueError, match="eos_token_id="):
            model.generate(**batch, eos_token_id=end)
    assert torch.equal(model.generate(**batch, eos_token_id=model.config.eos_token_id), model.generate(**batch))


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_arguments_are_named(name, tiny_exhird, batch_for):
    value = {"low_memory": True, "token_healing": True}.get(name, 4)
    with pytest.raises(ValueError, match=f"does not support {name}="):
        tiny_exhird("bigru").generate(**without_labels(batch_for("bigru")), **{name: value})


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_phrases": 0}, "max_phrases=0"),
        ({"min_phrases": -1}, "min_phrases=-1"),
        ({"min_phrases": 9}, "min_phrases=9 exceeds max_phrases=5"),
        ({"max_words_per_phrase": 0}, "max_words_per_phrase=0"),
        ({"exclusion_window": -2}, "exclusion_window=-2"),
        ({"num_beam": 2}, "num_beam"),
        ({"do_sample": True, "num_beams": 2}, "do_sample=True with num_beams=2"),
        ({"num_return_sequences": 2}, "num_return_sequences"),
        ({"max_length": 1}, "max_length"),
    ],
)
def test_invalid_arguments_are_named(options, message, tiny_exhird, batch_for):
    with pytest.raises(ValueError, match=message):
        tiny_exhird("bigru").generate(**without_labels(batch_for("bigru")), **options)


def test_a_checkpoint_keeps_its_generation_config(stopping, batch_for, tmp_path):  # noqa: F811
    model, batch = stopping("bigru").float(), without_labels(batch_for("bigru"))
    assert model.can_generate() and model.generation_config.decoder_start_token_id == START
    model.generation_config.num_beams, model.generation_config.max_phrases = 3, 2
    model.save_pretrained(tmp_path)
    again = ExhirdForKeyphraseGeneration.from_pretrained(tmp_path)
    expected = model.generate(**batch)
    assert torch.equal(again.generate(**batch), expected)
    assert not torch.equal(again.generate(**batch, num_beams=1), expected)
    GenerationConfig(pad_token_id=0, eos_token_id=9, max_length=4).save_pretrained(tmp_path)  # a pretrained encoder's
    other = ExhirdForKeyphraseGeneration.from_pretrained(tmp_path).generation_config
    assert (other.pad_token_id, other.eos_token_id, other.max_length) == (PAD, STOP, 32)
    (tmp_path / "generation_config.json").unlink()  # as checkpoints of before
    old = ExhirdForKeyphraseGeneration.from_pretrained(tmp_path)
    rows = old.generate_phrases(**batch)
    assert torch.equal(old.generate(**batch), rows_as_sequences(rows))
    assert old.config.is_encoder_decoder and isinstance(old.config, ExhirdConfig)


@pytest.mark.parametrize("kind", ["bigru", "pretrained"])
def test_sequences_become_the_pipelines_phrases(kind, stopping, tokenizer_for):  # noqa: F811
    """As the documentation has it: rows of `tokenize_documents`, the collator, `generate`, and each document's own words."""
    model, tokenizer, texts = stopping(kind), tokenizer_for(kind), DOCUMENTS["text"]
    rows = tokenize_documents({"text": texts}, tokenizer, keyphrases_column=None)
    rows = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
    ids = model.generate(**DataCollatorForKeyphraseGeneration(tokenizer)(rows))
    generator = KeyphraseGenerator(model, tokenizer, raw=True)
    new = 0
    for text, row, expected in zip(texts, ids.tolist(), generator.stream(texts), strict=True):
        source = tokenizer.encode_source(text)
        phrases = [
            tokenizer.convert_ids_to_words([i for i in phrase if not 1 <= i <= 7], source.oov_words)
            for phrase in split(row[1:])
        ]
        assert [words for words in phrases if words] == expected
        new += any(word in source.oov_words for words in phrases for word in words)
        assert isinstance(tokenizer.decode(row, skip_special_tokens=True), str)  # unknown ids are skipped
    assert new
