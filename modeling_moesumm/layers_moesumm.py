# SPDX-License-Identifier: Apache-2.0
"""The layers of pretrained models with deputies beside their feed-forward part, and the losses (MoeSumm, Sect. 4).

Letters: B rows, T tokens in each, S source tokens, d hidden size, L layers of encoder and decoder together, n tokens of a
batch including padding, V vocabulary, y_t the gold token.

The main expert keeps its names (`fc1` and `fc2`, or `mlp`), so checkpoints, adapters and quantizers find it. Routing is an
argument and never stored on modules, so threads, exceptions and gradient checkpointing cannot mix passes.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import dropout
from transformers.models.bart.modeling_bart import BartDecoderLayer, BartEncoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.pegasus.modeling_pegasus import PegasusDecoderLayer, PegasusEncoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from .cache_moesumm import CACHE, accepts_both_names
from .configuration_moesumm import BACKBONES
from .experts_moesumm import DeputyFeedForward
from .routing_moesumm import RoutingContext


class LayerWithDeputies:
    """Base of all layers: a feed-forward part of a main expert and deputies   (MoeSumm, Eq. 6-7)

    `layer_idx` is its index among all L, the encoder's first; `has_main_expert` is `False` in FlatMoE.
    """

    # the main expert's first matrices (W1, or of SwiGLU W1 and V), its last W2, activation, dropout
    expert_parts: Callable
    main_expert: Callable  # its input A -> its output X, both `(B, T, d)`

    def add_deputies(self, config, layer_idx: int):
        """Adds the deputies to a backbone layer whose class has been changed to this one: built as the main expert, narrower."""
        up, down, act, p = self.expert_parts()
        inner = config.deputy_intermediate_size or up[0].out_features
        structure = {"gated": len(up) > 1, "bias": up[0].bias is not None}
        self.layer_idx, self.has_main_expert = layer_idx, config.main_expert
        self.deputies = DeputyFeedForward(config, up[0].in_features, inner, act, p, **structure)
        if not config.main_expert:
            for linear in up:
                linear.weight = linear.bias = None
            down.weight = None

    @torch.no_grad()
    def copy_main_expert(self, source: nn.Module):
        """FlatMoE: every expert is initialised as a copy of the main expert of a backbone's layer."""
        up, down, _, _ = type(self).expert_parts(source)
        experts = self.deputies.experts
        experts.up_proj.copy_(torch.cat([linear.weight for linear in up]))
        if experts.up_bias is not None:
            experts.up_bias.copy_(torch.cat([linear.bias for linear in up]))
        experts.down_proj.copy_(down.weight.T)
        if down.bias is not None:
            self.expert_parts()[1].bias.copy_(down.bias)

    def without_main_expert(self, A: torch.Tensor) -> torch.Tensor:
        """X = b2, or 0 without biases: what FlatMoE has before its experts are added."""
        bias = self.expert_parts()[1].bias
        return torch.zeros_like(A) if bias is None else bias.expand_as(A)

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
        X = self.main_expert(A) if self.has_main_expert else self.without_main_expert(A)
        return self.deputies(A, X, routing, self.layer_idx) if routing.active else (X, None)

    def with_main_only_rows(self, hidden_states: torch.Tensor, routing: RoutingContext | None):
        """Doubles the rows, with the main expert only in the second half, if the margin compares with this layer."""
        if routing is None or routing.main_only_layer != self.layer_idx:
            return hidden_states, routing
        routing = routing.with_main_only_rows(len(hidden_states), hidden_states.device)
        return torch.cat([hidden_states, hidden_states]), routing


class BartLikeLayer(LayerWithDeputies):
    """What the layers of BART and PEGASUS share. `norm_first`: each part is normalised before it, as in PEGASUS, or after it."""

    norm_first = True

    def expert_parts(self):
        """W1, W2, activation and dropout."""
        return (self.fc1,), self.fc2, self.activation_fn, self.activation_dropout

    def main_expert(self, A: torch.Tensor) -> torch.Tensor:
        """X = act(A W1 + b1) W2 + b2   (MoeSumm, Eq. 1), both `(B, T, d)`."""
        H = self.activation_fn(self.fc1(A))
        H = dropout(H, p=self.activation_dropout, training=self.training)
        return self.fc2(H)

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


