"""Edits a mixture: adds or removes an expert, extracts one as a dense model, exports to the other format."""

import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

from run_tools.errors import expand_user

from .averaging import from_float, to_float64
from .checkpoints import Source, open_source
from .compatibility import check_shapes, check_with, lexicon_problem
from .compose import compose, metadata_files
from .errors import MergeError
from .findings import Report
from .gate_modes import GATE_MODES, RandomMode
from .gate_statistics import carried_statistics, statistics_file
from .gates import gates_with, gates_without
from .layout import RoutedPart
from .low_rank import energies, expanded_tensor
from .mixture import Mixture
from .output_config import dense_config, mixture_config, to_json_bytes
from .output_folder import write_output
from .output_tensors import CENTROIDS, OutputTensor, copy_tensor
from .places import places_beside
from .plan import Gates, expert_tensors, measure, zero_tensors
from .preflight import check_adapters
from .provenance import source_record
from .recipe import ExpertRecipe, Recipe, all_parts, read_recipe
from .shard_writer import Progress
from .tensor_files import PIECE, read_blocks
from .tokenizer_checks import check_tokenizer, check_written_settings
from .tokenizers import carried_files
from .value_checks import check_values

REMOVED_SUFFIX = " (removed)"  # marks an expert that was removed but is still part of the shared weights' mean
TUNED_REPLACED = "The tuned gates are replaced by gate_mode {mode}. Tune {out} again."
ExpertSource = int | Source  # an expert of the new mixture: the index of an old one, or a new source


