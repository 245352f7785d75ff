"""How a mixture routes: load, entropy, and the probability that top-k leaves out, per layer and expert.

Letters: B rows, T tokens, L routed modules, E experts, k experts that a decision chooses. A decision is one per token
where tokens are routed, one per row where whole sequences are.

No token is dropped, as it would be under a capacity limit: `dropped` is the share of the softmax over all experts that is
outside the chosen k, and so is lost when their weights are normalised.
"""

import math

import torch

EXTRA = 3  # columns after those of the experts: entropy, dropped, decisions


def routing_sums(router_logits, top_k: int, mask: torch.Tensor, expert_index=None) -> torch.Tensor:
    """Sums over the decisions of each row's real tokens (B, L, 2 E + 3), which are added up over batches and processes: how often
    each expert was chosen, its summed mixing weight, then summed entropy (nats), summed probability outside the choice, and the
    number of decisions.

    Args:
        router_logits: of L routed modules, each (B*T, E) as Mixtral gives them, (B, T, E), or (B, E) for sequences.
        top_k: k; E if all experts are mixed.
        mask: (B, T), 1 for real tokens.
        expert_index: the chosen experts, if they are not the top k of the logits: of L modules, each (B, T, k), (B, k) or (B,).
    """
    layers = []
    for number, logits in enumerate(router_logits):
        chosen = None if expert_index is None else expert_index[number]
        layers.append(layer_sums(logits, top_k, mask, chosen))
    return torch.stack(layers, dim=1)


def routing_of(outputs, config) -> tuple:
    """A mixture's outputs with router logits -> router_logits, top_k, expert_index for `routing_sums`. Under the domain
    policy all modules share one decision, which is certain if domain ids were given and no gate ran.
    """
    policy, E = getattr(config, "routing_policy", "token"), config.num_local_experts
    index = getattr(outputs, "expert_index", None)
    if policy == "sequence_soft":  # all experts are mixed; the index only has the one with the largest weight
        return outputs.router_logits, E, None
    if policy == "domain":
        certain = (torch.nn.functional.one_hot(index[0], E) - 1) * 1e4  # (B, E), a softmax of 0 and 1
        return outputs.router_logits[:1] or (certain,), 1, index[:1]
    return outputs.router_logits, 1 if policy == "sequence_hard" else config.num_experts_per_tok, index


def layer_sums(logits: torch.Tensor, top_k: int, mask: torch.Tensor, chosen=None) -> torch.Tensor:
    """The part of `routing_sums` of one routed module: (B, 2 E + 3)."""
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
    """Sums (..., L, 2 E + 3) -> a dictionary per routed module.

    load: share of the decisions that chose an expert (all together k); weight: its share of the mixture (all together
    1); entropy: mean entropy of a decision's probabilities, in nats, and entropy_share of log E; load_entropy_share:
    entropy of the mean weights, as a share of log E (1 if all experts are used equally); dropped: see above; decisions.
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


def dominant_expert(layer: dict) -> int | None:
    """The expert with more than half of a layer's weight (of two experts, three quarters), if there is one. Under top-2
    no expert can have more than half of the choices, and so weights are used.
    """
    weight = layer["weight"]
    largest = max(range(len(weight)), key=weight.__getitem__)
    return largest if len(weight) > 1 and weight[largest] > max(0.5, 1.5 / len(weight)) else None


def module_names(config) -> list[str]:
    """A name per routed module: its layer, and its own name if a layer has several."""
    if getattr(config, "routing_policy", "token") == "domain":
        return ["all"]
    if not hasattr(config, "routed_modules"):
        return [str(layer) for layer in range(config.num_hidden_layers)]
    return [str(layer) if name == "mlp" else f"{layer}.{name}" for layer, name in config.routed_modules()]


def to_log_dict(layers: list[dict], names: list[str]) -> dict[str, float]:
    """The report for the Trainer's log: eval_routing/layer_0/load_expert_1 and so on."""
    logs = {}
    for module, layer in zip(names, layers, strict=True):
        for name, value in layer.items():
            if isinstance(value, list):
                logs |= {f"eval_routing/layer_{module}/{name}_expert_{e}": share for e, share in enumerate(value)}
            else:
                logs[f"eval_routing/layer_{module}/{name}"] = value
    return logs


def format_report(layers: list[dict], names: list[str], expert_names: list[str] | None = None) -> str:
    """The report as a table, with a warning for each layer that one expert dominates."""
    width = max(map(len, [*names, "layer"]))
    lines = [f"{'layer':{width}}   load|weight of every expert   entropy (share of log E)   dropped"]
    expert_names = expert_names or [f"expert {e}" for e in range(len(layers[0]["load"]))]
    for module, layer in zip(names, layers, strict=True):
        pairs = zip(expert_names, layer["load"], layer["weight"], strict=True)
        experts = "  ".join(f"{name} {load:.2f}|{weight:.2f}" for name, load, weight in pairs)
        entropy = f"{layer['entropy']:.3f} nats ({layer['entropy_share']:.0%})"
        lines.append(f"{module:{width}}   {experts}   {entropy}   {layer['dropped']:.1%}")
    lines.append("dropped: probability outside the chosen experts (no token is left out)")
    for module, layer in zip(names, layers, strict=True):
        expert = dominant_expert(layer)
        if expert is not None:
            lines.append(
                f"warning: in layer {module} {expert_names[expert]} has {layer['weight'][expert]:.0%} of the weight, and the "
                "others are hardly used. Balance the load with --router-aux-loss-coef 0.01 or more."
            )
    return "\n".join(lines)
