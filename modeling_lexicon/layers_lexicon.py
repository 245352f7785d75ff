# SPDX-License-Identifier: Apache-2.0
"""Routed modules, and the Llama layers around them (LM-Lexicon, Sect. 3).

Letters: B sequences, T tokens in each, d a module's input size, E experts, k experts per token; x a routed module's
input, g = x W_gate.

The routing state of a forward pass is an argument, a `LayerRouting`, and is never stored on a module: passes of several
threads, passes that fail halfway and layers that run again in the backward pass do not mix. Llama's MLP and attention call
their linear layers with x alone; `LexiconMlp` and `LexiconAttention` pass the argument on.
"""

from collections.abc import Sequence

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from .cache_lexicon import accepts_both_names
from .configuration_lexicon import ATTENTION_LINEARS, MLP_LINEARS, LexiconConfig
from .experts_lexicon import LexiconExperts, LinearExperts, RoutedExperts, RoutingDecision
from .low_rank_lexicon import LowRankExperts
from .routing_lexicon import LayerRouting, Routing, at_least_float32, top_k_routing
from .saving_lexicon import lexperts_tools


class RoutedModule(nn.Module):
    """y = sum_i G(x)_i E_i(x), where G depends on the routing policy   (LM-Lexicon, Sect. 3)

    `number` is its position among the model's routed modules, in the order in which they run; `in_features` is d.
    """

    def __init__(self, config, number: int, in_features: int, experts: RoutedExperts):
        super().__init__()
        self.number, self.policy, self.k = number, config.routing_policy, config.num_experts_per_tok
        has_gate = self.policy != "domain" or (config.domain_gate and number == 0)
        self.gate = nn.Linear(in_features, config.num_local_experts, bias=False) if has_gate else None
        self.experts = experts
        self.register_buffer("inactive", None, persistent=False)  # indices of experts that get no tokens

    def gate_logits(self, x: torch.Tensor) -> torch.Tensor:
        """g = x W_gate, x (..., d) -> (..., E); minus infinity for experts that are not active."""
        logits = self.gate(x)
        return logits if self.inactive is None else logits.index_fill(-1, self.inactive.to(logits.device), -torch.inf)

    def prompt_logits(self, x: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        """x (B, T, d), prompt (B, T) -> the mean of g over each row's prompt (B, E), in float32 (float64 for float64).

        The gate is linear, so that it is applied to the mean of x, once per row.
        """
        prompt = prompt.to(x.device)
        total = at_least_float32(x).masked_fill(~prompt[..., None], 0).sum(1)  # (B, d)
        return at_least_float32(self.gate_logits((total / prompt.sum(1, keepdim=True)).to(x.dtype)))

    def decide(self, x: torch.Tensor, prompt: torch.Tensor) -> RoutingDecision:
        """x (B, T, d), prompt (B, T) -> one decision per row."""
        logits = self.prompt_logits(x, prompt)  # (B, E)
        probabilities = logits.softmax(-1)
        p, index = probabilities.max(-1)  # (B,)
        if self.policy == "sequence_soft":
            return RoutingDecision(index, probabilities, logits)
        # Gradients alone do not tell: the first pass of a re-entrant checkpoint has them off.
        needs_grad = self.training or torch.is_grad_enabled()
        return RoutingDecision(index, 1 + (p - p.detach()) if needs_grad else None, logits)

    def forward(self, x: torch.Tensor, routing: LayerRouting | None = None) -> torch.Tensor:
        """x (B, T, d) -> (B, T, out); raises a `RuntimeError` without `routing`, which the decoder layer passes."""
        if routing is None:
            raise RuntimeError(
                f"{type(self).__name__} was called without routing, which its decoder layer passes. Call the model, or "
                "the layer with routing=."
            )
        if self.policy != "token":
            return self.experts(x, routing.decide(self, x))
        logits = self.gate_logits(x)  # (B, T, E)
        weights, index = top_k_routing(logits, self.k)
        routing.record(index, None, logits)
        y = self.experts(x.flatten(0, 1), index.flatten(0, 1), weights.flatten(0, 1))
        return y.unflatten(0, x.shape[:2])


class RoutedLinears(nn.Module):
    """A mix-in for a Llama block some of whose linear layers are routed modules.

    `numbers` has the position of each routed linear layer among the model's routed modules.
    """

    def __init__(self, config: LexiconConfig, *args, numbers: dict[str, int]):
        super().__init__(config, *args)
        self.routed_names = frozenset(numbers)
        for name, number in numbers.items():
            dense = getattr(self, name)
            experts = LinearExperts(config, dense.in_features, dense.out_features, dense.bias is not None)
            setattr(self, name, RoutedModule(config, number, dense.in_features, experts))

    def project(self, name: str, x: torch.Tensor, routing: LayerRouting | None) -> torch.Tensor:
        """Applies the linear layer of this name, with `routing` if it is routed."""
        linear = getattr(self, name)
        return linear(x, routing) if name in self.routed_names else linear(x)


class LexiconMlp(RoutedLinears, LlamaMLP):
    """Llama's MLP with routed `gate_proj`, `up_proj` or `down_proj`."""

    def forward(self, x: torch.Tensor, routing: LayerRouting | None = None) -> torch.Tensor:
        """x (B, T, d) -> (B, T, d)."""
        gate, up = self.project("gate_proj", x, routing), self.project("up_proj", x, routing)
        return self.project("down_proj", self.act_fn(gate) * up, routing)


class BackboneAttention(LlamaAttention):
    """Llama's attention; with `qkv_bias` that of Qwen2, with `qk_norm` that of Qwen3."""

    def __init__(self, config: LexiconConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        for name in ("q_proj", "k_proj", "v_proj") if config.qkv_bias else ():
            linear = getattr(self, name)
            setattr(self, name, nn.Linear(linear.in_features, linear.out_features))
        for name in ("q_norm", "k_norm"):
            norm = LlamaRMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
            setattr(self, name, norm)


class LexiconAttention(RoutedLinears, BackboneAttention):
    """The attention with routed `q_proj`, `k_proj`, `v_proj` or `o_proj`."""

    @accepts_both_names
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        cache=None,
        routing: LayerRouting | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states (B, T, d) -> (B, T, d), and the attention weights if the implementation returns them.

        Like `LlamaAttention.forward`, with `routing`.
        """
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            self.project(name, hidden_states, routing).view(shape) for name in ("q_proj", "k_proj", "v_proj")
        )
        query, key, value = (x.transpose(1, 2) for x in (self.q_norm(query), self.k_norm(key), value))
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        options = {"dropout": self.attention_dropout if self.training else 0.0, "scaling": self.scaling, **kwargs}
        attended, weights = attend(self, query, key, value, attention_mask, **options)
        attended = attended.reshape(*hidden_states.shape[:-1], -1).contiguous()
        return self.project("o_proj", attended, routing), weights


class LexiconDecoderLayer(LlamaDecoderLayer):
    """A Llama layer whose MLP or linear layers are routed modules, as configured."""

    def __init__(self, config: LexiconConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        numbers = {name: i for i, (layer, name) in enumerate(config.routed_modules()) if layer == layer_idx}
        self.routed_names = list(numbers)
        of_attention = {name: number for name, number in numbers.items() if name in ATTENTION_LINEARS}
        of_mlp = {name: number for name, number in numbers.items() if name in MLP_LINEARS}
        if of_attention or config.qkv_bias or config.qk_norm:
            self.self_attn = LexiconAttention(config, layer_idx, numbers=of_attention)
        if "mlp" in self.routed_names:
            experts = LexiconExperts(config) if config.expert_rank is None else LowRankExperts(config)
            self.mlp = RoutedModule(config, numbers["mlp"], config.hidden_size, experts)
        elif of_mlp:
            self.mlp = LexiconMlp(config, numbers=of_mlp)
        self.attention_is_routed, self.mlp_is_routed = bool(of_attention), len(numbers) > len(of_attention)

    def _parent(self, name: str) -> nn.Module:
        return self if name == "mlp" else self.self_attn if name in ATTENTION_LINEARS else self.mlp

    def routed_modules(self) -> list[RoutedModule]:
        """The routed modules in order. They are looked up each time, because adapters replace or wrap modules."""
        submodules = [getattr(self._parent(name), name) for name in self.routed_names]
        return [m for submodule in submodules for m in submodule.modules() if isinstance(m, RoutedModule)]

    def __call__(self, hidden_states: torch.Tensor, routing: Routing | None = None, **kwargs) -> torch.Tensor:
        """hidden_states (B, T, d) -> (B, T, d).

        The decisions of routed modules are outputs of `forward`, not only side effects on `routing`: gradient checkpointing
        and sharding pass gradients through outputs only.
        """
        if not self.routed_names or routing is None:
            return super().__call__(hidden_states, **kwargs)
        hidden_states, *decisions = super().__call__(hidden_states, routing.domain_weights, routing=routing, **kwargs)
        routing.collect(decisions)
        return hidden_states

    def forward(
        self,
        hidden_states: torch.Tensor,
        domain_weights: torch.Tensor | None = None,
        routing: Routing | None = None,
        **kwargs,
    ):
        """hidden_states (B, T, d) -> (B, T, d), and index, weights and logits of each routed module."""
        if not self.routed_names or routing is None:
            return super().forward(hidden_states, **kwargs)
        layer_routing = LayerRouting(routing, domain_weights)
        to_attention = {"routing": layer_routing} if self.attention_is_routed else {}
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **to_attention, **kwargs)
        hidden_states = hidden_states + attended
        x = self.post_attention_layernorm(hidden_states)
        hidden_states = hidden_states + (self.mlp(x, layer_routing) if self.mlp_is_routed else self.mlp(x))
        return hidden_states, *layer_routing.outputs


class RoutedModelMixin:
    """Methods of all models that concern their routed modules: finding, freezing, adapting them."""

    lora_task: str | None = None

    def routed_modules(self) -> list[RoutedModule]:
        """The M routed modules, in the order in which they run."""
        return [m for layer in self.modules() if isinstance(layer, LexiconDecoderLayer) for m in layer.routed_modules()]

    def freeze_all_but(self, *parts: str) -> int:
        """Freezes everything except these parts, `"gates"` and `"experts"`: the last of LM-Lexicon's four steps.

        Returns the number of trainable parameters; raises a `ValueError` for a part that the model does not have.
        """
        for part in parts or ("nothing",):
            if part not in ("gates", "experts"):
                raise ValueError(f"freeze_all_but({part!r}): unknown part. Use 'gates', 'experts' or both.")
        modules = self.routed_modules()
        gates = [module.gate for module in modules if module.gate is not None] if "gates" in parts else []
        experts = [module.experts for module in modules] if "experts" in parts else []
        if "gates" in parts and not gates:
            raise ValueError(
                "freeze_all_but('gates'): the model has no gates, because routing_policy='domain' routes by domain_ids. "
                "Use domain_gate=True, or freeze_all_but('experts')."
            )
        self.requires_grad_(False)
        for module in (*gates, *experts):
            module.requires_grad_(True)
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def set_active_experts(self, experts: Sequence[str | int] | None) -> None:
        """Routes to these experts only, until the next call: what the others know is switched off, without touching files.

        Gates give the others no weight, so a token uses as many experts as before, or as are left. Nothing of this is saved:
        `lexperts merge remove` removes an expert for good.

        Args:
            experts: names as in `config.expert_names`, or indices; `None` for all experts.

        Raises:
            ValueError: for an unknown expert, and for no experts.
        """
        E, names = self.config.num_local_experts, self.config.expert_names or []
        chosen = set(range(E))
        if experts is not None:
            given = [names.index(expert) if expert in names else expert for expert in experts]
            unknown = [e for e in given if type(e) is not int or not 0 <= e < E]
            if unknown or not given:
                known = f"{', '.join(names)}, or " if names else ""
                problem = f"{unknown[0]!r} is not an expert" if unknown else "no expert is left"
                raise ValueError(f"set_active_experts({experts!r}): {problem}. Use {known}indices from 0 to {E - 1}.")
            chosen = set(given)
        inactive = sorted(set(range(E)) - chosen)
        for module in self.routed_modules():
            device = next(module.experts.parameters()).device
            device = "cpu" if device.type == "meta" else device  # of weights that are offloaded between passes
            module.inactive = torch.tensor(inactive, device=device) if inactive else None

    def lora_config(self, **overrides):
        """A peft `LoraConfig`: LoRA (r = 16, alpha = 32) on the attention's linear layers that are not routed, and gates (and a
        classifier's head) trained and saved in full. `overrides` are fields of `LoraConfig`, which replace these.

        Raises:
            ImportError: without Lexperts or peft.
            ValueError: if all linear layers of the attention are routed; then pass `target_parameters`.
        """
        linears = {name: module for name, module in self.named_modules() if isinstance(module, nn.Linear)}
        targets = [name for name in linears if name.rpartition(".")[2] in ATTENTION_LINEARS]
        if not targets and not {"target_modules", "target_parameters"} & set(overrides):
            raise ValueError(
                f"router_layers={self.config.router_layers} leaves no linear layers for LoRA. Pass target_parameters."
            )
        heads = [name for name in ("gate", "score") if any(key.rpartition(".")[2] == name for key in linears)]
        options = {"lora_alpha": 32, "lora_dropout": 0.0, "target_modules": targets, "modules_to_save": heads}
        tools = lexperts_tools("backbones", "lora_config()")
        return tools.make_lora_config(self, overrides, task_type=self.lora_task, **options)


def last_token_positions(input_ids, attention_mask, inputs_embeds, pad_token_id: int | None) -> torch.Tensor:
    """(B,): each row's last real token, by the mask, or without one by the padding token.

    Raises a `ValueError` for a batch without both.
    """
    B, T = (input_ids if input_ids is not None else inputs_embeds[..., 0]).shape
    if attention_mask is not None and attention_mask.dim() == 2:
        real = attention_mask[:, -T:] != 0
    elif input_ids is not None and pad_token_id is not None:
        real = input_ids != pad_token_id
    elif B == 1:
        return torch.tensor([T - 1])
    else:
        raise ValueError(
            f"A batch of {B} rows without attention_mask and without config.pad_token_id has unknown row ends. Pass "
            "attention_mask (batch, length), or set pad_token_id and pass input_ids."
        )
    return (real * torch.arange(T, device=real.device)).argmax(1)
