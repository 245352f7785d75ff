"""The layers of BART, PEGASUS and mBART with deputies beside their feed-forward part (MoeSumm, Sect. 4).

Letters: B rows, T tokens in each, S source tokens, d hidden size, L layers of encoder and decoder together.

`fc1` and `fc2` keep their names as the main expert, so that checkpoints, adapters and quantizers find them. The forward
passes are those of transformers' layers, line by line, except for `feed_forward`. What a pass knows is the argument
`routing`; modules keep nothing of it, so that threads, exceptions and gradient checkpointing, which calls a layer again
in the backward pass, cannot mix passes.
"""

import torch
from torch import nn
from torch.nn.functional import dropout
from transformers.models.bart.modeling_bart import BartDecoderLayer, BartEncoderLayer
from transformers.models.mbart.modeling_mbart import MBartDecoderLayer, MBartEncoderLayer
from transformers.models.pegasus.modeling_pegasus import PegasusDecoderLayer, PegasusEncoderLayer

from .experts_moesumm import Deputies
from .routing_moesumm import Routing


class LayerWithDeputies:
    """What all layers share: a feed-forward part of a main expert and deputies   (MoeSumm, Eq. 6-7)

    Attributes:
        number: of the layer among all L, the encoder's first.
        has_main_expert: `False` in FlatMoE.
        deputies: the layer's selectors and deputies.
    """

    def add_deputies(self, config, number: int):
        """Turns a new layer of the backbone, whose class has become this one, into a MoeSumm layer."""
        d, inner = self.fc1.in_features, config.deputy_size or self.fc1.out_features
        self.number, self.has_main_expert = number, config.main_expert
        self.deputies = Deputies(config, d, inner, self.activation_fn, self.activation_dropout)
        if not config.main_expert:
            self.fc1.weight = self.fc1.bias = self.fc2.weight = None

    def main_expert(self, A: torch.Tensor) -> torch.Tensor:
        """X = act(A W1 + b1) W2 + b2   (MoeSumm, Eq. 1): A (B, T, d) -> X (B, T, d), b2 alone in FlatMoE."""
        if not self.has_main_expert:
            return self.fc2.bias.expand_as(A)
        H = self.activation_fn(self.fc1(A))
        H = dropout(H, p=self.activation_dropout, training=self.training)
        return self.fc2(H)

    def feed_forward(self, A: torch.Tensor, routing: Routing | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """H = act([A W1_m + b1_m ; g_p (A W1_p + b1_p)]);  X = [W2_m ; W2_p] H + b2_m   (MoeSumm, Eq. 6-7)

        As the sum over the two blocks of H: the main expert's part, which alone is the backbone's feed-forward layer,
        and the deputy's.

        Args:
            A (`(B, T, d)`): the attention's output.

        Returns:
            X `(B, T, d)`, and with `gate_position="layer_output"` what the layer's output is to be multiplied by,
            `(B, T, 1)`, else `None`.
        """
        if routing is None:
            raise RuntimeError(
                f"{type(self).__name__} was called without routing: it does not know which datasets the rows are from. "
                "Call the MoeSumm model, or what its get_encoder() returns, and not its backbone."
            )
        X = self.main_expert(A)
        return self.deputies(A, X, routing, self.number) if routing.active else (X, None)

    def with_main_only_rows(self, hidden_states: torch.Tensor, routing: Routing | None):
        """The rows again by the main expert alone, where the margin compares with this layer without its deputies."""
        if routing is None or routing.main_only_layer != self.number:
            return hidden_states, routing
        return torch.cat([hidden_states, hidden_states]), routing.with_main_only_rows(len(hidden_states))


def gated(hidden_states: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """(B, T, d), (B, T, 1) -> (B, T, d)."""
    return hidden_states if gate is None else hidden_states * gate


def clamp_float16(hidden_states: torch.Tensor) -> torch.Tensor:
    limit = torch.finfo(hidden_states.dtype).max - 1000
    return torch.clamp(hidden_states, min=-limit, max=limit)


# BART normalises after each part of a layer, PEGASUS and mBART before it.


class PostNormEncoderLayer(LayerWithDeputies):
    """`BartEncoderLayer.forward` with deputies."""

    def forward(self, hidden_states: torch.Tensor, attention_mask, routing: Routing | None = None, **kwargs):
        """hidden_states (B, S, d) -> (B, S, d)."""
        residual = hidden_states
        hidden_states, _ = self.self_attn(hidden_states, attention_mask=attention_mask, **kwargs)
        hidden_states = dropout(hidden_states, p=self.dropout, training=self.training)
        hidden_states = self.self_attn_layer_norm(residual + hidden_states)

        residual = hidden_states
        hidden_states, gate = self.feed_forward(hidden_states, routing)
        hidden_states = dropout(hidden_states, p=self.dropout, training=self.training)
        hidden_states = gated(self.final_layer_norm(residual + hidden_states), gate)

        if hidden_states.dtype == torch.float16 and not torch.isfinite(hidden_states).all():
            hidden_states = clamp_float16(hidden_states)
        return hidden_states


class PreNormEncoderLayer(LayerWithDeputies):
    """`PegasusEncoderLayer.forward`, which is `MBartEncoderLayer.forward`, with deputies."""

    def forward(self, hidden_states: torch.Tensor, attention_mask, routing: Routing | None = None, **kwargs):
        """hidden_states (B, S, d) -> (B, S, d)."""
        residual = hidden_states
        hidden_states = self.self_attn_layer_norm(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states, attention_mask=attention_mask, **kwargs)
        hidden_states = dropout(hidden_states, p=self.dropout, training=self.training)
        hidden_states = residual + hidden_states

        residual = hidden_states
        hidden_states, gate = self.feed_forward(self.final_layer_norm(hidden_states), routing)
        hidden_states = dropout(hidden_states, p=self.dropout, training=self.training)
        hidden_states = gated(residual + hidden_states, gate)

        return clamp_float16(hidden_states) if hidden_states.dtype == torch.float16 else hidden_states


class PostNormDecoderLayer(LayerWithDeputies):
    """`BartDecoderLayer.forward` with deputies."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values=None,
        use_cache: bool | None = True,
        routing: Routing | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """hidden_states (B, T, d), encoder_hidden_states (B, S, d) -> (B, T, d), or (2B, T, d) where the margin asks."""
        residual = hidden_states
        hidden_states, _ = self.self_attn(
            hidden_states, past_key_values=past_key_values, attention_mask=attention_mask, **kwargs
        )
        hidden_states = dropout(hidden_states, p=self.dropout, training=self.training)
        hidden_states = self.self_attn_layer_norm(residual + hidden_states)

        if encoder_hidden_states is not None:
            residual = hidden_states
            hidden_states, _ = self.encoder_attn(
                hidden_states,
                key_value_states=encoder_hidden_states,
                attention_mask=encoder_attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
            hidden_states = dropout(hidden_states, p=self.dropout, training=self.training)
            hidden_states = self.encoder_attn_layer_norm(residual + hidden_states)

        hidden_states, routing = self.with_main_only_rows(hidden_states, routing)
        residual = hidden_states
        hidden_states, gate = self.feed_forward(hidden_states, routing)
        hidden_states = dropout(hidden_states, p=self.dropout, training=self.training)
        return gated(self.final_layer_norm(residual + hidden_states), gate)


class PreNormDecoderLayer(LayerWithDeputies):
    """`PegasusDecoderLayer.forward`, which is `MBartDecoderLayer.forward`, with deputies."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values=None,
        use_cache: bool | None = True,
        routing: Routing | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """hidden_states (B, T, d), encoder_hidden_states (B, S, d) -> (B, T, d), or (2B, T, d) where the margin asks."""
        residual = hidden_states
        hidden_states = self.self_attn_layer_norm(hidden_states)
        hidden_states, _ = self.self_attn(
            hidden_states, past_key_values=past_key_values, attention_mask=attention_mask, **kwargs
        )
        hidden_states = dropout(hidden_states, p=self.dropout, training=self.training)
        hidden_states = residual + hidden_states

        if encoder_hidden_states is not None:
            residual = hidden_states
            hidden_states = self.encoder_attn_layer_norm(hidden_states)
            hidden_states, _ = self.encoder_attn(
                hidden_states,
                key_value_states=encoder_hidden_states,
                attention_mask=encoder_attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
            hidden_states = dropout(hidden_states, p=self.dropout, training=self.training)
            hidden_states = residual + hidden_states

        hidden_states, routing = self.with_main_only_rows(hidden_states, routing)
        residual = hidden_states
        hidden_states, gate = self.feed_forward(self.final_layer_norm(hidden_states), routing)
        hidden_states = dropout(hidden_states, p=self.dropout, training=self.training)
        return gated(residual + hidden_states, gate)


class MoeSummBartEncoderLayer(PostNormEncoderLayer, BartEncoderLayer):
    """A layer of BART's encoder with deputies."""


class MoeSummBartDecoderLayer(PostNormDecoderLayer, BartDecoderLayer):
    """A layer of BART's decoder with deputies."""


class MoeSummPegasusEncoderLayer(PreNormEncoderLayer, PegasusEncoderLayer):
    """A layer of PEGASUS's encoder with deputies."""


class MoeSummPegasusDecoderLayer(PreNormDecoderLayer, PegasusDecoderLayer):
    """A layer of PEGASUS's decoder with deputies."""


class MoeSummMBartEncoderLayer(PreNormEncoderLayer, MBartEncoderLayer):
    """A layer of mBART's encoder with deputies."""


class MoeSummMBartDecoderLayer(PreNormDecoderLayer, MBartDecoderLayer):
    """A layer of mBART's decoder with deputies."""


LAYER_CLASSES = {
    BartEncoderLayer: MoeSummBartEncoderLayer,
    BartDecoderLayer: MoeSummBartDecoderLayer,
    PegasusEncoderLayer: MoeSummPegasusEncoderLayer,
    PegasusDecoderLayer: MoeSummPegasusDecoderLayer,
    MBartEncoderLayer: MoeSummMBartEncoderLayer,
    MBartDecoderLayer: MoeSummMBartDecoderLayer,
}


def layers_of(base: nn.Module) -> list[nn.Module]:
    """The L layers, the encoder's first.

    Raises:
        ValueError: for a backbone other than BART, PEGASUS or mBART.
    """
    stacks = [getattr(getattr(base, part, None), "layers", None) for part in ("encoder", "decoder")]
    layers = [layer for stack in stacks for layer in stack or ()]
    unknown = sorted({type(layer).__name__ for layer in layers if type(layer) not in LAYER_CLASSES})
    if unknown or not all(stacks):
        raise ValueError(
            f"backbone={type(base).__name__} is not supported: {', '.join(unknown) or 'its layers'} cannot be given "
            "deputies. Use a BART, PEGASUS or mBART."
        )
    return layers


def attach_deputies(base: nn.Module, config):
    """Gives every layer its deputies, in place; the backbone's parameters keep their names and places.

    Raises:
        ValueError: for a backbone that has other layers, or an activation that is not 0 at 0.
    """
    for number, layer in enumerate(layers_of(base)):
        if layer.activation_fn(torch.zeros(1, device="cpu")).item() != 0:
            raise ValueError(
                f"The activation {type(layer.activation_fn).__name__} is not 0 at 0: a deputy that was not chosen "
                "would still contribute. Use a backbone with gelu, relu or silu."
            )
        layer.__class__ = LAYER_CLASSES[type(layer)]  # in place: the backbone has made and initialised its weights
        layer.add_deputies(config, number)
