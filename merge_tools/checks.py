"""The preflight: everything that would spoil a merge, found before the first byte is written, and all of it at once."""

import hashlib
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

from .agreement import (
    check_configuration,
    check_own_tokenizers,
    check_rope,
    check_rows,
    check_shapes,
    check_tokenizer,
    tokenizer_of,
)
from .averaging import to_float32
from .errors import MergeError, reason, size
from .gates import make_gates, texts_of, tokenize
from .llama import LINEARS, LlamaShape, rope_parameters
from .planning import plan
from .recipe import Recipe, read_recipe, unmeasured
from .report import Report
from .sources import Checkpoint, Source, open_source, whole
from .tensor_files import TORCH_NAMES, audit, nonfinite, read_header, sampled_nonfinite

SLACK = 16 << 20  # bytes: room for what is written beside the tensors


def check(
    recipe: Recipe | dict | str | Path, out: str | Path | None = None, *, deep: bool = False, **changes
) -> Report:
    """Looks at everything a compose would need, and writes nothing.

    Args:
        recipe: YAML file, dict or `Recipe`.
        out: where the mixture is to go; its place and the free disk are then looked at too.
        deep: looks for NaN and infinities in every element, not in samples.
        changes: keys of the recipe to replace; `allow` adds to the recipe's.

    Returns:
        All findings, also when some are errors; `report.raise_for_errors()` turns these into one exception.
    """
    report = Report()
    try:
        report.recipe = read_recipe(recipe, **changes)
    except MergeError as error:
        report.add("error", "recipe", "recipe", str(error))
        return report
    open_sources(report)
    sources = distinct_sources(report)
    usable = [source for source in sources if check_shapes(report, source)]
    check_agreement(report, usable)
    check_values(report, sources, deep)
    check_distinct(report)
    check_adapters(report)
    if report.base is not None and any(source.checkpoint is report.base.checkpoint for source in usable):
        check_format(report, report.base)
        check_gates(report, report.base)
    check_centroids(report)
    if out is not None:
        check_place(report, Path(out))
        if report.ok:
            check_disk(report, Path(out), planned_bytes(report))
    return report


def open_sources(report: Report):
    """Base and experts, as far as they can be opened; a base that is one of the experts is opened once."""
    recipe = report.recipe

    def opened(name: str, given: str, base: str | None) -> Source | None:
        try:
            source = open_source(name, given, base)
        except MergeError as error:
            report.add("error", "files", name, str(error))
            return None
        except OSError as error:
            report.add("error", "files", name, f"{given} cannot be read: {error.strerror or error}.")
            return None
        count, total = len(source.files), sum(file.stat().st_size for file in source.files)
        report.add("ok", "files", name, f"{count} file{'s' * (count > 1)}, {size(total)}")
        return source

    known: dict[str, Source | None] = {}
    for expert in recipe.experts:
        source = opened(expert.name, expert.source_model, recipe.base_model)
        known[os.path.realpath(Path(expert.source_model).expanduser())] = source
        report.experts += [source] if source else []
    place = os.path.realpath(Path(recipe.base_model or recipe.experts[0].source_model).expanduser())
    if recipe.base_model is None:
        report.base = report.experts[0] if known[place] else None
    elif place in known:
        report.base = known[place] and replace(known[place], name="base", given=recipe.base_model)
    else:
        report.base = opened("base", recipe.base_model, None)


def distinct_sources(report: Report) -> list[Source]:
    """Base and experts, a base that is one of the experts left out."""
    base = report.base
    apart = base is not None and not any(expert.checkpoint is base.checkpoint for expert in report.experts)
    return [base, *report.experts] if apart else report.experts


