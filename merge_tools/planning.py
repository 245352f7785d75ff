"""The plan of a mixture: every tensor to be written, and what it is made from, before a byte is written."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .averaging import from_float, mean_equal, mean_float64, to_float32, view
from .errors import MergeError
from .llama import LlamaShape, RoutedPart, gated_parts, routed_parts
from .recipe import Recipe
from .sources import Source
from .tensor_files import DTYPE_BYTES, FLOATS, TensorEntry, read_blocks

CHUNK = 1 << 18  # elements: a mean's inputs and sums stay in the processor's cache


@dataclass(frozen=True)
class Part:
    """Elements `start` to `stop` of a tensor: the mean of some sources' elements there; of one source, its own."""

    sources: tuple[Source, ...]
    weights: tuple[float, ...]  # sum to 1
    start: int
    stop: int


@dataclass(frozen=True)
class OutputTensor:
    """A tensor of the mixture: parts taken from `tensor` of the sources, or values that are given."""

    name: str
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    tensor: str = ""
    parts: tuple[Part, ...] = ()
    given: np.ndarray | None = None  # raw elements

    @property
    def elements(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.elements * DTYPE_BYTES[self.dtype]

    @property
    def verbatim(self) -> TensorEntry | None:
        """The bytes to copy, where they are in a source as they stand."""
        if len(self.parts) != 1 or len(self.parts[0].sources) != 1:
            return None
        source = self.parts[0].sources[0]
        entry = source.entry(self.tensor)
        same = entry.dtype == self.dtype and entry.nbytes == self.nbytes
        return entry if same and source.is_verbatim(self.tensor) else None

    def blocks(self) -> Iterator[np.ndarray]:
        """The raw elements, block by block."""
        if self.given is not None:
            yield self.given.reshape(-1)
            return
        for part in self.parts:
            dtypes = [source.entry(self.tensor).dtype for source in part.sources]
            equal = len(set(part.weights)) == 1
            for raws in zip(*(self._read(source, part) for source in part.sources), strict=True):
                if len(raws) == 1:
                    yield convert(raws[0], dtypes[0], self.dtype)
                elif equal:
                    yield mean_equal(list(raws), dtypes, self.dtype)
                else:
                    yield mean_float64(list(raws), dtypes, list(part.weights), self.dtype)

    def _read(self, source: Source, part: Part) -> Iterator[np.ndarray]:
        if source.is_verbatim(self.tensor):
            return read_blocks(source.entry(self.tensor), CHUNK, part.start, part.stop)
        if part.start or part.stop != self.elements:
            raise MergeError(
                f"{self.tensor!r} of {source.name!r} is changed by an adapter and has another vocabulary: merge the "
                "adapter with peft's merge_and_unload() first."
            )
        return source.blocks(self.tensor, CHUNK)


def convert(raw: np.ndarray, dtype: str, out: str) -> np.ndarray:
    if dtype == out:
        return raw
    return from_float(view(raw, dtype) if dtype == "F64" else to_float32(raw, dtype), out)


def plan(
    recipe: Recipe,
    base: Source,
    experts: list[Source],
    gates: dict[str, np.ndarray],
    averaged: list[Source] | None = None,
) -> list[OutputTensor]:
    """All tensors of the mixture in the order in which they are used.

    Args:
        gates: gate's name -> (E, d) float32.
        averaged: the experts that what is not routed is made of; default all.
    """
    shape = LlamaShape.of(base.config)
    parts = routed_parts(shape.layers, recipe.router_layers, recipe.router_layers_index)
    with_gate = set(gated_parts(recipe, shape.layers))
    owner: dict[str, tuple[RoutedPart, str]] = {}
    for part in parts:
        owner.update({dense: (part, suffix) for dense, suffix in part.expert_tensors(shape)})
    weights = {id(expert): e.weight for expert, e in zip(experts, recipe.experts, strict=True)}
    averaged = experts if averaged is None else averaged
    begun, tensors = set(), []
    for name in shape.tensors():
        dtype = FLOATS[recipe.dtype] if recipe.dtype else base.entry(name).dtype
        if name not in owner:
            tensors.append(shared(name, dtype, recipe.average, base, averaged, weights))
            continue
        part = owner[name][0]
        if part in begun:
            continue
        begun.add(part)
        if part in with_gate:
            values = gates[part.gate]
            tensors.append(OutputTensor(part.gate, dtype, values.shape, given=from_float(values, dtype)))
        for index, expert in enumerate(experts):
            for dense, suffix in part.expert_tensors(shape):
                tensors.append(alone(part.expert(index, suffix), dense, dtype, expert))
    return tensors


def alone(name: str, tensor: str, dtype: str, source: Source) -> OutputTensor:
    """One source's tensor under another name."""
    shape = source.entry(tensor).shape
    count = int(np.prod(shape, dtype=np.int64))
    return OutputTensor(name, dtype, shape, tensor, (Part((source,), (1.0,), 0, count),))


def shared(
    name: str, dtype: str, average: str, base: Source, experts: list[Source], weights: dict[int, float]
) -> OutputTensor:
    """What is not routed: the experts' mean, or the base's. Rows that only some have are the mean of those.

    Args:
        weights: id of an expert -> its weight in a mean.
    """
    everyone = [base, *experts]
    tall = max(everyone, key=lambda source: source.entry(name).shape[0]).entry(name).shape
    width = int(np.prod(tall[1:], dtype=np.int64))
    preferred = [base] if average == "base" else [s for s in experts if weights[id(s)] > 0]
    parts, start = [], 0
    for stop in sorted({source.entry(name).shape[0] for source in everyone}):
        for group in (preferred, experts, [base]):
            having = [source for source in group if source.entry(name).shape[0] >= stop]
            if having:
                break
        shares = [weights.get(id(source), 1.0) for source in having]
        shares = shares if sum(shares) > 0 else [1.0] * len(having)
        parts.append(Part(tuple(having), tuple(s / sum(shares) for s in shares), start * width, stop * width))
        start = stop
    return OutputTensor(name, dtype, (start, *tall[1:]), name, merged(parts))


def merged(parts: list[Part]) -> tuple[Part, ...]:
    """Neighbours made of the same sources as one."""
    kept: list[Part] = []
    for part in parts:
        if kept and [id(s) for s in kept[-1].sources] == [id(s) for s in part.sources]:
            part = Part(part.sources, part.weights, kept.pop().start, part.stop)
        kept.append(part)
    return tuple(kept)


def parameters(recipe: Recipe, tensors: list[OutputTensor]) -> dict[str, int]:
    """Parameters in all, and how many of them work on one token."""
    total = sum(t.elements for t in tensors)
    return {"total": total, "active": at_work(recipe, total, sum(t.elements for t in tensors if ".experts." in t.name))}


def at_work(recipe: Recipe, total: int, in_experts: int) -> int:
    """Of `total` parameters, `in_experts` of them in all experts together, those that work on one token."""
    count = len(recipe.experts)
    chosen = {"token": recipe.experts_per_token, "sequence_soft": count}.get(recipe.routing_policy, 1)
    return total - in_experts * (count - chosen) // count