def add(
    mixture: str | Path,
    expert: str | Path | dict,
    out: str | Path,
    *,
    recompose: bool = False,
    allow: Sequence[str] = (),
    sources: Mapping[str, str | Path] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Adds an expert to a mixture. The shared weights and the other experts' gate rows do not change.

    Args:
        mixture: the mixture.
        expert: folder, Hub id, or a mapping as in a recipe (`source_model`, `name`, `positive_prompts`, ...).
        out: output folder, which must not exist or be empty.
        recompose: composes again from all sources, so the shared weights include the new expert.
        progress: as in `compose`.
        allow: differences to accept, see `Recipe`.
        sources: name of an expert, or "base" -> the folder where it is now, for those that were moved.

    Returns:
        What was written, and `warnings`.

    Raises:
        MergeError: if the expert is not compatible, or `out` is not free.
    """
    old = Mixture.open(mixture, sources)
    expert = expert if isinstance(expert, dict) else {"source_model": str(expert)}
    options = (old.recipe_from_here() if recompose else old.recipe).to_dict()
    check_options(old, expert)
    recipe = read_recipe({**options, "experts": [*options["experts"], expert]}, allow=list(allow))
    if old.recipe.centroids:
        raise MergeError("Cannot add an expert to a mixture with centroids. Compose it again with new centroids.")
    if recompose:
        return composed_again(old, recipe, out, progress)
    new = recipe.experts[-1]
    source = open_source(new.name, new.source_model, old.base_model, fix="Merge it with peft first")
    set_own_paths(old, new, source)
    warnings = check_new_expert(old, source, recipe)
    gates, tuned = gates_with(recipe, old, source), "tuned" in old.record and old.gated
    if gates.statistics:
        old.record.pop("tuned", None)
    written = write_with_experts(old, recipe, [*range(len(old.names)), source], gates, Path(out), progress)
    warnings += gates.warnings
    if tuned and gates.statistics:
        warnings.append(TUNED_REPLACED.format(mode=recipe.gate_mode, out=out))
    elif tuned:
        warnings.append(
            f"The gates were tuned without {new.name}, whose row is not trained. Tune them again: lexperts merge tune {out} TUNED "
            f"--domain {new.name}=FILE and one --domain for each other expert."
        )
    return {**written, "warnings": warnings}


def check_options(old: Mixture, expert: dict[str, Any]):
    """Raises a `MergeError` if a new expert lacks what the mixture's gates are computed from, or has a name that is taken."""
    mode, origin = GATE_MODES[old.recipe.gate_mode], expert.get("source_model")
    if mode.texts == "positive_prompts" and not expert.get(mode.texts):
        raise MergeError(
            f"The gates of {old.folder} are computed from texts (gate_mode {mode.name}). Give texts of the new expert's domain: "
            '--prompt "TEXT", or positive_prompts in Python.'
        )
    if mode.texts == "samples" and not expert.get(mode.texts):
        raise MergeError(
            f"The gates of {old.folder} are computed from samples (gate_mode {mode.name}). Give a .jsonl or .txt file of the new "
            "expert's own data: --samples FILE, or samples in Python."
        )
    name = expert.get("name") or (Path(origin).name if isinstance(origin, str | Path) else "")
    if name in old.names:
        raise MergeError(f"{old.folder} has an expert {name!r} already. Give the new one another name: --name NAME.")


def set_own_paths(old: Mixture, new: ExpertRecipe, source: Source):
    """Makes paths of a new expert absolute that the record of the mixture already has for another place."""
    places = old.places()
    is_folder = os.path.isdir(expand_user(new.source_model))
    if new.source_model in places and places[new.source_model] != (
        Path(os.path.abspath(source.folder)) if is_folder else None
    ):
        new.source_model = source.origin = os.path.abspath(source.folder)
    if new.samples in places and places[new.samples] != Path(os.path.abspath(new.samples)):
        new.samples = os.path.abspath(new.samples)


def composed_again(old: Mixture, recipe: Recipe, out: str | Path, progress: Progress | None):
    """Composes from all sources; warns if that replaces tuned gates."""
    for name, source in zip(old.names, old.record["experts"], strict=True):
        if name in recipe.names:
            old.find_source(name, source["source"])
    if recipe.base_model:
        old.find_source("base", old.record["base"]["source"])
    written = compose(recipe, out, progress=progress)
    if "tuned" in old.record:
        written["warnings"].append(TUNED_REPLACED.format(mode=recipe.gate_mode, out=out))
    return written


def check_new_expert(old: Mixture, source: Source, recipe: Recipe) -> list[str]:
    """Compares a new expert with the mixture, as `compose` compares experts with the base. Returns the warnings."""
    if source.config.get("model_type") != old.family.model_type:
        found = f"{source.config.get('model_type')!r:.60}"
        raise MergeError(
            f"{source.name} has model_type {found}, but the experts of the mixture are {old.family.model_type}."
        )
    report = Report(allow=recipe.allow)
    if check_shapes(report, source):
        check_with(report, old.source, source, {"dtype": recipe.dtype})
        check_tokenizer(report, old.source, source, old.source)
        check_written_settings(report, old.source, old.source, [source])
        check_values(report, [source], deep=False)
        if source.adapter:
            check_adapters(report, recipe, old.open_base(), [source], remedy="Merge it with peft first.")
    report.raise_for_errors()
    return [f"{finding.subject}: {finding.message}" for finding in report.warnings]


def remove(
    mixture: str | Path,
    expert: str,
    out: str | Path,
    *,
    recompose: bool = False,
    sources: Mapping[str, str | Path] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Removes an expert, given by its name, from a mixture. Everything else stays the same. Returns what was written.

    Args:
        recompose: composes again from the sources of the other experts.
        mixture, out, sources, progress: as in `add`.

    Raises:
        MergeError: if the expert does not exist, too few experts would be left, or `out` is not free.
    """
    old = Mixture.open(mixture, sources)
    removed = old.index_of(expert)
    if len(old.names) == 2:
        raise MergeError(f"Removing {expert!r} would leave one expert. Use extract to get it as a dense model.")
    if old.recipe.centroids:
        raise MergeError("Cannot remove an expert from a mixture with centroids. Compose it again from the others.")
    if old.recipe.tokenizer_source == expert:
        raise MergeError(
            f"{expert!r} provides the tokenizer (tokenizer_source). Compose the mixture again from the others."
        )
    options = (old.recipe_from_here() if recompose else old.recipe).to_dict()
    kept = [i for i in range(len(old.names)) if i != removed]
    if options["experts_per_token"] > len(kept):
        raise MergeError(
            f"The mixture has experts_per_token={options['experts_per_token']}, but {len(kept)} experts would be left. "
            f"Compose it again with experts_per_token={len(kept)} or less."
        )
    recipe = read_recipe({**options, "experts": [options["experts"][i] for i in kept]})
    if recompose:
        return composed_again(old, recipe, out, progress)
    return write_with_experts(old, recipe, kept, gates_without(old, kept), Path(out), progress)


def write_with_experts(
    old: Mixture,
    recipe: Recipe,
    experts: Sequence[ExpertSource],
    gates: Gates,
    out: Path,
    progress: Progress | None,
) -> dict[str, Any]:
    """Writes the mixture with other experts and their gates."""
    tensors = plan_with_experts(old, experts, gates.values)
    record = deepcopy(old.record) | {"recipe": recipe.to_dict()}
    if gates.info:
        record["gates"] = gates.info
    averaged = [n if n in recipe.names or n.endswith(REMOVED_SUFFIX) else n + REMOVED_SUFFIX for n in old.shared_from]
    if recipe.average == "base" and "vocab" not in recipe.allow:
        averaged = recipe.names  # no shared weight is computed from the experts
    gate_rows = [old.gate_rows[e] if isinstance(e, int) else old.next_row for e in experts]
    for key, value, default in (
        ("shared_from", averaged, recipe.names),
        (
            "gate_rows",
            gate_rows if isinstance(GATE_MODES[recipe.gate_mode], RandomMode) else [],
            [*range(len(experts))],
        ),
    ):
        record.pop(key, None)
        if value and value != default:
            record[key] = value

    def make_files(scans) -> dict[str, bytes]:
        record["experts"] = [
            old.record["experts"][e] if isinstance(e, int) else source_record(e, scans) for e in experts
        ]
        if recipe.rank:
            known, found = old.record.get("energies"), energies(tensors, len(experts))
            record["energies"] = [known[e] if known and isinstance(e, int) else found[i] for i, e in enumerate(experts)]
        return edited_files(old, record, recipe, tensors, out)

    new = [expert for expert in experts if isinstance(expert, Source)]
    return write_output(out, tensors, [old.source, *new], progress, make_files, statistics_file(gates.statistics))


def plan_with_experts(
    old: Mixture, experts: Sequence[ExpertSource], gates: Mapping[str, np.ndarray], recipe: Recipe | None = None
) -> list[OutputTensor]:
    """The tensors of a mixture with other experts and `gates`; the others are copied. `recipe`: with the names of its format."""
    tensors, gated, shape = [], old.gated, old.shape
    parts = dict(zip(old.parts, all_parts(recipe or old.recipe, shape), strict=True))
    beside = {name: part for part in old.parts for name in (*part.zero_tensors(shape), *part.base_tensors())}
    for item in old.layout():
        if isinstance(item, str):
            if item not in beside or item in (
                *parts[beside[item]].zero_tensors(shape),
                *parts[beside[item]].base_tensors(),
            ):
                tensors.append(copy_tensor(item, item, old.source.entry(item).dtype, old.source))
            continue
        new = parts[item]
        if item in gated:
            dtype = old.source.entry(item.gate).dtype
            values = from_float(gates[item.gate], dtype)
            tensors.append(OutputTensor(new.gate, dtype, values.shape, values=values))
        dtype = old.source.entry(item.expert(0, item.expert_tensors(shape)[0][1])).dtype
        for index, expert in enumerate(experts):
            if isinstance(expert, int):
                tensors += kept_expert(old, item, expert, new, index)
            else:
                base = old.open_base() if new.rank else expert
                tensors += expert_tensors(new, index, shape, dtype, base, expert)
        if not item.zero_tensors(shape):
            tensors += zero_tensors(new, shape, dtype)
    return tensors


def kept_expert(old: Mixture, item: RoutedPart, expert: int, new: RoutedPart, index: int) -> list[OutputTensor]:
    """The tensors of an expert of a mixture at a router, as the expert `index` of a new mixture; in full if that has no low rank."""
    if item.rank and not new.rank:
        return [
            expanded_tensor(new.expert(index, suffix), dense, item, expert, old.source, old.shape)
            for dense, suffix in new.expert_tensors(old.shape)
        ]
    names = zip(item.expert_tensors(old.shape), new.expert_tensors(old.shape), strict=True)
    pairs = [(new.expert(index, suffix), item.expert(expert, stored)) for (_, stored), (_, suffix) in names]
    return [copy_tensor(name, tensor, old.source.entry(tensor).dtype, old.source) for name, tensor in pairs]


def edited_files(
    old: Mixture, record: dict[str, Any], recipe: Recipe, tensors: list[OutputTensor], out: Path
) -> dict[str, bytes]:
    """The files of an edited mixture except its weights."""
    record["beside"] = places_beside(record, out, old.places())
    centroid_size = old.config.get("centroid_size")
    config = mixture_config(recipe, old.source, record["format"], tensors[0].shape[0], centroid_size)
    return metadata_files(config, record, measure(recipe, tensors), carried_files(old.folder))


def extract(
    mixture: str | Path,
    expert: str,
    out: str | Path,
    *,
    sources: Mapping[str, str | Path] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Extracts an expert as a dense model: its own routed weights with the mixture's shared weights.

    Args:
        expert: name of the expert.
        mixture, out, sources, progress: as in `add`.

    Returns:
        What was written, and `shared`, which compares the shared weights with those of the expert's source if it still
        exists: `equal`, the number of `differing` tensors and the `largest` difference.

    Raises:
        MergeError: if the expert does not exist, or `out` is not free.
    """
    old = Mixture.open(mixture, sources)
    index = old.index_of(expert)
    routed = {dense: part for part in old.parts for dense, _ in part.expert_tensors(old.shape)}
    tensors = [
        dense_tensor(old, name, routed[name], index)
        if name in routed
        else copy_tensor(name, name, old.source.entry(name).dtype, old.source)
        for name in old.shape.tensors()
    ]
    files = carried_files(old.folder) | {"config.json": to_json_bytes(dense_config(old.source))}
    written = write_output(Path(out), tensors, [old.source], progress, lambda scans: files)
    return {**written, "expert": expert, "shared": compare_shared(old, index, set(routed))}


def dense_tensor(old: Mixture, name: str, part: RoutedPart, expert: int) -> OutputTensor:
    """A tensor of an expert under its name in a dense model."""
    if part.rank:
        return expanded_tensor(name, name, part, expert, old.source, old.shape)
    stored = part.expert(expert, dict(part.expert_tensors(old.shape))[name])
    return copy_tensor(name, stored, old.source.entry(stored).dtype, old.source)


def compare_shared(old: Mixture, index: int, routed: set[str]) -> dict[str, Any]:
    """Compares the mixture's shared weights with the expert's own."""
    try:
        source = old.open_expert(index)
    except MergeError as error:
        return {"compared": False, "why": str(error)}
    differing, largest = 0, 0.0
    names = [name for name in old.shape.tensors() if name not in routed and name in source]
    for name in names:
        ours, theirs = old.source.entry(name), source.entry(name)
        count, difference = min(ours.elements, theirs.elements), 0.0
        for a, b in zip(read_blocks(ours, PIECE, 0, count), source.blocks(name, PIECE), strict=False):
            gap = np.abs(to_float64(a, ours.dtype) - to_float64(b[: len(a)], theirs.dtype))
            difference = max(difference, float(gap.max(initial=0.0)))
        differing += difference > 0
        largest = max(largest, difference)
    result = {"compared": True, "equal": differing == 0, "tensors": len(names)}
    return result | {"differing": differing, "largest": largest}


def export(
    mixture: str | Path,
    out: str | Path,
    format: str,
    *,
    converter: str | Path | None = None,
    quantize: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Writes the same weights in another format. Returns what was written.

    Args:
        format: "lexicon" (supports all policies), the model_type of the family's mixture such as "mixtral" (opens
            without this package), or "gguf" (one file for llama.cpp, see `export_gguf`).
        converter: for "gguf", llama.cpp's convert_hf_to_gguf.py, to be run instead of the package `gguf`.
        quantize: for "gguf", "q8_0" for weights of 8 bits.
        mixture, out, progress: as in `add`; for "gguf" `out` is a file.

    Raises:
        MergeError: if the format cannot represent the mixture.
    """
    if format == "gguf":
        from .gguf_export import export_gguf

        return export_gguf(mixture, out, converter=converter, quantize=quantize, progress=progress)
    for name, value in {"converter": converter, "quantize": quantize}.items():
        if value is not None:
            raise MergeError(f"{name} is for the format gguf alone. Use --format gguf, or leave --{name} out.")
    old = Mixture.open(mixture)
    stock = old.shape.mixture.model_type
    if format not in (stock, "lexicon"):
        raise MergeError(f"Invalid format: {format!r:.60}. Use {stock}, lexicon or gguf.")
    # by token, centroids name the nearest cluster of a text, and route nothing
    dropped = {"rank": None, "centroids": None, "embedder": None} if format == stock else {}
    recipe = read_recipe({**old.recipe.to_dict(), "format": format} | dropped)
    if format == stock and old.shape.attention_bias and not old.shape.mixture.attention_biases:
        raise MergeError(f"{old.folder} has attention biases, which a {stock} does not support. Use --format lexicon.")
    if format == "lexicon" and (reason := lexicon_problem(old.family, old.config)):
        raise MergeError(f"{old.folder} cannot be written as lexicon: {reason}")
    tensors = plan_with_experts(old, list(range(len(old.names))), old.gates(), recipe)
    has_centroids = format == stock and CENTROIDS in old.source
    tensors = [tensor for tensor in tensors if not (has_centroids and tensor.name == CENTROIDS)]
    record = {**deepcopy(old.record), "format": format, "recipe": recipe.to_dict()}
    if old.recipe.rank and not recipe.rank:
        del record["energies"]
        record["expanded_rank"] = old.recipe.rank
    files = edited_files(old, record, recipe, tensors, Path(out))
    beside = carried_statistics(old.folder, old.record["gates"])
    written = write_output(Path(out), tensors, [old.source], progress, lambda scans: files, beside)
    note = f"The centroids are left out: a {stock} has no assign_domains(). They do not route tokens."
    return written | ({"notes": [note]} if has_centroids else {})
