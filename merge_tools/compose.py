"""Merges the experts of a recipe into one mixture.

The names and shapes of the base are the layout: its MLPs are routed, and all other tensors are copied from it or averaged. A mixture is a
list of `Item`s, each of which loads one tensor when it is written.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from run_tools.errors import UserError
from run_tools.versions import __version__

from .check import check_sources, mixture_class
from .families import MLP, MixtureClass
from .gates import make_gates
from .low_rank import Factors
from .output import mixture_config, write_config, write_tokenizer
from .recipe import Recipe, read_recipe
from .record import Hashes, source_record, write_record
from .sources import DTYPES, NAMES, VOCABULARY, Source, open_file, open_source
from .writer import BYTES, SHARD_BYTES, Item, new_folder, write_tensors

CENTROIDS = "domain_centroids"  # the tensor of the centroids of the experts' clusters
ROWS = 1 << 22  # elements of each expert that a mean reads at once


def compose(
    recipe: Recipe | dict | str | Path,
    out: str | Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    dry_run: bool = False,
    **changes,
) -> dict[str, Any]:
    """Merges the experts of a recipe into one sparse checkpoint. `out` is complete afterwards, or does not exist.

    Args:
        recipe: YAML file, dict or `Recipe`.
        out: output folder, which must not exist or be empty.
        shard_bytes: maximum size of a file.
        dry_run: checks everything and makes the gates, but writes nothing.
        changes: keys of the recipe to replace.

    Returns:
        `out`, `format`, `experts`, `gate_mode`, `average`, `tensors`, `bytes`, `parameters`, `active_parameters` (per token) and `warnings`.

    Raises:
        UserError: for the first thing that is wrong with the recipe or a source. Nothing is written then.
    """
    recipe = read_recipe(recipe, **changes)
    base, experts = open_sources(recipe)
    kind = mixture_class(recipe, base)
    warnings = check_sources(recipe, base, experts)
    centroids = centroid_items(recipe)
    factors = Factors(base, recipe.rank, recipe.dtype) if recipe.rank else None
    with new_folder(out, keep=not dry_run) as folder:
        hashes = Hashes([] if dry_run else [base, *experts])
        gates = make_gates(recipe, base, experts, folder)
        items = mixture_items(recipe, base, experts, kind, gates.values, factors) + centroids
        summary = {"out": str(out), "experts": recipe.names, "gate_mode": recipe.gate_mode, "average": recipe.average}
        summary |= summarize(recipe, kind, items)
        if not dry_run:
            write_tensors(folder, items, shard_bytes)
            write_config(folder, mixture_config(recipe, base, kind, *(item.shape[1] for item in centroids)))
            record = {
                "made_by": f"lexperts {__version__}",
                "family": base.config.model_type,
                "format": kind.model_type,
                "recipe": recipe.to_dict(),
                "base": source_record(base, hashes, out),
                # the row is the number that seeds an expert's row of random gates
                "experts": [source_record(expert, hashes, out) | {"row": row} for row, expert in enumerate(experts)],
                "gates": gates.info,
                "written": write_tokenizer(base.folder, folder),
            }
            if factors:
                record["energies"] = factors.means()
            write_record(folder, record, summary)
    return {**summary, "warnings": warnings + gates.warnings}


def open_sources(recipe: Recipe) -> tuple[Source, list[Source]]:
    """Opens base and experts; a folder that is listed twice is opened once."""
    known: dict[str, Source] = {}

    def opened(name: str, origin: str) -> Source:
        if origin not in known:
            known[origin] = open_source(name, origin, recipe.base_model)
        return known[origin].renamed(name)

    experts = [opened(expert.name, expert.source_model) for expert in recipe.experts]
    return opened("base", recipe.base_model) if recipe.base_model else experts[0], experts


def mixture_items(
    recipe: Recipe,
    base: Source,
    experts: Sequence[Source],
    kind: MixtureClass,
    gates: Mapping[int, torch.Tensor],
    factors: Factors | None = None,
    averaged: Sequence[Source] | None = None,
) -> list[Item]:
    """All tensors of a mixture.

    Args:
        gates: layer -> its gate (E, d), for the layers that have one.
        factors: of experts of low rank.
        averaged: the experts that weights without routing are averaged over; default: all.
    """
    items = []
    shared = shared_items(recipe, base, experts if averaged is None else averaged)
    for name, (dtype, shape) in base.specs.items():
        dtype = NAMES[getattr(torch, recipe.dtype)] if recipe.dtype else dtype
        if not (match := MLP.fullmatch(name)):
            items.append(shared(name, dtype))
            continue
        layer, linear = int(match[1]), match[2]
        if linear == "gate_proj":
            items += router_items(kind, layer, dtype, shape[1], gates.get(layer))
        if factors:
            items.append(Item(kind.base(layer, linear), dtype, shape, base.name, partial(base.__getitem__, name)))
        for index, expert in enumerate(experts):
            if not factors:
                load = partial(expert.__getitem__, name)
                items.append(Item(kind.expert(layer, index, linear), dtype, shape, expert.name, load))
                continue
            for half, size in (("A", (factors.rank, shape[1])), ("B", (shape[0], factors.rank))):
                load = partial(expert.factor, factors, name, half)
                items.append(Item(kind.expert(layer, index, linear, half), dtype, size, expert.name, load))
    return items


def router_items(kind: MixtureClass, layer: int, dtype: str, width: int, gate: torch.Tensor | None) -> list[Item]:
    """The gate of a layer, if it has one, and the shared expert of zeros of classes that require one."""
    items = [] if gate is None else [Item(kind.gate(layer), dtype, tuple(gate.shape), "gates", lambda: gate)]
    zeros = kind.zeros(layer, width).items()
    return items + [Item(name, dtype, size, "gates", partial(torch.zeros, size)) for name, size in zeros]


def shared_items(recipe: Recipe, base: Source, experts: Sequence[Source]) -> Callable[[str, str], Item]:
    """What gives the item of a tensor that is not routed, by its name and dtype: a copy of the base's, or the mean in float64."""
    weights = {expert.name: expert.weight for expert in recipe.experts}
    chosen = [expert for expert in experts if weights[expert.name] > 0]
    total = sum(weights[expert.name] for expert in chosen)

    def mean(name: str, dtype: torch.dtype) -> torch.Tensor:
        flat = [expert[name].reshape(-1) for expert in chosen]
        result = torch.empty(len(flat[0]), dtype=dtype)
        for start in range(0, len(result), ROWS):
            rows = slice(start, start + ROWS)
            parts = (part[rows].double() * weights[expert.name] for part, expert in zip(flat, chosen, strict=True))
            result[rows] = (sum(parts) / total).to(dtype)
        return result.reshape(base.specs[name][1])

    def item(name: str, dtype: str) -> Item:
        shape = base.specs[name][1]
        if recipe.average == "base" or not chosen or (recipe.tokenizer == "base" and name in VOCABULARY):
            return Item(name, dtype, shape, base.name, partial(base.__getitem__, name))
        names = ", ".join(expert.name for expert in chosen)
        return Item(name, dtype, shape, f"the mean of {names}", partial(mean, name, DTYPES[dtype]))

    return item


