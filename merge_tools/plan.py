"""The plan of a mixture: every tensor to be written and the sources that it is computed from, and its configuration."""

import math
import os
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from run_tools.versions import __version__

from .averages import AVERAGES
from .averaging import from_float, to_float32
from .checkpoints import Source
from .errors import MergeError
from .findings import Report
from .layout import RoutedPart, Shape, mixture_layout
from .low_rank import energies, factor_tensors
from .output_config import mixture_config, output_format
from .output_tensors import CENTROIDS, OutputTensor, copy_tensor, zeros
from .places import places_beside
from .provenance import source_record
from .recipe import Recipe, all_parts, gated_parts
from .slices import MEAN, Slice
from .source_scan import ScanResult
from .tensor_files import FLOATS, TORCH_NAMES, has_nonfinite, read_all, read_header
from .tokenizers import named_source
from .vocabulary_rows import VOCABULARY_TENSORS, VocabularyRows, vocabulary_rows


@dataclass
class Gates:
    """The first values of gates.

    Attributes:
        values: name of a gate -> `(E, d)`, float32.
        info: how they were made, for the merge record.
        statistics: what is saved beside the mixture to compute them again.
        warnings: what the user should know.
    """

    values: dict[str, np.ndarray] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    statistics: list[OutputTensor] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass
class Plan:
    """Everything about a mixture except its bytes. Gates are zero until `set_gates`."""

    recipe: Recipe
    base: Source
    experts: list[Source]
    format: str  # model_type of the mixture
    tensors: list[OutputTensor]
    config: dict[str, Any]
    report: Report = field(default_factory=Report)
    gates: Gates = field(default_factory=Gates)

    def set_gates(self, gates: Gates) -> None:
        """Sets the values of gates."""
        self.gates, values = gates, gates.values
        self.tensors = [
            replace(t, values=from_float(values[t.name], t.dtype)) if t.name in values else t for t in self.tensors
        ]

    @cached_property
    def sizes(self) -> dict[str, int]:
        """`bytes`, `parameters` and `active_parameters`, those that are active per token."""
        return measure(self.recipe, self.tensors)

    def summary(self) -> dict[str, Any]:
        """Format, experts, size on disk and in memory, parameters in total and active per token."""
        summary = {"format": self.format, "experts": self.recipe.names, "tensors": len(self.tensors)}
        return {**summary, **self.sizes, "memory_bytes": self.sizes["bytes"]}

    def record(self, scans: dict[Path, ScanResult], out: Path) -> dict[str, Any]:
        """The content of merge_record.json, from which a mixture can be verified, extended and taken apart."""
        record: dict[str, Any] = {
            "made_by": f"lexperts {__version__}",
            "family": self.base.shape.family.model_type,
            "format": self.format,
            "recipe": self.recipe.to_dict(),
            "base": source_record(self.base, scans),
            "experts": [source_record(expert, scans) for expert in self.experts],
            "gates": self.gates.info,
        }
        if self.recipe.rank:
            record["energies"] = energies(self.tensors, len(self.experts))
        return record | {"beside": places_beside(record, out)}


def make_plan(
    recipe: Recipe,
    base: Source,
    experts: list[Source],
    centroids: np.ndarray | None = None,
    averaged: list[Source] | None = None,
) -> Plan:
    """The plan of a recipe that passed the preflight.

    Args:
        centroids: of the experts' clusters, `(E, size)`, float32, to be stored with the mixture.
        averaged: the experts that weights without routing are merged from; default: all.
    """
    tensors, format = plan_tensors(recipe, base, experts, averaged), output_format(recipe, base)
    vocab_size, size = tensors[0].shape[0], None if centroids is None else centroids.shape[1]
    if centroids is not None:
        values = centroids.view("<u4")
        tensors.append(OutputTensor(CENTROIDS, "F32", centroids.shape, values=values))
    config = mixture_config(recipe, base, format, vocab_size, size, named_source(recipe, experts))
    return Plan(recipe, base, experts, format, tensors, config)


def plan_tensors(
    recipe: Recipe, base: Source, experts: list[Source], averaged: list[Source] | None = None
) -> list[OutputTensor]:
    """All tensors of the mixture in the order in which a forward pass uses them, with gates of zeros."""
    shape, tensors = base.shape, []
    parts, with_gate = all_parts(recipe, shape), gated_parts(recipe, shape)
    weights = {id(expert): e.weight for expert, e in zip(experts, recipe.experts, strict=True)}
    averaged = experts if averaged is None else averaged
    rows = vocabulary_rows(recipe, base, averaged)
    for item in mixture_layout(shape, parts):
        first = item if isinstance(item, str) else item.expert_tensors(shape)[0][0]
        dtype = FLOATS[recipe.dtype] if recipe.dtype else base.entry(first).dtype
        if isinstance(item, str):
            tensors.append(shared_tensor(item, dtype, recipe, base, averaged, weights, rows))
            continue
        if item in with_gate:
            tensors.append(zeros(item.gate, dtype, (len(experts), item.input_size(shape))))
        for index, expert in enumerate(experts):
            tensors += expert_tensors(item, index, shape, dtype, base, expert)
        tensors += [copy_tensor(name, dense, dtype, base) for name, dense in item.base_tensors().items()]
        tensors += zero_tensors(item, shape, dtype)
    return tensors


