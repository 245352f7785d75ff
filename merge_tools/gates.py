"""The first values of gates, a matrix (E, d) for each routed layer with one row per expert.

random       N(0, 0.02), seeded by layer and expert, so that adding an expert does not change the other rows
hidden       the base's hidden states at the last token of each prompt, the mean over prompts minus that over negative ones, of
             length 1, as in mergekit-moe
cheap_embed  the same with the summed embeddings of each prompt's tokens
ridge        ridge regression of each token's expert on the router's inputs, in closed form, see `ridge`
none         no gates: the domain policy is told the expert
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from run_tools.model_loading import open_model, open_tokenizer
from run_tools.model_options import gpu_or_cpu

from .errors import MergeError
from .families import MLP
from .gate_statistics import Gates, collect_statistics, fit_gates
from .recipe import TEXTS_OF, ExpertRecipe, Recipe
from .sources import Source

GATE_STD = 0.02  # with N(0, 1), logits would be of the order of sqrt(d) and an untrained router overconfident
SHORTEST = 1e-8  # length that a vector is divided by at least, as in mergekit-moe
PARALLEL = 1 - 1e-9  # cosine of two rows from which they are the same for a router
SAME_ROWS = "the rows of {} and {} in the gate of layer {} are equal or parallel: no router can tell them apart. Use different texts."


def gated_layers(recipe: Recipe, base: Source) -> list[int]:
    """The layers that have a gate: all that are routed; with the domain policy only the first, or none."""
    layers = sorted({int(match[1]) for name in base.specs if (match := MLP.fullmatch(name))})
    return layers if recipe.routing_policy != "domain" else layers[: recipe.gate_mode != "none"]


def make_gates(recipe: Recipe, base: Source, experts: Sequence[Source], folder: Path) -> Gates:
    """The gates of a recipe, whose sources these are. The statistics of `ridge` are saved in `folder`."""
    layers = gated_layers(recipe, base)
    if recipe.gate_mode == "ridge" and layers:
        for expert, source in zip(recipe.experts, experts, strict=True):
            collect_statistics(recipe, expert, source, layers, folder)
        return fit_gates(recipe, layers, folder)
    rows = new_rows(recipe, base, layers, recipe.experts, list(range(len(experts))))
    return Gates(rows, {"mode": recipe.gate_mode}, find_equal_rows(rows, recipe.names))


def new_rows(
    recipe: Recipe, base: Source, layers: list[int], experts: Sequence[ExpertRecipe], numbers: Sequence[int]
) -> dict[int, torch.Tensor]:
    """The rows of some experts in a mode whose rows do not depend on the other experts; `numbers` seed random rows."""
    if not layers or recipe.gate_mode not in TEXTS_OF:
        return {layer: random_rows(recipe.seed, layer, base.config.hidden_size, numbers) for layer in layers}
    with torch.no_grad():
        vectors = text_vectors(base, layers, recipe.gate_mode)
        rows = [text_rows(vectors, expert, recipe.gate_mode == "cheap_embed") for expert in experts]
    return {layer: torch.stack([row[i] for row in rows]).float() for i, layer in enumerate(layers)}


def random_rows(seed: int, layer: int, width: int, numbers: Sequence[int]) -> torch.Tensor:
    """Rows (E, width) from N(0, 0.02), each seeded by the number of its expert."""
    rows = [np.random.default_rng([seed, layer, *b"mlp", e]).standard_normal(width) * GATE_STD for e in numbers]
    return torch.from_numpy(np.stack(rows).astype(np.float32))


def text_rows(vectors, expert: ExpertRecipe, normalise_means: bool) -> torch.Tensor:
    """The rows (L, d) of an expert at L layers: the mean of its prompts' vectors minus that of its negative ones, of length 1; float64."""

    def mean(texts: list[str]) -> torch.Tensor | float:
        if not texts:
            return 0.0
        value = torch.stack([vectors(text) for text in texts]).mean(0)
        return with_length_1(value) if normalise_means else value

    return with_length_1(mean(expert.positive_prompts) - mean(expert.negative_prompts))


def with_length_1(rows: torch.Tensor) -> torch.Tensor:
    """Vectors along the last axis, each divided by its length."""
    return rows / rows.norm(dim=-1, keepdim=True).clamp(min=SHORTEST)


def text_vectors(base: Source, layers: list[int], mode: str):
    """What gives the vectors of a text, (L, d), float64: with `hidden` the states of its last token at the input of each layer, with
    `cheap_embed` the sum of its embeddings, the same for each layer.

    A prompt is encoded as by mergekit-moe: the first special token, then the text without special tokens. A `MergeError` is raised for one
    without tokens, and for one that is too long.
    """
    from transformers import AutoModel

    tokenizer, longest = open_tokenizer(base.folder), base.config.max_position_embeddings
    if mode == "cheap_embed":
        table = base["model.embed_tokens.weight"]
    else:
        model = open_model(AutoModel, base.folder, dtype="auto").eval().to(gpu_or_cpu())

    def vectors(text: str) -> torch.Tensor:
        ids = tokenizer((tokenizer.bos_token or "") + text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        if not 0 < ids.shape[1] <= longest:
            raise MergeError(f"The prompt {text[:60]!r} has {ids.shape[1]} tokens, which must be 1 to {longest}.")
        if mode == "cheap_embed":
            return table[ids[0]].double().sum(0).expand(len(layers), -1)
        states = model(ids.to(model.device), output_hidden_states=True, use_cache=False).hidden_states
        return torch.stack([states[layer][0, -1] for layer in layers]).double().cpu()

    return vectors


def find_equal_rows(gates: dict[int, torch.Tensor], names: list[str]) -> list[str]:
    """A warning if experts have parallel or zero rows in a gate, so that a router cannot tell them apart."""
    for layer, rows in gates.items():
        unit = with_length_1(rows.double())
        cosines = unit @ unit.T - 2 * torch.eye(len(rows))
        if float(cosines.max()) > PARALLEL:
            first, other = divmod(int(cosines.argmax()), len(rows))
            return [SAME_ROWS.format(names[first], names[other], layer)]
    return []
