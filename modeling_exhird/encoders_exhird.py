# SPDX-License-Identifier: Apache-2.0
"""Encoders of a document's words: recurrent, convolutional, sparse attention, or a pretrained encoder.

Letters: B documents, L words of the longest one, N windows of S sub-words, E embedding size, d hidden size.

Every encoder is called with embedded words (B, L, E) and a mask (B, L), and returns `EncodedWords`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention_exhird import SparseRelativeAttention, left_padding_lengths, roll_rows, sinusoids
from .patterns_exhird import SparsePattern


class EncodedWords(NamedTuple):
    """The output of an encoder.

    Attributes:
        states: (B, L, d), 0 at padding.
        final_state: (B, d), of recurrent encoders.
        hidden_states, attentions: if requested, as in `ExhirdEncoderOutput`.
    """

    states: torch.Tensor
    final_state: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


class CheckpointableEncoder(nn.Module):
    """An encoder with gradient checkpointing of its parts."""

    gradient_checkpointing = False

    def maybe_checkpoint(self, layer: Callable, *inputs):
        """`layer(*inputs)`, recomputed in the backward pass if gradient checkpointing is on."""
        if self.gradient_checkpointing and self.training:
            return checkpoint(layer, *inputs, use_reentrant=False)
        return layer(*inputs)


class RecurrentEncoder(CheckpointableEncoder):
    """A bidirectional GRU or LSTM, d / 2 per direction; its final states start the phrase decoder (Chen et al. 2020).

    PyTorch computes all layers in one call: gradient checkpointing recomputes them together, and the states between them
    are not available as hidden states.
    """

    def __init__(self, config):
        super().__init__()
        rnn_class = nn.GRU if config.encoder_type == "bigru" else nn.LSTM
        sizes = config.word_size, config.hidden_size // 2, config.num_hidden_layers
        dropout = config.dropout if config.num_hidden_layers > 1 else 0.0
        self.rnn = rnn_class(*sizes, batch_first=True, bidirectional=True, dropout=dropout)

    def forward(self, x, mask, output_attentions: bool = False, output_hidden_states: bool = False) -> EncodedWords:
        """x (B, L, E), mask (B, L) -> states (B, L, d)."""
        lengths = mask.sum(1)
        order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)  # moves left padding to the right
        words = x.gather(1, order[..., None].expand_as(x))
        packed = pack_padded_sequence(words, lengths.clamp(min=1).cpu(), batch_first=True, enforce_sorted=False)
        packed_states, final = self.maybe_checkpoint(self.rnn, packed)
        states = pad_packed_sequence(packed_states, batch_first=True, total_length=x.shape[1])[0]
        states = torch.zeros_like(states).scatter(1, order[..., None].expand_as(states), states)
        final = final[0] if isinstance(final, tuple) else final  # h of an LSTM, not c
        states = states * mask[..., None]
        hidden = (x, states) if output_hidden_states else None
        return EncodedWords(states, torch.cat([final[-2], final[-1]], -1), hidden, () if output_attentions else None)


class ConvolutionalEncoder(CheckpointableEncoder):
    """Gated convolutions over three words, x <- (x + GLU(conv(x))) sqrt(1/2), as in OpenNMT (Gehring et al. 2017)."""

    def __init__(self, config):
        super().__init__()
        d = config.hidden_size
        self.project = nn.Linear(config.word_size, d)
        self.layers = nn.ModuleList(nn.Conv1d(d, 2 * d, 3, padding=1) for _ in range(config.num_hidden_layers))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, mask, output_attentions: bool = False, output_hidden_states: bool = False) -> EncodedWords:
        """x (B, L, E), mask (B, L) -> states (B, L, d)."""
        real = mask[..., None].to(x.dtype)  # (B, L, 1)
        h = self.project(x) * real  # (B, L, d)
        hidden = [h]
        for layer in self.layers:
            h = (h + self.maybe_checkpoint(self.gated, layer, h.transpose(1, 2)).transpose(1, 2)) * 0.5**0.5 * real
            hidden.append(h)
        return EncodedWords(h, None, tuple(hidden) if output_hidden_states else None, () if output_attentions else None)

    def gated(self, layer: nn.Module, h: torch.Tensor) -> torch.Tensor:
        """GLU(conv(dropout(h)))"""
        return F.glu(layer(self.dropout(h)), 1)


class TransformerLayer(GradientCheckpointingLayer):
    """x <- x + attention(norm(x));  x <- x + W_2 relu(W_1 norm(x))"""

    def __init__(self, config):
        super().__init__()
        d = config.hidden_size
        pattern = SparsePattern(
            lead=config.lead_size, window=config.window_size, top_k=config.attention_top_k, use_lead=config.use_lead,
            use_window=config.use_window, use_top_k=config.use_top_k, segment=config.segment_length,
        )  # fmt: skip
        self.attention = SparseRelativeAttention(
            d, config.num_attention_heads, pattern, relative=config.relative_attention,
            implementation=config.sparse_attention_implementation,
        )  # fmt: skip
        self.attention_norm = nn.LayerNorm(d, eps=1e-6)
        self.up = nn.Linear(d, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, d)
        self.feed_forward_norm = nn.LayerNorm(d, eps=1e-6)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, output_attentions: bool = False, shift=None):
        """x (B, L, d) and mask (B, L) of rows that start at position 0 -> x, and attention weights or `None`.

        `shift` is that of `SparseRelativeAttention.forward`.
        """
        y, weights = self.attention(self.attention_norm(x), mask, output_attentions, shift)
        x = x + self.dropout(y)
        return x + self.dropout(self.down(self.dropout(self.up(self.feed_forward_norm(x)).relu()))), weights


class TransformerEncoder(nn.Module):
    """Layers of sparse, relative attention (Xu et al. 2021), with LayerNorm before each part and at the end as in OpenNMT."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, mask, output_attentions: bool = False, output_hidden_states: bool = False) -> EncodedWords:
        """x (B, L, E), mask (B, L) -> states (B, L, d)."""
        if self.config.relative_attention is None:
            x = x * x.shape[-1] ** 0.5 + self.positions(mask).to(x.dtype)
        x = self.dropout(x)
        hidden, attentions, shift, aligned = [x], [], left_padding_lengths(mask), mask
        if shift is not None:
            x, aligned = roll_rows(x, shift), roll_rows(mask, shift)
        for layer in self.layers:
            x, weights = layer(x, aligned, output_attentions, shift)
            attentions.append(weights)
            if output_hidden_states and len(hidden) < len(self.layers):  # rolled back and forth: part of the graph
                hidden.append(x if shift is None else roll_rows(x, -shift))
                x = x if shift is None else roll_rows(hidden[-1], shift)
        x = self.norm(x) * aligned[..., None]
        hidden.append(x if shift is None else roll_rows(x, -shift))
        return EncodedWords(
            hidden[-1],
            None,
            tuple(hidden) if output_hidden_states else None,
            tuple(attentions) if output_attentions else None,
        )

    def positions(self, mask: torch.Tensor) -> torch.Tensor:
        """(B, L) -> sinusoids (B, L, d), counted from each document's first word."""
        index = (mask.cumsum(1) - 1).clamp(min=0)
        return sinusoids(torch.arange(mask.shape[1], device=mask.device), self.config.hidden_size)[index]