def summarize(recipe: Recipe, kind: MixtureClass, items: list[Item]) -> dict[str, Any]:
    """Format, number of tensors, bytes, and parameters in total and active per token."""
    sizes = [(item.name, item.nbytes // BYTES[item.dtype]) for item in items]
    total, count = sum(size for _, size in sizes), len(recipe.experts)
    routed = sum(size for name, size in sizes if ".experts." in name)
    selected = {"token": recipe.experts_per_token, "sequence_soft": count}.get(recipe.routing_policy, 1)
    return {
        "format": kind.model_type,
        "tensors": len(items),
        "bytes": sum(item.nbytes for item in items),
        "parameters": total,
        "active_parameters": total - routed * (count - selected) // count,
    }


def centroid_items(recipe: Recipe) -> list[Item]:
    """The only tensor of `recipe.centroids`, (E, size), in float32; none if the recipe has no centroids.

    Raises a `UserError` if the file holds anything else.
    """
    if recipe.centroids is None:
        return []
    with open_file(Path(recipe.centroids)) as file:
        found = [file.get_tensor(name) for name in file.offset_keys()]
    shapes, count = [tuple(tensor.shape) for tensor in found], len(recipe.experts)
    if len(shapes) != 1 or len(shapes[0]) != 2 or shapes[0][0] != count:
        raise UserError(f"{recipe.centroids} has tensors of shapes {shapes}, expected one of ({count}, size).")
    return [Item(CENTROIDS, "F32", shapes[0], "centroids", tensor.clone) for tensor in found]
