"""The statistics of `gate_mode: ridge`, one file per expert beside a mixture, from which its gates are computed again without the texts.

A file holds the `Moments` of each router by its layer: `LAYER.second`, `LAYER.mean` and `LAYER.held_out`. Its metadata are the number of
`tokens`, and the SHA-256 of the `samples`, in whatever order.
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

from run_tools.model_loading import open_model, open_tokenizer
from run_tools.model_options import gpu_or_cpu

from .errors import MergeError
from .recipe import ExpertRecipe, Recipe
from .ridge import Moments, MomentSum, confusion, fit_gate
from .sources import Source, open_file
from .texts import read_samples

FOLDER = "gate_statistics"
TOKENS_PER_DIMENSION = 8
LONGEST = 4096  # tokens of a text
BEGINNING = 128  # tokens of a long text that are used before other texts are
HELD_OUT_SHARE = 5  # one of so many texts is held out; with fewer texts the end of each


@dataclass
class Gates:
    """Layer -> gate (E, d), float32; how they were made, for the merge record; and warnings."""

    values: dict[int, torch.Tensor] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def collect_statistics(recipe: Recipe, expert: ExpertRecipe, source: Source, layers: list[int], folder: Path) -> None:
    """Runs an expert on its own samples, in the dtype of the mixture, and saves the moments of each router's inputs in `folder`.

    Raises:
        MergeError: for samples that cannot be used, and states that are not finite. The message names the expert.
    """
    from transformers import AutoModel

    texts = read_samples(Path(expert.samples or ""))
    # of a sorted file the first would be of one kind
    texts = [texts[i] for i in np.random.default_rng(recipe.seed).permutation(len(texts))]
    tokenizer, width = open_tokenizer(source.folder), source.config.hidden_size
    enough = recipe.gate_tokens or TOKENS_PER_DIMENSION * width
    longest = min(source.config.max_position_embeddings, LONGEST)
    ids = encode_beginnings(texts, lambda text: tokenizer(text, verbose=False)["input_ids"], enough, longest)
    dtype = getattr(torch, recipe.dtype) if recipe.dtype else "auto"
    model = open_model(AutoModel, source.folder, dtype=dtype).eval().to(gpu_or_cpu())
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
    except MergeError as error:
        raise MergeError(f"{expert.name}: {error}") from error
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
    so that a few long texts do not outweigh the others. Raises a `MergeError` for a text without tokens.

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
            raise MergeError(f"The sample {text[:60]!r} has no tokens.")
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
        MergeError: for statistics that are missing, experts with equal samples, and inputs that are zero.
    """
    paths = [folder / FOLDER / f"{name}.safetensors" for name in recipe.names]
    known, tokens, warnings = dict[str, str](), list[int](), list[str]()
    for name, path in zip(recipe.names, paths, strict=True):
        with open_file(path) as file:
            metadata = file.metadata()
        if (other := known.setdefault(metadata["samples"], name)) != name:
            raise MergeError(f"{name} has the same samples as {other}. Give it samples of its own data.")
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
