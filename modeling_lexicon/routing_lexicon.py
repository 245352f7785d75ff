"""The routing state of one forward pass, how it is kept on the cache, and the balance loss (LM-Lexicon, Sect. 3).

Letters: B sequences, T tokens in each, N tokens in all, d a module's input size, E experts, k experts per token; x a
routed module's input, g = x W_gate.

A `Routing` belongs to one forward pass, a `LayerRouting` to one run of one decoder layer. Both travel as arguments.
"""

from dataclasses import replace
from types import MethodType

import torch
import torch.nn.functional as F

from .configuration_lexicon import LexiconConfig
from .experts_lexicon import Decision

# Where the decisions of an earlier call are kept: on the cache of keys and values, beside what they have shaped.
KEPT = "lexicon_decisions"


class Routing:
    """What one forward pass knows, and what its routed modules have found so far.

    Args:
        policy: the configuration's `routing_policy`.
        prompt (`(B, T)`, bool): the tokens that a sequence's decision reads; `None` where nothing is to be decided.
        given: the domain policy's decision, where it is known beforehand.
        kept: decisions of an earlier call by the number of the routed module, from the cache.
        learn_gate: whether the domain gate reads the prompt although the decision is given, to learn it.

    Attributes:
        decisions: one for each routed module that has run, in their order; for the token policy its index (B, T, k)
            and logits (B, T, E).
    """

    def __init__(self, policy, prompt=None, given=None, kept=None, learn_gate=False):
        self.policy, self.prompt, self.given, self.learn_gate = policy, prompt, given, learn_gate
        self.kept = kept or {}
        self.domain = given
        self.decisions = []

    @property
    def domain_weights(self) -> torch.Tensor | None:
        return None if self.domain is None else self.domain.weights

    def collect(self, found: list[torch.Tensor | None]):
        """Takes what a decoder layer returned: index, weights and logits of each of its routed modules."""
        for index, weights, logits in zip(found[::3], found[1::3], found[2::3], strict=True):
            decision = Decision(index, weights, logits)
            if self.policy == "domain":
                self.domain = self.domain or decision
                decision.rows = self.domain.rows
            self.decisions.append(decision)

    def to_keep(self) -> dict[int, Decision]:
        """The decisions that hold for the tokens to come, without their gradients."""
        if self.policy == "token":
            return {}
        if self.policy == "domain":
            index, logits = self.domain.index, self.domain.logits
            return {0: Decision(index, None, None if logits is None else logits.detach(), self.domain.rows)}
        soft = self.policy == "sequence_soft"
        return {
            number: replace(d, weights=d.weights.detach() if soft else None, logits=d.logits.detach())
            for number, d in enumerate(self.decisions)
        }


class LayerRouting:
    """One decoder layer's share of a `Routing`, made anew each time the layer runs: also when gradient checkpointing
    runs it again in the backward pass, which must decide again and not find its own earlier decisions.

    Args:
        routing: the forward pass's.
        domain_weights (`(B,)`): the weights of the domain gate's decision, where an earlier layer took it. They are an
            input and an output of layers because a re-entrant checkpoint lets gradients pass in no other way.
    """

    def __init__(self, routing: Routing, domain_weights: torch.Tensor | None):
        self.routing = routing
        self.domain = routing.domain and replace(routing.domain, weights=domain_weights)
        self.found = []

    def record(self, index: torch.Tensor, weights: torch.Tensor | None, logits: torch.Tensor | None):
        self.found += [index, weights, logits]

    def decide(self, module, x: torch.Tensor) -> Decision:
        """The decision for each row of x (B, T, d): kept, given, or taken now by the `RoutedModule`'s gate on the prompt."""
        routing = self.routing
        decision = routing.kept.get(module.number)
        if routing.policy == "domain":
            decision = self._domain(module, x)
        elif decision is None:
            decision = module.decide(x, routing.prompt)
        self.record(decision.index, decision.weights, decision.logits)
        return decision

    def _domain(self, module, x):
        given = self.routing.given
        if given is not None:
            if module.gate is None:
                return replace(given, logits=None)
            if self.routing.learn_gate:
                return replace(given, logits=module.prompt_logits(x.detach(), self.routing.prompt))
            return given
        if module.gate is not None:
            self.domain = module.decide(x, self.routing.prompt)
            return self.domain
        return replace(self.domain, logits=None)


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """x in float32, or in float64 where it is that: a softmax over logits loses too much in less."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def top_k_routing(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(KeepTopK(g, k)) in float32, or float64 for float64   (LM-Lexicon, Sect. 3; Shazeer et al. 2017, Eq. 3)

    logits (..., E) -> weights (..., k) that sum to 1, index (..., k), heaviest first. With k = 1 the weight is 1 and
    carries the gradient of the full softmax's probability (straight through), or the gate would never learn.
    """
    logits = at_least_float32(logits)
    if k == 1:
        p, index = logits.softmax(-1).max(-1, keepdim=True)
        return 1 + (p - p.detach()), index
    kept, index = logits.topk(k, dim=-1)
    return kept.softmax(-1), index


