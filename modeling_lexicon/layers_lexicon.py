# SPDX-License-Identifier: Apache-2.0
"""Routed MLPs, and the Llama layers around them (LM-Lexicon, Sect. 3).

Letters: B sequences, T tokens in each, d hidden size, E experts, k experts per token; x the input of a layer's MLP, g = x W_gate.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from .configuration_lexicon import LexiconConfig
from .experts_lexicon import LexiconExperts, RoutingDecision
from .low_rank_lexicon import LowRankExperts
from .routing_lexicon import Routing, at_least_float32, top_k_routing
from .shared_lexicon import lexperts_tools

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")  # of the attention


class RoutedModule(nn.Module):
    """y = sum_i G(x)_i E_i(x), where G depends on the routing policy   (LM-Lexicon, Sect. 3)"""

    def __init__(self, config: LexiconConfig, layer: int):
        super().__init__()
        self.layer, self.policy, self.k = layer, config.routing_policy, config.num_experts_per_tok
        has_gate = self.policy != "domain" or (config.domain_gate and layer == 0)
        self.gate = nn.Linear(config.hidden_size, config.num_local_experts, bias=False) if has_gate else None
        self.experts = LexiconExperts(config) if config.expert_rank is None else LowRankExperts(config)
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

    def decide_by_gate(self, x: torch.Tensor, prompt: torch.Tensor) -> RoutingDecision:
        """x (B, T, d), prompt (B, T) -> one decision per row."""
        logits = self.prompt_logits(x, prompt)  # (B, E)
        probabilities = logits.softmax(-1)
        p, index = probabilities.max(-1)  # (B,)
        if self.policy == "sequence_soft":
            return RoutingDecision(index, probabilities, logits)
        # without gradients, too: the first pass of a re-entrant checkpoint has them off
        needs_grad = self.training or torch.is_grad_enabled()
        return RoutingDecision(index, 1 + (p - p.detach()) if needs_grad else None, logits)

    def decide(self, x: torch.Tensor, routing: Routing, domain_weights: torch.Tensor | None) -> RoutingDecision:
        """The decision for each row of x (B, T, d): cached, given, of an earlier layer, or made now by the gate. Raises a
        `ValueError` for a given expert that is not active.
        """
        if self.policy != "domain":
            return routing.cached.get(self.layer) or self.decide_by_gate(x, routing.prompt)
        fixed = routing.fixed_domain
        off = None if fixed is None or self.inactive is None else self.inactive.to(fixed.index.device)
        if off is not None and torch.isin(fixed.index, off).any():
            raise ValueError(f"domain_ids has one of {off.tolist()}, which set_active_experts() has switched off.")
        if self.gate is None:
            return replace(fixed or replace(routing.domain, weights=domain_weights), logits=None)
        if fixed is None:
            return self.decide_by_gate(x, routing.prompt)
        if routing.train_domain_gate:
            return replace(fixed, logits=self.prompt_logits(x.detach(), routing.prompt))
        return fixed

    def forward(self, x: torch.Tensor, routing: Routing, domain_weights: torch.Tensor | None = None) -> tuple:
        """x (B, T, d) -> y (B, T, d), and index, weights and logits of the decision; see `LexiconDecoderLayer.forward`."""
        if self.policy != "token":
            decision = self.decide(x, routing, domain_weights)
            return self.experts(x, decision), decision.index, decision.weights, decision.logits
        logits = self.gate_logits(x)  # (B, T, E)
        weights, index = top_k_routing(logits, self.k)
        y = self.experts(x.flatten(0, 1), index.flatten(0, 1), weights.flatten(0, 1))
        return y.unflatten(0, x.shape[:2]), index, None, logits


class LexiconDecoderLayer(LlamaDecoderLayer):
    """A Llama layer with a routed MLP."""

    def __init__(self, config: LexiconConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        # with `qkv_bias` the attention of Qwen2, with `qk_norm` that of Qwen3
        self.self_attn = (Qwen3Attention if config.qk_norm else LlamaAttention)(config, layer_idx)
        for name in LINEARS[:3] if config.qkv_bias else ():
            linear = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(linear.in_features, linear.out_features))
        self.mlp = RoutedModule(config, layer_idx)

    def __call__(self, hidden_states: torch.Tensor, routing: Routing, **kwargs) -> torch.Tensor:
        """hidden_states (B, T, d) -> (B, T, d).

        The decision is an output of `forward`, and the weights of an earlier one a positional argument: gradient checkpointing and
        sharding pass gradients in no other way. When a layer runs again in the backward pass, its decision is not collected.
        """
        hidden_states, *decision = super().__call__(hidden_states, routing.domain_weights, routing=routing, **kwargs)
        routing.collect(*decision)
        return hidden_states

    def forward(
        self, hidden_states: torch.Tensor, domain_weights: torch.Tensor | None, routing: Routing, **kwargs
    ) -> tuple:
        """hidden_states (B, T, d) -> (B, T, d), and index, weights and logits of the decision.

        `domain_weights` (B,) are those of the domain gate's decision, if an earlier layer made it.
        """
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        y, *decision = self.mlp(self.post_attention_layernorm(hidden_states), routing, domain_weights)
        return hidden_states + y, *decision


class RoutedModelMixin:
    """Methods of all models that concern their routed modules."""

    lora_task: str | None = None

    def routed_modules(self) -> list[RoutedModule]:
        """One per layer, also where an adapter has wrapped it."""
        return [module for module in self.modules() if isinstance(module, RoutedModule)]

    def set_active_experts(self, experts: Sequence[str | int] | None) -> None:
        """Routes to these experts only, until the next call. Nothing of this is saved: `lexperts merge remove` removes an expert.

        Gates give the others no weight, so a token uses as many experts as before, or as are left.

        Args:
            experts: names as in `config.expert_names`, or indices; `None` for all experts.

        Raises:
            ValueError: for an unknown expert, and for no experts.
        """
        E, names = self.config.num_local_experts, self.config.expert_names or []
        given = range(E) if experts is None else [names.index(one) if one in names else one for one in experts]
        unknown = [e for e in given if type(e) is not int or not 0 <= e < E]
        if unknown or not given:
            known = ", ".join([*names, f"or indices from 0 to {E - 1}"])
            raise ValueError(f"set_active_experts({experts!r}) names no or unknown experts. Use {known}.")
        inactive = sorted(set(range(E)) - set(given))
        for module in self.routed_modules():
            device = next(module.experts.parameters()).device
            device = "cpu" if device.type == "meta" else device  # of weights that are offloaded between passes
            module.inactive = torch.tensor(inactive, device=device) if inactive else None

    def lora_config(self, **overrides):
        """A peft `LoraConfig`: LoRA (r = 16, alpha = 32) on the attention's linear layers, and gates (and a classifier's head) trained
        and saved in full. `overrides` are fields of `LoraConfig`, which replace these.

        Raises:
            ImportError: without Lexperts or peft.
        """
        linears = {name.rpartition(".")[2]: name for name, part in self.named_modules() if isinstance(part, nn.Linear)}
        heads = [name for name in ("gate", "score") if name in linears]
        options = {"lora_alpha": 32, "lora_dropout": 0.0, "target_modules": list(LINEARS), "modules_to_save": heads}
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
        raise ValueError(f"{B} rows without attention_mask (batch, length) and config.pad_token_id have unknown ends.")
    return (real * torch.arange(T, device=real.device)).argmax(1)
