"""Verifies a mixture: hashes its sources again, computes its tensors again and compares them."""

from pathlib import Path
from typing import Any

import numpy as np

from .checkpoints import Source
from .errors import MergeError
from .gates import gate_without_texts
from .layout import Shape
from .mixture import Mixture
from .plan import CHUNK, OutputTensor, centroid_tensor, plan_tensors, read_centroids
from .shard_writer import Progress
from .tensor_files import equal_blocks, hash_and_scan, read_blocks


def verify(folder: str | Path, *, progress: Progress | None = None) -> dict[str, Any]:
    """Compares a mixture with its sources: SHA-256 of the files, expert tensors byte by byte, means computed again.

    Args:
        folder: the mixture.
        progress: receives the progress of each phase.

    Returns:
        `ok`; `compared`, the number of tensors by group; `faults`, one line per difference; `notes` on what could not be
        compared.

    Raises:
        MergeError: if the mixture or a source cannot be opened.
    """
    mixture, progress = Mixture.open(folder), progress or Progress()
    base, experts = mixture.open_base(), mixture.open_experts()
    sources = [base, *experts]
    faults = changed_files(sources, [mixture.record["base"], *mixture.record["experts"]], progress)
    counts = {"experts": 0, "shared": 0, "gates": 0}
    notes: list[str] = []
    missing = [fault for source in sources for fault in missing_tensors(source, base)]
    if missing:  # the tensors cannot be computed again
        return {"ok": False, "compared": counts, "faults": faults + missing, "notes": notes}
    expected = expected_tensors(mixture, base, experts, notes)
    progress.start("verify", sum(tensor.nbytes for tensor in expected))
    for tensor in expected:
        faults += compare_tensor(tensor, mixture)
        counts[tensor_group(tensor)] += 1
        progress.advance("verify", tensor.nbytes)
    return {"ok": not faults, "compared": counts, "faults": faults, "notes": notes}


def tensor_group(tensor: OutputTensor) -> str:
    """The group in which a tensor is counted."""
    return "gates" if tensor.name.endswith(".gate.weight") else "experts" if ".experts." in tensor.name else "shared"


def expected_tensors(mixture: Mixture, base: Source, experts: list[Source], notes: list[str]) -> list[OutputTensor]:
    """The tensors that can be computed again from the sources; adds a note for those that cannot."""
    recipe, skipped = mixture.recipe, set()
    if not set(mixture.shared_from) <= set(mixture.names):
        notes.append(f"Shared weights were not compared: they are the mean of {', '.join(mixture.shared_from)}.")
        skipped.add("shared")
    if mixture.gated and recipe.gate_mode not in ("random", "zeros"):
        notes.append(f"Gates were not compared: gate_mode={recipe.gate_mode} needs a run of the base model.")
        skipped.add("gates")
    averaged = [expert for expert in experts if expert.name in mixture.shared_from]
    gates = {part.gate: gate_without_texts(recipe, part, mixture.shape, mixture.gate_rows) for part in mixture.gated}
    tensors = plan_tensors(recipe, base, experts, gates, averaged)
    try:
        centroids = read_centroids(recipe)
    except MergeError as error:
        notes.append(f"Centroids were not compared: {error}")
        centroids = None
    if centroids is not None:
        tensors.append(centroid_tensor(centroids))
    return [tensor for tensor in tensors if tensor_group(tensor) not in skipped]


def changed_files(sources: list[Source], records: list[dict], progress: Progress) -> list[str]:
    """One line per source file whose SHA-256 differs from the recorded one."""
    faults, hashes = [], {}
    for source, record in zip(sources, records, strict=True):
        for file, recorded in zip(source.files, record["files"], strict=False):
            if file not in hashes:
                progress.start("read", file.stat().st_size)
                hashes[file] = hash_and_scan(file, [], lambda count: progress.advance("read", count)).sha256
            if hashes[file] != recorded["sha256"]:
                faults.append(f"{source.name}: {file} has changed since the merge.")
        if len(source.files) != len(record["files"]):
            faults.append(f"{source.name}: has {len(source.files)} files; {len(record['files'])} were merged.")
    return faults


def missing_tensors(source: Source, base: Source) -> list[str]:
    """A line for the first tensor that a source no longer has, or has in an incompatible shape."""
    for name, shape in Shape.from_config(base.config).tensors().items():
        if name not in source or source.entry(name).shape[1:] != shape[1:]:
            return [f"{source.name}: {name!r} is missing or has an incompatible shape."]
    return []


def compare_tensor(tensor: OutputTensor, mixture: Mixture) -> list[str]:
    """A line on how the stored tensor differs from the expected one; empty if they are equal bit by bit."""
    entry = mixture.source.entry(tensor.name)
    if (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
        return [f"{tensor.name}: {entry.dtype} {list(entry.shape)} instead of {tensor.dtype} {list(tensor.shape)}."]
    differing, first, position = 0, None, 0
    for expected, stored in zip(equal_blocks(tensor.blocks(), CHUNK), read_blocks(entry, CHUNK), strict=True):
        if not np.array_equal(expected, stored):
            indices = np.flatnonzero(expected != stored)
            differing += len(indices)
            first = position + int(indices[0]) if first is None else first
        position += len(stored)
    if not differing:
        return []
    return [f"{tensor.name}: {differing:,} of {tensor.elements:,} elements differ, starting at element {first}."]
