# SPDX-License-Identifier: Apache-2.0
"""The layers of BART, PEGASUS and mBART with deputies beside their feed-forward part, and the losses (MoeSumm, Sect. 4).

Letters: B rows, T tokens in each, S source tokens, d hidden size, L layers of encoder and decoder together, n tokens of a
batch including padding, V vocabulary, y_t the gold token.

The main expert keeps the names `fc1` and `fc2`, so checkpoints, adapters and quantizers find it. The forward passes are
those of transformers' layers, except for `feed_forward`. Routing is an argument and never stored on modules,
so threads, exceptions and gradient checkpointing (which calls a layer again in the backward pass) cannot mix passes.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import dropout
from transformers.models.bart.modeling_bart import BartDecoderLayer, BartEncoderLayer
from transformers.models.mbart.modeling_mbart import MBartDecoderLayer, MBartEncoderLayer
from transformers.models.pegasus.modeling_pegasus import PegasusDecoderLayer, PegasusEncoderLayer

from .cache_moesumm import CACHE, accepts_both_names
from .experts_moesumm import DeputyFeedForward
from .routing_moesumm import RoutingContext


class LayerWithDeputies:
    """Base of all layers: a feed-forward part of a main expert and deputies   (MoeSumm, Eq. 6-7)

    `layer_idx` is the layer's index among all L, the encoder's first; `norm_first`, whether each part is normalised before
    it, as in PEGASUS and mBART, or after it, as in BART; `has_main_expert` is `False` in FlatMoE.
    """

    norm_first = True

    def add_deputies(self, config, layer_idx: int):
        """Adds the deputies to a backbone layer whose class has been changed to this one."""
        d, inner = self.fc1.in_features, config.deputy_intermediate_size or self.fc1.out_features
        self.layer_idx, self.has_main_expert = layer_idx, config.main_expert
        self.deputies = DeputyFeedForward(config, d, inner, self.activation_fn, self.activation_dropout)
        if not config.main_expert:
            self.fc1.weight = self.fc1.bias = self.fc2.weight = None

    def main_expert(self, A: torch.Tensor) -> torch.Tensor:
        """X = act(A W1 + b1) W2 + b2   (MoeSumm, Eq. 1), both `(B, T, d)`; in FlatMoE X = b2."""
        if not self.has_main_expert:
            return self.fc2.bias.expand_as(A)
        H = self.activation_fn(self.fc1(A))
        H = dropout(H, p=self.activation_dropout, training=self.training)
        return self.fc2(H)

    def feed_forward(self, A: torch.Tensor, routing: RoutingContext | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """H = act([A W1_m + b1_m ; g_p (A W1_p + b1_p)]);  X = [W2_m ; W2_p] H + b2_m   (MoeSumm, Eq. 6-7)

        X is computed as a sum over the two blocks of H: the main expert's output (the backbone's feed-forward layer) and
        the deputy's. A and X are `(B, T, d)`. Also returns the factor of the layer's output `(B, T, 1)` with
        `gate_position="layer_output"`, otherwise `None`.
        """
        if routing is None:
            raise RuntimeError(
                f"{type(self).__name__} was called without routing, so the datasets of the rows are unknown. Call the "
                "MoeSumm model or its get_encoder(), not its backbone."
            )
        X = self.main_expert(A)
        return self.deputies(A, X, routing, self.layer_idx) if routing.active else (X, None)

    def attend(self, attention: nn.Module, norm: nn.Module, x: torch.Tensor, **kwargs) -> torch.Tensor:
        """Attention, with the residual connection and the LayerNorm."""
        y, _ = attention(norm(x) if self.norm_first else x, **kwargs)
        y = x + dropout(y, p=self.dropout, training=self.training)
        return y if self.norm_first else norm(y)

    def gated_feed_forward(self, x: torch.Tensor, routing: RoutingContext | None) -> torch.Tensor:
        """`feed_forward`, with the residual connection, the LayerNorm and the gate of the layer's output."""
        norm = self.final_layer_norm
        y, gate = self.feed_forward(norm(x) if self.norm_first else x, routing)
        y = x + dropout(y, p=self.dropout, training=self.training)
        y = y if self.norm_first else norm(y)
        return y if gate is None else y * gate

    def with_main_only_rows(self, hidden_states: torch.Tensor, routing: RoutingContext | None):
        """Doubles the rows, with the main expert only in the second half, if the margin compares with this layer."""
        if routing is None or routing.main_only_layer != self.layer_idx:
            return hidden_states, routing
        routing = routing.with_main_only_rows(len(hidden_states), hidden_states.device)
        return torch.cat([hidden_states, hidden_states]), routing


class EncoderLayerWithDeputies(LayerWithDeputies):
    """`forward` of the encoder layers of BART, PEGASUS and mBART, with deputies."""

    def forward(self, hidden_states: torch.Tensor, attention_mask, routing: RoutingContext | None = None, **kwargs):
        """Computes the layer; hidden_states and result are `(B, S, d)`."""
        norm = self.self_attn_layer_norm
        hidden_states = self.attend(self.self_attn, norm, hidden_states, attention_mask=attention_mask, **kwargs)
        hidden_states = self.gated_feed_forward(hidden_states, routing)
        if hidden_states.dtype == torch.float16 and (self.norm_first or not torch.isfinite(hidden_states).all()):
            limit = torch.finfo(torch.float16).max - 1000  # as transformers clamps
            hidden_states = hidden_states.clamp(-limit, limit)
        return hidden_states


