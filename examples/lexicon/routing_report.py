"""What the routers of a mixture do: load, entropy, and the probability that top-k leaves out, a layer and an expert.

Letters: B rows, T tokens, L routed modules, E experts, k experts that a decision chooses. A decision is one per token
where tokens are routed, one per row where whole sequences are.

No token is ever dropped here, as it would be under a capacity limit: `dropped` is only the share of the softmax over all
experts that lies outside the chosen k, and so is lost when their weights are made to sum to 1.
"""

import math

import torch

EXTRA = 3  # columns after those of the experts: entropy, dropped, decisions


def routing_sums(router_logits, top_k: int, mask: torch.Tensor, expert_index=None) -> torch.Tensor:
    """Per-row sums over the real tokens' decisions, to be added up over batches and processes.

    Args:
        router_logits: of L routed modules, each (B*T, E) as Mixtral gives them, (B, T, E), or (B, E) for sequences.
        top_k: k; E where all experts are mixed.
        mask: (B, T), 1 for real tokens.
        expert_index: the choices, where they are no top-k of the logits: of L modules, each (B, T, k), (B, k) or (B,).

    Returns:
        (B, L, 2 E + 3): how often each expert was chosen, its summed mixing weight, then summed entropy (nats), summed
        probability outside the choice, and the number of decisions.
    """
    layers = []
    for number, logits in enumerate(router_logits):
        chosen = None if expert_index is None else expert_index[number]
        layers.append(layer_sums(logits, top_k, mask, chosen))
    return torch.stack(layers, dim=1)


def routing_of(outputs, config) -> tuple:
    """A mixture's outputs with router logits -> router_logits, top_k, expert_index for `routing_sums`.

    Under the domain policy all modules share one decision, so that there is one entry; where its ids were given and no
    gate was asked, the choice counts as certain.
    """
    policy, E = getattr(config, "routing_policy", "token"), config.num_local_experts
    index = getattr(outputs, "expert_index", None)
    if policy == "sequence_soft":  # all experts are mixed; the index names the heaviest alone
        return outputs.router_logits, E, None
    if policy == "domain":
        certain = (torch.nn.functional.one_hot(index[0], E) - 1) * 1e4  # (B, E), a softmax of 0 and 1
        return outputs.router_logits[:1] or (certain,), 1, index[:1]
    return outputs.router_logits, 1 if policy == "sequence_hard" else config.num_experts_per_tok, index


def layer_sums(logits: torch.Tensor, top_k: int, mask: torch.Tensor, chosen=None) -> torch.Tensor:
    """One routed module's part of `routing_sums` -> (B, 2 E + 3)."""
    B, T = mask.shape
    E = logits.shape[-1]
    per_row = logits.dim() == 2 and logits.shape[0] == B and T != 1
    logits = logits.float().reshape(B, 1 if per_row else T, E)
    real = mask.new_ones(B, 1).float() if per_row else mask.float()  # (B, D), D decisions of a row
    chosen = logits.topk(top_k, dim=-1).indices if chosen is None else chosen.reshape(*real.shape, -1)  # (B, D, k)
    log_p = logits.log_softmax(-1)
    p = log_p.exp()  # (B, D, E)
    picked = torch.zeros_like(p).scatter_(-1, chosen, 1.0)
    inside = (p * picked).sum(-1)  # (B, D)
    weights = logits.masked_fill(picked == 0, -math.inf).softmax(-1)
    rest = torch.stack([-(p * log_p).sum(-1), 1 - inside, torch.ones_like(inside)], dim=-1)  # (B, D, 3)
    return (torch.cat([picked, weights, rest], dim=-1) * real[..., None]).sum(1)


def summarise(sums: torch.Tensor) -> list[dict]:
    """Sums (..., L, 2 E + 3) -> a dict per routed module.

    load: share of the decisions that chose an expert (all together k); weight: its share of the mixture (all together
    1); entropy: mean entropy of a decision's probabilities, in nats, and entropy_share of log E; load_entropy_share:
    entropy of the mean weights, as a share of log E (1 when all experts are used alike); dropped: see above; decisions.
    """
    sums = sums.double().reshape(-1, *sums.shape[-2:]).sum(0)  # (L, 2 E + 3)
    E = (sums.shape[-1] - EXTRA) // 2
    full = math.log(E) if E > 1 else 1.0
    layers = []
    for layer in sums:
        entropy, dropped, decisions = layer[2 * E :].tolist()
        weight = layer[E : 2 * E] / decisions
        layers.append(
            {
                "load": (layer[:E] / decisions).tolist(),
                "weight": weight.tolist(),
                "entropy": entropy / decisions,
                "entropy_share": entropy / decisions / full,
                "load_entropy_share": torch.special.entr(weight).sum().item() / full,
                "dropped": max(dropped / decisions, 0.0),
                "decisions": int(decisions),
            }
        )
    return layers


def one_sided(layer: dict) -> int | None:
    """The expert that takes more than half of a layer, if one does.

    Counted by weight, since under top-2 no expert can have more than half of the choices; of two experts one always has
    about half, so that there three quarters are the limit.
    """
    weight = layer["weight"]
    largest = max(range(len(weight)), key=weight.__getitem__)
    return largest if len(weight) > 1 and weight[largest] > max(0.5, 1.5 / len(weight)) else None


def places(config) -> list[str]:
    """Where each routed module stands: its layer, and its name where a layer has several."""
    if getattr(config, "routing_policy", "token") == "domain":
        return ["all"]
    if not hasattr(config, "routed_modules"):
        return [str(layer) for layer in range(config.num_hidden_layers)]
    return [str(layer) if name == "mlp" else f"{layer}.{name}" for layer, name in config.routed_modules()]


def flat(layers: list[dict], where: list[str]) -> dict[str, float]:
    """The report as a Trainer logs it: eval_routing/layer_0/load_expert_1 and so on."""
    found = {}
    for place, layer in zip(where, layers, strict=True):
        for name, value in layer.items():
            if isinstance(value, list):
                found |= {f"eval_routing/layer_{place}/{name}_expert_{e}": share for e, share in enumerate(value)}
            else:
                found[f"eval_routing/layer_{place}/{name}"] = value
    return found


def table(layers: list[dict], where: list[str], names: list[str] | None = None) -> str:
    """The report as people read it, with a warning for each layer that one expert has taken over."""
    width = max(map(len, [*where, "layer"]))
    lines = [f"{'layer':{width}}   load|weight of every expert   entropy (share of log E)   dropped"]
    names = names or [f"expert {e}" for e in range(len(layers[0]["load"]))]
    for place, layer in zip(where, layers, strict=True):
        pairs = zip(names, layer["load"], layer["weight"], strict=True)
        experts = "  ".join(f"{name} {load:.2f}|{weight:.2f}" for name, load, weight in pairs)
        entropy = f"{layer['entropy']:.3f} nats ({layer['entropy_share']:.0%})"
        lines.append(f"{place:{width}}   {experts}   {entropy}   {layer['dropped']:.1%}")
    lines.append("dropped: probability outside the chosen experts; every token is still read, none is left out")
    for place, layer in zip(where, layers, strict=True):
        expert = one_sided(layer)
        if expert is not None:
            lines.append(
                f"warning: in layer {place} {names[expert]} takes {layer['weight'][expert]:.0%} of the weight, so that the "
                "others are hardly used. A --router_aux_loss_coef of 0.01 or more spreads the load."
            )
    return "\n".join(lines)
