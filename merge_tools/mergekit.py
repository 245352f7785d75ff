"""Recipes of mergekit: keys and values of mergekit-moe without a counterpart here, and files of mergekit-yaml, which are no mixtures."""

from typing import Any

from run_tools.errors import join_names

from .errors import MergeError
from .families import MIXTURES

# Keys without a counterpart -> the value with which it does what is done here, and what to do with others.
KEYS: dict[str, tuple[Any, str]] = {
    "noise_scale": (0, "Remove it: experts are copied byte by byte. Tune the gates after the merge to break symmetry."),
    "residual_scale": (
        1,
        "Remove it: experts are copied byte by byte. Scale down_proj in the expert's checkpoint first.",
    ),
    "shared_experts": ([], "Remove it: every expert is routed."),
}
AVERAGES = {"dare_linear": "dare", "linear": "mean"}  # name in mergekit -> the same here
GATES = {
    "uniform_random": "Use random, N(0, 0.02), or zeros.",
    "hidden_avg": "Use router_input: the mean of mergekit-moe includes the padding of shorter prompts.",
    "hidden_last": "Use hidden, which is the same.",
}
# The names of its architectures, of which a recipe gives a beginning -> the format that is written.
ARCHITECTURES = {"mixtral": "mixtral", "qwen moe": "qwen2_moe", "qwen3 moe": "qwen3_moe"}
USE_FORMAT = f"Use format: {', '.join(MIXTURES)}, or leave it out."
DENSE_KEYS = ("merge_method", "models", "slices", "modules")


def formats_of(architecture: str) -> list[str]:
    """The formats that a value of the key `architecture` names."""
    return [format for name, format in ARCHITECTURES.items() if name.startswith(architecture.lower())]


def check_is_mixture(recipe: dict) -> None:
    """Raises a `MergeError` for a recipe of mergekit-yaml."""
    if "experts" not in recipe and (found := [key for key in DENSE_KEYS if key in recipe]):
        raise MergeError(
            f"The recipe has {join_names(found, len(found))}: it is a recipe for one dense model (mergekit-yaml), which Lexperts "
            "does not make. Run it with mergekit. The recipe of a mixture has experts: [{source_model: PATH}, ...]."
        )
