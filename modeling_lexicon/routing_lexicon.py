# SPDX-License-Identifier: Apache-2.0
"""The routing state of one forward pass, its decisions on the cache, and the router losses (LM-Lexicon, Sect. 3).

Letters: B sequences, T tokens in each, N tokens in all, E experts, k experts per token; x the input of a layer's MLP,
g = x W_gate.
"""

from dataclasses import replace
from functools import partial
from types import MethodType

import torch
import torch.nn.functional as F
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from .configuration_lexicon import LexiconConfig
from .experts_lexicon import RoutingDecision

# Decisions of earlier calls are an attribute of the key-value cache.
CACHE_ATTR = "lexicon_decisions"


class Routing:
    """The routing inputs of one forward pass, and the decisions of its layers so far. It is an argument of layers and modules, and
    is never stored on them: passes of several threads, and passes that fail halfway, do not mix.

    Args:
        policy: the configuration's `routing_policy`.
        prompt (`(B, T)`, bool): the tokens that a decision per row reads; `None` if all decisions are known.
        fixed_domain: the decision of the domain policy, if it is known before the pass.
        cached: decisions of an earlier call by layer, from the cache.
        train_domain_gate: whether the domain gate reads the prompt although the decision is known, to learn it.

    Its `decisions` are one per layer that has run, in order; for the token policy with index (B, T, k) and logits (B, T, E).
    """

    def __init__(self, policy, prompt=None, fixed_domain=None, cached=None, train_domain_gate=False):
        self.policy, self.prompt, self.train_domain_gate = policy, prompt, train_domain_gate
        self.fixed_domain = self.domain = fixed_domain
        self.cached, self.decisions = cached or {}, []

    @property
    def domain_weights(self) -> torch.Tensor | None:
        """Weights (B,) of the domain policy's decision."""
        return None if self.domain is None else self.domain.weights

    def collect(self, index: torch.Tensor, weights: torch.Tensor | None, logits: torch.Tensor | None):
        """Adds the decision of the next layer."""
        decision = RoutingDecision(index, weights, logits)
        if self.policy == "domain":
            self.domain = self.domain or decision
            decision.rows = self.domain.rows
        self.decisions.append(decision)

    def cacheable(self) -> dict[int, RoutingDecision]:
        """The decisions that hold for later tokens, without gradients."""
        if self.policy == "domain":
            index, logits = self.domain.index, self.domain.logits
            return {0: RoutingDecision(index, None, None if logits is None else logits.detach(), self.domain.rows)}
        soft = self.policy == "sequence_soft"
        return {
            layer: replace(d, weights=d.weights.detach() if soft else None, logits=d.logits.detach())
            for layer, d in enumerate(self.decisions)
        }


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


# Methods of caches that move rows -> the rows of the moved batch, from its size before and the argument.
MOVES = {
    "reorder_cache": lambda batch, order: order.tolist(),
    "batch_select_indices": lambda batch, indices: indices.tolist(),
    "batch_repeat_interleave": lambda batch, repeats: [row for row in range(batch) for _ in range(repeats)],
}


def attach_to_cache(cache, decisions: dict[int, RoutingDecision]):
    """Stores decisions on a cache, whose `MOVES` then move them, too."""
    setattr(cache, CACHE_ATTR, decisions)
    if not torch.compiler.is_compiling():
        for name in MOVES:
            # Bound methods, which a deep copy of the cache binds to itself.
            setattr(cache, name, MethodType(partial(move_rows, name), cache))


def move_rows(name: str, cache, argument):
    """The cache's own method of this name, for the decisions, too."""
    getattr(type(cache), name)(cache, argument)
    decisions = getattr(cache, CACHE_ATTR)
    rows = MOVES[name](len(decisions[0].index), argument)
    setattr(cache, CACHE_ATTR, {layer: decision.select(rows) for layer, decision in decisions.items()})


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
            raise ValueError(f"attention_mask={form} marks no prompt. Also pass prompt_mask {shape}, or domain_ids.")
    prompt = real
    if prompt_mask is not None:
        if tuple(prompt_mask.shape) != (B, T):
            raise ValueError(
                f"prompt_mask has the shape {tuple(prompt_mask.shape)}, and the tokens of this call {(B, T)}. A row is routed by "
                "its whole prompt at once (in generate: prefill_chunk_size=None)."
            )
        prompt = prompt_mask.to(device).bool() & real
    first = F.one_hot(real.int().argmax(1), T).bool()  # (B, T)
    return prompt | (first & ~prompt.any(1, keepdim=True))


def make_routing(
    config: LexiconConfig,
    shape,
    device,
    attention_mask,
    domain_ids,
    prompt_mask,
    cache,
    train_domain_gate,
    position_ids,
) -> Routing:
    """The routing state for a forward pass over tokens of this shape (B, T); arguments as in `LexiconModel.forward`.

    Raises a `ValueError` if an input that the decision needs is missing, for ids out of range, and for packed rows.
    """
    policy, fixed_domain, prompt = config.routing_policy, None, None
    if policy == "token":
        return Routing(policy)
    has_cache = not is_empty(cache)
    cached = getattr(cache, CACHE_ATTR, None) if has_cache else None
    if cached is not None and policy != "domain" and len(cached) != config.num_hidden_layers:
        cached = None  # another model's
    if cached is not None and len(cached[0].index) != shape[0]:
        raise ValueError(
            f"The cache has routing decisions of {len(cached[0].index)} rows, and this call {shape[0]}. Move rows by its "
            f"methods {', '.join(MOVES)}."
        )
    if policy == "domain":
        if domain_ids is not None:
            fixed_domain = check_domains(domain_ids.to(device), shape[0], config.num_local_experts)
        elif cached is not None:
            fixed_domain = cached[0]
        elif not config.domain_gate:
            raise ValueError(
                "routing_policy='domain' without domain_gate needs domain_ids (batch,). model.assign_domains(texts, embedder) "
                "computes them from saved centroids."
            )
        train_domain_gate = train_domain_gate and config.domain_gate and domain_ids is not None and cached is None
    if cached is None and (fixed_domain is None or train_domain_gate):
        if has_cache and prompt_mask is None:
            raise ValueError(
                "cache contains tokens but no routing decisions of this model. Pass the cache of its own whole prompt, or, with "
                "a learned prefix, prompt_mask (batch, length)."
            )
        is_read = attention_mask is None and position_ids is not None and not torch.compiler.is_compiling()
        if is_read and (position_ids.diff(dim=-1) < 0).any():  # they start again within a row
            raise ValueError(f"routing_policy={policy!r} routes rows, and position_ids have several texts in a row.")
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


def load_balancing_loss(config, router_logits, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """E * sum_i f_i P_i over the tokens (or rows) of all layers, as in transformers' Mixtral: f_i the share that chose expert i, P_i
    its mean probability   (Fedus et al. 2022, Eq. 4-6)

    router_logits (tuple of `(B, T, E)` or `(B, E)`), attention_mask (`(B, T)`, zero at padding) -> a scalar: k when routing is
    uniform, up to E when it has collapsed.
    """
    by_token = config.routing_policy == "token"
    has_mask = by_token and torch.is_tensor(attention_mask) and attention_mask.dim() == 2
    mask = attention_mask[:, -router_logits[0].shape[1] :] if has_mask else None
    flat = tuple(logits.flatten(0, -2) for logits in router_logits)  # (N, E)
    return load_balancing_loss_func(flat, flat[0].shape[1], config.num_experts_per_tok if by_token else 1, mask)


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
