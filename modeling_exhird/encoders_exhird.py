"""What reads a document's words: recurrent, convolutional or sparse-attention encoders, or a pretrained one.

Letters: B documents, L words of the longest one, N windows of S sub-words, E embedding size, d hidden size.

Every encoder is called as (embedded words (B, L, E), mask (B, L)) and gives the memory (B, L, d), 0 at padding, and the state
that the phrase decoder starts from (B, d), or None where it has none of its own.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from .attention_exhird import SparsePattern, SparseRelativeAttention, sinusoids


class LayeredEncoder(nn.Module):
    """An encoder whose layers may be computed anew in the backward pass instead of being kept."""

    gradient_checkpointing = False

    def run(self, layer: Callable, *given):
        if self.gradient_checkpointing and self.training:
            return checkpoint(layer, *given, use_reentrant=False)
        return layer(*given)


class RecurrentEncoder(LayeredEncoder):
    """A GRU or LSTM that reads both ways, d / 2 each; its last states start the phrase decoder (Chen et al. 2020)."""

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

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = mask.sum(1)
        order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)  # padding on the left goes to the right
        given = x.gather(1, order[..., None].expand_as(x))
        packed = pack_padded_sequence(given, lengths.clamp(min=1).cpu(), batch_first=True, enforce_sorted=False)
        states, last = self.run(self.rnn, packed)
        memory = pad_packed_sequence(states, batch_first=True, total_length=x.shape[1])[0]
        memory = torch.zeros_like(memory).scatter(1, order[..., None].expand_as(memory), memory)
        last = last[0] if isinstance(last, tuple) else last  # of an LSTM h, not c
        return memory * mask[..., None], torch.cat([last[-2], last[-1]], -1)


class ConvolutionalEncoder(LayeredEncoder):
    """Gated convolutions over three words, x <- (x + GLU(conv(x))) sqrt(1/2), as in OpenNMT (Gehring et al. 2017)."""

    def __init__(self, config):
        super().__init__()
        d = config.hidden_size
        self.project = nn.Linear(config.word_size, d)
        self.layers = nn.ModuleList(nn.Conv1d(d, 2 * d, 3, padding=1) for _ in range(config.num_hidden_layers))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, None]:
        real = mask[:, None].to(x.dtype)  # (B, 1, L)
        h = self.project(x).transpose(1, 2) * real  # (B, d, L)
        for layer in self.layers:
            h = (h + self.run(self.gated, layer, h)) * 0.5**0.5 * real
        return h.transpose(1, 2), None

    def gated(self, layer: nn.Module, h: torch.Tensor) -> torch.Tensor:
        return F.glu(layer(self.dropout(h)), 1)


class TransformerLayer(nn.Module):
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

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), mask))
        return x + self.dropout(self.down(self.dropout(self.up(self.feed_forward_norm(x)).relu())))


class TransformerEncoder(LayeredEncoder):
    """Layers of sparse, relative attention (Xu et al. 2021), normalised before each part and at the end as in OpenNMT."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, None]:
        if self.config.relative_attention is None:
            x = x * x.shape[-1] ** 0.5 + self.positions(mask).to(x.dtype)
        x = self.dropout(x)
        for layer in self.layers:
            x = self.run(layer, x, mask)
        return self.norm(x) * mask[..., None], None

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

    def forward(self, mask, pieces, piece_mask, words) -> tuple[torch.Tensor, None]:
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
        states = self.read_windows(pieces, piece_mask)
        length, words = mask.shape[1], words.flatten(1)
        pooled = pool_pieces(states.flatten(1, 2), words, length)
        found = torch.zeros(*mask.shape[:1], length + 1, device=mask.device, dtype=torch.bool)
        found = found.scatter(1, torch.where(words < 0, length, words), True)[:, :length]
        pooled = torch.where(found[..., None], pooled, self.nothing.weight.to(pooled.dtype))
        return self.project(pooled) * mask[..., None], None

    def read_windows(self, pieces, piece_mask) -> torch.Tensor:
        """-> the backbone's states (B, N, S, d); windows of padding alone are not read."""
        if piece_mask is None:
            return self.states(pieces.flatten(0, 1), None).unflatten(0, pieces.shape[:2])
        # padding on the left goes to the right: the backbone's positions count from there
        order = (piece_mask == 0).to(torch.uint8).argsort(dim=2, stable=True)
        there = piece_mask.any(2)
        read = self.states(pieces.gather(2, order)[there], piece_mask.gather(2, order)[there])
        states = read.new_zeros(*pieces.shape, read.shape[-1])
        states[there] = read
        return torch.zeros_like(states).scatter(2, order[..., None].expand_as(states), states)

    def states(self, pieces, mask) -> torch.Tensor:
        return self.backbone(pieces, attention_mask=mask, return_dict=True).last_hidden_state


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
