"""Edits a mixture: adds or removes an expert, extracts one as a dense model, exports to another format.

Its experts and its shared weights are the sources of the new one, see `View`.
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from run_tools.errors import UserError

from .check import check_sources, mixture_class
from .compose import CENTROIDS, mixture_items, summarize
from .families import FAMILIES, MIXTURES
from .gates import FOLDER, Gates, collect_statistics, find_equal_rows, fit_gates, new_rows
from .low_rank import Factors
from .mixture import Mixture
from .output import dense_config, mixture_config, write_config, write_tokenizer
from .recipe import TEXTS_OF, Recipe, read_recipe
from .record import Hashes, source_record, write_record
from .sources import Source, open_source
from .writer import Item, new_folder, write_tensors

REMOVED = " (removed)"  # marks an expert that was removed but is still part of the shared weights' mean
TUNED = "The gates were tuned without {}, or are replaced. Tune them again: lexperts merge tune {} TUNED --domain NAME=FILE ..."


def add(
    mixture: str | Path,
    expert: str | Path | dict,
    out: str | Path,
    *,
    sources: Mapping[str, str | Path] | None = None,
    tokenizer: str | None = None,
) -> dict[str, Any]:
    """Adds an expert to a mixture. The shared weights and the other experts' rows of gates do not change, but with `gate_mode: ridge`.

    Args:
        mixture: the mixture.
        expert: folder, Hub id, or a mapping as in a recipe (`source_model`, `name`, `positive_prompts`, ...).
        out: output folder, which must not exist or be empty.
        sources: "base" -> the folder where it is now, if it was moved.
        tokenizer: "base" accepts an expert with another vocabulary, as in a recipe.

    Returns:
        What was written, and `warnings`.

    Raises:
        UserError: if the expert is not compatible, or `out` is not free.
    """
    old = Mixture(mixture, sources)
    if old.recipe.centroids:
        raise UserError("A mixture with centroids cannot get another expert. Compose it again with new centroids.")
    options, expert = old.recipe.to_dict(), expert if isinstance(expert, dict) else {"source_model": str(expert)}
    recipe = read_recipe({**options, "experts": [*options["experts"], expert]})
    new, row = recipe.experts[-1], 1 + max(record["row"] for record in old.record["experts"])
    source = open_source(new.name, new.source_model, old.base_model)
    accepted = replace(recipe, tokenizer=tokenizer or recipe.tokenizer)  # type: ignore[arg-type]
    warnings, hashes = check_sources(accepted, old.shared, [source]), Hashes([source])

    def make_gates(folder: Path) -> Gates:
        layers = list(old.gates())
        if recipe.gate_mode == "ridge" and layers:
            collect_statistics(recipe, new, source, layers, folder)
            return fit_gates(recipe, layers, folder)
        base = old.open_source("base") if recipe.gate_mode in TEXTS_OF else old.shared
        rows = new_rows(recipe, base, layers, [new], [row])
        values = {layer: torch.cat([gate, rows[layer]]) for layer, gate in old.gates().items()}
        return Gates(values, {"mode": recipe.gate_mode}, find_equal_rows(values, recipe.names))

    record = edited_record(old, recipe, out)
    if "tuned" in record and recipe.gate_mode == "ridge":
        del record["tuned"]  # all rows are fitted again
    record["experts"].append(source_record(source, hashes, out) | {"row": row})
    written = write_mixture(old, recipe, [*old.views, source], make_gates, record, out)
    if "tuned" in old.record:
        warnings.append(TUNED.format(new.name, out))
    return written | {"warnings": warnings + written["warnings"]}


def remove(mixture: str | Path, expert: str, out: str | Path) -> dict[str, Any]:
    """Removes an expert, given by its name, from a mixture. Everything else stays the same; gates of `ridge` are fitted to those that stay.

    Raises:
        UserError: if the expert does not exist, too few experts would be left, or `out` is not free.
    """
    old = Mixture(mixture)
    removed = old.index_of(expert)
    kept = [index for index in range(len(old.names)) if index != removed]
    if len(kept) < 2:
        raise UserError(f"Removing {expert!r} would leave one expert. Use extract to get it as a dense model.")
    if old.recipe.centroids:
        raise UserError("No expert of a mixture with centroids can be removed. Compose it again from the others.")
    options = old.recipe.to_dict()
    recipe = read_recipe({**options, "experts": [options["experts"][index] for index in kept]})

    def make_gates(folder: Path) -> Gates:
        values = {layer: gate[kept] for layer, gate in old.gates().items()}
        if recipe.gate_mode != "ridge" or not values:
            return Gates(values, {"mode": recipe.gate_mode})
        if not (folder / FOLDER).is_dir():
            return Gates(values, {"mode": "ridge"}, [f"{old.folder} has no {FOLDER}: gates are not fitted again."])
        (folder / FOLDER / f"{expert}.safetensors").unlink(missing_ok=True)
        fitted = fit_gates(recipe, list(values), folder)
        return Gates(values, fitted.info) if "tuned" in old.record else fitted

    views = [old.views[index] for index in kept]
    return write_mixture(old, recipe, views, make_gates, edited_record(old, recipe, out), out)


def edited_record(old: Mixture, recipe: Recipe, out: str | Path) -> dict[str, Any]:
    """The record of a mixture with another recipe, with the old experts that are in it."""

    def moved(source: dict[str, Any]) -> dict[str, Any]:
        from_old, new = old.folder.resolve(), Path(out).expanduser().resolve()
        return source | {k: os.path.relpath(from_old / source[k], new) for k in ("path", "over") if k in source}

    experts = [moved(expert) for expert in old.record["experts"] if expert["name"] in recipe.names]
    record = {**old.record, "recipe": recipe.to_dict(), "base": moved(old.record["base"]), "experts": experts}
    shared = [name if name in recipe.names else name.removesuffix(REMOVED) + REMOVED for name in old.shared_from]
    return record | ({"shared_from": shared} if recipe.average == "mean" else {})


def write_mixture(
    old: Mixture,
    recipe: Recipe,
    experts: Sequence[Source],
    make_gates: Callable[[Path], Gates],
    record: dict[str, Any],
    out: str | Path,
) -> dict[str, Any]:
    """Writes a mixture of views and new sources with the shared weights of the old one. Gates are made in its folder, beside statistics."""
    kind, factors = mixture_class(recipe, old.shared), Factors(old.shared, recipe.rank) if recipe.rank else None
    recipe = replace(recipe, average="base", dtype=None)
    with new_folder(out) as folder:
        if (old.folder / FOLDER).is_dir():
            shutil.copytree(old.folder / FOLDER, folder / FOLDER)
        gates = make_gates(folder)
        items = mixture_items(recipe, old.shared, experts, kind, gates.values, factors)
        centroids = old.source.specs.get(CENTROIDS) if recipe.centroids else None
        if centroids:
            items.append(Item(CENTROIDS, *centroids, old.shared.name, partial(old.source.__getitem__, CENTROIDS)))
        summary = {"out": str(out), "experts": recipe.names, **summarize(recipe, kind, items)}
        write_tensors(folder, items)
        write_config(folder, mixture_config(recipe, old.shared, kind, centroids and centroids[1][1]))
        if factors:
            known = old.record.get("energies", {}) | factors.means()
            record["energies"] = {name: known[name] for name in recipe.names if name in known}
        record |= {"gates": gates.info or record["gates"], "format": kind.model_type}
        write_record(folder, record | {"written": write_tokenizer(old.folder, folder)}, summary)
    return summary | {"warnings": gates.warnings}


def extract(mixture: str | Path, expert: str, out: str | Path) -> dict[str, Any]:
    """Extracts an expert, given by its name, as a dense model: its own MLPs with the mixture's shared weights. Returns what was written.

    Raises:
        UserError: if the expert does not exist, or `out` is not free.
    """
    old = Mixture(mixture)
    view = old.views[old.index_of(expert)]
    items = [Item(name, *spec, expert, partial(view.__getitem__, name)) for name, spec in view.specs.items()]
    with new_folder(out) as folder:
        write_tensors(folder, items)
        write_config(folder, dense_config(FAMILIES[old.record["family"]], old.source))
        write_tokenizer(old.folder, folder)
    return {"out": str(out), "tensors": len(items), "bytes": sum(item.nbytes for item in items), "expert": expert}


def export(mixture: str | Path, out: str | Path, format: str) -> dict[str, Any]:
    """Writes the same weights in another format. Returns what was written.

    Args:
        format: "lexicon" (supports all policies), the model_type of the family's mixture such as "mixtral" (opens
            without this package), or "gguf" (one file for llama.cpp, see `export_gguf`).
        mixture, out: as in `add`; for "gguf" `out` is a file.

    Raises:
        UserError: if the format cannot represent the mixture.
    """
    if format == "gguf":
        from .gguf_export import export_gguf

        return export_gguf(mixture, out)
    old = Mixture(mixture)
    # by token, centroids name the nearest cluster of a text, and route nothing
    dropped = ("architecture", "rank", "centroids", "embedder") if format in MIXTURES else ("architecture",)
    recipe = read_recipe({**old.recipe.to_dict(), **dict.fromkeys(dropped), "format": format})
    record = edited_record(old, recipe, out)
    if old.recipe.rank and not recipe.rank:
        del record["energies"]
        record["expanded_rank"] = old.recipe.rank
    return write_mixture(old, recipe, old.views, lambda folder: Gates(old.gates()), record, out)
