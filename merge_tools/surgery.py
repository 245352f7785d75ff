"""Experts added to a mixture, removed from it, taken out as dense models; the mixture in another format."""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

from .agreement import check_configuration, check_rope, check_shapes, check_vocabulary
from .averaging import from_float, to_float64
from .card import model_card
from .checks import check_adapters, check_disk, check_place, check_values
from .composing import compose, source_files
from .errors import MergeError
from .gates import measured, random_row, texts_of
from .mixture import Mixture
from .planning import CHUNK, OutputTensor, alone, parameters
from .recipe import Recipe, read_recipe
from .records import code_files, dense_config, dump, mixture_config, source_record
from .report import Report
from .sources import TOKENIZER_FILES, Source, open_source
from .tensor_files import read_blocks
from .writing import SHARD_BYTES, Progress, Writer, finish, growing_folder, lay_out

REMOVED = " (removed)"  # behind the name of an expert that is still in the shared weights' mean
Column = int | Source  # an expert of the new mixture: one of the old by its index, or a new source


def add(
    mixture: str | Path,
    expert: str | Path | dict,
    out: str | Path,
    *,
    reaverage: bool = False,
    low_memory: bool = False,
    allow: Sequence[str] = (),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """A mixture with one expert more, at `out`; shared weights and the other experts' gates stay as they are.

    Args:
        expert: folder, Hub id, or a mapping as in a recipe (`source_model`, `name`, `positive_prompts`, ...).
        reaverage: reads all sources again and composes afresh, the new one in the average too.

    Raises:
        MergeError: when the expert does not fit, or `out` is occupied.
    """
    old, progress = Mixture.open(mixture), progress or Progress()
    given = expert if isinstance(expert, dict) else {"source_model": str(expert)}
    plain = old.recipe.to_dict()
    recipe = read_recipe({**plain, "experts": [*plain["experts"], given]}, allow=list(allow))
    if old.recipe.centroids:
        raise MergeError(
            "The mixture carries a centroid for each expert, and the new one brings none: compose it afresh."
        )
    if reaverage:
        return compose(recipe, out, low_memory=low_memory, progress=progress)
    new = recipe.experts[-1]
    source = open_source(new.name, new.source_model, recipe.base_model)
    warnings = check_newcomer(old, source, recipe)
    rows = new_rows(recipe, old, low_memory)
    written = rebuild(old, recipe, [*range(len(old.names)), source], rows, Path(out), progress)
    return {**written, "warnings": warnings}


def check_newcomer(old: Mixture, source: Source, recipe: Recipe) -> list[str]:
    """Holds a new expert against the mixture as `compose` holds experts against the base -> warnings."""
    report = Report(recipe=recipe)
    if check_shapes(report, source):
        for look in (check_configuration, check_rope, check_vocabulary):
            look(report, old.source, source)
        check_values(report, [source], deep=False)
        if source.adapter:
            report.base, report.experts = old.open_base(), [source]
            check_adapters(report)
    report.raise_for_errors()
    return [f"{finding.subject}: {finding.message}" for finding in report.warnings]


def new_rows(recipe: Recipe, old: Mixture, low_memory: bool) -> dict[str, np.ndarray]:
    """Gate's name -> its row for the last expert of the recipe, as a fresh compose would make it."""
    if recipe.gate_mode == "zeros":
        return {part.gate: np.zeros(part.input_size(old.shape), np.float32) for part in old.gated}
    if recipe.gate_mode == "random":
        number = old.next_row
        return {p.gate: random_row(recipe.seed, p, number, p.input_size(old.shape)) for p in old.gated}
    if not old.gated:
        return {}
    texts = texts_of(recipe, recipe.experts[-1])
    gates = measured(recipe, old.open_base(), old.gated, [texts], low_memory).values
    return {name: values[0] for name, values in gates.items()}


def remove(
    mixture: str | Path,
    expert: str,
    out: str | Path,
    *,
    reaverage: bool = False,
    low_memory: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """A mixture with one expert less, at `out`; everything else stays as it is.

    Args:
        expert: its name.
        reaverage: reads the sources of the others again and composes afresh.

    Raises:
        MergeError: when there is no such expert, too few would be left, or `out` is occupied.
    """
    old, progress = Mixture.open(mixture), progress or Progress()
    gone = old.index_of(expert)
    if len(old.names) == 2:
        raise MergeError(f"Without {expert!r} one expert would be left: take it out with extract.")
    if old.recipe.centroids:
        raise MergeError(
            "The mixture carries a centroid for each expert: compose it afresh from the experts that stay."
        )
    plain = old.recipe.to_dict()
    kept = [i for i in range(len(old.names)) if i != gone]
    if plain["experts_per_token"] > len(kept):
        raise MergeError(
            f"The mixture uses {plain['experts_per_token']} experts a token, and {len(kept)} would be left: compose it "
            "afresh with fewer experts_per_token."
        )
    recipe = read_recipe({**plain, "experts": [plain["experts"][i] for i in kept]})
    if reaverage:
        return compose(recipe, out, low_memory=low_memory, progress=progress)
    return rebuild(old, recipe, kept, {}, Path(out), progress)


def rebuild(
    old: Mixture, recipe: Recipe, columns: list[Column], rows: dict[str, np.ndarray], out: Path, progress: Progress
) -> dict[str, Any]:
    """Writes a mixture whose experts are `columns`, with new `rows` at the end of the gates, the rest as it was."""
    tensors = rearranged(old, columns, rows)
    record = deepcopy(old.record) | {"recipe": recipe.to_dict()}
    averaged = [n if n in recipe.names or n.endswith(REMOVED) else n + REMOVED for n in old.shared_from]
    if recipe.average == "base" and "vocab" not in recipe.allow:
        averaged = recipe.names  # nothing that is shared is made of them, whoever they are
    numbers = [old.gate_rows[c] if isinstance(c, int) else old.next_row for c in columns]
    for key, value, usual in (
        ("shared_from", averaged, recipe.names),
        ("gate_rows", numbers if recipe.gate_mode == "random" else [], list(range(len(columns)))),
    ):
        record.pop(key, None)
        if value and value != usual:
            record[key] = value

    def contents(audits) -> dict[str, bytes]:
        record["experts"] = [
            old.record["experts"][c] if isinstance(c, int) else source_record(c, audits) for c in columns
        ]
        config = mixture_config(
            recipe, old.source, tensors[0].shape[0], record["format"], old.config.get("centroid_size")
        )
        return described(old, record, recipe, config, tensors)

    new = [column for column in columns if isinstance(column, Source)]
    return write(tensors, [old.source, *new], out, progress, contents)


def rearranged(old: Mixture, columns: list[Column], rows: dict[str, np.ndarray]) -> list[OutputTensor]:
    """The tensors of a mixture with other experts: verbatim but for the gates."""
    dense_of = {(part, suffix): dense for part in old.parts for dense, suffix in part.expert_tensors(old.shape)}
    part_of = {part.expert(0, suffix): part for part in old.parts for _, suffix in part.expert_tensors(old.shape)}
    gates = {part.gate: part for part in old.gated}
    tensors, begun = [], set()
    for name in old.layout():
        entry = old.source.entry(name)
        if name in gates:
            values = old.gate(gates[name])[[c for c in columns if isinstance(c, int)]]
            if name in rows:
                values = np.concatenate([values, from_float(rows[name], entry.dtype)[None]])
            tensors.append(OutputTensor(name, entry.dtype, values.shape, given=np.ascontiguousarray(values)))
        elif ".experts." not in name:
            tensors.append(alone(name, name, entry.dtype, old.source))
        elif name in part_of and part_of[name] not in begun:
            part = part_of[name]
            begun.add(part)
            for new, column in enumerate(columns):
                for _, suffix in part.expert_tensors(old.shape):
                    dtype = old.source.entry(part.expert(0, suffix)).dtype
                    old_one = isinstance(column, int)
                    source = old.source if old_one else column
                    tensor = part.expert(column, suffix) if old_one else dense_of[part, suffix]
                    tensors.append(alone(part.expert(new, suffix), tensor, dtype, source))
    return tensors


def described(
    old: Mixture, record: dict[str, Any], recipe: Recipe, config: dict[str, Any], tensors: list[OutputTensor]
) -> dict[str, bytes]:
    """The small files of a mixture made from another: its tokenizer, and what was written anew."""
    files = carried_files(old.folder)
    nbytes = sum(tensor.nbytes for tensor in tensors)
    files |= {
        "config.json": dump(config),
        "merge_record.json": dump(record),
        "README.md": model_card(record, parameters(recipe, tensors), nbytes),
    }
    return files | (code_files() if record["format"] == "lexicon" else {})


def carried_files(folder: Path) -> dict[str, bytes]:
    names = [*TOKENIZER_FILES, "generation_config.json"]
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}


def write(
    tensors: list[OutputTensor],
    sources: list[Source],
    out: Path,
    progress: Progress,
    contents: Callable[[dict], dict[str, bytes]],
) -> dict[str, Any]:
    """Checks the place, writes tensors and then the small files that `contents` makes from the sources' hashes."""
    report = Report(base=sources[0], experts=sources[1:])
    check_place(report, out)
    nbytes = sum(tensor.nbytes for tensor in tensors)
    check_disk(report, out, nbytes)
    report.raise_for_errors()
    shards = lay_out(tensors, SHARD_BYTES)
    with growing_folder(out, resume=False) as folder:
        audits = Writer(folder, shards, source_files(sources), False, progress).run()
        finish(folder, out, shards, contents(audits), progress)
    return {"out": str(out), "tensors": len(tensors), "bytes": nbytes}


def extract(mixture: str | Path, expert: str, out: str | Path, *, progress: Progress | None = None) -> dict[str, Any]:
    """One expert as a dense Llama again: its own routed weights in the mixture's shared ones.

    Returns:
        What was written, and `shared`: how the shared weights compare with those of the expert's source, where that is
        still there: `equal`, or the largest difference and in how many tensors.
    """
    old, progress = Mixture.open(mixture), progress or Progress()
    index = old.index_of(expert)
    stored = {
        dense: part.expert(index, suffix) for part in old.parts for dense, suffix in part.expert_tensors(old.shape)
    }
    tensors = [
        alone(name, stored.get(name, name), old.source.entry(stored.get(name, name)).dtype, old.source)
        for name in old.shape.tensors()
    ]
    files = carried_files(old.folder) | {"config.json": dump(dense_config(old.config))}
    written = write(tensors, [old.source], Path(out), progress, lambda audits: files)
    return {**written, "expert": expert, "shared": compare_shared(old, index, set(stored))}


def compare_shared(old: Mixture, index: int, routed: set[str]) -> dict[str, Any]:
    """How far the mixture's shared weights are from the expert's own."""
    given = old.recipe.experts[index]
    try:
        source = open_source(given.name, given.source_model, old.recipe.base_model)
    except MergeError as error:
        return {"compared": False, "why": str(error)}
    differing, largest = 0, 0.0
    names = [name for name in old.shape.tensors() if name not in routed and name in source]
    for name in names:
        ours, theirs = old.source.entry(name), source.entry(name)
        count, apart = min(math.prod(ours.shape), math.prod(theirs.shape)), 0.0
        for a, b in zip(read_blocks(ours, CHUNK, 0, count), source.blocks(name, CHUNK), strict=False):
            gap = np.abs(to_float64(a, ours.dtype) - to_float64(b[: len(a)], theirs.dtype))
            apart = max(apart, float(gap.max(initial=0.0)))
        differing += apart > 0
        largest = max(largest, apart)
    return {
        "compared": True,
        "equal": differing == 0,
        "tensors": len(names),
        "differing": differing,
        "largest": largest,
    }


def export(mixture: str | Path, out: str | Path, format: str, *, progress: Progress | None = None) -> dict[str, Any]:
    """The same weights under another class: "mixtral" opens without this project, "lexicon" knows more policies.

    Raises:
        MergeError: where the format cannot hold the mixture.
    """
    old, progress = Mixture.open(mixture), progress or Progress()
    if format not in ("mixtral", "lexicon"):
        raise MergeError(f"There is no format {format!r}. Use mixtral or lexicon.")
    plain = old.recipe.to_dict()
    recipe = read_recipe({**plain, "format": format})
    if format == "mixtral" and (old.shape.attention_bias or "domain_centroids" in old.source):
        what = "biases in its attention" if old.shape.attention_bias else "centroids"
        raise MergeError(f"{old.folder} has {what}, which a Mixtral does not hold. It can stay a lexicon.")
    tensors = rearranged(old, list(range(len(old.names))), {})
    record = {**deepcopy(old.record), "format": format, "recipe": recipe.to_dict()}
    config = mixture_config(recipe, old.source, tensors[0].shape[0], format, old.config.get("centroid_size"))
    return write(
        tensors, [old.source], Path(out), progress, lambda audits: described(old, record, recipe, config, tensors)
    )
