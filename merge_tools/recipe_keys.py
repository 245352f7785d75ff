"""The keys of a recipe: which are unknown, and which only mergekit-moe has."""

from run_tools.errors import did_you_mean, short_repr

from .families import MIXTURES

# Keys and values of mergekit-moe without a counterpart -> what to do instead.
MERGEKIT_ONLY = {
    "noise_scale": "Remove it: experts are copied byte by byte. Tune the gates after the merge to break symmetry.",
    "residual_scale": "Remove it: experts are copied byte by byte. Scale down_proj in the expert's checkpoint first.",
    "shared_experts": "Remove it: every expert is routed.",
    "architecture": f"Use format: {', '.join(MIXTURES)}, or leave it out.",
}
# Values of these keys with which mergekit-moe does what is done here.
NEUTRAL: dict[str, tuple] = {
    "noise_scale": (0,),
    "residual_scale": (1,),
    "shared_experts": ([],),
    "architecture": ("",),
}
MERGEKIT_AVERAGES = {"dare_linear": "dare", "linear": "mean"}  # name in mergekit -> the same here
MERGEKIT_GATES = {
    "uniform_random": "Use random, N(0, 0.02), or zeros.",
    "hidden_avg": "Use router_input: the mean of mergekit-moe includes the padding of shorter prompts.",
    "hidden_last": "Use hidden, which is the same.",
}

MAX_ERRORS = 20  # reported at once


def find_key_errors(recipe: dict, known: set[str], known_of_experts: set[str]) -> list[str]:
    """All keys of a recipe and its experts that are unknown, or that only mergekit-moe has, one message each, at most 20.

    Args:
        known, known_of_experts: the keys of a recipe, and of an expert in it.
    """
    errors, experts = [], recipe.get("experts")
    mappings = [(known, "the recipe", recipe)]
    for expert in experts if isinstance(experts, list | tuple) else []:
        if isinstance(expert, dict):
            name = short_repr(expert.get("name") or expert.get("source_model"))
            mappings.append((known_of_experts, f"the expert {name}", expert))
    for keys, where, options in mappings:
        for name, value in options.items():
            if len(errors) == MAX_ERRORS:
                return errors
            if name in MERGEKIT_ONLY:
                if value is not None and value not in NEUTRAL[name]:
                    advice = MERGEKIT_ONLY[name]
                    errors.append(f"{name} in {where} is a key of mergekit-moe that is not supported. {advice}")
            elif name not in keys:
                errors.append(f"Unknown key {short_repr(name)} in {where}.{did_you_mean(str(name), keys)}")
            elif name == "gate_mode" and isinstance(value, str) and value in MERGEKIT_GATES:
                errors.append(f"gate_mode: {value} of mergekit-moe is not supported. {MERGEKIT_GATES[value]}")
    return errors
