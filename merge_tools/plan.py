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
from .layout import Shape, all_parts, gated_parts, mixture_layout
from .recipe import Recipe
from .tensor_files import DTYPE_BYTES, FLOATS, PIECE, TORCH_NAMES, TensorEntry, has_nonfinite, read_blocks, read_header

CHUNK = PIECE  # elements: the inputs and the sum of a mean stay in the processor's cache


@dataclass(frozen=True)
class Slice:
    """Elements `start` to `stop` of a tensor: the weighted mean of these elements in some sources."""

    sources: tuple[Source, ...]
    weights: tuple[float, ...]  # sum to 1
    start: int
    stop: int


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
        if len(self.slices) != 1 or len(self.slices[0].sources) != 1:
            return None
        source = self.slices[0].sources[0]
        entry = source.entry(self.tensor)
        same = entry.dtype == self.dtype and entry.nbytes == self.nbytes
        return entry if same and source.is_verbatim(self.tensor) else None

    def entries(self) -> list[TensorEntry]:
        """The stored tensors that it is computed from."""
        return [source.entry(self.tensor) for part in self.slices for source in part.sources]

    def blocks(self, start: int = 0) -> Iterator[np.ndarray]:
        """Yields the raw elements from `start` on in blocks."""
        if self.values is not None:
            yield self.values.reshape(-1)[start:]
            return
        for part in self.slices:
            if start >= part.stop:
                continue
            part = replace(part, start=max(part.start, start))
            dtypes = [source.entry(self.tensor).dtype for source in part.sources]
            equal = len(set(part.weights)) == 1
            for raws in zip(*(self._read(source, part) for source in part.sources), strict=True):
                if len(raws) == 1:
                    yield convert(raws[0], dtypes[0], self.dtype)
                elif equal:
                    yield mean_equal(list(raws), dtypes, self.dtype)
                else:
                    yield mean_float64(list(raws), dtypes, list(part.weights), self.dtype)

    def _read(self, source: Source, part: Slice) -> Iterator[np.ndarray]:
        if source.is_verbatim(self.tensor):
            return read_blocks(source.entry(self.tensor), CHUNK, part.start, part.stop)
        if part.stop != self.elements or len(self.slices) > 1:
            raise MergeError(
                f"The adapter {source.name!r} changes {self.tensor!r} and has a different vocabulary. Merge it "
                "with peft's merge_and_unload() first."
            )
        return skip(source.blocks(self.tensor, CHUNK), part.start)


def skip(blocks: Iterator[np.ndarray], count: int) -> Iterator[np.ndarray]:
    """Blocks without the first `count` elements."""
    for block in blocks:
        if count < len(block):
            yield block[count:]
        count = max(count - len(block), 0)


def overflow_message(name: str, dtype: str) -> str:
    """The message for a tensor whose values exceed the range of the output's dtype."""
    largest = {"F16": "float16's maximum of 65,504", "BF16": "bfloat16's maximum of 3.39e38"}
    return f"{name!r} has values above {largest.get(dtype, f'the maximum of {TORCH_NAMES[dtype]}')}. " + (
        "Use dtype: bfloat16 or float32." if dtype == "F16" else "Its expert is broken. Use an earlier checkpoint."
    )


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
    for item in mixture_layout(shape, parts):
        first = item if isinstance(item, str) else item.expert_tensors(shape)[0][0]
        dtype = FLOATS[recipe.dtype] if recipe.dtype else base.entry(first).dtype
        if isinstance(item, str):
            tensors.append(shared_tensor(item, dtype, recipe.average, base, averaged, weights))
            continue
        if item in with_gate:
            values = gates[item.gate]
            tensors.append(OutputTensor(item.gate, dtype, values.shape, values=from_float(values, dtype)))
        for index, expert in enumerate(experts):
            for dense, suffix in item.expert_tensors(shape):
                tensors.append(copy_tensor(item.expert(index, suffix), dense, dtype, expert))
        for name, size in item.zero_tensors(shape).items():
            zeros = np.zeros(size, f"<u{DTYPE_BYTES[dtype]}")
            tensors.append(OutputTensor(name, dtype, size, values=zeros))
    return tensors


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
    name: str, dtype: str, average: str, base: Source, experts: list[Source], weights: dict[int, float]
) -> OutputTensor:
    """A tensor that is not routed: the mean over the experts, or the base's. Rows that only some have are their mean.

    `weights` maps the `id` of an expert to its weight in the mean; `average` is "mean" or "base".
    """
    sources = [base, *experts]
    largest = max(sources, key=lambda source: source.entry(name).shape[0]).entry(name).shape
    width = math.prod(largest[1:])
    preferred = [base] if average == "base" else [s for s in experts if weights[id(s)] > 0]
    slices, start = [], 0
    for stop in sorted({source.entry(name).shape[0] for source in sources}):
        for group in (preferred, experts, [base]):
            group = [source for source in group if source.entry(name).shape[0] >= stop]
            if group:
                break
        shares = [weights.get(id(source), 1.0) for source in group]
        shares = shares if sum(shares) > 0 else [1.0] * len(group)
        slices.append(Slice(tuple(group), tuple(s / sum(shares) for s in shares), start * width, stop * width))
        start = stop
    return OutputTensor(name, dtype, (start, *largest[1:]), name, merge_adjacent_slices(slices))


def merge_adjacent_slices(slices: list[Slice]) -> tuple[Slice, ...]:
    """Joins adjacent slices of the same sources."""
    merged: list[Slice] = []
    for part in slices:
        if merged and [id(s) for s in merged[-1].sources] == [id(s) for s in part.sources]:
            part = Slice(part.sources, part.weights, merged.pop().start, part.stop)
        merged.append(part)
    return tuple(merged)


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
