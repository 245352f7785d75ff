"""A mixture on disk: read back into what it was made of, inspected, and held against its sources."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .agreement import configuration_faults
from .averaging import to_float32
from .checks import read_centroids
from .errors import MergeError
from .gates import random_row
from .llama import LlamaShape, RoutedPart, gated_parts, rope_parameters, routed_parts
from .planning import CHUNK, OutputTensor, at_work, plan
from .recipe import Recipe, read_recipe
from .records import RECORD, read_record
from .sources import Source, open_checkpoint, open_source, whole
from .tensor_files import audit, read_blocks
from .writing import Progress


@dataclass
class Mixture:
    """A folder written by `compose`, `add`, `remove` or `export`."""

    source: Source
    record: dict[str, Any]
    recipe: Recipe

    @classmethod
    def open(cls, folder: str | Path) -> "Mixture":
        """
        Raises:
            MergeError: for a folder that is no mixture of ours, or whose files do not fit together.
        """
        folder = Path(folder).expanduser()
        record = read_record(folder)
        source = Source("mixture", str(folder), open_checkpoint(folder))
        faults = configuration_faults(source.config)
        if faults:
            raise MergeError(f"{folder / 'config.json'} is damaged: {faults[0]}. Copy or compose the mixture again.")
        try:
            mixture = cls(source, record, read_recipe(record["recipe"]))
            for given in [record["base"], *record["experts"]]:
                if not all(isinstance(given[key], str) for key in ("name", "source")) or not given["files"]:
                    raise MergeError(
                        f"{folder / RECORD} does not say what {given['name']!r} was made of. Compose again."
                    )
                for file in given["files"]:
                    file["name"], file["sha256"]
            expected = mixture.layout()
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise MergeError(
                f"{folder / RECORD} is damaged ({error!r:.80}). Copy or compose the mixture again."
            ) from error
        missing = [name for name in expected if name not in mixture.source]
        if missing:
            raise MergeError(f"{folder} lacks the tensor {missing[0]!r}, though its record speaks of it.")
        return mixture

    @property
    def folder(self) -> Path:
        return self.source.checkpoint.folder

    @property
    def config(self) -> dict[str, Any]:
        return self.source.config

    @property
    def names(self) -> list[str]:
        return self.recipe.names

    @property
    def shared_from(self) -> list[str]:
        """The experts whose mean the shared weights are."""
        return self.record.get("shared_from", self.names)

    @property
    def gate_rows(self) -> list[int]:
        """By which number each expert's random gate row was drawn: its place, until others were removed."""
        return self.record.get("gate_rows", list(range(len(self.names))))

    @property
    def next_row(self) -> int:
        return max(self.gate_rows) + 1

    @cached_property
    def shape(self) -> LlamaShape:
        return LlamaShape.of(self.config)

    @property
    def parts(self) -> list[RoutedPart]:
        return routed_parts(self.shape.layers, self.recipe.router_layers, self.recipe.router_layers_index)

    @property
    def gated(self) -> list[RoutedPart]:
        return gated_parts(self.recipe, self.shape.layers)

    def layout(self) -> list[str]:
        """The names of its tensors, in the order of the plan."""
        owner = {dense: part for part in self.parts for dense, _ in part.expert_tensors(self.shape)}
        names, begun = [], set()
        for name in self.shape.tensors():
            part = owner.get(name)
            if part is None:
                names.append(name)
            elif part not in begun:
                begun.add(part)
                names += [part.gate] * (part in self.gated)
                names += [
                    part.expert(e, suffix)
                    for e in range(len(self.names))
                    for _, suffix in part.expert_tensors(self.shape)
                ]
        return names + ["domain_centroids"] * ("domain_centroids" in self.source)

    def index_of(self, name: str) -> int:
        if name not in self.names:
            raise MergeError(f"There is no expert {name!r} in {self.folder}. Its experts: {', '.join(self.names)}.")
        return self.names.index(name)

    def gate(self, part: RoutedPart) -> np.ndarray:
        """(E, d) raw elements."""
        raw, _ = whole(self.source.entry(part.gate))
        return raw.reshape(self.source.entry(part.gate).shape)

    def open_base(self) -> Source:
        given = self.record["base"]["source"]
        return open_source("base", given)

    def open_experts(self) -> list[Source]:
        return [open_source(e.name, e.source_model, self.recipe.base_model) for e in self.recipe.experts]


