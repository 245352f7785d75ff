"""The plan of a mixture: every tensor to be written and the sources that it is computed from."""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from .averaging import from_float, mean_equal, mean_float64, to_float32, view
from .checkpoints import Source, read_all
from .errors import MergeError
from .layout import RoutedPart, Shape, all_parts, gated_parts, mixture_layout
from .recipe import Recipe
from .task_vectors import TASK_METHODS, TaskMerge
from .tensor_files import DTYPE_BYTES, FLOATS, PIECE, TORCH_NAMES, TensorEntry, has_nonfinite, read_blocks, read_header
from .vocabulary_rows import VOCABULARY_TENSORS, VocabularyRows, vocabulary_rows

CHUNK = PIECE  # elements: the inputs and the sum of a mean stay in the processor's cache


@dataclass(frozen=True)
class Slice:
    """Elements `start` to `stop` of a tensor: the weighted mean of these elements in some sources, or their task vectors."""

    sources: tuple[Source, ...]
    weights: tuple[float, ...]  # sum to 1
    start: int
    stop: int
    merge: TaskMerge | None = None  # how task vectors are merged instead of a mean

    def key(self, tensor: str) -> tuple:
        """Everything that determines the values, for the fingerprint of a run."""
        locations = [(s.origin, tensor, str(s.entry(tensor).file)) for s in self.sources]
        values = locations, self.weights, self.start, self.stop
        return (*values, self.merge.key(tensor, self.sources)) if self.merge else values


@dataclass(frozen=True)
class OutputTensor:
    """A tensor of the mixture: slices of the sources' `tensor`, or the raw elements `values`."""

    name: str
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    tensor: str = ""
    slices: tuple[Slice, ...] = ()
    values: np.ndarray | None = None

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.elements * DTYPE_BYTES[self.dtype]

    @property
    def copy_source(self) -> TensorEntry | None:
        """The stored tensor that can be copied byte by byte, or None if the tensor has to be computed."""
        if len(self.slices) != 1 or len(self.slices[0].sources) != 1 or self.slices[0].merge:
            return None
        source = self.slices[0].sources[0]
        entry = source.entry(self.tensor)
        same = entry.dtype == self.dtype and entry.nbytes == self.nbytes
        return entry if same and source.is_verbatim(self.tensor) else None

    def entries(self) -> list[TensorEntry]:
        """The stored tensors that it is computed from."""
        sources = [s for part in self.slices for s in (*part.sources, *([part.merge.base] if part.merge else []))]
        return [source.entry(self.tensor) for source in sources]

    def blocks(self, start: int = 0) -> Iterator[np.ndarray]:
        """Yields the raw elements from `start` on in blocks."""
        if self.values is not None:
            yield self.values.reshape(-1)[start:]
            return
        for part in self.slices:
            if start >= part.stop:
                continue
            part = replace(part, start=max(part.start, start))
            if part.merge:
                span = range(part.start, part.stop)
                yield from part.merge.blocks(
                    self.tensor, part.sources, part.weights, span, self.dtype, self._read_span, CHUNK
                )
                continue
            dtypes = [source.entry(self.tensor).dtype for source in part.sources]
            equal = len(set(part.weights)) == 1
            for raws in zip(
                *(self._read_span(source, part.start, part.stop, CHUNK) for source in part.sources), strict=True
            ):
                if len(raws) == 1:
                    yield convert(raws[0], dtypes[0], self.dtype)
                elif equal:
                    yield mean_equal(list(raws), dtypes, self.dtype)
                else:
                    yield mean_float64(list(raws), dtypes, list(part.weights), self.dtype)

    def _read_span(self, source: Source, start: int, stop: int, elements: int) -> Iterator[np.ndarray]:
        if source.is_verbatim(self.tensor):
            return read_blocks(source.entry(self.tensor), elements, start, stop)
        return skip(source.blocks(self.tensor, elements), start, stop)


def skip(blocks: Iterator[np.ndarray], start: int, stop: int) -> Iterator[np.ndarray]:
    """The elements `start` to `stop` of a sequence of blocks."""
    position = 0
    for block in blocks:
        first, last = max(start - position, 0), min(stop - position, len(block))
        if first < last:
            yield block[first:last]
        position += len(block)


def overflow_message(name: str, dtype: str, merged: bool = False) -> str:
    """The message for a tensor whose values exceed the range of the output's dtype; `merged` if its density matters."""
    largest = {"F16": "float16's maximum of 65,504", "BF16": "bfloat16's maximum of 3.39e38"}
    remedy = "Use dtype: bfloat16 or float32." if dtype == "F16" else "Its expert is broken. Use an earlier checkpoint."
    if merged and dtype != "F16":
        return f"{name!r} overflows {TORCH_NAMES[dtype]}. Use a larger density."
    return f"{name!r} has values above {largest.get(dtype, f'the maximum of {TORCH_NAMES[dtype]}')}. {remedy}"


def convert(raw: np.ndarray, dtype: str, out: str) -> np.ndarray:
    """Converts raw elements to another dtype."""
    if dtype == out:
        return raw
    return from_float(view(raw, dtype) if dtype == "F64" else to_float32(raw, dtype), out)


