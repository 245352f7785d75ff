"""Edits a mixture: adds or removes an expert, extracts one as a dense model, exports to another format.

Its experts and its shared weights are the sources of the new one, see `View`.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from run_tools.errors import expand_user

from .card import write_card
from .check import check_lexicon, check_sources, mixture_class
from .compose import CENTROIDS, compose, mixture_items, summarize
from .errors import MergeError
from .families import FAMILIES, MIXTURES, MLP
from .gate_statistics import FOLDER, collect_statistics
from .gates import Gates, find_equal_rows, fit_gates, new_rows
from .low_rank import Factors
from .mixture import Mixture
from .output import dense_config, mixture_config, write_config, write_tokenizer
from .recipe import TEXTS_OF, Recipe, read_recipe
from .record import Hashes, source_record, write_record
from .sources import Source, open_source
from .writer import Item, new_folder, write_tensors

REMOVED = " (removed)"  # marks an expert that was removed but is still part of the shared weights' mean
TUNED = "The gates were tuned without {}. Tune them again: lexperts merge tune {} TUNED --domain NAME=FILE ..."


def add(
    mixture: str | Path,
    expert: str | Path | dict,
    out: str | Path,
    *,
    recompose: bool = False,
    sources: Mapping[str, str | Path] | None = None,
    **changes,
) -> dict[str, Any]:
    """Adds an expert to a mixture. The shared weights and the other experts' rows of gates do not change, but with `gate_mode: ridge`.

    Args:
        mixture: the mixture.
        expert: folder, Hub id, or a mapping as in a recipe (`source_model`, `name`, `positive_prompts`, ...).
        out: output folder, which must not exist or be empty.
        recompose: composes again from all sources, so the shared weights include the new expert.
        sources: name of an expert, or "base" -> the folder where it is now, for those that were moved.
        changes: keys of the recipe to replace, such as `tokenizer`.

    Returns:
        What was written, and `warnings`.

    Raises:
        MergeError: if the expert is not compatible, or `out` is not free.
    """
    old = Mixture(mixture, sources)
    if old.recipe.centroids:
        raise MergeError("A mixture with centroids cannot get another expert. Compose it again with new centroids.")
    if recompose:
        old.recipe = recipe_from_here(old)
    options, expert = old.recipe.to_dict(), expert if isinstance(expert, dict) else {"source_model": str(expert)}
    recipe = read_recipe({**options, "experts": [*options["experts"], expert]}, **changes)
    if recompose:
        return compose(recipe, out)
    new = recipe.experts[-1]
    source = open_source(new.name, new.source_model, recipe.base_model)
    warnings = check_sources(recipe, old.shared, [source])
    numbers = [record["row"] for record in old.record["experts"]] + [1 + max(r["row"] for r in old.record["experts"])]
    with new_folder(out) as folder:
        hashes, old_gates = Hashes([source]), old.gates()
        layers = list(old_gates)
        if recipe.gate_mode == "ridge" and layers:
            shutil.copytree(old.folder / FOLDER, folder / FOLDER)
            collect_statistics(recipe, new, source, layers, folder)
            gates = fit_gates(recipe, layers, folder)
        else:
            base = old.open_source("base") if recipe.gate_mode in TEXTS_OF else old.shared
            rows = new_rows(recipe, base, layers, [new], numbers[-1:])
            values = {layer: torch.cat([gate, rows[layer]]) for layer, gate in old_gates.items()}
            gates = Gates(values, {"mode": recipe.gate_mode}, find_equal_rows(values, recipe.names))
        record = edited_record(old, recipe, gates.info, out)
        experts = [*old.views, source]
        written = write_mixture(old, recipe, experts, gates.values, record, folder, out, hashes)
    if "tuned" in old.record:
        warnings.append(TUNED.format(new.name, out))
    return written | {"warnings": warnings + gates.warnings}


def remove(
    mixture: str | Path,
    expert: str,
    out: str | Path,
    *,
    recompose: bool = False,
    sources: Mapping[str, str | Path] | None = None,
) -> dict[str, Any]:
    """Removes an expert, given by its name, from a mixture. Everything else stays the same; gates of `ridge` are fitted to those that stay.

    Args:
        recompose: composes again from the sources of the other experts.
        mixture, out, sources: as in `add`.

    Raises:
        MergeError: if the expert does not exist, too few experts would be left, or `out` is not free.
    """
    old = Mixture(mixture, sources)
    removed = old.index_of(expert)
    kept = [index for index in range(len(old.names)) if index != removed]
    if len(kept) < 2:
        raise MergeError(f"Removing {expert!r} would leave one expert. Use extract to get it as a dense model.")
    if old.recipe.centroids:
        raise MergeError("No expert of a mixture with centroids can be removed. Compose it again from the others.")
    options = (recipe_from_here(old) if recompose else old.recipe).to_dict()
    recipe = read_recipe({**options, "experts": [options["experts"][index] for index in kept]})
    if recompose:
        return compose(recipe, out)
    with new_folder(out) as folder:
        values, info = {layer: gate[kept] for layer, gate in old.gates().items()}, {"mode": recipe.gate_mode}
        if recipe.gate_mode == "ridge" and values and (old.folder / FOLDER).is_dir():
            shutil.copytree(
                old.folder / FOLDER, folder / FOLDER, ignore=shutil.ignore_patterns(f"{expert}.safetensors")
            )
            fitted = fit_gates(recipe, list(values), folder)
            values, info = (values if "tuned" in old.record else fitted.values), fitted.info
        record = edited_record(old, recipe, info, out, kept)
        return write_mixture(old, recipe, [old.views[index] for index in kept], values, record, folder, out)


def edited_record(
    old: Mixture, recipe: Recipe, gates: dict[str, Any], out: str | Path, kept: Sequence[int] | None = None
) -> dict[str, Any]:
    """The record of a mixture with another recipe, whose old experts are those with the indices `kept`; default: all."""

    def moved(source: dict[str, Any]) -> dict[str, Any]:
        if "path" not in source:
            return source
        return source | {"path": os.path.relpath(old.folder.resolve() / source["path"], expand_user(out).resolve())}

    experts = old.record["experts"]
    record = {
        **old.record,
        "recipe": recipe.to_dict(),
        "base": moved(old.record["base"]),
        "gates": gates or old.record["gates"],
    }
    record["experts"] = [moved(experts[index]) for index in (range(len(experts)) if kept is None else kept)]
    shared = [name if name in recipe.names else name.removesuffix(REMOVED) + REMOVED for name in shared_from(old)]
    return record | ({"shared_from": shared} if shared != recipe.names and recipe.average == "mean" else {})


def shared_from(old: Mixture) -> list[str]:
    """The names of the experts that the shared weights are the mean of."""
    return old.record.get("shared_from", old.names)


def write_mixture(
    old: Mixture,
    recipe: Recipe,
    experts: Sequence[Source],
    gates: dict[int, torch.Tensor],
    record: dict[str, Any],
    folder: Path,
    out: str | Path,
    hashes: Hashes | None = None,
) -> dict[str, Any]:
    """Writes a mixture of views and new sources, with the shared weights of the old one, into a folder that becomes `out`."""
    kind, factors = mixture_class(recipe, old.shared), Factors(old.shared, recipe.rank) if recipe.rank else None
    items = mixture_items(replace(recipe, average="base", dtype=None), old.shared, experts, kind, gates, factors)
    centroids = old.source.specs.get(CENTROIDS) if recipe.centroids else None
    if centroids:
        items.append(Item(CENTROIDS, *centroids, old.shared.name, lambda: old.source[CENTROIDS]))
    if (folder_of_statistics := old.folder / FOLDER).is_dir() and not (folder / FOLDER).is_dir():
        shutil.copytree(folder_of_statistics, folder / FOLDER)
    summary = {"out": str(out), "experts": recipe.names, **summarize(recipe, kind, items)}
    write_tensors(folder, items)
    write_config(folder, mixture_config(replace(recipe, dtype=None), old.shared, kind, centroids and centroids[1][1]))
    for source in experts:
        if hashes and source.name not in old.names:
            row = 1 + max(expert["row"] for expert in record["experts"])
            record["experts"].append(source_record(source, hashes, out) | {"row": row})
    if factors:
        known = {**(old.record.get("energies") or {})} | {
            n: round(sum(e) / len(e), 4) for n, e in factors.energies.items()
        }
        record["energies"] = {name: known[name] for name in recipe.names if name in known}
    record |= {"format": kind.model_type, "written": write_tokenizer(old.folder, folder)}
    write_record(folder, record)
    write_card(folder, record, summary)
    return summary


def recipe_from_here(old: Mixture) -> Recipe:
    """The recipe with the folders of its sources where they are now."""
    experts = [
        replace(expert, source_model=place_of(old, expert.name, expert.source_model)) for expert in old.recipe.experts
    ]
    base = old.recipe.base_model and place_of(old, "base", old.recipe.base_model)
    return replace(old.recipe, experts=experts, base_model=base)


def place_of(old: Mixture, name: str, origin: str) -> str:
    """Where a source of a mixture is now; a Hub id is unchanged. Raises a `MergeError` if it was moved."""
    record = old.record["base"] if name == "base" else old.record["experts"][old.index_of(name)]
    place = str(
        old.moved.get(name) or (os.path.normpath(old.folder.resolve() / record["path"]) if "path" in record else origin)
    )
    if "path" in record and not os.path.isdir(place):
        raise MergeError(f"{name}: the folder {place!r} does not exist. If it was moved: --moved {name}=FOLDER.")
    return place


def extract(
    mixture: str | Path, expert: str, out: str | Path, *, sources: Mapping[str, str | Path] | None = None
) -> dict[str, Any]:
    """Extracts an expert as a dense model: its own MLPs with the mixture's shared weights.

    Args:
        expert: name of the expert.
        mixture, out, sources: as in `add`.

    Returns:
        What was written, and `differing`: the number of shared tensors that differ from those of the expert's source; `None` if that is gone.

    Raises:
        MergeError: if the expert does not exist, or `out` is not free.
    """
    old = Mixture(mixture, sources)
    view = old.views[old.index_of(expert)]
    items = [Item(name, *spec, expert, partial(view.__getitem__, name)) for name, spec in view.specs.items()]
    with new_folder(out) as folder:
        write_tensors(folder, items)
        write_config(folder, dense_config(FAMILIES[old.record["family"]], old.source))
        write_tokenizer(old.folder, folder)
    try:
        source: Source | None = old.open_source(expert)
    except MergeError:
        source = None
    shared = [name for name in view.specs if not MLP.fullmatch(name)]
    differing = None if source is None else sum(not same(view, source, name) for name in shared)
    return {
        "out": str(out),
        "tensors": len(items),
        "bytes": sum(i.nbytes for i in items),
        "expert": expert,
        "differing": differing,
    }


def same(one: Source, other: Source, name: str) -> bool:
    """Whether two models have the same tensor, up to its dtype."""
    return name in other.specs and one.specs[name][1] == other.specs[name][1] and bool((one[name] == other[name]).all())


def export(mixture: str | Path, out: str | Path, format: str) -> dict[str, Any]:
    """Writes the same weights in another format. Returns what was written.

    Args:
        format: "lexicon" (supports all policies), the model_type of the family's mixture such as "mixtral" (opens
            without this package), or "gguf" (one file for llama.cpp, see `export_gguf`).
        mixture, out: as in `add`; for "gguf" `out` is a file.

    Raises:
        MergeError: if the format cannot represent the mixture.
    """
    if format == "gguf":
        from .gguf_export import export_gguf

        return export_gguf(mixture, out)
    old = Mixture(mixture)
    # by token, centroids name the nearest cluster of a text, and route nothing
    dropped = {"rank": None, "centroids": None, "embedder": None} if format in MIXTURES else {}
    recipe = read_recipe({**old.recipe.to_dict(), **dropped, "format": format})
    if format == "lexicon":
        check_lexicon(old.shared)
    with new_folder(out) as folder:
        record = edited_record(old, recipe, {}, out)
        if old.recipe.rank and not recipe.rank:
            record.pop("energies", None)
            record["expanded_rank"] = old.recipe.rank
        return write_mixture(old, recipe, old.views, old.gates(), record, folder, out)
