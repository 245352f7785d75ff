"""What reads a document's words: recurrent, convolutional or sparse-attention encoders, or a pretrained one.

Letters: B documents, L words of the longest one, N windows of S sub-words, E embedding size, d hidden size.

Every encoder is called as (embedded words (B, L, E), mask (B, L)) and gives what is in `Read`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention_exhird import SparseRelativeAttention, left_padding, sinusoids, turn
from .patterns_exhird import SparsePattern


class Read(NamedTuple):
    """What an encoder gives: the memory (B, L, d), 0 at padding; the state that the phrase decoder starts from (B, d), or
    None where it has none of its own; hidden states and attentions where they are asked for, as in `ExHirdEncoderOutput`.
    """

    memory: torch.Tensor
    last: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None


class LayeredEncoder(nn.Module):
    """An encoder whose parts may be recomputed in the backward pass instead of being kept (gradient checkpointing)."""

    gradient_checkpointing = False

    def run(self, layer: Callable, *given):
        if self.gradient_checkpointing and self.training:
            return checkpoint(layer, *given, use_reentrant=False)
        return layer(*given)


class RecurrentEncoder(LayeredEncoder):
    """A GRU or LSTM that reads both ways, d / 2 each; its last states start the phrase decoder (Chen et al. 2020).

    PyTorch computes all layers in one call: gradient checkpointing recomputes all of them together, and what is between
    them is not among the hidden states.
    """

    def __init__(self, config):
        super().__init__()
        kind = nn.GRU if config.encoder_type == "bigru" else nn.LSTM
        self.rnn = kind(
            config.word_size,
            config.hidden_size // 2,
            config.num_hidden_layers,
            batch_first=True,
            bidirectional=True,
            dropout=config.dropout if config.num_hidden_layers > 1 else 0.0,
        )

    def forward(self, x, mask, output_attentions: bool = False, output_hidden_states: bool = False) -> Read:
        lengths = mask.sum(1)
        order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)  # padding on the left goes to the right
        given = x.gather(1, order[..., None].expand_as(x))
        packed = pack_padded_sequence(given, lengths.clamp(min=1).cpu(), batch_first=True, enforce_sorted=False)
        states, last = self.run(self.rnn, packed)
        memory = pad_packed_sequence(states, batch_first=True, total_length=x.shape[1])[0]
        memory = torch.zeros_like(memory).scatter(1, order[..., None].expand_as(memory), memory)
        last = last[0] if isinstance(last, tuple) else last  # of an LSTM h, not c
        memory = memory * mask[..., None]
        hidden = (x, memory) if output_hidden_states else None
        return Read(memory, torch.cat([last[-2], last[-1]], -1), hidden, () if output_attentions else None)


class ConvolutionalEncoder(LayeredEncoder):
    """Gated convolutions over three words, x <- (x + GLU(conv(x))) sqrt(1/2), as in OpenNMT (Gehring et al. 2017)."""

    def __init__(self, config):
        super().__init__()
        d = config.hidden_size
        self.project = nn.Linear(config.word_size, d)
        self.layers = nn.ModuleList(nn.Conv1d(d, 2 * d, 3, padding=1) for _ in range(config.num_hidden_layers))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, mask, output_attentions: bool = False, output_hidden_states: bool = False) -> Read:
        real = mask[..., None].to(x.dtype)  # (B, L, 1)
        h = self.project(x) * real  # (B, L, d)
        hidden = [h]
        for layer in self.layers:
            h = (h + self.run(self.gated, layer, h.transpose(1, 2)).transpose(1, 2)) * 0.5**0.5 * real
            hidden.append(h)
        return Read(h, None, tuple(hidden) if output_hidden_states else None, () if output_attentions else None)

    def gated(self, layer: nn.Module, h: torch.Tensor) -> torch.Tensor:
        return F.glu(layer(self.dropout(h)), 1)


class TransformerLayer(GradientCheckpointingLayer):
    """x <- x + attention(norm(x));  x <- x + W_2 relu(W_1 norm(x))"""

    def __init__(self, config):
        super().__init__()
        d = config.hidden_size
        pattern = SparsePattern(
            lead=config.lead_size,
            window=config.window_size,
            top_k=config.attention_top_k,
            use_lead=config.use_lead,
            use_window=config.use_window,
            use_top_k=config.use_top_k,
            segment=config.segment_length,
        )
        self.attention = SparseRelativeAttention(
            d,
            config.num_attention_heads,
            pattern,
            relative=config.relative_attention,
            scale=config.scale_attention,
            implementation=config.attention_implementation,
        )
        self.attention_norm = nn.LayerNorm(d, eps=1e-6)
        self.up = nn.Linear(d, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, d)
        self.feed_forward_norm = nn.LayerNorm(d, eps=1e-6)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, output_attentions: bool = False, first=None):
        """x (B, L, d) and mask (B, L) of rows that start at the left -> x, and as `SparseRelativeAttention` gives them weights."""
        y, weights = self.attention.attend_aligned(self.attention_norm(x), mask, output_attentions, first)
        x = x + self.dropout(y)
        return x + self.dropout(self.down(self.dropout(self.up(self.feed_forward_norm(x)).relu()))), weights


class TransformerEncoder(nn.Module):
    """Layers of sparse, relative attention (Xu et al. 2021), normalised before each part and at the end as in OpenNMT."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, mask, output_attentions: bool = False, output_hidden_states: bool = False) -> Read:
        if self.config.relative_attention is None:
            x = x * x.shape[-1] ** 0.5 + self.positions(mask).to(x.dtype)
        x = self.dropout(x)
        hidden, attentions, first, aligned = [x], [], left_padding(mask), mask
        if first is not None:
            x, aligned = turn(x, first), turn(mask, first)
        for layer in self.layers:
            x, weights = layer(x, aligned, output_attentions, first)
            attentions.append(weights)
            if output_hidden_states and len(hidden) < len(self.layers):  # in their own places, and through these
                hidden.append(x if first is None else turn(x, -first))
                x = x if first is None else turn(hidden[-1], first)
        x = self.norm(x) * aligned[..., None]
        hidden.append(x if first is None else turn(x, -first))
        return Read(
            hidden[-1],
            None,
            tuple(hidden) if output_hidden_states else None,
            tuple(attentions) if output_attentions else None,
        )

    def positions(self, mask: torch.Tensor) -> torch.Tensor:
        """(B, L) -> sinusoids (B, L, d), counted from each document's first word."""
        place = (mask.cumsum(1) - 1).clamp(min=0)
        if self.config.restart_positions and self.config.segment_length:
            place = place % self.config.segment_length
        return sinusoids(torch.arange(mask.shape[1], device=mask.device), self.config.hidden_size)[place]


