"""Verifies a mixture: hashes its sources again, computes its tensors and its configuration again, and compares them."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from run_tools.errors import join_names

from .averaging import to_float32
from .checkpoints import Source
from .errors import MergeError
from .gate_modes import GATE_MODES, DrawnMode, RidgeMode
from .gate_statistics import read_statistics, ridge_gates
from .gates import drawn_gate
from .low_rank import product, stored
from .mixture import Mixture
from .output_config import to_json_bytes
from .output_tensors import OutputTensor
from .places import TEMPLATES
from .plan import Gates, Plan, make_plan, read_centroids
from .shard_writer import Progress
from .source_scan import compare_hashes, sha256_of
from .tensor_files import PIECE, equal_blocks, read_blocks

ADDED_BY_TRANSFORMERS = {"transformers_version", "_name_or_path"}  # by save_pretrained
# between computed values, relative to their norm: processors differ by less, but for the rounding of a format
TOLERANCE = {"F32": 1e-3, "F16": 1e-3, "BF16": 8e-3}


def verify(
    folder: str | Path,
    *,
    sources: Mapping[str, str | Path] | None = None,
    sha256: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Compares a mixture with its sources and its record: hashes of the files, expert tensors byte by byte, means computed
    again, config.json key by key, and the tokenizer's files. Experts of low rank and gates of `ridge`, which is computed again from
    the statistics beside the mixture, differ between processors, so they may be off by a relative norm of `TOLERANCE`.

    Args:
        folder: the mixture.
        sources: name of an expert, or "base" -> the folder where it is now, for those that were moved.
        sha256: also computes the SHA-256 of every source file, for comparison with published ones.
        progress: receives the progress of each phase.

    Returns:
        `ok`; `compared`, the number of tensors by group; `faults`, one line per difference; `notes` on what could not be
        compared; with `sha256`, `files`: name of a source -> name of a file -> SHA-256.

    Raises:
        MergeError: if the mixture or a source cannot be opened.
    """
    mixture, progress = Mixture.open(folder, sources), progress or Progress()
    base, experts = mixture.open_base(), mixture.open_experts()
    opened, records = [base, *experts], [mixture.record["base"], *mixture.record["experts"]]
    counts = {"experts": 0, "shared": 0, "gates": 0}
    notes: list[str] = []
    faults = changed_sources(opened, records, notes, progress) + changed_files(mixture, notes)
    result: dict[str, Any] = {"ok": False, "compared": counts, "faults": faults, "notes": notes}
    if sha256:
        result["files"] = {source.name: {file.name: sha256_of(file) for file in source.files} for source in opened}
    missing = [fault for source in opened for fault in missing_tensors(source, base)]
    if missing:  # the tensors cannot be computed again
        faults += missing
        return result
    plan, skipped = expected_plan(mixture, base, experts, notes)
    faults += changed_settings(mixture, plan, skipped, notes)
    expected = [tensor for tensor in plan.tensors if tensor_group(tensor) not in skipped]
    progress.start("verify", sum(tensor.nbytes for tensor in expected))
    by_name, fitted = {t.name: t for t in expected}, isinstance(GATE_MODES[mixture.recipe.gate_mode], RidgeMode)
    for tensor in expected:
        group = tensor_group(tensor)
        if wrong := compare_form(tensor, mixture):
            faults += wrong
        elif group == "factors":
            faults += compare_product(by_name, tensor.name, mixture)
        elif group == "gates" and fitted:
            faults += compare_gate(tensor, mixture)
        else:
            faults += compare_tensor(tensor, mixture)
        counts[group] = counts.get(group, 0) + 1
        progress.advance("verify", tensor.nbytes)
    return {**result, "ok": not faults}


