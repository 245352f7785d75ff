"""Encoders, decoder, copying and the exclusive loss against slow implementations."""

import pytest
import torch
from torch.testing import assert_close

from modeling_exhird.decoder_exhird import EncoderMemory, HierarchicalDecoder, exclusive_pairs

from .conftest import each_kind, make_batch, tiny_exhird


@pytest.mark.parametrize("side", ["right", "left"])
@each_kind
def test_the_decoder_starts_from_the_final_states_or_from_the_mean(kind, side):
    """A GRU's states are PyTorch's of the words alone."""
    model, batch = tiny_exhird(kind), make_batch(padding_side=side)
    with torch.no_grad():
        encoded = model.encoder(batch["input_ids"], batch["attention_mask"])
        for b, inside in enumerate(batch["attention_mask"].bool()):
            states, start = encoded.last_hidden_state[b, inside], encoded.decoder_initial_state[b]
            if kind == "bigru":
                words = model.encoder.embeddings(batch["input_ids"][b, inside])
                alone = model.encoder.word_encoder.rnn(words[None])[0][0]  # (L, d)
                assert_close(states, alone, rtol=0, atol=1e-6)
                expected = torch.cat([alone[-1, :8], alone[0, 8:]])
            else:
                expected = model.encoder.start.project(states.mean(0)).tanh()
            assert_close(start, expected, rtol=0, atol=1e-6)
            assert (encoded.last_hidden_state[b, ~inside] == 0).all()


def slow_decoder(decoder, embedded, labels, start, states, mask, end_ids):
    """Chen et al. 2020 a document, a phrase and a word at a time: two softmaxes, and their product made to sum to 1."""
    word_weights = torch.cat([decoder.word_input.weight, decoder.word_feedback.weight], 1)
    word_gates = word_weights, decoder.word_state.weight, decoder.word_input.bias, decoder.word_state.bias
    of_input, of_state = decoder.phrase_input, decoder.phrase_state
    phrase_gates = of_input.weight, of_state.weight, of_input.bias, of_state.bias
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
    memory = EncoderMemory(states, bias, torch.zeros(B, L, dtype=torch.long))
    a, alpha = decoder(embedded, labels, start, memory, ends)
    vectors, attention = slow_decoder(decoder, embedded, labels, start, states, mask, ends)

    places = list(vectors)
    assert sorted(map(list, places)) == (labels != -100).nonzero().tolist()
    slow = torch.stack([vectors[place] for place in places])
    fast = torch.stack([a[place] for place in places])
    assert_close(fast, slow, rtol=0, atol=1e-12)
    for place in places:
        b = place[0]
        assert_close(alpha[place][mask[b]], attention[place], rtol=0, atol=1e-12)
        assert (alpha[place][~mask[b]] == 0).all()
    silent = (labels == -100).all(2)
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


@each_kind
def test_words_have_one_distribution_that_sums_to_one(kind):
    """And the few words whose P the loss needs have the same P as among all words."""
    model, batch = tiny_exhird(kind), make_batch()
    config, V, copy_ids = model.config, model.config.vocab_size, batch["copy_ids"]
    extra = int(copy_ids.max()) + 1 - V
    torch.manual_seed(1)
    a = torch.randn(4, config.hidden_size)
    alpha = torch.rand(copy_ids.shape) * batch["attention_mask"]
    alpha = alpha / alpha.sum(1, keepdim=True)
    with torch.no_grad():
        p = model.generator.probabilities(a, alpha, copy_ids, extra)
        assert p.shape == (4, V + extra) and extra == 5
        assert_close(p.sum(1), torch.ones(4))
        assert (p[:, config.pad_token_id] == 0).all()
        rows, words = (x.flatten() for x in torch.meshgrid(torch.arange(4), torch.arange(V + extra), indexing="ij"))
        assert_close(model.generator(a, alpha, copy_ids, rows, words).view_as(p), p, rtol=0, atol=1e-7)
    assert (p[0, V:] > 0).all() and p[1, V] > 0 and (p[1, V + 1 :] == 0).all() and (p[3, V:] == 0).all()


def slow_pairs(labels, V, unk, window):
    """For each phrase row, each earlier row in the window: its first word, unless it is missing or the same word."""
    pairs = []
    for b, document in enumerate(labels.tolist()):
        firsts = [row[1] if len(row) > 1 else -100 for row in document]
        for i, own in enumerate(firsts):
            reach = i if window < 0 else min(window, i)
            for k in range(i - reach, i):
                one, other = (unk if word >= V else word for word in (own, firsts[k]))
                pairs += [(b, i, firsts[k])] if -100 not in (one, other) and one != other else []
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