def pool_pieces(states: torch.Tensor, words: torch.Tensor, length: int) -> torch.Tensor:
    """Sub-words' states (B, S, d) and the word that each belongs to (B, S), -1 for none -> their means (B, length, d)."""
    index = torch.where(words < 0, length, words)[..., None]  # what is of no word goes into a place that is cut off
    sums = states.new_zeros(len(states), length + 1, states.shape[-1])
    sums = sums.scatter_add(1, index.expand_as(states), states)[:, :length]
    counts = states.new_zeros(len(states), length + 1, 1).scatter_add(1, index, torch.ones_like(states[..., :1]))
    return sums / counts[:, :length].clamp(min=1)


class PieceEncoder(nn.Module):
    """A pretrained encoder's states of sub-words, averaged over each word, in the decoder's size. Not in the papers.

    A word without sub-words, such as the mark after a title, has the vector `nothing`.
    """

    def __init__(self, config, backbone: nn.Module):
        super().__init__()
        self.config, self.backbone = config, backbone
        # what a model asks the modules right below it for, to save and load what stands under them (T5 ties embeddings)
        self.all_tied_weights_keys = {
            f"backbone.{k}": f"backbone.{v}" for k, v in backbone.all_tied_weights_keys.items()
        }
        for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "_no_split_modules"):
            setattr(self, name, getattr(backbone, name))
        self.project = nn.Linear(config.text_config.hidden_size, config.hidden_size)
        self.nothing = nn.Embedding(1, config.text_config.hidden_size)  # a module, which peft can save

    def train(self, mode: bool = True):
        """As in PyTorch; a frozen backbone stays in eval mode, without dropout."""
        super().train(mode)
        if self.config.freeze_backbone:
            self.backbone.eval()
        return self

    def forward(self, mask, pieces, piece_mask, words, **wanted) -> Read:
        """mask (B, L) of words; sub-words' ids, mask and words (B, N, S) -> memory (B, L, d).

        A word that stands in two windows has the mean of both.

        Raises:
            ValueError: for windows beyond the backbone's positions.
        """
        limit = getattr(self.backbone.config, "max_position_embeddings", None) or pieces.shape[-1]
        if pieces.shape[-1] > limit:
            raise ValueError(
                f"A window has {pieces.shape[-1]:,} sub-words, and the encoder {limit:,} positions. Set "
                f"tokenizer.pieces.model_max_length to {limit:,} or less: longer texts are then read in windows."
            )
        read, place = self.read_windows(pieces, piece_mask, **wanted)
        length, words = mask.shape[1], words.flatten(1)
        found = torch.zeros(*mask.shape[:1], length + 1, device=mask.device, dtype=torch.bool)
        found = found.scatter(1, torch.where(words < 0, length, words), True)[:, :length]

        def of_words(states):
            pooled = pool_pieces(place(states).flatten(1, 2), words, length)
            return torch.where(found[..., None], pooled, self.nothing.weight.to(pooled.dtype))

        memory = self.project(of_words(read.last_hidden_state)) * mask[..., None]
        hidden = None
        if wanted.get("output_hidden_states"):
            hidden = (*(of_words(states) * mask[..., None] for states in read.hidden_states), memory)
        return Read(memory, None, hidden, read.attentions if wanted.get("output_attentions") else None)

    def read_windows(self, pieces, piece_mask, **wanted):
        """-> the backbone's outputs of the windows, those of padding alone left out, and what puts states (windows, S, d) of
        them into (B, N, S, d).
        """
        if piece_mask is None:
            read = self.backbone(pieces.flatten(0, 1), attention_mask=None, return_dict=True, **wanted)
            return read, lambda states: states.unflatten(0, pieces.shape[:2])
        # padding on the left goes to the right: the backbone's positions count from there
        order = (piece_mask == 0).to(torch.uint8).argsort(dim=2, stable=True)
        there = piece_mask.any(2)
        given = {"attention_mask": piece_mask.gather(2, order)[there], "return_dict": True}
        read = self.backbone(pieces.gather(2, order)[there], **given, **wanted)

        def place(states):
            placed = states.new_zeros(*pieces.shape, states.shape[-1])
            placed[there] = states
            return torch.zeros_like(placed).scatter(2, order[..., None].expand_as(placed), placed)

        return read, place


ENCODERS = {
    "bigru": RecurrentEncoder,
    "bilstm": RecurrentEncoder,
    "cnn": ConvolutionalEncoder,
    "transformer": TransformerEncoder,
}


class PhraseStart(nn.Module):
    """Where the phrase decoder begins: the encoder's own last state, tanh(W mean(memory) + b), or zeros."""

    def __init__(self, config):
        super().__init__()
        self.kind = config.starts_from
        self.project = nn.Linear(config.hidden_size, config.hidden_size) if self.kind == "mean" else None

    def forward(self, memory: torch.Tensor, mask: torch.Tensor, last: torch.Tensor | None) -> torch.Tensor:
        """memory (B, L, d), mask (B, L), last (B, d) -> (B, d)."""
        if self.kind == "last":
            return last
        if self.kind == "zeros":
            return memory.new_zeros(len(memory), memory.shape[-1])
        mean = memory.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)  # memory is 0 at padding
        return self.project(mean).tanh()