def pool_subwords(states: torch.Tensor, word_ids: torch.Tensor, length: int) -> torch.Tensor:
    """Sub-word states (B, S, d) and the index of each one's word (B, S), -1 for none -> means per word (B, length, d)."""
    index = torch.where(word_ids < 0, length, word_ids)[..., None]  # -1: a column that is cut off
    sums = states.new_zeros(len(states), length + 1, states.shape[-1])
    sums = sums.scatter_add(1, index.expand_as(states), states)[:, :length]
    counts = states.new_zeros(len(states), length + 1, 1).scatter_add(1, index, torch.ones_like(states[..., :1]))
    return sums / counts[:, :length].clamp(min=1)


class PretrainedWordEncoder(nn.Module):
    """A pretrained encoder, whose sub-word states are averaged over each word and projected to d. Not in the papers.

    A word without sub-words, such as `<eot>`, gets the learnt vector `no_subword_embedding`.
    """

    def __init__(self, config, backbone: nn.Module):
        super().__init__()
        self.config, self.backbone = config, backbone
        # transformers reads these attributes of a model's direct children when it saves and loads (T5 ties embeddings)
        self.all_tied_weights_keys = {
            f"backbone.{k}": f"backbone.{v}" for k, v in backbone.all_tied_weights_keys.items()
        }
        for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "_no_split_modules"):
            setattr(self, name, getattr(backbone, name))
        self.project = nn.Linear(config.text_config.hidden_size, config.hidden_size)
        # a module, so that peft can save it
        self.no_subword_embedding = nn.Embedding(1, config.text_config.hidden_size)

    def train(self, mode: bool = True):
        """As in PyTorch, but a frozen backbone stays in eval mode, without dropout."""
        super().train(mode)
        if self.config.freeze_backbone:
            self.backbone.eval()
        return self

    def forward(self, mask, subword_ids, subword_mask, subword_word_ids, **output_options) -> EncodedWords:
        """mask (B, L) of words; ids, mask and word indices of sub-words (B, N, S) -> states (B, L, d).

        A word in two windows gets the mean over both.

        Raises:
            ValueError: for windows longer than the backbone's positions.
        """
        limit = getattr(self.backbone.config, "max_position_embeddings", None) or subword_ids.shape[-1]
        if subword_ids.shape[-1] > limit:
            raise ValueError(
                f"A window has {subword_ids.shape[-1]:,} sub-words, but the encoder has {limit:,} positions. Set "
                f"tokenizer.subword_tokenizer.model_max_length to {limit:,} or less; longer texts are then split."
            )
        outputs, to_windows = self.encode_windows(subword_ids, subword_mask, **output_options)
        length, word_ids = mask.shape[1], subword_word_ids.flatten(1)
        has_subwords = torch.zeros(*mask.shape[:1], length + 1, device=mask.device, dtype=torch.bool)
        has_subwords = has_subwords.scatter(1, torch.where(word_ids < 0, length, word_ids), True)[:, :length]

        def word_states(states):
            pooled = pool_subwords(to_windows(states).flatten(1, 2), word_ids, length)
            return torch.where(has_subwords[..., None], pooled, self.no_subword_embedding.weight.to(pooled.dtype))

        states = self.project(word_states(outputs.last_hidden_state)) * mask[..., None]
        hidden = None
        if output_options.get("output_hidden_states"):
            hidden = (*(word_states(layer) * mask[..., None] for layer in outputs.hidden_states), states)
        return EncodedWords(
            states, None, hidden, outputs.attentions if output_options.get("output_attentions") else None
        )

    def encode_windows(self, subword_ids, subword_mask, **output_options):
        """The backbone's outputs for all windows that are not empty, and a function that arranges their states as (B, N, S, d)."""
        if subword_mask is None:
            outputs = self.backbone(subword_ids.flatten(0, 1), attention_mask=None, return_dict=True, **output_options)
            return outputs, lambda states: states.unflatten(0, subword_ids.shape[:2])
        # moves left padding to the right, since the backbone's positions count from the left
        order = (subword_mask == 0).to(torch.uint8).argsort(dim=2, stable=True)
        not_empty = subword_mask.any(2)
        inputs = {"attention_mask": subword_mask.gather(2, order)[not_empty], "return_dict": True}
        outputs = self.backbone(subword_ids.gather(2, order)[not_empty], **inputs, **output_options)

        def to_windows(states):
            windows = states.new_zeros(*subword_ids.shape, states.shape[-1])
            windows[not_empty] = states
            return torch.zeros_like(windows).scatter(2, order[..., None].expand_as(windows), windows)

        return outputs, to_windows


ENCODER_CLASSES = {
    "bigru": RecurrentEncoder,
    "bilstm": RecurrentEncoder,
    "cnn": ConvolutionalEncoder,
    "transformer": TransformerEncoder,
}


class DecoderInit(nn.Module):
    """The initial state of the phrase decoder: the encoder's final state, tanh(W mean(m) + b), or zeros."""

    def __init__(self, config):
        super().__init__()
        self.method = config.resolved_decoder_init
        self.project = nn.Linear(config.hidden_size, config.hidden_size) if self.method == "mean" else None

    def forward(self, states: torch.Tensor, mask: torch.Tensor, final_state: torch.Tensor | None) -> torch.Tensor:
        """states (B, L, d), mask (B, L), final_state (B, d) -> (B, d)."""
        if self.method == "last":
            return final_state
        if self.method == "zeros":
            return states.new_zeros(len(states), states.shape[-1])
        mean = states.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)  # states are 0 at padding
        return self.project(mean).tanh()
