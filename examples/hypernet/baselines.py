"""What the hypernetwork is compared with: the same encoder, heads and data, another way of reading the text.

Letters: B pairs, U tokens of a title, L of a text, d the backbone's hidden size, D size of the text's states.
"""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from modeling_hypernet import HypernetModel


class TwoWays(nn.Module):
    """An LSTM or GRU that reads both ways and stops at each text's end: (B, L, d) -> (B, L, D), D = 2 (D / 2)."""

    def __init__(self, kind: type, input_size: int, output_size: int):
        super().__init__()
        self.rnn = kind(input_size, output_size // 2, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths.clamp(min=1).cpu(), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.shape[1])[0]


class PlainModel(HypernetModel):
    """The backbone's states of the text as they are."""

    def build_reader(self, config):
        self.reader = nn.Linear(config.input_size, config.output_size)

    def read(self, u, u_lengths, v, v_lengths):
        return self.reader(v), None


class BiLstmModel(HypernetModel):
    """An LSTM that reads the text both ways (Sahrawat et al. 2020)."""

    def build_reader(self, config):
        self.reader = TwoWays(nn.LSTM, config.input_size, config.output_size)

    def read(self, u, u_lengths, v, v_lengths):
        return self.reader(v, v_lengths), None


class TitleGuidedModel(HypernetModel):
    """The title-guided encoder: each token of the text gathers from the title by attention (Chen et al. 2019, Sect. 3.2).

    c_i = sum_j softmax_j(u_i W t_j) t_j;   m = GRU([u; c]);   (u + m) / 2
    """

    def build_reader(self, config):
        D = config.output_size
        self.reader = nn.ModuleDict(
            {
                "text": TwoWays(nn.GRU, config.input_size, D),
                "title": TwoWays(nn.GRU, config.input_size, D),
                "match": nn.Linear(D, D, bias=False),
                "merge": TwoWays(nn.GRU, 2 * D, D),
            }
        )

    def read(self, u, u_lengths, v, v_lengths):
        text, title = self.reader["text"](v, v_lengths), self.reader["title"](u, u_lengths)
        scores = self.reader["match"](text) @ title.mT  # (B, L, U)
        beyond = torch.arange(u.shape[1], device=u.device) >= u_lengths[:, None]
        gathered = scores.masked_fill(beyond[:, None], -torch.inf).softmax(-1) @ title  # (B, L, D)
        merged = self.reader["merge"](torch.cat([text, gathered], -1), v_lengths)
        return (text + merged) / 2, None
