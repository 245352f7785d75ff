# SPDX-License-Identifier: Apache-2.0
"""Encoders of a document's words: a recurrent one (Chen et al. 2020), and a Transformer of sparse attention (Xu et al. 2021).

Letters: B documents, L words of the longest one, E embedding size, d hidden size.

An encoder is called with embedded words (B, L, E) and a mask (B, L) of words that come first, and returns states (B, L, d), 0 at
padding, and a final state (B, d) or `None`.
"""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention_exhird import SparsePattern, SparseRelativeAttention, sinusoids


class RecurrentEncoder(GradientCheckpointingLayer):
    """A bidirectional GRU, d / 2 per direction; its final states start the phrase decoder."""

    def __init__(self, config):
        super().__init__()
        sizes = config.word_size, config.hidden_size // 2, config.num_hidden_layers
        dropout = config.dropout if config.num_hidden_layers > 1 else 0.0
        self.rnn = nn.GRU(*sizes, batch_first=True, bidirectional=True, dropout=dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See the module."""
        lengths = mask.sum(1).clamp(min=1).cpu()
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        packed, final = self.rnn(packed)
        states = pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1])[0]
        return states * mask[..., None], torch.cat([final[-2], final[-1]], -1)


class TransformerLayer(GradientCheckpointingLayer):
    """x <- x + attention(norm(x));  x <- x + W_2 relu(W_1 norm(x))"""

    def __init__(self, config):
        super().__init__()
        d = config.hidden_size
        pattern = SparsePattern(
            lead=config.lead_size, window=config.window_size, top_k=config.attention_top_k, use_lead=config.use_lead,
            use_window=config.use_window, use_top_k=config.use_top_k,
        )  # fmt: skip
        self.attention = SparseRelativeAttention(d, config.num_attention_heads, pattern, config.relative_attention)
        self.attention_norm = nn.LayerNorm(d, eps=1e-6)
        self.up = nn.Linear(d, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, d)
        self.feed_forward_norm = nn.LayerNorm(d, eps=1e-6)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """x (B, L, d), mask (B, L) -> (B, L, d)."""
        x = x + self.dropout(self.attention(self.attention_norm(x), mask))
        return x + self.dropout(self.down(self.dropout(self.up(self.feed_forward_norm(x)).relu())))


class TransformerEncoder(nn.Module):
    """Layers of sparse, relative attention, with LayerNorm before each part and at the end as in OpenNMT."""

    def __init__(self, config):
        super().__init__()
        self.absolute = config.relative_attention is None
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, None]:
        """See the module."""
        if self.absolute:
            _, L, d = x.shape
            x = x * d**0.5 + sinusoids(torch.arange(L, device=x.device), d).to(x.dtype)
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x) * mask[..., None], None


ENCODER_CLASSES: dict[str, type] = {"bigru": RecurrentEncoder, "transformer": TransformerEncoder}


class DecoderInit(nn.Module):
    """The initial state of the phrase decoder: the final state of a BiGRU, tanh(W mean(m) + b) of a Transformer."""

    def __init__(self, config):
        super().__init__()
        is_recurrent, d = config.encoder_type == "bigru", config.hidden_size
        self.project = None if is_recurrent else nn.Linear(d, d)

    def forward(self, states: torch.Tensor, mask: torch.Tensor, final_state: torch.Tensor | None) -> torch.Tensor:
        """states (B, L, d), mask (B, L), final_state (B, d) -> (B, d)."""
        if self.project is None:
            return final_state
        mean = states.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)  # states are 0 at padding
        return self.project(mean).tanh()