def plan_tensors(
    recipe: Recipe,
    base: Source,
    experts: list[Source],
    gates: dict[str, np.ndarray],
    averaged: list[Source] | None = None,
) -> list[OutputTensor]:
    """All tensors of the mixture in the order in which a forward pass uses them.

    `gates` maps the name of a gate to its values `(E, d)`, float32. `averaged` are the experts that weights without
    routing are averaged over; default: all.
    """
    shape = Shape.from_config(base.config)
    parts, with_gate = all_parts(recipe, shape), gated_parts(recipe, shape)
    weights = {id(expert): e.weight for expert, e in zip(experts, recipe.experts, strict=True)}
    averaged, tensors = experts if averaged is None else averaged, []
    rows = vocabulary_rows(recipe, base, averaged)
    for item in mixture_layout(shape, parts):
        first = item if isinstance(item, str) else item.expert_tensors(shape)[0][0]
        dtype = FLOATS[recipe.dtype] if recipe.dtype else base.entry(first).dtype
        if isinstance(item, str):
            tensors.append(shared_tensor(item, dtype, recipe, base, averaged, weights, rows))
            continue
        if item in with_gate:
            values = gates[item.gate]
            tensors.append(OutputTensor(item.gate, dtype, values.shape, values=from_float(values, dtype)))
        for index, expert in enumerate(experts):
            for dense, suffix in item.expert_tensors(shape):
                tensors.append(copy_tensor(item.expert(index, suffix), dense, dtype, expert))
        tensors += zero_tensors(item, shape, dtype)
    return tensors


def zero_tensors(part: RoutedPart, shape: Shape, dtype: str) -> list[OutputTensor]:
    """The tensors of the shared expert of a routed part, all zero, if its class has one."""
    zeros = f"<u{DTYPE_BYTES[dtype]}"
    return [OutputTensor(n, dtype, size, values=np.zeros(size, zeros)) for n, size in part.zero_tensors(shape).items()]


def copy_tensor(name: str, tensor: str, dtype: str, source: Source) -> OutputTensor:
    """A tensor of one source under another name."""
    entry = source.entry(tensor)
    return OutputTensor(name, dtype, entry.shape, tensor, (Slice((source,), (1.0,), 0, entry.elements),))


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
    if recipe.is_stock and recipe.format != "lexicon":
        raise MergeError("A Mixtral cannot store centroids. Use format: lexicon, or remove the key centroids.")
    raw, dtype = read_all(entries[0])
    if dtype not in TORCH_NAMES or has_nonfinite(raw, dtype):
        raise MergeError(f"{path} (dtype {dtype}) holds values that are not finite numbers. Run `cluster` again.")
    return np.ascontiguousarray(to_float32(raw, dtype).reshape(entries[0].shape))


def centroid_tensor(centroids: np.ndarray) -> OutputTensor:
    """The centroids `(E, size)`, float32, as a tensor of the mixture."""
    return OutputTensor("domain_centroids", "F32", centroids.shape, values=centroids.view("<u4"))


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
    sources, shape = [base, *experts], base.entry(name).shape
    width, of_tokens = math.prod(shape[1:]), name in VOCABULARY_TENSORS
    stops = vocabulary.stops({source.entry(name).shape[0] for source in sources}) if of_tokens else [shape[0]]
    preferred = [base] if recipe.average == "base" else [s for s in experts if weights[id(s)] > 0]
    task_merge = None
    if recipe.average in TASK_METHODS:
        task_merge = TaskMerge(base, recipe.average, recipe.density, recipe.seed)
    slices, start = [], 0
    for stop in stops:
        owners = vocabulary.owners(stop) if of_tokens else None
        owning = [e for e in experts if owners and e.name in owners and e.entry(name).shape[0] >= stop]
        for group in (owning, preferred, experts, [base]):
            group = [source for source in group if source.entry(name).shape[0] >= stop]
            if group:
                break
        shares = [weights.get(id(source), 1.0) for source in group]
        shares = shares if sum(shares) > 0 else [1.0] * len(group)
        shares = tuple(share / sum(shares) for share in shares)
        in_base = stop <= base.entry(name).shape[0] and group != [base] and not owning  # other rows have no task vector
        merge = task_merge if in_base else None
        slices.append(Slice(tuple(group), shares, start * width, stop * width, merge))
        start = stop
    return OutputTensor(name, dtype, (start, *shape[1:]), name, merge_adjacent_slices(slices))


def merge_adjacent_slices(slices: list[Slice]) -> tuple[Slice, ...]:
    """Joins adjacent slices of the same sources."""
    merged: list[Slice] = []
    for part in slices:
        if merged and slice_kind(merged[-1]) == slice_kind(part):
            part = replace(part, start=merged.pop().start)
        merged.append(part)
    return tuple(merged)


def slice_kind(part: Slice) -> tuple:
    """What adjacent slices must have in common to be joined."""
    return [id(source) for source in part.sources], part.merge is None


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