def changed_settings(mixture: Mixture, plan: Plan, skipped: set[str], notes: list[str]) -> list[str]:
    """One line per field of config.json that is not as the merge wrote it; adds a note on fields that it did not write."""
    config, written = mixture.config, json.loads(to_json_bytes(plan.config))
    if "shared" in skipped:
        written["vocab_size"] = mixture.shape.vocab_size
    if "centroids" in skipped:
        written["centroid_size"] = config.get("centroid_size")
    if added := sorted(set(config) - set(written) - ADDED_BY_TRANSFORMERS):
        notes.append(f"config.json has fields that the merge did not write: {join_names(added)}.")
    return [
        f"config.json: {key} is {config.get(key, 'not set')!r:.80} instead of {value!r:.80}."
        for key, value in written.items()
        if config.get(key) != value  # null and no value mean the same
    ]


def changed_files(mixture: Mixture, notes: list[str]) -> list[str]:
    """One line per file beside the weights (tokenizer, generation settings) that is missing or has changed."""
    written = mixture.record.get("written")
    if not isinstance(written, dict):
        notes.append("The tokenizer's files were not compared: the record does not list them.")
        return []
    faults = []
    for name, digest in written.items():
        template = Path(name).parts[:-1] == (TEMPLATES,)
        path = mixture.folder / (TEMPLATES if template else "") / Path(name).name
        if not path.is_file():
            faults.append(f"{name} is missing. It was written with the mixture.")
        elif hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            faults.append(f"{name} has changed since the merge.")
    return faults


def tensor_group(tensor: OutputTensor) -> str:
    """The group in which a tensor is counted."""
    if tensor.name.endswith(".gate.weight"):
        return "gates"
    if ".experts." not in tensor.name:
        return "shared"
    return "factors" if tensor.name.endswith((".A.weight", ".B.weight")) else "experts"


def expected_plan(mixture: Mixture, base: Source, experts: list[Source], notes: list[str]) -> tuple[Plan, set[str]]:
    """The plan by which the mixture was made, and what cannot be computed again from the sources; adds a note for each of these."""
    recipe, skipped, gates = mixture.recipe, set(), dict[str, np.ndarray]()
    if not set(mixture.shared_from) <= set(mixture.names):
        notes.append(f"Shared weights were not compared: they are merged from {', '.join(mixture.shared_from)}.")
        skipped.add("shared")
    if mixture.gated and "tuned" in mixture.record:
        notes.append("Gates were not compared: they were tuned after the merge.")
        skipped.add("gates")
    elif mixture.gated:
        try:
            gates = expected_gates(mixture)
        except MergeError as error:
            notes.append(f"Gates were not compared: {error}")
            skipped.add("gates")
    if "expanded_rank" in mixture.record:
        notes.append(f"Experts were not compared: they were of rank {mixture.record['expanded_rank']}.")
        skipped.add("experts")
    try:
        place = mixture.locate(recipe.centroids) if recipe.centroids else None
        centroids = read_centroids(replace(recipe, centroids=str(place)) if place else recipe)
    except MergeError as error:
        notes.append(f"Centroids were not compared: {error}")
        centroids = None
        skipped.add("centroids")
    averaged = [expert for expert in experts if expert.name in mixture.shared_from]
    plan = make_plan(recipe, base, experts, centroids, averaged)
    plan.set_gates(Gates(gates, mixture.record["gates"]))
    return plan, skipped


def expected_gates(mixture: Mixture) -> dict[str, np.ndarray]:
    """The gates of a mixture, drawn again or fitted again to the statistics beside it.

    Raises:
        MergeError: if its mode needs texts or the experts' own gates, or its statistics are missing or damaged.
    """
    recipe, mode = mixture.recipe, GATE_MODES[mixture.recipe.gate_mode]
    if isinstance(mode, RidgeMode):
        return ridge_gates(mixture.gated, read_statistics(mixture.folder, mixture.record["gates"])).values
    if not isinstance(mode, DrawnMode):
        raise MergeError(f"gate_mode={recipe.gate_mode} is computed from texts or read from the experts.")
    return {part.gate: drawn_gate(recipe, part, mixture.shape, mixture.gate_rows) for part in mixture.gated}