class DecoderLayerWithDeputies(LayerWithDeputies):
    """`forward` of the decoder layers of BART, PEGASUS and mBART, with deputies."""

    @accepts_both_names
    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        cache=None,
        use_cache: bool | None = True,
        routing: RoutingContext | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """Computes the layer: `(B, T, d)`, or `(2B, T, d)` if the margin compares with it."""
        kwargs[CACHE] = cache
        norm = self.self_attn_layer_norm
        hidden_states = self.attend(self.self_attn, norm, hidden_states, attention_mask=attention_mask, **kwargs)
        if encoder_hidden_states is not None:
            kwargs |= {"key_value_states": encoder_hidden_states, "attention_mask": encoder_attention_mask}
            hidden_states = self.attend(self.encoder_attn, self.encoder_attn_layer_norm, hidden_states, **kwargs)
        return self.gated_feed_forward(*self.with_main_only_rows(hidden_states, routing))


class MoeSummBartEncoderLayer(EncoderLayerWithDeputies, BartEncoderLayer):
    """A layer of BART's encoder with deputies."""

    norm_first = False


class MoeSummBartDecoderLayer(DecoderLayerWithDeputies, BartDecoderLayer):
    """A layer of BART's decoder with deputies."""

    norm_first = False


class MoeSummPegasusEncoderLayer(EncoderLayerWithDeputies, PegasusEncoderLayer):
    """A layer of PEGASUS's encoder with deputies."""


class MoeSummPegasusDecoderLayer(DecoderLayerWithDeputies, PegasusDecoderLayer):
    """A layer of PEGASUS's decoder with deputies."""


class MoeSummMBartEncoderLayer(EncoderLayerWithDeputies, MBartEncoderLayer):
    """A layer of mBART's encoder with deputies."""


class MoeSummMBartDecoderLayer(DecoderLayerWithDeputies, MBartDecoderLayer):
    """A layer of mBART's decoder with deputies."""


LAYER_CLASSES = {
    BartEncoderLayer: MoeSummBartEncoderLayer,
    BartDecoderLayer: MoeSummBartDecoderLayer,
    PegasusEncoderLayer: MoeSummPegasusEncoderLayer,
    PegasusDecoderLayer: MoeSummPegasusDecoderLayer,
    MBartEncoderLayer: MoeSummMBartEncoderLayer,
    MBartDecoderLayer: MoeSummMBartDecoderLayer,
}


def get_layers(base: nn.Module) -> list[nn.Module]:
    """The L layers of a backbone, the encoder's first; raises a `ValueError` for one other than BART, PEGASUS or mBART."""
    stacks = [getattr(getattr(base, part, None), "layers", None) for part in ("encoder", "decoder")]
    layers = [layer for stack in stacks for layer in stack or ()]
    unknown = sorted({type(layer).__name__ for layer in layers if type(layer) not in LAYER_CLASSES})
    if unknown or not all(stacks):
        raise ValueError(
            f"backbone={type(base).__name__} is not supported: deputies cannot be added to "
            f"{', '.join(unknown) or 'its layers'}. Use a BART, PEGASUS or mBART."
        )
    return layers


def attach_deputies(base: nn.Module, config):
    """Adds deputies to every layer, in place. The backbone's parameters keep their names.

    Raises a `ValueError` for a backbone that has other layers, or an activation that is not 0 at 0.
    """
    for layer_idx, layer in enumerate(get_layers(base)):
        if layer.activation_fn(torch.zeros(1, device="cpu")).item() != 0:
            raise ValueError(
                f"The activation {type(layer.activation_fn).__name__} is not 0 at 0, so an unselected deputy would still "
                "contribute. Use a backbone with gelu, relu or silu."
            )
        layer.__class__ = LAYER_CLASSES[type(layer)]  # in place: its weights are already initialised
        layer.add_deputies(config, layer_idx)


def token_losses(logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    """-log P(y_t), with label smoothing eps -(1 - eps) log P(y_t) - eps / V sum_v log P(v).

    logits `(n, V)`, labels `(n,)` -> `(n,)`, in float32 or better, and 0 where the label is -100.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)


def margin_losses(full: torch.Tensor, main: torch.Tensor) -> torch.Tensor:
    """m_t = P_full(y_t) - P_main(y_t);  L_m = (1 - P_full(y_t)) (1 - m_t^5) / 2   (MoeSumm, Eq. 8-9; Miao et al. 2021)

    full and main, -log P_full(y_t) and -log P_main(y_t), both `(n,)` -> `(n,)`.
    """
    p_full, p_main = (-full).exp(), (-main).exp()
    return (1 - p_full) * (1 - (p_full - p_main) ** 5) / 2
