"""The statistics of `gate_mode: ridge` and their file beside a mixture, from which its gates are computed again without the texts.

The file holds for each expert, by its index, and each router the `Moments`: `EXPERT.LAYER.PART.second`, `.mean` and `.held_out`.
"""

import hashlib
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .averaging import from_float, to_float32, to_float64
from .checkpoints import Source
from .errors import MergeError
from .gate_modes import GATE_MODES, RidgeMode, TextMode
from .gate_texts import encode_texts, run_dense, texts_of
from .layout import RoutedPart
from .output_tensors import OutputTensor
from .plan import Gates
from .provenance import RECORD
from .recipe import ExpertRecipe, Recipe, gated_parts
from .ridge import HELD_OUT_TOKENS, Moments, MomentSum, confusion, fit_gate
from .shard_writer import Progress
from .tensor_files import DTYPE_BYTES, FLOATS, read_header

FILE = "gate_statistics.tensors"  # in the safetensors format; engines read every *.safetensors of a folder as weights
FIELDS = ("second", "mean", "held_out")
FEW_TOKENS = 5  # per dimension
HELD_OUT_SHARE = 5  # one of so many texts is held out; with fewer texts the end of each
DIGITS = 4


@dataclass
class ExpertStatistics:
    """The moments of one expert: layer and part of a router, as in `key_of` -> moments of its inputs.

    Attributes:
        tokens: the number of tokens that they are of.
        samples: the SHA-256 of its samples, in whatever order.
        dtype: of the hidden states, safetensors' name.
    """

    name: str
    tokens: int
    samples: str
    dtype: str
    moments: dict[str, Moments]

    def tensors(self, number: int) -> list[OutputTensor]:
        """What is saved of them, as those of the expert with this number."""
        dtypes = dict(zip(FIELDS, ("F32", "F64", self.dtype), strict=True))
        return [
            OutputTensor(f"{number}.{router}.{field}", dtype, array.shape, values=from_float(array, dtype))
            for router, moments in self.moments.items()
            for field, dtype in dtypes.items()
            for array in (getattr(moments, field),)
        ]


def statistics_of(
    recipe: Recipe,
    base: Source,
    parts: list[RoutedPart],
    experts: list[ExpertRecipe],
    sources: list[Source],
    progress: Progress | None = None,
) -> list[ExpertStatistics]:
    """Runs each expert on its own samples, in the dtype of the mixture. `sources` are those of the experts.

    Raises:
        MergeError: for samples that cannot be used, and states that are not finite. The message names the expert.
    """
    mode = GATE_MODES[recipe.gate_mode]
    assert isinstance(mode, TextMode)
    groups = [texts_of(recipe, expert) for expert in experts]
    texts, dtype = encode_texts(recipe, base, groups), dtype_of_states(recipe, base)
    progress = progress or Progress()
    progress.start("gates", len(parts) * sum(len(text.tokens) for text in texts))
    found = []
    for number, (expert, source) in enumerate(zip(experts, sources, strict=True)):
        own = [text for text in texts if text.expert == number]
        sums = {key_of(part): MomentSum(part.input_size(base.shape)) for part in parts}
        for part, _, index, states in run_dense(source, parts, own, mode.state, dtype):
            stop = training_tokens(index, len(own), len(states))
            sums[key_of(part)].add(states[:stop], held_out=False)
            sums[key_of(part)].add(states[stop:], held_out=True)
            progress.advance("gates", len(states))
        try:
            moments = {router: spilled(sums.pop(router).moments()) for router in list(sums)}
        except MergeError as error:
            raise MergeError(f"{expert.name}: {error}") from error
        samples = hashlib.sha256(repr(sorted(groups[number][0])).encode()).hexdigest()
        found.append(ExpertStatistics(expert.name, next(iter(moments.values())).count, samples, dtype, moments))
    return found


def dtype_of_states(recipe: Recipe, base: Source) -> str:
    """The dtype of a mixture's hidden states, safetensors' name."""
    return FLOATS[recipe.dtype] if recipe.dtype else base.entry("model.embed_tokens.weight").dtype


