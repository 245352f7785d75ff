"""Routed modules, and the Llama layers around them (LM-Lexicon, paper's Sect. 3).

Letters: B sequences, T tokens in each, d a module's input size, E experts, k experts per token; x a routed module's
input, g = x W_gate.

What a forward pass knows reaches a routed module as an argument, a `LayerRouting`, and is kept on no module: passes of
several threads, passes that fail halfway and layers that are run again in the backward pass do not mix. Llama's MLP and
attention call their linear layers with x alone; `LexiconMlp` and `LexiconAttention` hand the argument on.
"""

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from .configuration_lexicon import ATTENTION_LINEARS, MLP_LINEARS, LexiconConfig
from .experts_lexicon import Decision, LexiconExperts, LinearExperts, RoutedExperts
from .routing_lexicon import LayerRouting, Routing, at_least_float32, top_k_routing


class RoutedModule(nn.Module):
    """y = sum_i G(x)_i E_i(x), with G as the routing policy says   (LM-Lexicon, paper's Sect. 3)

    Args:
        config: the model's.
        number: its place among the model's routed modules, in the order in which they run.
        in_features: d.
        experts: what it routes to.
    """

    def __init__(self, config, number: int, in_features: int, experts: RoutedExperts):
        super().__init__()
        self.number, self.policy, self.k = number, config.routing_policy, config.num_experts_per_tok
        has_gate = self.policy != "domain" or (config.domain_gate and number == 0)
        self.gate = nn.Linear(in_features, config.num_local_experts, bias=False) if has_gate else None
        self.experts = experts

    def prompt_logits(self, x: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        """x (B, T, d), prompt (B, T) -> the mean of g over each row's prompt (B, E), in float32 (float64 for float64).

        The gate is linear: it reads the mean of x, once a row.
        """
        prompt = prompt.to(x.device)
        total = at_least_float32(x).masked_fill(~prompt[..., None], 0).sum(1)  # (B, d)
        return at_least_float32(self.gate((total / prompt.sum(1, keepdim=True)).to(x.dtype)))

    def decide(self, x: torch.Tensor, prompt: torch.Tensor) -> Decision:
        """x (B, T, d), prompt (B, T) -> a decision a row."""
        logits = self.prompt_logits(x, prompt)  # (B, E)
        probabilities = logits.softmax(-1)
        p, index = probabilities.max(-1)  # (B,)
        if self.policy == "sequence_soft":
            return Decision(index, probabilities, logits)
        # Not by whether gradients are on: the first pass of a re-entrant checkpoint has them off.
        learns = self.training or torch.is_grad_enabled()
        return Decision(index, 1 + (p - p.detach()) if learns else None, logits)

    def forward(self, x: torch.Tensor, routing: LayerRouting | None = None) -> torch.Tensor:
        """x (B, T, d) -> (B, T, out).

        Raises:
            RuntimeError: without `routing`, which the decoder layer passes.
        """
        if routing is None:
            raise RuntimeError(
                f"{type(self).__name__} was called outside of its decoder layer, without routing. Call the model, or "
                "the layer with routing=."
            )
        if self.policy != "token":
            return self.experts(x, routing.decide(self, x))
        logits = self.gate(x)  # (B, T, E)
        weights, index = top_k_routing(logits, self.k)
        routing.record(index, None, logits)
        y = self.experts(x.flatten(0, 1), index.flatten(0, 1), weights.flatten(0, 1))
        return y.unflatten(0, x.shape[:2])


class RoutedMlp(RoutedModule):
    """E Llama MLPs behind one gate: Mixtral's block, for all policies."""

    def __init__(self, config, number: int):
        super().__init__(config, number, config.hidden_size, LexiconExperts(config))


class RoutedLinear(RoutedModule):
    """E linear layers behind a gate of their own, in the place of one linear layer."""

    def __init__(self, config, number: int, linear: nn.Linear):
        experts = LinearExperts(config, linear.in_features, linear.out_features, linear.bias is not None)
        super().__init__(config, number, linear.in_features, experts)


class RoutedLinears(nn.Module):
    """A mix-in for a Llama block some of whose linear layers are routed modules.

    Args:
        config, args: for the block.
        numbers: the routed ones by name, with their number among the model's routed modules.
    """

    def __init__(self, config: LexiconConfig, *args, numbers: dict[str, int]):
        super().__init__(config, *args)
        self.routed_names = frozenset(numbers)
        for name, number in numbers.items():
            setattr(self, name, RoutedLinear(config, number, getattr(self, name)))

    def project(self, name: str, x: torch.Tensor, routing: LayerRouting | None) -> torch.Tensor:
        """The linear layer of this name, with `routing` where it is routed."""
        linear = getattr(self, name)
        return linear(x, routing) if name in self.routed_names else linear(x)


class LexiconMlp(RoutedLinears, LlamaMLP):
    """Llama's MLP, for routed `gate_proj`, `up_proj` or `down_proj`."""

    def forward(self, x: torch.Tensor, routing: LayerRouting | None = None) -> torch.Tensor:
        """x (B, T, d) -> (B, T, d)."""
        gate, up = self.project("gate_proj", x, routing), self.project("up_proj", x, routing)
        return self.project("down_proj", self.act_fn(gate) * up, routing)


class LexiconAttention(RoutedLinears, LlamaAttention):
    """Llama's attention, for routed `q_proj`, `k_proj`, `v_proj` or `o_proj`."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values=None,
        routing: LayerRouting | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states (B, T, d) -> (B, T, d), and the attention weights where the implementation has them.

        As `LlamaAttention.forward`, but for `routing`.
        """
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            self.project(name, hidden_states, routing).view(shape).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        attended, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        attended = attended.reshape(*hidden_states.shape[:-1], -1).contiguous()
        return self.project("o_proj", attended, routing), weights


class LexiconDecoderLayer(LlamaDecoderLayer):
    """A Llama layer whose MLP or linear layers are routed modules where the configuration says so."""

    def __init__(self, config: LexiconConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        numbers = {name: i for i, (layer, name) in enumerate(config.routed_modules()) if layer == layer_idx}
        self.routed_names = list(numbers)
        of_attention, of_mlp = (
            {name: numbers[name] for name in names if name in numbers} for names in (ATTENTION_LINEARS, MLP_LINEARS)
        )
        if of_attention:
            self.self_attn = LexiconAttention(config, layer_idx, numbers=of_attention)
        if "mlp" in numbers:
            self.mlp = RoutedMlp(config, numbers["mlp"])
        elif of_mlp:
            self.mlp = LexiconMlp(config, numbers=of_mlp)
        self.attention_is_routed, self.mlp_is_routed = bool(of_attention), len(numbers) > len(of_attention)

    def _parent(self, name: str) -> nn.Module:
        return self if name == "mlp" else self.self_attn if name in ATTENTION_LINEARS else self.mlp

    def routed_modules(self) -> list[RoutedModule]:
        """They are looked up each time: an adapter may have put copies of them, or itself, in their place."""
        places = [getattr(self._parent(name), name) for name in self.routed_names]
        return [module for place in places for module in place.modules() if isinstance(module, RoutedModule)]

    def __call__(self, hidden_states: torch.Tensor, routing: Routing | None = None, **kwargs) -> torch.Tensor:
        """hidden_states (B, T, d) -> (B, T, d).

        What the routed modules found comes out of `forward` as outputs, and not only by way of `routing`: whatever runs
        between here and there (checkpoints, sharding) carries gradients through outputs alone.
        """
        if not self.routed_names or routing is None:
            return super().__call__(hidden_states, **kwargs)
        hidden_states, *found = super().__call__(hidden_states, routing.domain_weights, routing=routing, **kwargs)
        routing.collect(found)
        return hidden_states

    def forward(
        self,
        hidden_states: torch.Tensor,
        domain_weights: torch.Tensor | None = None,
        routing: Routing | None = None,
        **kwargs,
    ):
        """(B, T, d) -> (B, T, d), and index, weights and logits of each routed module."""
        if not self.routed_names or routing is None:
            return super().forward(hidden_states, **kwargs)
        layer_routing = LayerRouting(routing, domain_weights)
        to_attention = {"routing": layer_routing} if self.attention_is_routed else {}
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **to_attention, **kwargs)
        hidden_states = hidden_states + attended
        x = self.post_attention_layernorm(hidden_states)
        hidden_states = hidden_states + (self.mlp(x, layer_routing) if self.mlp_is_routed else self.mlp(x))
        return hidden_states, *layer_routing.found


__all__ = [
    "LexiconAttention",
    "LexiconDecoderLayer",
    "LexiconMlp",
    "RoutedLinear",
    "RoutedMlp",
    "RoutedModule",
]