class EncoderLayerWithDeputies(BartLikeLayer):
    """`forward` of the encoder layers of BART and PEGASUS, with deputies."""

    def forward(self, hidden_states: torch.Tensor, attention_mask, routing: RoutingContext | None = None, **kwargs):
        """Computes the layer; hidden_states and result are `(B, S, d)`."""
        norm = self.self_attn_layer_norm
        hidden_states = self.attend(self.self_attn, norm, hidden_states, attention_mask=attention_mask, **kwargs)
        hidden_states = self.gated_feed_forward(hidden_states, routing)
        if hidden_states.dtype == torch.float16 and (self.norm_first or not torch.isfinite(hidden_states).all()):
            limit = torch.finfo(torch.float16).max - 1000  # as transformers clamps
            hidden_states = hidden_states.clamp(-limit, limit)
        return hidden_states


class DecoderLayerWithDeputies(BartLikeLayer):
    """`forward` of the decoder layers of BART and PEGASUS, with deputies."""

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


class LlamaLikeLayer(LayerWithDeputies):
    """`forward` of the layers of Llama, Mistral, Qwen2 and Qwen3, with deputies   (MoeSumm, Eq. 4-7, for SwiGLU)

    H = [silu(A W1_m) * A V_m ; silu(g_p A W1_p) * A V_p];  X = [W2_m ; W2_p] H, the main expert being the pretrained MLP.
    """

    def expert_parts(self):
        """W1 and V, W2, activation, without dropout."""
        return (self.mlp.gate_proj, self.mlp.up_proj), self.mlp.down_proj, self.mlp.act_fn, 0.0

    def main_expert(self, A: torch.Tensor) -> torch.Tensor:
        """X = (silu(A W1) * A V) W2, both `(B, T, d)`."""
        return self.mlp(A)

    @accepts_both_names
    def forward(
        self, hidden_states: torch.Tensor, cache=None, routing: RoutingContext | None = None, **kwargs
    ) -> torch.Tensor:
        """Computes the layer: `(B, T, d)`, or `(2B, T, d)` if the margin compares with it."""
        y, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **{CACHE: cache}, **kwargs)
        hidden_states, routing = self.with_main_only_rows(hidden_states + y, routing)
        y, gate = self.feed_forward(self.post_attention_layernorm(hidden_states), routing)
        hidden_states = hidden_states + y
        return hidden_states if gate is None else hidden_states * gate


class MoeSummLlamaLayer(LlamaLikeLayer, LlamaDecoderLayer):
    """A layer of Llama with deputies."""


class MoeSummMistralLayer(LlamaLikeLayer, MistralDecoderLayer):
    """A layer of Mistral with deputies."""


class MoeSummQwen2Layer(LlamaLikeLayer, Qwen2DecoderLayer):
    """A layer of Qwen2 with deputies."""


class MoeSummQwen3Layer(LlamaLikeLayer, Qwen3DecoderLayer):
    """A layer of Qwen3 with deputies."""


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


LAYER_CLASSES = {
    BartEncoderLayer: MoeSummBartEncoderLayer,
    BartDecoderLayer: MoeSummBartDecoderLayer,
    PegasusEncoderLayer: MoeSummPegasusEncoderLayer,
    PegasusDecoderLayer: MoeSummPegasusDecoderLayer,
    LlamaDecoderLayer: MoeSummLlamaLayer,
    MistralDecoderLayer: MoeSummMistralLayer,
    Qwen2DecoderLayer: MoeSummQwen2Layer,
    Qwen3DecoderLayer: MoeSummQwen3Layer,
}


def layer_stacks(base: nn.Module) -> list:
    """The layers of encoder and decoder, or of the decoder alone, of a backbone; `None` for a part without layers."""
    parts = [base] if hasattr(base, "layers") else [getattr(base, part, None) for part in ("encoder", "decoder")]
    return [getattr(part, "layers", None) for part in parts]


def get_layers(base: nn.Module) -> list[nn.Module]:
    """The L layers of a backbone, the encoder's first; raises a `ValueError` for one that is not supported."""
    layers = [layer for stack in layer_stacks(base) for layer in stack or ()]
    unknown = sorted({type(layer).__name__ for layer in layers if type(layer) not in LAYER_CLASSES})
    if unknown or not layers:
        raise ValueError(f"{type(base).__name__} with the layers {unknown} is not supported. Use a {BACKBONES}.")
    return layers


def attach_deputies(base: nn.Module, config):
    """Adds deputies to every layer, in place; raises a `ValueError` for a backbone that is not supported. The backbone's
    parameters keep their names.
    """
    for layer_idx, layer in enumerate(get_layers(base)):
        layer.__class__ = LAYER_CLASSES[type(layer)]  # in place: its weights are already initialised
        act = layer.expert_parts()[2]
        if act(torch.zeros(1, device="cpu")).item() != 0:
            raise ValueError(f"The activation {type(act).__name__} is not 0 at 0. Use one with gelu, relu or silu.")
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