def is_empty(cache) -> bool:
    """Whether a cache of keys and values holds no tokens yet."""
    if cache is None:
        return True
    length = cache.get_seq_length()
    if torch.is_tensor(length) and torch.compiler.is_compiling():  # a static cache: its length is not read in a graph
        return getattr(cache, KEPT, None) is None
    return bool(length == 0)


def keep_on_cache(cache, decisions: dict[int, Decision]):
    """Keeps decisions on a cache; where its rows are moved, chosen or repeated, they go along."""
    setattr(cache, KEPT, decisions)
    if not torch.compiler.is_compiling():
        for move in (reorder_cache, batch_select_indices, batch_repeat_interleave):
            # Bound methods, which a deep copy of the cache binds anew.
            setattr(cache, move.__name__, MethodType(move, cache))


def reorder_cache(cache, beam_idx):
    type(cache).reorder_cache(cache, beam_idx)
    move_decisions(cache, beam_idx.tolist())


def batch_select_indices(cache, indices):
    type(cache).batch_select_indices(cache, indices)
    move_decisions(cache, indices.tolist())


def batch_repeat_interleave(cache, repeats):
    type(cache).batch_repeat_interleave(cache, repeats)
    batch = len(getattr(cache, KEPT)[0].index)
    move_decisions(cache, [row for row in range(batch) for _ in range(repeats)])


def move_decisions(cache, rows: list[int]):
    setattr(cache, KEPT, {number: decision.select(rows) for number, decision in getattr(cache, KEPT).items()})


def find_prompt(
    shape: tuple[int, int], attention_mask: torch.Tensor | None, prompt_mask: torch.Tensor | None, device
) -> torch.Tensor:
    """The tokens that a sequence's decision reads: `prompt_mask`'s real tokens, or all real ones.

    A row without any reads its first real token: the least, and nothing of what follows.

    Returns: (B, T), bool, at least one in each row.

    Raises:
        ValueError: for masks of another shape.
    """
    B, T = shape
    real = torch.ones(shape, dtype=torch.bool, device=device)
    if attention_mask is not None:
        if torch.is_tensor(attention_mask) and attention_mask.dim() == 2:
            real = attention_mask[:, -T:].to(device).bool()
        elif prompt_mask is None:
            form = tuple(attention_mask.shape) if torch.is_tensor(attention_mask) else type(attention_mask).__name__
            raise ValueError(
                f"attention_mask={form}: a sequence's or domain's decision reads the real tokens of its prompt, which "
                f"only a mask of the shape (batch, length) tells. Pass prompt_mask {shape} beside it, non-zero at these "
                "tokens, or with routing_policy='domain' pass domain_ids (batch,)."
            )
    prompt = real
    if prompt_mask is not None:
        if tuple(prompt_mask.shape) != (B, T):
            raise ValueError(
                f"prompt_mask has the shape {tuple(prompt_mask.shape)}, and this call's tokens {(B, T)}: a sequence is "
                "routed by its whole prompt at once. Pass prompt and mask whole (in generate: prefill_chunk_size=None)."
            )
        prompt = prompt_mask.to(device).bool() & real
    first = F.one_hot(real.int().argmax(1), T).bool()  # (B, T)
    return prompt | (first & ~prompt.any(1, keepdim=True))


