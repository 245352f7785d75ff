# SPDX-License-Identifier: Apache-2.0
"""The routing state of one forward pass, its decisions on the cache, and the router losses (LM-Lexicon, Sect. 3).

Letters: B sequences, T tokens in each, N tokens in all, d a module's input size, E experts, k experts per token; x a
routed module's input, g = x W_gate.

A `Routing` belongs to one forward pass, a `LayerRouting` to one run of one decoder layer. Both are passed as arguments.
"""

from dataclasses import replace
from types import MethodType

import torch
import torch.nn.functional as F

from .configuration_lexicon import LexiconConfig
from .experts_lexicon import RoutingDecision

# Decisions of earlier calls are an attribute of the key-value cache.
CACHE_ATTR = "lexicon_decisions"


class Routing:
    """The routing inputs of one forward pass, and the decisions of its routed modules so far.

    Args:
        policy: the configuration's `routing_policy`.
        prompt (`(B, T)`, bool): the tokens that a decision per row reads; `None` if all decisions are known.
        fixed_domain: the decision of the domain policy, if it is known before the pass.
        cached: decisions of an earlier call by the number of the routed module, from the cache.
        train_domain_gate: whether the domain gate reads the prompt although the decision is known, to learn it.

    Its `decisions` are one per routed module that has run, in order; for the token policy with index (B, T, k) and logits
    (B, T, E).
    """

    def __init__(self, policy, prompt=None, fixed_domain=None, cached=None, train_domain_gate=False):
        self.policy, self.prompt, self.train_domain_gate = policy, prompt, train_domain_gate
        self.fixed_domain = self.domain = fixed_domain
        self.cached, self.decisions = cached or {}, []

    @property
    def domain_weights(self) -> torch.Tensor | None:
        """Weights (B,) of the domain policy's decision."""
        return None if self.domain is None else self.domain.weights

    def collect(self, outputs: list[torch.Tensor | None]):
        """Adds the outputs of a decoder layer: index, weights and logits of each of its routed modules."""
        for index, weights, logits in zip(outputs[::3], outputs[1::3], outputs[2::3], strict=True):
            decision = RoutingDecision(index, weights, logits)
            if self.policy == "domain":
                self.domain = self.domain or decision
                decision.rows = self.domain.rows
            self.decisions.append(decision)

    def cacheable(self) -> dict[int, RoutingDecision]:
        """The decisions that hold for later tokens, without gradients."""
        if self.policy == "token":
            return {}
        if self.policy == "domain":
            index, logits = self.domain.index, self.domain.logits
            return {0: RoutingDecision(index, None, None if logits is None else logits.detach(), self.domain.rows)}
        soft = self.policy == "sequence_soft"
        return {
            number: replace(d, weights=d.weights.detach() if soft else None, logits=d.logits.detach())
            for number, d in enumerate(self.decisions)
        }


class LayerRouting:
    """The part of a `Routing` that belongs to one run of one decoder layer. When gradient checkpointing runs a layer again
    in the backward pass, it gets a new one: it must decide again, without its own earlier decisions.

    `domain_weights` (B,) are those of the domain gate's decision, if an earlier layer made it. They are an input and an
    output of layers, because a re-entrant checkpoint passes gradients in no other way.
    """

    def __init__(self, routing: Routing, domain_weights: torch.Tensor | None):
        self.routing = routing
        self.domain = routing.domain and replace(routing.domain, weights=domain_weights)
        self.outputs = []

    def record(self, index: torch.Tensor, weights: torch.Tensor | None, logits: torch.Tensor | None):
        """Adds a decision to the layer's outputs."""
        self.outputs += [index, weights, logits]

    def decide(self, module, x: torch.Tensor) -> RoutingDecision:
        """The decision for each row of x (B, T, d): cached, fixed, or made now by the gate of the `RoutedModule`."""
        if self.routing.policy == "domain":
            decision = self._domain(module, x)
        else:
            decision = self.routing.cached.get(module.number) or module.decide(x, self.routing.prompt)
        self.record(decision.index, decision.weights, decision.logits)
        return decision

    def _domain(self, module, x):
        routing, fixed = self.routing, self.routing.fixed_domain
        inactive = None if module.inactive is None or fixed is None else module.inactive.to(fixed.index.device)
        if inactive is not None and torch.isin(fixed.index, inactive).any():
            raise ValueError(
                f"domain_ids has an expert that is not active, {module.inactive.tolist()}. Choose others, or call "
                "set_active_experts(None)."
            )
        if module.gate is None:
            return replace(fixed or self.domain, logits=None)
        if fixed is None:
            self.domain = module.decide(x, routing.prompt)
            return self.domain
        if routing.train_domain_gate:
            return replace(fixed, logits=module.prompt_logits(x.detach(), routing.prompt))
        return fixed


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """x in float32, or in float64 if it is float64: a softmax over logits needs that precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def top_k_routing(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(KeepTopK(g, k)) in float32, or float64 for float64   (LM-Lexicon, Sect. 3; Shazeer et al. 2017, Eq. 3)

    logits (..., E) -> weights (..., k) that sum to 1, index (..., k), largest weight first. With k = 1 the weight is 1 and
    has the gradient of the full softmax's probability (straight-through estimator); otherwise the gate would not learn.
    """
    logits = at_least_float32(logits)
    if k == 1:
        p, index = logits.softmax(-1).max(-1, keepdim=True)
        return 1 + (p - p.detach()), index
    top, index = logits.topk(k, dim=-1)
    return top.softmax(-1), index


