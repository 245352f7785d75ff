"""Baselines of the hypernetwork: the same encoder, heads and data, but another layer that encodes the text.

Letters: B pairs, U tokens of a title, L of a text, d the backbone's hidden size, D size of the text's states.
"""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from transformers import initialization as init

from modeling_hypernet import HypernetModel


class BidirectionalRnn(nn.Module):
    """A bidirectional LSTM or GRU over padded texts: (B, L, d) -> (B, L, D), with D / 2 per direction."""

    def __init__(self, rnn_class: type, input_size: int, output_size: int):
        super().__init__()
        self.rnn = rnn_class(input_size, output_size // 2, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """x (B, L, d), lengths (B,) -> (B, L, D)."""
        packed = pack_padded_sequence(x, lengths.clamp(min=1).cpu(), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.shape[1])[0]


class PlainModel(HypernetModel):
    """The backbone's states of the text, with a linear layer."""

    def build_layers(self, config):
        """See `HypernetModel`."""
        self.reader = nn.Linear(config.input_size, config.output_size)

    def encode_main(self, u, u_lengths, v, v_lengths):
        """See `HypernetModel`; z is `None`."""
        return self.reader(v), None


class BiLstmModel(HypernetModel):
    """A bidirectional LSTM over the text (Sahrawat et al. 2020)."""

    def build_layers(self, config):
        """See `HypernetModel`."""
        self.reader = BidirectionalRnn(nn.LSTM, config.input_size, config.output_size)

    def encode_main(self, u, u_lengths, v, v_lengths):
        """See `HypernetModel`; z is `None`."""
        return self.reader(v, v_lengths), None


class TitleGuidedModel(HypernetModel):
    """The title-guided encoder: each token of the text attends to the title (Chen et al. 2019, Sect. 3.2).

    c_i = sum_j softmax_j(u_i W t_j) t_j;   m = GRU([u; c]);   (u + m) / 2
    """

    def build_layers(self, config):
        """See `HypernetModel`."""
        D = config.output_size
        self.reader = nn.ModuleDict(
            {
                "text": BidirectionalRnn(nn.GRU, config.input_size, D),
                "title": BidirectionalRnn(nn.GRU, config.input_size, D),
                "match": nn.Linear(D, D, bias=False),
                "merge": BidirectionalRnn(nn.GRU, 2 * D, D),
            }
        )

    def _init_weights(self, module):
        """As in transformers, which leaves a GRU's weights as they are in memory."""
        if isinstance(module, nn.GRU):
            for weight in module.parameters():
                init.uniform_(weight, -(module.hidden_size**-0.5), module.hidden_size**-0.5)
        else:
            super()._init_weights(module)

    def encode_main(self, u, u_lengths, v, v_lengths):
        """See `HypernetModel`; z is `None`."""
        text, title = self.reader["text"](v, v_lengths), self.reader["title"](u, u_lengths)
        scores = self.reader["match"](text) @ title.mT  # (B, L, U)
        padding = torch.arange(u.shape[1], device=u.device) >= u_lengths[:, None]
        weights = scores.masked_fill(padding[:, None], torch.finfo(scores.dtype).min).softmax(-1)
        gathered = weights.masked_fill(padding[:, None], 0) @ title  # (B, L, D), zeros without a title
        merged = self.reader["merge"](torch.cat([text, gathered], -1), v_lengths)
        return (text + merged) / 2, None