def training_tokens(index: int, count: int, tokens: int) -> int:
    """How many of a text's tokens are not held out. `index`: of the text, of `count`."""
    if count < HELD_OUT_SHARE:
        return tokens - max(tokens // HELD_OUT_SHARE, 1)
    return 0 if index % HELD_OUT_SHARE == HELD_OUT_SHARE - 1 else tokens


def spilled(moments: Moments) -> Moments:
    """The same moments in a temporary file that is gone with them: the memory of a run is that of one expert."""
    arrays = {name: getattr(moments, name) for name in ("second", "held_out")}
    for name, array in arrays.items():
        with tempfile.TemporaryFile() as file:
            arrays[name] = np.memmap(file, array.dtype, "w+", shape=array.shape)
            arrays[name][:] = array
    return replace(moments, **arrays)


def key_of(part: RoutedPart) -> str:
    """The name of a router in all formats of mixtures."""
    return f"{part.layer}.{part.part}"


def ridge_gates(parts: list[RoutedPart], statistics: Sequence[ExpertStatistics]) -> Gates:
    """The gates, and how they were made: `tokens` per expert, `ridge` and `scale` per gate, and `confusion` (E, E), the share of
    expert i's held-out tokens that are routed to expert j first, the mean over gates.

    Raises:
        MergeError: for experts with equal samples, and inputs that are zero.
    """
    known: dict[str, str] = {}
    for expert in statistics:
        if (other := known.setdefault(expert.samples, expert.name)) != expert.name:
            raise MergeError(f"{expert.name} has the same samples as {other}. Give it samples of its own data.")
    values, fits, tables = {}, [], []
    for part in parts:
        experts = [expert.moments[key_of(part)] for expert in statistics]
        values[part.gate], fit = fit_gate(experts)
        tables.append(confusion(experts, values[part.gate]))
        fits.append(
            {
                "layer": part.layer,
                "part": part.part,
                **fit,
                "accuracy": round(float(tables[-1].diagonal().mean()), DIGITS),
            }
        )
    tensors = [tensor for number, expert in enumerate(statistics) for tensor in expert.tensors(number)]
    info = {
        "mode": "ridge",
        "experts": [expert.name for expert in statistics],
        "tokens": [expert.tokens for expert in statistics],
        "samples": [expert.samples for expert in statistics],
        "fits": fits,
        "confusion": np.mean(tables, axis=0).round(DIGITS).tolist(),
        "statistics": digest(tensors),
    }
    return Gates(values, info, tensors, too_few(statistics))


def size_of_statistics(recipe: Recipe, base: Source) -> int:
    """At most how many bytes the statistics of a recipe take; 0 if its mode has none."""
    if not isinstance(GATE_MODES[recipe.gate_mode], RidgeMode):
        return 0
    held_out = HELD_OUT_TOKENS * DTYPE_BYTES[dtype_of_states(recipe, base)]
    widths = [part.input_size(base.shape) for part in gated_parts(recipe, base.shape)]
    return len(recipe.experts) * sum(d * (d + 1) // 2 * 4 + d * (8 + held_out) for d in widths)


def too_few(statistics: Sequence[ExpertStatistics]) -> list[str]:
    """A warning for each expert with fewer tokens than its gates need."""
    width = len(next(iter(statistics[0].moments.values())).mean)
    return [
        f"{expert.name} has {expert.tokens:,} tokens of samples for gates of width {width}, which are reliable from "
        f"{FEW_TOKENS * width:,} on. Add samples."
        for expert in statistics
        if expert.tokens < FEW_TOKENS * width
    ]


def digest(tensors: Iterable[OutputTensor]) -> str:
    """The SHA-256 of the saved statistics."""
    found = hashlib.sha256()
    for tensor in tensors:
        for block in tensor.blocks():
            found.update(np.ascontiguousarray(block).view(np.uint8))
    return found.hexdigest()


def statistics_file(tensors: list[OutputTensor]) -> dict[str, list[OutputTensor]]:
    """The name of the file -> its tensors; empty without tensors."""
    return {FILE: tensors} if tensors else {}


def carried_statistics(folder: Path, info: dict[str, Any]) -> dict[str, list[OutputTensor]]:
    """The file beside a mixture for a copy with other formats or gates, which does not need it: as in `statistics_file`."""
    return statistics_file(saved_tensors(folder, info)) if "statistics" in info and (folder / FILE).is_file() else {}


def saved_tensors(folder: Path, info: dict[str, Any]) -> list[OutputTensor]:
    """The tensors of the file beside a mixture, whose record says `info` about its gates.

    Raises:
        MergeError: if the file is missing, damaged, or of another mixture.
    """
    path, again = folder / FILE, "Copy it again, or use --recompose."
    if not path.is_file():
        raise MergeError(f"{path} does not exist: the gates cannot be computed again without it. {again}")
    tensors = [
        OutputTensor(
            e.name, e.dtype, e.shape, values=np.memmap(path, f"<u{DTYPE_BYTES[e.dtype]}", "r", e.start, e.shape)
        )
        for e in read_header(path)
    ]
    if digest(tensors) != info["statistics"]:
        raise MergeError(f"{path} is damaged, or of another mixture: {RECORD} has another hash. {again}")
    return tensors


def read_statistics(folder: Path, info: dict[str, Any]) -> list[ExpertStatistics]:
    """The statistics beside a mixture, see `saved_tensors`."""
    saved = {tensor.name: tensor for tensor in saved_tensors(folder, info)}
    facts = zip(info["experts"], info["tokens"], info["samples"], strict=True)
    found = [ExpertStatistics(*of_expert, "", {}) for of_expert in facts]
    for name in saved:
        number, router = name.split(".", 1)
        if router.endswith(".second"):
            router = router.removesuffix(".second")
            second, mean, held_out = (saved[f"{number}.{router}.{field}"] for field in FIELDS)
            expert = found[int(number)]
            expert.dtype = held_out.dtype
            values = [
                to_float64(mean.raw, "F64"),
                to_float32(second.raw, "F32"),
                to_float32(held_out.raw, held_out.dtype),
            ]
            expert.moments[router] = Moments(expert.tokens, *values)
    return found