def inspect(folder: str | Path) -> dict[str, Any]:
    """What a mixture is made of: experts and their origin, parameters, gates, files."""
    mixture = Mixture.open(folder)
    entries = mixture.source.checkpoint.entries
    elements = {name: int(np.prod(entry.shape, dtype=np.int64)) for name, entry in entries.items()}
    total = sum(elements.values())
    in_experts = sum(count for name, count in elements.items() if ".experts." in name)
    recipe, count = mixture.recipe, len(mixture.names)
    return {
        "folder": str(mixture.folder),
        "format": mixture.record["format"],
        "made_by": mixture.record["made_by"],
        "routing_policy": recipe.routing_policy,
        "experts_per_token": recipe.experts_per_token,
        "router_layers": recipe.router_layers,
        "router_layers_index": recipe.router_layers_index,
        "shared": f"the base's ({mixture.record['base']['source']})"
        if recipe.average == "base"
        else f"the mean of {', '.join(mixture.shared_from)}",
        "rope": rope_parameters(mixture.config),
        "tied": mixture.shape.tied,
        "parameters": total,
        "active_parameters": at_work(recipe, total, in_experts),
        "parameters_per_expert": in_experts // count,
        "bytes": sum(entry.nbytes for entry in entries.values()),
        "experts": mixture.record["experts"],
        "base": mixture.record["base"],
        "gate_mode": recipe.gate_mode,
        "gates": [gate_facts(mixture, part) for part in mixture.gated],
    }


def gate_facts(mixture: Mixture, part: RoutedPart) -> dict[str, Any]:
    """Condition number of the gate (large: two experts are hardly told apart), and the norms of its rows."""
    gate = to_float32(mixture.gate(part), mixture.source.entry(part.gate).dtype).astype(np.float64)
    singular = np.linalg.svd(gate, compute_uv=False)
    condition = float(singular[0] / singular[-1]) if singular[-1] > 0 else float("inf")
    norms = np.linalg.norm(gate, axis=1)
    return {
        "layer": part.layer,
        "part": part.part,
        "condition_number": round(condition, 3) if np.isfinite(condition) else None,
        "row_norms": [round(float(norm), 4) for norm in norms],
    }


def verify(folder: str | Path, *, progress: Progress | None = None) -> dict[str, Any]:
    """Holds a mixture against its sources: their files by sha256, expert tensors by their bytes, averages done again.

    Returns:
        `ok`; the counts of tensors compared; `faults`, one line each; `notes`, what could not be compared and why.
    """
    mixture, progress = Mixture.open(folder), progress or Progress()
    base, experts = mixture.open_base(), mixture.open_experts()
    sources = [base, *experts]
    faults = changed_files(sources, [mixture.record["base"], *mixture.record["experts"]], progress)
    counts, notes = {"experts": 0, "shared": 0, "gates": 0}, []
    unlike = [fault for source in sources for fault in other_tensors(source, base)]
    if unlike:  # there is nothing to do again
        return {"ok": False, "compared": counts, "faults": faults + unlike, "notes": notes}
    expected = expected_tensors(mixture, base, experts, notes)
    progress.start("verify", sum(tensor.nbytes for tensor in expected))
    for tensor in expected:
        faults += difference(tensor, mixture)
        counts[kind_of(tensor)] += 1
        progress.advance("verify", tensor.nbytes)
    return {"ok": not faults, "compared": counts, "faults": faults, "notes": notes}


def kind_of(tensor: OutputTensor) -> str:
    return "gates" if tensor.name.endswith(".gate.weight") else "experts" if ".experts." in tensor.name else "shared"