def is_empty(cache) -> bool:
    """Whether a cache of keys and values holds no tokens yet."""
    if cache is None:
        return True
    length = cache.get_seq_length()
    if torch.is_tensor(length) and torch.compiler.is_compiling():  # a static cache
        return getattr(cache, CACHE_ATTR, None) is None
    return bool(length == 0)


def attach_to_cache(cache, decisions: dict[int, RoutingDecision]):
    """Stores decisions on a cache, whose methods then also reorder, select or repeat them."""
    setattr(cache, CACHE_ATTR, decisions)
    if not torch.compiler.is_compiling():
        for move in (reorder_cache, batch_select_indices, batch_repeat_interleave):
            # Bound methods, which a deep copy of the cache binds to itself.
            setattr(cache, move.__name__, MethodType(move, cache))


def reorder_cache(cache, beam_idx):
    """The cache's own method, which also moves the decisions."""
    type(cache).reorder_cache(cache, beam_idx)
    move_decisions(cache, beam_idx.tolist())


def batch_select_indices(cache, indices):
    """The cache's own method, which also selects the decisions."""
    type(cache).batch_select_indices(cache, indices)
    move_decisions(cache, indices.tolist())


def batch_repeat_interleave(cache, repeats):
    """The cache's own method, which also repeats the decisions."""
    type(cache).batch_repeat_interleave(cache, repeats)
    batch = len(getattr(cache, CACHE_ATTR)[0].index)
    move_decisions(cache, [row for row in range(batch) for _ in range(repeats)])


def move_decisions(cache, rows: list[int]):
    """Replaces the cache's decisions with those of these rows, which may repeat."""
    decisions = getattr(cache, CACHE_ATTR)
    setattr(cache, CACHE_ATTR, {number: decision.select(rows) for number, decision in decisions.items()})