def changed_sources(sources: list[Source], records: list[dict], notes: list[str], progress: Progress) -> list[str]:
    """One line per source file whose hash differs from the recorded one."""
    faults, equal = [], {}
    for source, record in zip(sources, records, strict=True):
        for file, recorded in zip(source.files, record["files"], strict=False):
            key = (file, recorded.get("xxh3"), recorded.get("sha256"))
            if key not in equal:
                progress.start("read", file.stat().st_size)
                advance = partial(progress.advance, "read")
                equal[key] = compare_hashes(file, source.tensors_of(file), recorded, advance)
            if equal[key] is None:
                notes.append(f"{source.name}: {file} was not hashed when it was merged.")
            if equal[key] is False or file.stat().st_size != recorded["bytes"]:
                faults.append(f"{source.name}: {file} has changed since the merge.")
        if len(source.files) != len(record["files"]):
            faults.append(f"{source.name}: has {len(source.files)} files; {len(record['files'])} were merged.")
    return faults


def missing_tensors(source: Source, base: Source) -> list[str]:
    """A line for the first tensor that a source no longer has, or has in an incompatible shape."""
    for name, shape in base.shape.tensors().items():
        if name not in source or source.entry(name).shape[1:] != shape[1:]:
            return [f"{source.name}: {name!r} is missing or has an incompatible shape."]
    return []


def compare_form(tensor: OutputTensor, mixture: Mixture) -> list[str]:
    """A line if the stored tensor has another type or shape than the expected one."""
    entry = mixture.source.entry(tensor.name)
    if (entry.dtype, entry.shape) == (tensor.dtype, tensor.shape):
        return []
    return [f"{tensor.name}: {entry.dtype} {list(entry.shape)} instead of {tensor.dtype} {list(tensor.shape)}."]


def compare_tensor(tensor: OutputTensor, mixture: Mixture) -> list[str]:
    """A line on how the stored tensor differs from the expected one; empty if they are equal bit by bit."""
    entry = mixture.source.entry(tensor.name)
    differing, first, position = 0, None, 0
    for expected, found in zip(equal_blocks(tensor.blocks(), PIECE), read_blocks(entry, PIECE), strict=True):
        if not np.array_equal(expected, found):
            indices = np.flatnonzero(expected != found)
            differing += len(indices)
            first = position + int(indices[0]) if first is None else first
        position += len(found)
    if not differing:
        return []
    return [f"{tensor.name}: {differing:,} of {tensor.elements:,} elements differ, starting at element {first}."]


def compare_gate(tensor: OutputTensor, mixture: Mixture) -> list[str]:
    """As `compare_tensor` for a gate that was fitted again, within the tolerance."""
    expected = to_float32(np.concatenate(list(tensor.blocks())), tensor.dtype).reshape(tensor.shape)
    return compare_values(tensor.name, tensor.dtype, expected, stored(mixture.source, tensor.name))


def compare_product(tensors: dict[str, OutputTensor], name: str, mixture: Mixture) -> list[str]:
    """As `compare_gate` for the product of an expert's two factors, which is compared where its A is expected."""
    other = name.removesuffix("A.weight") + "B.weight"
    if not name.endswith(".A.weight") or compare_form(
        tensors[other], mixture
    ):  # its own comparison reports the form of B
        return []
    found = stored(mixture.source, other) @ stored(mixture.source, name)
    return compare_values(f"{name} and {other}", tensors[name].dtype, product(tensors[name]), found)


def compare_values(name: str, dtype: str, expected: np.ndarray, found: np.ndarray) -> list[str]:
    """A line if values differ by more than the tolerance."""
    difference = float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30))
    if difference <= TOLERANCE.get(dtype, TOLERANCE["F32"]):
        return []
    return [f"{name}: values differ by {difference:.1%} of their norm."]