def expected_tensors(mixture: Mixture, base: Source, experts: list[Source], notes: list[str]) -> list[OutputTensor]:
    """What the mixture should hold, as far as its sources tell; a note on what they do not."""
    recipe, skipped = mixture.recipe, set()
    if not set(mixture.shared_from) <= set(mixture.names):
        notes.append(f"The shared weights are made of {', '.join(mixture.shared_from)}: they are not compared.")
        skipped.add("shared")
    if mixture.gated and recipe.gate_mode not in ("random", "zeros"):
        notes.append(f"Gates of the mode {recipe.gate_mode} are not compared: making them needs a model.")
        skipped.add("gates")
    averaged = [expert for expert in experts if expert.name in mixture.shared_from]
    tensors = plan(recipe, base, experts, gates_again(mixture), averaged)
    try:
        centroids = read_centroids(recipe)
    except MergeError as error:
        notes.append(f"The centroids are not compared: {error}")
        centroids = None
    if centroids is not None:
        tensors.append(OutputTensor("domain_centroids", "F32", centroids.shape, given=centroids.view("<u4")))
    return [tensor for tensor in tensors if kind_of(tensor) not in skipped]


def gates_again(mixture: Mixture) -> dict[str, np.ndarray]:
    """Random gates drawn again, others as zeros."""
    recipe, shape = mixture.recipe, mixture.shape
    gates = {part.gate: np.zeros((len(mixture.names), part.input_size(shape)), np.float32) for part in mixture.gated}
    if recipe.gate_mode == "random":
        for part in mixture.gated:
            width = part.input_size(shape)
            gates[part.gate] = np.stack([random_row(recipe.seed, part, n, width) for n in mixture.gate_rows])
    return gates


def changed_files(sources: list[Source], records: list[dict], progress: Progress) -> list[str]:
    """Source files whose sha256 is no longer the recorded one."""
    faults, known = [], {}
    for source, record in zip(sources, records, strict=True):
        for file, noted in zip(source.files, record["files"], strict=False):
            if file not in known:
                progress.start("read", file.stat().st_size)
                known[file] = audit(file, [], lambda count: progress.advance("read", count)).sha256
            if known[file] != noted["sha256"]:
                faults.append(f"{source.name}: {file} has changed since the merge.")
        if len(source.files) != len(record["files"]):
            faults.append(f"{source.name}: has {len(source.files)} files where {len(record['files'])} were merged.")
    return faults


def other_tensors(source: Source, base: Source) -> list[str]:
    """A line on the first tensor that a source no longer has, or has in a shape that fits no mixture with this base."""
    for name, shape in LlamaShape.of(base.config).tensors().items():
        if name not in source or source.entry(name).shape[1:] != shape[1:]:
            return [f"{source.name}: {name!r} is no longer there, or no longer fits."]
    return []


def difference(tensor: OutputTensor, mixture: Mixture) -> list[str]:
    """A line on how the stored tensor differs from what it should be; none where every bit agrees."""
    entry = mixture.source.entry(tensor.name)
    if (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
        return [f"{tensor.name}: {entry.dtype} {list(entry.shape)} instead of {tensor.dtype} {list(tensor.shape)}."]
    wrong, first = 0, None
    at = 0
    for ours, theirs in zip(same_blocks(tensor), read_blocks(entry, CHUNK), strict=True):
        if not np.array_equal(ours, theirs):
            places = np.flatnonzero(ours != theirs)
            wrong += len(places)
            first = at + int(places[0]) if first is None else first
        at += len(theirs)
    if not wrong:
        return []
    return [f"{tensor.name}: {wrong:,} of {tensor.elements:,} elements differ, from element {first}."]


def same_blocks(tensor: OutputTensor) -> Iterator[np.ndarray]:
    """The tensor's blocks, cut to CHUNK elements each."""
    rest = np.empty(0, f"<u{tensor.nbytes // max(tensor.elements, 1)}")
    for block in tensor.blocks():
        if not len(rest) and len(block) == CHUNK:
            yield block
            continue
        rest = np.concatenate([rest, block])
        while len(rest) >= CHUNK:
            yield rest[:CHUNK]
            rest = rest[CHUNK:]
    if len(rest):
        yield rest