def plan_routing(
    config: LexiconConfig,
    shape: tuple[int, int],
    device,
    attention_mask: torch.Tensor | None = None,
    domain_ids: torch.Tensor | None = None,
    prompt_mask: torch.Tensor | None = None,
    past_key_values=None,
    learn_domain_gate: bool = False,
) -> Routing:
    """What a forward pass over tokens of this shape (B, T) routes by; arguments as in `LexiconModel.forward`.

    Raises:
        ValueError: when there is nothing to decide by (the message says what is missing), or for ids out of range.
    """
    policy, given, prompt = config.routing_policy, None, None
    if policy == "token":
        return Routing(policy)
    cached = not is_empty(past_key_values)
    kept = getattr(past_key_values, KEPT, None) if cached else None
    if kept is not None and policy != "domain" and len(kept) != len(config.routed_modules()):
        kept = None  # another model's
    if kept is not None and len(kept[0].index) != shape[0]:
        raise ValueError(
            f"The cache holds routing decisions for {len(kept[0].index)} rows, and this call has {shape[0]}. "
            "Move rows by the cache's own methods (batch_repeat_interleave, batch_select_indices, reorder_cache)."
        )
    if policy == "domain":
        if domain_ids is not None:
            given = check_domains(domain_ids.to(device), shape[0], config.num_local_experts)
        elif kept is not None:
            given = kept[0]
        elif not config.domain_gate:
            raise ValueError(
                "routing_policy='domain' needs domain_ids, one expert a row, and the model has no domain gate to find "
                "them. Pass domain_ids (batch,); model.assign_domains(texts, embedder) finds them by saved centroids."
            )
        learn_domain_gate = learn_domain_gate and config.domain_gate and domain_ids is not None and not cached
    if kept is None and (given is None or learn_domain_gate):
        if cached:
            raise ValueError(
                "past_key_values holds tokens but no routing decision, so that these tokens' experts are not known. "
                "Pass a cache that this model filled from the prompt on, with the same routing_policy."
            )
        prompt = find_prompt(shape, attention_mask, prompt_mask, device)
    return Routing(policy, prompt, given, kept, learn_domain_gate)


def check_domains(domain_ids: torch.Tensor, batch: int, num_experts: int) -> Decision:
    if tuple(domain_ids.shape) != (batch,):
        raise ValueError(f"domain_ids has the shape {tuple(domain_ids.shape)}: pass one id a row, ({batch},).")
    decision = Decision(domain_ids.long())
    if not torch.compiler.is_compiling():
        wrong = [expert for expert, _ in decision.rows.groups if not 0 <= expert < num_experts]
        if wrong:
            raise ValueError(
                f"domain_ids has {wrong[0]}, but there are {num_experts} experts: ids go from 0 to {num_experts - 1}."
            )
    return decision


def load_balancing_loss(
    router_logits: tuple[torch.Tensor, ...],
    expert_index: tuple[torch.Tensor, ...],
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """mean over modules of E * sum_i f_i P_i, f_i the share of tokens (or rows) that chose expert i, P_i its mean
    probability   (Fedus et al. 2022, Eq. 4-6, a module at a time)

    A module at a time, and then the mean: over all at once, two that have collapsed on different experts would pass
    for balanced.

    Args:
        router_logits (tuple of `(B, T, E)` or `(B, E)`), expert_index (tuple of `(B, T, k)` or `(B,)`): the outputs'.
        attention_mask (`(B, T)`): zero at tokens that do not count.

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


__all__ = [
    "LayerRouting",
    "Routing",
    "at_least_float32",
    "keep_on_cache",
    "load_balancing_loss",
    "plan_routing",
    "top_k_routing",
]