def check_agreement(report: Report, sources: list[Source]):
    """Every source against the base, or the first where that cannot be used."""
    if not sources:
        return
    base = report.base
    first = base if base and any(source.checkpoint is base.checkpoint for source in sources) else sources[0]
    speaker = next((source for source in [first, *sources] if tokenizer_of(source)), first)
    check_own_tokenizers(report, sources)
    for source in sources:
        if source is not first and source.checkpoint is not first.checkpoint:
            check_configuration(report, first, source)
            check_rows(report, first, source)
        check_rope(report, first, source)
        if source is not speaker:
            check_tokenizer(report, speaker, source)


def check_values(report: Report, sources: list[Source], deep: bool):
    """NaN and infinities: in samples of every tensor, or in all elements."""
    seen: dict[Path, list[str]] = {}
    for source in sources:
        for file in source.files:
            if file in seen:
                continue
            entries = source.checkpoint.tensors_of(file)
            if source.adapter and file in source.adapter.files:
                entries = sorted(
                    [e for a, b, _ in source.adapter.pairs.values() for e in (a, b)]
                    + list(source.adapter.replaced.values()),
                    key=lambda entry: entry.start,
                )
            seen[file] = list(audit(file, entries).nonfinite) if deep else sampled_nonfinite(entries)
        bad = [name for file in source.files for name in seen[file]]
        if bad:
            report.add("error", "values", source.name, not_finite(bad))
        else:
            report.add("ok", "values", source.name, "all finite" if deep else "finite in all samples")


def not_finite(names: list[str]) -> str:
    more = len(names) - 1
    who = f"{names[0]!r} holds" if not more else f"{names[0]!r} and {more} more tensor{'s' * (more > 1)} hold"
    return f"{who} NaN or infinite values: the expert is broken. Take an earlier checkpoint."


