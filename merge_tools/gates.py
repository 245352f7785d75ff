"""The first values of gates, a matrix (E, d) for each routed layer with one row per expert.

random       N(0, 0.02), seeded by layer and expert, so that adding an expert does not change the other rows
hidden       the base's hidden states at the last token of each prompt, the mean over prompts minus that over negative ones, of
             length 1, as in mergekit-moe
cheap_embed  the same with the summed embeddings of each prompt's tokens
ridge        ridge regression of each token's expert on the router's inputs, in closed form, see `ridge`
none         no gates: the domain policy is told the expert

With `ridge` there is one file of statistics per expert beside a mixture, from which its gates are computed again without the texts. It holds
the `Moments` of each router by its layer: `LAYER.second`, `LAYER.mean` and `LAYER.held_out`. Its metadata are the number of `tokens`, and
the SHA-256 of the `samples`, in whatever order.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tqdm import tqdm

from run_tools.errors import UserError
from run_tools.loading import open_model, open_tokenizer

from .families import MLP
from .recipe import TEXTS_OF, ExpertRecipe, Recipe
from .ridge import Moments, MomentSum, confusion, fit_gate
from .sources import Source, open_file
from .texts import read_samples

GATE_STD = 0.02  # with N(0, 1), logits would be of the order of sqrt(d) and an untrained router overconfident
SHORTEST = 1e-8  # length that a vector is divided by at least, as in mergekit-moe
PARALLEL = 1 - 1e-9  # cosine of two rows from which they are the same for a router
FOLDER = "gate_statistics"
TOKENS_PER_DIMENSION = 8
LONGEST = 4096  # tokens of a text
BEGINNING = 128  # tokens of a long text that are used before other texts are
HELD_OUT_SHARE = 5  # one of so many texts is held out; with fewer texts the end of each
SAME_ROWS = "the rows of {} and {} in the gate of layer {} are equal or parallel: no router can tell them apart. Use different texts."


@dataclass
class Gates:
    """Layer -> gate (E, d), float32; how they were made, for the merge record; and warnings."""

    values: dict[int, torch.Tensor] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


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

    A prompt is encoded as by mergekit-moe: the first special token, then the text without special tokens. A `UserError` is raised for one
    without tokens, and for one that is too long.
    """
    from transformers import AutoModelForCausalLM  # AutoModel would report the output layer as unexpected

    tokenizer, longest = open_tokenizer(base.folder), base.config.max_position_embeddings
    if mode == "cheap_embed":
        table = base["model.embed_tokens.weight"]
    else:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = open_model(AutoModelForCausalLM, base.folder, dtype="auto").eval().base_model.to(device)

    def vectors(text: str) -> torch.Tensor:
        ids = tokenizer((tokenizer.bos_token or "") + text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        if not 0 < ids.shape[1] <= longest:
            raise UserError(f"The prompt {text[:60]!r} has {ids.shape[1]} tokens, which must be 1 to {longest}.")
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


def collect_statistics(recipe: Recipe, expert: ExpertRecipe, source: Source, layers: list[int], folder: Path) -> None:
    """Runs an expert on its own samples, in the dtype of the mixture, and saves the moments of each router's inputs in `folder`.

    Raises:
        UserError: for samples that cannot be used, and states that are not finite. The message names the expert.
    """
    from transformers import AutoModelForCausalLM

    texts = read_samples(Path(expert.samples or ""))
    # of a sorted file the first would be of one kind
    texts = [texts[i] for i in np.random.default_rng(recipe.seed).permutation(len(texts))]
    tokenizer, width = open_tokenizer(source.folder), source.config.hidden_size
    enough = recipe.gate_tokens or TOKENS_PER_DIMENSION * width
    longest = min(source.config.max_position_embeddings, LONGEST)
    ids = encode_beginnings(texts, lambda text: tokenizer(text, verbose=False)["input_ids"], enough, longest)
    dtype = getattr(torch, recipe.dtype) if recipe.dtype else "auto"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = open_model(AutoModelForCausalLM, source.folder, dtype=dtype).eval().base_model.to(device)
    sums = {layer: MomentSum(width) for layer in layers}
    seen: dict[int, torch.Tensor] = {}
    for layer in layers:
        model.layers[layer].mlp.register_forward_pre_hook(lambda _, args, layer=layer: seen.update({layer: args[0][0]}))
    with torch.no_grad():
        for index, tokens in enumerate(tqdm(ids, desc=f"samples of {expert.name}", unit="text", disable=None)):
            model(torch.tensor([tokens], device=model.device), use_cache=False)
            stop = training_tokens(index, len(ids), len(tokens))
            for layer in layers:
                sums[layer].add(seen[layer][:stop], held_out=False)
                sums[layer].add(seen[layer][stop:], held_out=True)
    try:
        found = {layer: sums.pop(layer).moments() for layer in layers}
    except UserError as error:
        raise UserError(f"{expert.name}: {error}") from error
    save(folder / FOLDER / f"{expert.name}.safetensors", found, model.dtype, texts)


def save(path: Path, found: dict[int, Moments], dtype: torch.dtype, texts: Sequence[str]) -> None:
    """Writes the statistics of one expert; held-out states in the dtype of the model."""
    path.parent.mkdir(exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for layer, own in found.items():
        parts = {"second": own.second, "mean": own.mean, "held_out": own.held_out}
        tensors |= {f"{layer}.{part}": torch.from_numpy(value) for part, value in parts.items()}
        tensors[f"{layer}.held_out"] = tensors[f"{layer}.held_out"].to(dtype)
    samples = hashlib.sha256(repr(sorted(texts)).encode()).hexdigest()
    save_file(tensors, path, {"tokens": str(next(iter(found.values())).count), "samples": samples})


def encode_beginnings(
    texts: Sequence[str], encode: Callable[[str], list[int]], enough: int, longest: int
) -> list[list[int]]:
    """The first tokens of each text until there are enough: at most BEGINNING of one, and more of each only if there are not enough texts,
    so that a few long texts do not outweigh the others. Raises a `UserError` for a text without tokens.

    A model reads a text from its beginning, and what the first tokens do there reaches all that follow. Pieces from the middle would have
    other states, and put other tokens at the beginning.
    """
    encoded: list[list[int]] = []
    size, left = min(BEGINNING, longest), enough
    for text in texts:
        if left <= 0:
            break
        encoded.append(encode(text))
        if not encoded[-1]:
            raise UserError(f"The sample {text[:60]!r} has no tokens.")
        left -= min(len(encoded[-1]), size)
    if left > 0:
        size = bisect_left(range(longest), enough, size, key=lambda size: sum(min(len(ids), size) for ids in encoded))
    return [ids[:size] for ids in encoded]


def training_tokens(index: int, count: int, tokens: int) -> int:
    """How many of a text's tokens are not held out. `index`: of the text, of `count`."""
    if count < HELD_OUT_SHARE:
        return tokens - max(tokens // HELD_OUT_SHARE, 1)
    return 0 if index % HELD_OUT_SHARE == HELD_OUT_SHARE - 1 else tokens


def read_moments(path: Path, layer: int) -> Moments:
    """The moments of an expert's inputs of the router of a layer."""
    with open_file(path) as file:
        mean, second, held_out = (file.get_tensor(f"{layer}.{part}") for part in ("mean", "second", "held_out"))
        return Moments(int(file.metadata()["tokens"]), mean.numpy(), second.numpy(), held_out.float().numpy())


def fit_gates(recipe: Recipe, layers: list[int], folder: Path) -> Gates:
    """The gates of `ridge` from the statistics in a folder.

    `info` has the `tokens` of each expert, and `confusion` (E, E), the share of expert i's held-out tokens that are routed to expert j
    first, the mean over layers.

    Raises:
        UserError: for statistics that are missing, experts with equal samples, and inputs that are zero.
    """
    paths = [folder / FOLDER / f"{name}.safetensors" for name in recipe.names]
    known, tokens, warnings = dict[str, str](), list[int](), list[str]()
    for name, path in zip(recipe.names, paths, strict=True):
        with open_file(path) as file:
            metadata = file.metadata()
        if (other := known.setdefault(metadata["samples"], name)) != name:
            raise UserError(f"{name} has the same samples as {other}. Give it samples of its own data.")
        tokens.append(int(metadata["tokens"]))
    values, tables = {}, []
    for layer in layers:
        moments = [read_moments(path, layer) for path in paths]
        gate, _ = fit_gate(moments)
        values[layer] = torch.from_numpy(gate)
        tables.append(confusion(moments, gate))
    for name, count in zip(recipe.names, tokens, strict=True):
        if count < 5 * gate.shape[1]:
            warnings.append(f"{name} has {count:,} tokens of samples, fewer than 5 per dimension. Add samples.")
    info = {"mode": "ridge", "experts": recipe.names, "tokens": tokens}
    return Gates(values, info | {"confusion": np.mean(tables, axis=0).round(4).tolist()}, warnings)