def expert_tensors(
    part: RoutedPart, index: int, shape: Shape, dtype: str, base: Source, expert: Source
) -> list[OutputTensor]:
    """The tensors of an expert at a router, as its expert of this index."""
    if part.rank:
        return factor_tensors(part, index, shape, dtype, base, expert)
    return [
        copy_tensor(part.expert(index, suffix), dense, dtype, expert) for dense, suffix in part.expert_tensors(shape)
    ]


def zero_tensors(part: RoutedPart, shape: Shape, dtype: str) -> list[OutputTensor]:
    """The tensors of the shared expert of a routed part, all zero, if its class has one."""
    return [zeros(name, dtype, size) for name, size in part.zero_tensors(shape).items()]


def read_centroids(recipe: Recipe) -> np.ndarray | None:
    """Reads the only tensor of `recipe.centroids` as float32 of shape `(E, size)`; None if the recipe has no centroids.

    Raises a `MergeError` if the file is missing, holds other tensors, or holds values that are not finite.
    """
    if recipe.centroids is None:
        return None
    path = Path(recipe.centroids)
    if not os.path.isfile(path):
        raise MergeError(f"centroids={str(path)!r:.300} does not exist. Give the centroids.safetensors of `cluster`.")
    entries = read_header(path)
    if len(entries) != 1 or len(entries[0].shape) != 2 or entries[0].shape[0] != len(recipe.experts):
        shapes = [list(entry.shape) for entry in entries[:4]]
        raise MergeError(
            f"{path} holds tensors of shapes {shapes}; expected one tensor of shape ({len(recipe.experts)}, size), with "
            "one centroid per expert in the order of the experts."
        )
    (entry,) = entries
    raw = read_all(entry)
    if entry.dtype not in TORCH_NAMES or has_nonfinite(raw, entry.dtype):
        raise MergeError(f"{path} (dtype {entry.dtype}) holds values that are not finite numbers. Run `cluster` again.")
    return np.ascontiguousarray(to_float32(raw, entry.dtype).reshape(entry.shape))


def shared_tensor(
    name: str,
    dtype: str,
    recipe: Recipe,
    base: Source,
    experts: list[Source],
    weights: dict[int, float],
    vocabulary: VocabularyRows,
) -> OutputTensor:
    """A tensor that is not routed, by `recipe.average`. Rows of tokens that only some experts have are their mean.

    `weights` maps the `id` of an expert to its weight in the mean.
    """
    average, sources, shape = AVERAGES[recipe.average], [base, *experts], base.entry(name).shape
    width, of_tokens = math.prod(shape[1:]), name in VOCABULARY_TENSORS
    stops = vocabulary.stops({source.entry(name).shape[0] for source in sources}) if of_tokens else [shape[0]]
    slices: list[Slice] = []
    start = 0
    for stop in stops:
        owners = vocabulary.owners(stop) if of_tokens else None
        owning = [e for e in experts if owners and e.name in owners and e.entry(name).shape[0] >= stop]
        for group in (owning, average.sources(base, experts, weights), experts, [base]):
            group = [source for source in group if source.entry(name).shape[0] >= stop]
            if group:
                break
        shares = [weights.get(id(source), 1.0) for source in group]
        shares = shares if sum(shares) > 0 else [1.0] * len(group)
        in_base = stop <= shape[0] and group != [base] and not owning  # other rows have no task vector
        chosen = average if in_base and (len(group) > 1 or average.of_differences) else MEAN
        part = Slice(
            name, tuple(group), tuple(share / sum(shares) for share in shares), start * width, stop * width, chosen,
            base if chosen.of_differences else None, recipe.density or 1.0, recipe.seed,
        )  # fmt: skip
        if slices and slices[-1].kind == part.kind:
            part = replace(part, start=slices.pop().start)
        slices.append(part)
        start = stop
    return OutputTensor(name, dtype, (start, *shape[1:]), tuple(slices))


def measure(recipe: Recipe, tensors: list[OutputTensor]) -> dict[str, int]:
    """The size of a mixture in bytes, its number of parameters, and how many of them are active per token."""
    total = sum(t.elements for t in tensors)
    active = active_parameters(recipe, total, sum(t.elements for t in tensors if ".experts." in t.name))
    return {"bytes": sum(t.nbytes for t in tensors), "parameters": total, "active_parameters": active}


def active_parameters(recipe: Recipe, total: int, in_experts: int) -> int:
    """The parameters that are active per token, of `total` parameters with `in_experts` in all experts together."""
    count = len(recipe.experts)
    selected = {"token": recipe.experts_per_token, "sequence_soft": count}.get(recipe.routing_policy, 1)
    return total - in_experts * (count - selected) // count
