"""Verifies a mixture: hashes its sources again, makes its tensors and its configuration again, and compares them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from run_tools.errors import UserError
from run_tools.files import sha256_of

from .check import mixture_class
from .compose import CENTROIDS, centroid_items, mixture_items
from .gates import fit_gates, random_rows
from .low_rank import Factors
from .mixture import Mixture
from .output import mixture_config
from .record import Hashes
from .sources import Source, read_json
from .writer import Item

# between computed values, relative to their norm: processors differ by less, but for the rounding of a format
TOLERANCE = {"F32": 1e-3, "F16": 1e-3, "BF16": 8e-3}


def verify(folder: str | Path, *, sources: Mapping[str, str | Path] | None = None) -> dict[str, Any]:
    """Compares a mixture with its sources and its record: hashes of the files, expert tensors bit by bit, means computed again, config.json
    key by key, and the tokenizer's files. Experts of low rank and gates of `ridge`, which is computed again from the statistics beside the
    mixture, differ between processors, so they may be off by a relative norm of `TOLERANCE`.

    Args:
        folder: the mixture.
        sources: name of an expert, or "base" -> the folder where it is now, for those that were moved.

    Returns:
        `ok`; `compared`, the number of tensors by group; `faults`, one line per difference; `notes` on what could not be compared.

    Raises:
        UserError: if the mixture or a source cannot be opened.
    """
    mixture = Mixture(folder, sources)
    base, experts = mixture.open_source("base"), [mixture.open_source(name) for name in mixture.names]
    written = read_json(mixture.folder / "config.json")
    items, skipped, notes = expected_items(mixture, base, experts)
    size = mixture.source.specs[CENTROIDS][1][1] if CENTROIDS in mixture.source.specs else None
    expected = mixture_config(mixture.recipe, base, mixture_class(mixture.recipe, base), size)
    faults = changed_files(mixture, [base, *experts])
    faults += [
        f"config.json: {key} is {found!r:.80} instead of {value!r:.80}."
        for key, value in expected.items()
        if (found := written.get(key)) != value  # null and no value mean the same
    ]
    extra = mixture.source.specs.keys() - {item.name for item in items} - {CENTROIDS}
    faults += [f"{name} is not a tensor of the merge." for name in sorted(extra)]
    counts = dict.fromkeys(("experts", "shared", "gates"), 0)
    for item in tqdm(items, desc="comparing", unit="tensor", disable=None):
        if (group := group_of(item.name)) not in skipped:
            faults += compare(item, mixture)
            counts[group] += 1
    return {"ok": not faults, "compared": counts, "faults": faults, "notes": notes}


def group_of(name: str) -> str:
    """The group in which a tensor is counted."""
    return "gates" if name.endswith(".gate.weight") else "experts" if ".experts." in name else "shared"


def expected_items(mixture: Mixture, base: Source, experts: list[Source]) -> tuple[list[Item], set[str], list[str]]:
    """The items of which the mixture was made, the groups that cannot be made again, and a note on each of these."""
    recipe, gates, skipped, notes = mixture.recipe, mixture.gates(), set(), []
    averaged = [expert for expert in experts if expert.name in mixture.shared_from]
    if len(averaged) < len(mixture.shared_from):
        notes.append(f"Shared weights were not compared: they are the mean over {', '.join(mixture.shared_from)}.")
        skipped.add("shared")
    if "expanded_rank" in mixture.record:
        notes.append(f"Experts were not compared: they were of rank {mixture.record['expanded_rank']}.")
        skipped.add("experts")
    try:
        gates = expected_gates(mixture, base, gates)
    except UserError as error:
        notes.append(f"Gates were not compared: {error}")
        skipped.add("gates")
    factors = Factors(base, recipe.rank, recipe.dtype) if recipe.rank else None
    items = mixture_items(recipe, base, experts, mixture_class(recipe, base), gates, factors, averaged)
    if CENTROIDS in mixture.source.specs:
        try:
            items += centroid_items(recipe)
        except UserError as error:
            notes.append(f"Centroids were not compared: {error}")
    return items, skipped, notes


def expected_gates(mixture: Mixture, base: Source, gates: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """The gates of a mixture, drawn again or fitted again to the statistics beside it. Raises a `UserError` if that is not possible."""
    recipe, layers = mixture.recipe, list(gates)
    if "tuned" in mixture.record:
        raise UserError("they were tuned after the merge.")
    if recipe.gate_mode == "ridge" and layers:
        return fit_gates(recipe, layers, mixture.folder).values
    if recipe.gate_mode not in ("random", "none"):
        raise UserError(f"gate_mode: {recipe.gate_mode} computes them from texts.")
    rows = [expert["row"] for expert in mixture.record["experts"]]
    return {layer: random_rows(recipe.seed, layer, base.config.hidden_size, rows) for layer in layers}


def compare(item: Item, mixture: Mixture) -> list[str]:
    """A line on how the stored tensor differs from the expected one; empty if they are equal, or equal enough for one that is computed."""
    if item.name not in mixture.source.specs:
        return [f"{item.name} is missing."]
    found, expected = mixture.source[item.name], item.value()
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return [f"{item.name} is {found.dtype} {list(found.shape)} instead of {expected.dtype} {list(expected.shape)}."]
    if torch.equal(found, expected):
        return []
    factor = item.name.endswith((".A.weight", ".B.weight"))
    if factor or (group_of(item.name) == "gates" and mixture.recipe.gate_mode == "ridge"):
        # singular vectors may have the other sign
        ours, theirs = (value.double().abs() if factor else value.double() for value in (found, expected))
        difference = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))
        same = difference <= TOLERANCE[item.dtype]
        return [] if same else [f"{item.name}: values differ by {difference:.1%} of their norm."]
    return [f"{item.name}: {int((found != expected).sum()):,} of {found.numel():,} elements differ."]


def changed_files(mixture: Mixture, sources: list[Source]) -> list[str]:
    """One line per file of a source, and per file beside the weights (tokenizer, generation settings), whose SHA-256 is not the recorded one."""
    faults, hashes = [], Hashes(sources)
    for source, record in zip(sources, [mixture.record["base"], *mixture.record["experts"]], strict=True):
        found = hashes.of(source)
        names = [name for name in found | record["files"] if found.get(name) != record["files"].get(name)]
        faults += [f"{source.name}: {name} has changed since the merge." for name in names]
    for name, digest in mixture.record["written"].items():
        path = mixture.folder / Path(name).name
        if not path.is_file() or sha256_of(path) != digest:
            faults.append(f"{name} {'has changed since the merge' if path.is_file() else 'is missing'}.")
    return faults
