"""The values of a recipe's keys against each other."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from run_tools.errors import did_you_mean, short_repr

from .averages import AVERAGES, WITH_DENSITY
from .families import MLP
from .gate_modes import GATE_MODES, AnchorMode, SampleMode

if TYPE_CHECKING:
    from .recipe import Recipe

# The keys whose default, in place of an invalid value, could be the cause; and the message.
Conflict = tuple[tuple[str, ...], str]


def find_conflicts(recipe: "Recipe") -> Iterator[Conflict]:
    """What is wrong with a recipe of valid values."""
    yield from expert_conflicts(recipe)
    yield from average_conflicts(recipe)
    yield from layer_conflicts(recipe)
    yield from gate_conflicts(recipe)


def expert_conflicts(recipe: "Recipe") -> Iterator[Conflict]:
    """Of the number of experts, their weights, and the tokenizer that is theirs."""
    count, k = len(recipe.experts), recipe.experts_per_token
    if count < 2:
        yield (), "The recipe has one expert. A mixture needs two or more."
    elif k > count:
        yield (), f"experts_per_token={k} exceeds the number of experts ({count}). Use {count} or less."
    tokenizers = ("base", "union", *recipe.names)
    if recipe.tokenizer_source is not None and recipe.tokenizer_source not in tokenizers:
        hint = did_you_mean(recipe.tokenizer_source, tokenizers)
        yield (
            ("base_model",),
            f"tokenizer_source={short_repr(recipe.tokenizer_source)} is not base, union or an expert.{hint}",
        )
    if sum(expert.weight for expert in recipe.experts) <= 0:
        yield (), "weights are 0 for all experts. Give at least one expert a positive weight."


def average_conflicts(recipe: "Recipe") -> Iterator[Conflict]:
    """Of the average of weights that are not routed."""
    average, count = AVERAGES[recipe.average], len(recipe.experts)
    if average.needs_base and recipe.base_model is None:
        reason = (
            "it merges the experts' differences from the base"
            if average.of_differences
            else "it provides these weights"
        )
        yield ("base_model",), f"average: {recipe.average} needs base_model: {reason}."
    if average.experts not in (None, count):
        yield (
            (),
            f"average: {recipe.average} is for {average.experts} experts, but the recipe has {count}. Use mean.",
        )
    if recipe.density is not None and average.density is None:
        yield (
            ("average",),
            f"density is for average: {', '.join(WITH_DENSITY)}, but average is {recipe.average}. Remove it, or change average.",
        )


def layer_conflicts(recipe: "Recipe") -> Iterator[Conflict]:
    """Of the routed layers, and of what can represent them."""
    routed = recipe.router_layers
    if not routed or len(set(routed)) < len(routed):
        yield (), f"router_layers={short_repr(routed)} is empty or has duplicates. Use mlp."
    if "mlp" in routed and set(routed) & set(MLP):
        yield (), "router_layers: mlp already includes gate_proj, up_proj and down_proj. Remove it or them."
    if recipe.rank and ("mlp" not in routed or recipe.base_model is None):
        need = "base_model, from which the experts differ" if recipe.base_model is None else "router_layers: mlp"
        yield ("base_model",), f"rank: {recipe.rank} needs {need}. Add it, or remove rank."
    if recipe.format not in ("auto", "lexicon") and not recipe.is_stock:
        yield (
            (),
            f"format: {recipe.format} supports only whole MLPs in all layers, routed per token. Remove router_layers, "
            "router_layers_index, attention, rank and routing_policy, or use format: lexicon.",
        )


def gate_conflicts(recipe: "Recipe") -> Iterator[Conflict]:
    """Of the gates, and of the texts that they are made from."""
    mode = GATE_MODES[recipe.gate_mode]
    if mode.name == "none" and recipe.routing_policy != "domain":
        message = f"gate_mode: none is not possible with routing_policy: {recipe.routing_policy}. Use random."
        yield ("routing_policy",), message
    if recipe.gate_tokens and not isinstance(mode, SampleMode):
        yield (
            ("gate_mode",),
            f"gate_tokens: {recipe.gate_tokens} is for gate_mode: ridge or centroid, but gate_mode is {mode.name}. Remove it, or change gate_mode.",
        )
    if mode.only_hidden and {"o_proj", "down_proj"} & set(recipe.router_layers):
        yield (
            (),
            f"gate_mode: {mode.name} does not support o_proj and down_proj, whose inputs are not hidden states. "
            "Use gate_mode: router_input.",
        )
    if isinstance(mode, AnchorMode) and recipe.router_layers != ["mlp"]:
        yield (
            (),
            f"gate_mode: {mode.name} is for whole MLPs, whose gates were learned. Remove router_layers and attention.",
        )
    lacking = [expert.name for expert in recipe.experts if mode.texts and not getattr(expert, mode.texts)]
    if lacking:
        fix = (
            "Add a .jsonl or .txt file of its own data."
            if mode.texts == "samples"
            else "Add some, or use gate_mode: random."
        )
        yield (), f"gate_mode: {mode.name} needs {mode.texts} for every expert; {lacking[0]!r} has none. {fix}"