def with_virtual_tokens(prompt_mask: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor | None:
    """A prompt mask (B, t) of given tokens -> (B, T), where `inputs_embeds` (B, T, d) begin with virtual tokens of prompt
    tuning: the prompt contains these.
    """
    if prompt_mask is None or inputs_embeds is None:
        return prompt_mask
    return F.pad(prompt_mask, (max(inputs_embeds.shape[1] - prompt_mask.shape[1], 0), 0), value=1)


def resolve_prompt_mask(
    shape: tuple[int, int], attention_mask: torch.Tensor | None, prompt_mask: torch.Tensor | None, device
) -> torch.Tensor:
    """The tokens (B, T), bool, that a decision per row reads: the real tokens of `prompt_mask`, or all real tokens; for a
    row without any its first real token. Raises a `ValueError` for masks of another shape.
    """
    B, T = shape
    real = torch.ones(shape, dtype=torch.bool, device=device)
    if attention_mask is not None:
        if torch.is_tensor(attention_mask) and attention_mask.dim() == 2:
            real = attention_mask[:, -T:].to(device).bool()
        elif prompt_mask is None:
            form = tuple(attention_mask.shape) if torch.is_tensor(attention_mask) else type(attention_mask).__name__
            raise ValueError(
                f"attention_mask={form}: a routing decision per row reads the real tokens of its prompt, which only a "
                f"mask of the shape (batch, length) marks. Also pass prompt_mask {shape}, non-zero at these tokens, or, "
                "with routing_policy='domain', domain_ids (batch,)."
            )
    prompt = real
    if prompt_mask is not None:
        if tuple(prompt_mask.shape) != (B, T):
            raise ValueError(
                f"prompt_mask has the shape {tuple(prompt_mask.shape)}, but the tokens of this call {(B, T)}. A sequence is "
                "routed by its whole prompt at once: pass the whole prompt and mask (in generate: prefill_chunk_size=None)."
            )
        prompt = prompt_mask.to(device).bool() & real
    first = F.one_hot(real.int().argmax(1), T).bool()  # (B, T)
    return prompt | (first & ~prompt.any(1, keepdim=True))


def make_routing(
    config: LexiconConfig, shape, device, attention_mask, domain_ids, prompt_mask, cache, train_domain_gate
) -> Routing:
    """The routing state for a forward pass over tokens of this shape (B, T); arguments as in `LexiconModel.forward`.

    Raises a `ValueError` if an input that the decision needs is missing, or for ids out of range.
    """
    policy, fixed_domain, prompt = config.routing_policy, None, None
    if policy == "token":
        return Routing(policy)
    has_cache = not is_empty(cache)
    cached = getattr(cache, CACHE_ATTR, None) if has_cache else None
    if cached is not None and policy != "domain" and len(cached) != len(config.routed_modules()):
        cached = None  # another model's
    if cached is not None and len(cached[0].index) != shape[0]:
        raise ValueError(
            f"The cache holds routing decisions for {len(cached[0].index)} rows, and this call has {shape[0]}. "
            "Move rows by the cache's own methods (batch_repeat_interleave, batch_select_indices, reorder_cache)."
        )
    if policy == "domain":
        if domain_ids is not None:
            fixed_domain = check_domains(domain_ids.to(device), shape[0], config.num_local_experts)
        elif cached is not None:
            fixed_domain = cached[0]
        elif not config.domain_gate:
            raise ValueError(
                "routing_policy='domain' needs domain_ids, one expert per row, because the model has no domain gate. "
                "Pass domain_ids (batch,); model.assign_domains(texts, embedder) computes them from saved centroids."
            )
        train_domain_gate = train_domain_gate and config.domain_gate and domain_ids is not None and cached is None
    if cached is None and (fixed_domain is None or train_domain_gate):
        if has_cache and prompt_mask is None:
            raise ValueError(
                "cache contains tokens but no routing decisions. Pass a cache that this model has filled from the "
                "start of the prompt, with the same routing_policy; or, if the cache holds a learned prefix, prompt_mask "
                "(batch, length), non-zero at the tokens of this call that the decision reads."
            )
        prompt = resolve_prompt_mask(shape, attention_mask, prompt_mask, device)
    return Routing(policy, prompt, fixed_domain, cached, train_domain_gate)


def check_domains(domain_ids: torch.Tensor, batch: int, num_experts: int) -> RoutingDecision:
    """The decision of given domain ids (B,); raises a `ValueError` for another shape, or an id out of range."""
    if tuple(domain_ids.shape) != (batch,):
        raise ValueError(f"domain_ids has the shape {tuple(domain_ids.shape)}: pass one id per row, ({batch},).")
    decision = RoutingDecision(domain_ids.long())
    known = [] if torch.compiler.is_compiling() else decision.rows.groups
    if invalid := [expert for expert, _ in known if not 0 <= expert < num_experts]:
        raise ValueError(f"domain_ids has {invalid[0]}, but with {num_experts} experts ids are 0 to {num_experts - 1}.")
    return decision


def load_balancing_loss(
    router_logits: tuple[torch.Tensor, ...],
    expert_index: tuple[torch.Tensor, ...],
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """mean over modules of E * sum_i f_i P_i, f_i the share of tokens (or rows) that chose expert i, P_i its mean
    probability   (Fedus et al. 2022, Eq. 4-6; pooled over modules, two that collapse on different experts look balanced)

    Args:
        router_logits (tuple of `(B, T, E)` or `(B, E)`), expert_index (tuple of `(B, T, k)` or `(B,)`): the outputs'.
        attention_mask (`(B, T)`): zero at padding.

    Returns: a scalar: k when routing is uniform, up to E when it has collapsed.
    """
    losses = []
    for logits, index in zip(router_logits, expert_index, strict=False):
        E = logits.shape[-1]
        p = at_least_float32(logits).softmax(-1).reshape(-1, E)  # (N, E)
        chosen = F.one_hot(index.reshape(len(p), -1), E).sum(1)  # (N, E)
        counts = p.new_ones(len(p), 1)
        if attention_mask is not None and logits.dim() == 3:
            counts = attention_mask[:, -logits.shape[1] :].reshape(-1, 1).to(p)
        total = counts.sum().clamp(min=1)
        f, P = (chosen * counts).sum(0) / total, (p * counts).sum(0) / total  # (E,)
        losses.append((E * (f * P).sum()).to(router_logits[0].device))
    return torch.stack(losses).mean()


def compute_aux_loss(config, outputs, attention_mask, domain_ids) -> torch.Tensor | None:
    """The load-balancing loss of the gates that made decisions; `None` if none did."""
    is_fixed = config.routing_policy == "domain" and domain_ids is not None
    if is_fixed or not outputs.router_logits:
        return None
    mask = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
    return load_balancing_loss(outputs.router_logits, outputs.expert_index, mask)


def router_loss(config, outputs, aux_loss, domain_ids, share: torch.Tensor) -> torch.Tensor | float:
    """Router losses, weighted by `share` (B,), each row's part of the step's labels (exact under gradient accumulation)."""
    loss = 0.0
    if aux_loss is not None and config.router_aux_loss_coef:
        loss = config.router_aux_loss_coef * share.sum() * aux_loss.to(share.device)
    if config.routing_policy == "domain" and domain_ids is not None and outputs.router_logits:
        # the domain gate learns these ids
        logits = outputs.router_logits[0].to(share.device)
        gate_loss = F.cross_entropy(logits, domain_ids.to(share.device), reduction="none")  # (B,)
        loss = loss + (gate_loss * share).sum()
    return loss
