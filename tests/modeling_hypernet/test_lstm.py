"""The LSTM with generated weights: every implementation against the loop, and both against PyTorch's LSTM."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from modeling_hypernet.lstm_hypernet import (
    GeneratedLstm,
    MetaEncoder,
    WeightGenerator,
    lstm_batched,
    lstm_per_example,
    reverse_sequences,
)

N_X, N_Z, N_H = 6, 3, 5
each_lstm = pytest.mark.parametrize("lstm", [lstm_per_example, lstm_batched])


@pytest.fixture
def loop(benchmark_module):
    return benchmark_module("plain").generated_lstm


def make(lengths, dtype=torch.float64, bidirectional=False):
    torch.manual_seed(0)
    layer = GeneratedLstm(N_Z, N_X, N_H, bidirectional).to(dtype)
    for p in layer.parameters():
        nn.init.normal_(p, std=0.5)
    x = torch.randn(len(lengths), max(1, *lengths), N_X, dtype=dtype, requires_grad=True)
    z = torch.randn(len(lengths), N_Z, dtype=dtype, requires_grad=True)
    return layer, x, torch.tensor(lengths), z


def results(lstm, layer, x, lengths, z, upstream):
    for leaf in (x, z, *layer.parameters()):
        leaf.grad = None
    y = layer(x, lengths, z, lstm)
    (y * upstream).sum().backward()
    return [y.detach(), *(leaf.grad for leaf in (x, z, *layer.parameters()))]


@each_lstm
@pytest.mark.parametrize("lengths", [[1], [7, 1, 0, 2, 5], [40, 9]])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_every_implementation_equals_the_loop_in_values_and_all_gradients(lstm, lengths, bidirectional, loop):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        layer, x, lengths_, z = make(lengths, dtype, bidirectional)
        upstream = torch.randn(len(lengths), x.shape[1], N_H * (1 + bidirectional), dtype=dtype)
        slow = results(loop, layer, x, lengths_, z, upstream)
        fast = results(lstm, layer, x, lengths_, z, upstream)
        assert_close(fast, slow, rtol=tolerance, atol=tolerance)
        beyond = torch.arange(x.shape[1]) >= lengths_[:, None]
        assert (fast[0][beyond] == 0).all() and (fast[1][beyond] == 0).all()
        if max(lengths) > 1:  # negative control: other weights give other states
            other = results(lstm, layer, x, lengths_, (z.detach() + 1).requires_grad_(), upstream)
            assert not torch.allclose(other[0], slow[0], atol=1e-3)


def test_with_one_title_it_is_one_lstm_with_the_generated_weights(loop):
    layer, x, lengths, z = make([6, 4])
    z = z[:1].expand(2, -1)
    hidden, weight, bias = (w[0, [1, 0, 2, 3]].flatten(0, 1) for w in layer.generators[0](z))
    stock = nn.LSTM(N_X, N_H, batch_first=True).double()
    parameters = {"weight_hh_l0": hidden, "weight_ih_l0": weight, "bias_ih_l0": bias, "bias_hh_l0": 0 * bias}
    expected, _ = torch.func.functional_call(stock, parameters, (x,))
    expected = expected * (torch.arange(6) < lengths[:, None])[..., None]
    for lstm in (loop, lstm_per_example, lstm_batched):
        assert_close(layer(x, lengths, z, lstm), expected)


@pytest.mark.parametrize("hidden", [None, 8])
def test_the_meta_encoder_uses_all_tokens_and_no_padding(hidden):
    torch.manual_seed(0)
    encoder = MetaEncoder(N_X, 16, hidden)
    assert encoder.lstm.hidden_size == (hidden or 16) and (encoder.projection is None) == (hidden is None)
    u, lengths = torch.randn(2, 5, N_X), torch.tensor([5, 2])
    z = encoder(u, lengths)
    assert_close(z.norm(dim=-1), torch.ones(2), rtol=1e-2, atol=1e-2)
    assert_close(z.sum(-1), torch.zeros(2), rtol=0, atol=1e-5)
    changed = u.clone()
    changed[1, 2:] = 9.0
    assert_close(encoder(changed, lengths), z)
    changed[1, 1] = 9.0  # negative control
    assert not torch.allclose(encoder(changed, lengths)[1], z[1], atol=1e-3)


def test_the_generators_have_the_papers_number_of_parameters():
    """The sizes of BERT-large: P weights per text, P N_z parameters."""
    with torch.device("meta"):
        generator = WeightGenerator(32, 1024, 512)
        assert sum(w[0].numel() for w in generator(torch.empty(2, 32))) == 3_147_776
    assert sum(p.numel() for p in generator.parameters()) == 3_147_776 * 32


def test_reverse_sequences_reverses_texts_and_keeps_padding():
    x = torch.arange(8.0).view(2, 4, 1)
    assert reverse_sequences(x, torch.tensor([3, 4])).flatten().tolist() == [2, 1, 0, 3, 7, 6, 5, 4]