def sampled_digest(checkpoint: Checkpoint, parts: tuple[str, ...] = ()) -> str:
    """A fingerprint of some bytes from the middle of every tensor (of those whose names hold one of `parts`)."""
    digest = hashlib.sha256()
    handles = {file: os.open(file, os.O_RDONLY) for file in checkpoint.files}
    try:
        for name, entry in sorted(checkpoint.entries.items()):
            if not parts or any(part in name for part in parts):
                count = min(entry.nbytes, 4096)
                digest.update(os.pread(handles[entry.file], count, entry.start + (entry.nbytes - count) // 2))
    finally:
        for handle in handles.values():
            os.close(handle)
    return digest.hexdigest()


def check_distinct(report: Report):
    """Experts that are the same where they are routed make a mixture that routes for nothing."""
    parts = tuple(LINEARS[4:]) if report.recipe.router_layers == ["mlp"] else tuple(report.recipe.router_layers)
    seen: dict[tuple[str, str], str] = {}
    for source in report.experts:
        adapter = str(source.adapter.folder.resolve()) if source.adapter else ""
        key = (adapter, sampled_digest(source.checkpoint, parts))
        if key in seen:
            report.add(
                "warning",
                "experts",
                source.name,
                f"has the same weights as {seen[key]} in every sample of its routed layers: routing between them changes "
                "nothing.",
            )
        seen.setdefault(key, source.name)


def check_adapters(report: Report):
    """Adapters belong to one base: to the recipe's, or all to the same."""
    adapted = [expert for expert in report.experts if expert.adapter]
    if not adapted:
        return
    of_base = report.base and (report.recipe.base_model or report.base.adapter)
    first = report.base if of_base else adapted[0]
    wanted = sampled_digest(first.checkpoint)
    for expert in adapted:
        if sampled_digest(expert.checkpoint) != wanted:
            report.add(
                "error",
                "adapter",
                expert.name,
                f"is an adapter over {expert.checkpoint.folder}, whose weights are not those of {first.name} "
                f"({first.checkpoint.folder}). Name its own base as base_model, or merge it with peft first.",
            )
        elif expert.adapter.stand_in:
            named = expert.adapter.config.get("base_model_name_or_path")
            report.add(
                "warning",
                "adapter",
                expert.name,
                f"was trained over {named!r}, which is not here: {expert.checkpoint.folder} is taken for it.",
            )
        else:
            report.add("ok", "adapter", expert.name, f"LoRA over {expert.checkpoint.folder}")
        check_left_out(report, expert)


def check_left_out(report: Report, expert: Source):
    """With `average: base`, what an adapter changed outside of the routed layers goes nowhere."""
    recipe = report.recipe
    if recipe.average != "base":
        return
    routed = tuple(f".{name}." for part in recipe.router_layers for name in (LINEARS[4:] if part == "mlp" else [part]))
    changed = [*expert.adapter.pairs, *expert.adapter.replaced]
    lost = [name for name in changed if not any(part in name for part in routed)]
    if lost:
        report.add(
            "warning",
            "adapter",
            expert.name,
            f"changes {lost[0]!r} and {len(lost) - 1} more tensors that are not routed: average: base leaves them out. Use "
            "average: mean to keep their share.",
        )


def check_gates(report: Report, base: Source):
    """Prompts and samples that gates are measured with: there, and readable for the base's tokenizer and embeddings."""
    recipe, shape = report.recipe, LlamaShape.of(base.config)
    if recipe.gate_mode not in ("hidden", "cheap_embed", "centroid"):
        return
    texts = []
    for expert in recipe.experts:
        try:
            texts += [text for group in texts_of(recipe, expert) for text in group]
        except MergeError as error:
            report.add("error", "gates", expert.name, str(error))
        except (OSError, ValueError) as error:
            report.add("error", "gates", expert.name, f"its samples cannot be read ({reason(error)}).")
    if any(finding.check in ("gates", "tokenizer") and finding.level == "error" for finding in report.findings):
        return
    try:
        tokens = tokenize(base, texts)
    except MergeError as error:
        report.add("error", "gates", base.name, str(error))
    except Exception as error:  # a file that is JSON, but no tokenizer, is refused by a bare Exception
        report.add("error", "gates", base.name, f"its tokenizer does not open ({reason(error)}). Copy it again.")
    else:
        last = max(max(ids) for ids in tokens)
        if last >= shape.vocab_size:
            report.add(
                "error",
                "gates",
                base.name,
                f"a prompt has the token {last}, and its embeddings have {shape.vocab_size} rows.",
            )
        else:
            report.add("ok", "gates", base.name, f"{len(texts)} texts, {sum(map(len, tokens)):,} tokens to measure")


def check_centroids(report: Report):
    try:
        read_centroids(report.recipe)
    except MergeError as error:
        report.add("error", "centroids", "centroids", str(error))


def read_centroids(recipe: Recipe) -> np.ndarray | None:
    """(E, size) float32 from the only tensor of a safetensors file.

    Raises:
        MergeError: for another file, or values that are not finite.
    """
    if recipe.centroids is None:
        return None
    path = Path(recipe.centroids)
    if not os.path.isfile(path):
        raise MergeError(f"There is no file of centroids {str(path)!r:.300}.")
    entries = read_header(path)
    if len(entries) != 1 or len(entries[0].shape) != 2 or entries[0].shape[0] != len(recipe.experts):
        shapes = [list(entry.shape) for entry in entries[:4]]
        raise MergeError(
            f"{path} holds tensors of the shapes {shapes}, where one of ({len(recipe.experts)}, size) is needed: a centroid "
            "for each expert, in their order."
        )
    if recipe.is_stock and recipe.format != "lexicon":
        raise MergeError(
            "centroids travel with a lexicon only, and this recipe makes a Mixtral. Add format: lexicon, or leave them out."
        )
    raw, dtype = whole(entries[0])
    if dtype not in TORCH_NAMES or nonfinite(raw, dtype):
        raise MergeError(f"{path} holds values that are no finite numbers, of dtype {dtype}. Cluster again.")
    return np.ascontiguousarray(to_float32(raw, dtype).reshape(entries[0].shape))


def check_format(report: Report, base: Source):
    """What the format can hold, and who will be able to read it."""
    recipe, shape, rope = report.recipe, LlamaShape.of(base.config), rope_parameters(base.config)
    bad = [i for i in recipe.router_layers_index or [] if not 0 <= i < shape.layers]
    if bad:
        report.add(
            "error", "recipe", "router_layers_index", f"there is no layer {bad[0]}: layers are 0 to {shape.layers - 1}."
        )
    if shape.mlp_bias and "mlp" in recipe.router_layers:
        report.add("error", "format", base.name, "its MLPs have biases, which routed MLPs do not hold.")
    if recipe.format == "mixtral" and shape.attention_bias:
        report.add(
            "error",
            "format",
            base.name,
            "its attention has biases, which a Mixtral does not hold: use format: lexicon.",
        )
    if output_format(recipe, base) != "mixtral":
        report.add(
            "note", "format", "output", "a LexiconForCausalLM: opens with `import modeling_lexicon`, or as remote code."
        )
        return
    report.add("ok", "format", "output", "a stock MixtralForCausalLM")
    if rope["rope_type"] != "default":
        report.add(
            "warning",
            "rope",
            "output",
            f"releases 4.x of transformers whose Mixtral has no rope scaling would ignore {rope['rope_type']!r} without a "
            "word: open the result with transformers 5.",
        )
    if shape.head_dim * shape.heads != shape.hidden_size:
        report.add("warning", "format", "output", f"head_dim {shape.head_dim} is read by transformers 5 only.")


def output_format(recipe: Recipe, base: Source) -> str:
    if recipe.format != "auto":
        return recipe.format
    stock = recipe.is_stock and not LlamaShape.of(base.config).attention_bias
    return "mixtral" if stock else "lexicon"


def check_place(report: Report, out: Path):
    """The output is nobody's input, is free, and can be made."""
    target = out.expanduser().resolve()
    for source in [report.base, *report.experts]:
        folders = {source.checkpoint.folder.resolve(), source.folder.resolve()} if source else set()
        for folder in folders:
            how = "is" if target == folder else "holds" if target in folder.parents else "lies in"
            if how != "lies in" or folder in target.parents:
                message = f"{how} the source {source.name!r}, which is never written to. Choose another place."
                report.add("error", "output", str(out), message)
                return
    if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
        report.add("error", "output", str(out), "is occupied already. Choose another place, or remove it first.")
        return
    parent = existing_parent(target)
    if not parent.is_dir():
        report.add("error", "output", str(out), f"cannot be made: {parent} is a file. Choose another place.")
    elif not os.access(parent, os.W_OK | os.X_OK):
        report.add("error", "output", str(out), f"cannot be made: {parent} is not writable. Choose another place.")
    else:
        report.add("ok", "output", str(out), "is free")


def planned_bytes(report: Report) -> int:
    """What the tensors will take, gates of any mode among them."""
    recipe = unmeasured(report.recipe)
    gates = make_gates(recipe, report.base).values
    return sum(tensor.nbytes for tensor in plan(recipe, report.base, report.experts, gates))


def existing_parent(path: Path) -> Path:
    return next((parent for parent in path.parents if os.path.lexists(parent)), path)


def check_disk(report: Report, out: Path, needed: int):
    """Room for what will be written, and some over; what an interrupted run has left there counts as free."""
    target = out.expanduser().resolve()
    free = shutil.disk_usage(existing_parent(target)).free
    left = target.parent / f".{target.name}.partial"
    if left.is_dir():
        free += sum(file.stat().st_blocks * 512 for file in left.iterdir())
    wanted = needed + SLACK
    if free < wanted:
        report.add(
            "error",
            "disk",
            str(out),
            f"{size(free)} are free where {size(wanted)} are needed. Make room, or write elsewhere.",
        )
    else:
        report.add("ok", "disk", str(out), f"{size(needed)} of {size(free)} free")
