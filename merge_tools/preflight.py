"""The preflight: finds everything that would spoil a merge, all at once, before the first byte is written."""

import hashlib
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from run_tools.errors import expand_user, format_size, is_encodable, short_reason

from .checkpoints import Source, open_source
from .compatibility import (
    check_shapes,
    check_with,
    lexicon_problem,
)
from .errors import MergeError
from .findings import Report
from .gates import make_gates, prompts_for, tokenize
from .layout import Shape, rope_parameters
from .opening import find_opening_errors
from .output_config import mixture_config, output_format, special_ids
from .plain_configs import is_plain
from .plan import OutputTensor, plan_tensors, read_centroids
from .recipe import ATTENTION_LINEARS, MLP_LINEARS, WITH_PROMPTS, Recipe, read_recipe, with_zero_gates
from .staging import find_staging_problem, partial_folder
from .task_vectors import TASK_METHODS
from .tensor_files import (
    TensorEntry,
    read_blocks,
)
from .tokenizer_checks import check_tokenizers
from .tokenizers import named_source
from .value_checks import check_float16, check_values
from .vocabulary_rows import vocabulary_rows

LONGEST_NAME = 255  # bytes, of a file or a folder
SLACK = 16 << 20  # bytes reserved for files other than tensors


@dataclass
class OpenedSources:
    """The base model and the experts of a recipe that could be opened."""

    base: Source | None = None
    experts: list[Source] = field(default_factory=list)

    @property
    def distinct(self) -> list[Source]:
        """Base and experts, without a base that is one of the experts."""
        base = self.base
        separate = base is not None and not any(expert.checkpoint is base.checkpoint for expert in self.experts)
        return [base, *self.experts] if separate else self.experts


@dataclass
class Preflight:
    """The findings on a recipe, and its sources. `recipe` is None if it could not be read."""

    report: Report
    recipe: Recipe | None = None
    sources: OpenedSources = field(default_factory=OpenedSources)


def check(
    recipe: Recipe | dict | str | Path, out: str | Path | None = None, *, deep: bool = False, **changes
) -> Report:
    """Checks everything that a merge needs, without writing anything.

    Args:
        recipe: YAML file, dict or `Recipe`.
        out: output folder; if given, its path and the free disk space are checked too.
        deep: scans every element for NaN and infinity instead of samples.
        changes: keys of the recipe to replace; `allow` is added to the recipe's.

    Returns:
        All findings, including errors. `report.raise_for_errors()` raises them as one exception.
    """
    return run_preflight(recipe, out, deep=deep, thorough=True, **changes).report


def run_preflight(
    recipe: Recipe | dict | str | Path,
    out: str | Path | None = None,
    *,
    deep: bool = False,
    thorough: bool = False,
    **changes,
) -> Preflight:
    """Like `check`, but also returns the recipe and the opened sources.

    With `thorough`, every configuration is tried in transformers; otherwise those that are not ordinary.
    """
    report = Report()
    try:
        recipe = read_recipe(recipe, **changes)
    except MergeError as error:
        for line in str(error).splitlines():
            report.add("error", "recipe", "recipe", line)
        return Preflight(report)
    report.allow = recipe.allow
    sources = open_sources(report, recipe)
    base = sources.base
    usable = [source for source in sources.distinct if check_shapes(report, source)]
    check_agreement(report, recipe, base, usable)
    check_values(report, sources.distinct, deep, recipe.dtype)
    check_distinct(report, recipe, sources.experts)
    check_task_vectors(report, recipe, sources)
    check_adapters(report, recipe, sources)
    if base is not None and any(source.checkpoint is base.checkpoint for source in usable):
        check_format(report, recipe, base)
        check_gates(report, recipe, base)
    check_centroids(report, recipe)
    if report.ok and uses_float16(recipe, sources):
        check_float16(report, plan_without_gates(recipe, sources))
    if report.ok:
        check_opening(report, recipe, sources, thorough)
    if out is not None:
        check_output_path(report, Path(out), sources)
        if report.ok:
            check_disk(report, Path(out), sum(tensor.nbytes for tensor in plan_without_gates(recipe, sources)))
    return Preflight(report, recipe, sources)


def open_sources(report: Report, recipe: Recipe) -> OpenedSources:
    """Opens base and experts. A base that is one of the experts is opened once."""

    def try_open(name: str, origin: str, base: str | None) -> Source | None:
        try:
            source = open_source(name, origin, base)
        except (MergeError, OSError) as error:
            reason = (
                str(error) if isinstance(error, MergeError) else f"{origin} cannot be read: {error.strerror or error}."
            )
            report.add("error", "files", name, reason)
            return None
        count, total = len(source.files), sum(file.stat().st_size for file in source.files)
        report.add("ok", "files", name, f"{count} file{'s' * (count > 1)}, {format_size(total)}")
        return source

    sources = OpenedSources()
    by_path: dict[str, Source | None] = {}
    for expert in recipe.experts:
        source = try_open(expert.name, expert.source_model, recipe.base_model)
        by_path[os.path.realpath(expand_user(expert.source_model))] = source
        sources.experts += [source] if source else []
    path = os.path.realpath(expand_user(recipe.base_model or recipe.experts[0].source_model))
    if recipe.base_model is None:
        sources.base = sources.experts[0] if by_path[path] else None
    elif path in by_path:
        sources.base = by_path[path] and replace(by_path[path], name="base", origin=recipe.base_model)
    else:
        sources.base = try_open("base", recipe.base_model, None)
    return sources


def check_opening(report: Report, recipe: Recipe, sources: OpenedSources, thorough: bool):
    """Checks that transformers can open models with the configurations of the sources and of the mixture.

    Unless `thorough`, configurations that `is_plain` recognises are not tried.
    """
    base, configs = sources.base, {source.name: source.config for source in sources.distinct}
    centroids = read_centroids(recipe)
    rows = vocabulary_rows(recipe, base, sources.experts).count
    size = None if centroids is None else centroids.shape[1]
    configs["output"] = mixture_config(
        recipe, base, rows, output_format(recipe, base), size, named_source(recipe, sources.experts)
    )
    if not thorough:
        configs = {name: config for name, config in configs.items() if not is_plain(config)}
    if not configs:
        return
    for name, error in zip(configs, find_opening_errors(list(configs.values())), strict=True):
        if error:
            message = (
                f"transformers cannot open its config.json: {error:.300}. Correct the value, or copy the file again."
            )
            report.add("error", "configuration", name, message)


def check_agreement(report: Report, recipe: Recipe, base: Source | None, sources: list[Source]):
    """Compares every source with the base, or with the first source if the base cannot be used."""
    if not sources:
        return
    first = base if base and any(source.checkpoint is base.checkpoint for source in sources) else sources[0]
    provider = named_source(recipe, sources)
    changed = {"dtype": recipe.dtype} | (special_ids(provider) if provider else {})
    for source in sources:
        check_with(report, first, source, changed)
    check_tokenizers(report, recipe, first, sources)


def sampled_digest(entries: Iterable[TensorEntry]) -> str:
    """SHA-256 of some bytes from the middle of every tensor."""
    digest = hashlib.sha256()
    for entry in sorted(entries, key=lambda entry: entry.name):
        count = min(entry.elements, 1024)
        start = (entry.elements - count) // 2
        digest.update(b"".join(read_blocks(entry, count, start, start + count)))
    return digest.hexdigest()


def routed_modules(recipe: Recipe) -> tuple[str, ...]:
    """The linear layers that the recipe routes."""
    return tuple(name for part in recipe.router_layers for name in (MLP_LINEARS if part == "mlp" else (part,)))


def check_distinct(report: Report, recipe: Recipe, experts: list[Source]):
    """Warns about experts whose routed weights are equal: routing between them has no effect."""
    names: dict[tuple, str] = {}
    routed = tuple(f".{module}." for module in routed_modules(recipe))
    for source in experts:
        adapter, entries = source.adapter, source.checkpoint.entries.values()
        weights = sampled_digest(entry for entry in entries if any(module in entry.name for module in routed))
        changes = [entry for entry in adapter.entries if any(m in entry.name for m in routed)] if adapter else []
        scalings = [pair[2] for name, pair in sorted(adapter.lora_pairs.items())] if changes else []
        key = (weights, sampled_digest(changes), str(scalings))
        other = names.setdefault(key, source.name)
        if other == source.name:
            continue
        message = f"has the same routed weights as {other} (in all samples): routing between them has no effect."
        if adapter and not changes:
            message += f" Its adapter changes {adapter.changed[0]!r}, but no routed weight"
            attention = any(f".{name}." in weight for name in ATTENTION_LINEARS for weight in adapter.changed)
            message += ". Use attention: routed." if attention else "."
        report.add("warning", "experts", source.name, message)


def check_task_vectors(report: Report, recipe: Recipe, sources: OpenedSources):
    """Warns about an expert that is the base itself if differences from the base are merged."""
    if recipe.average not in TASK_METHODS or sources.base is None:
        return
    for source in sources.experts:
        if source.checkpoint is sources.base.checkpoint and source.adapter is None:
            message = f"is the base model: its task vector is zero, which weakens the others with {recipe.average}."
            report.add("warning", "experts", source.name, message)


def check_adapters(
    report: Report,
    recipe: Recipe,
    sources: OpenedSources,
    remedy: str = "Set base_model to its own base, or merge it with peft first.",
):
    """Checks that all adapters belong to the same base: the recipe's, if it names one."""
    adapters = [expert for expert in sources.experts if expert.adapter]
    if not adapters:
        return
    base = sources.base
    first = base if base and (recipe.base_model or base.adapter) else adapters[0]
    expected = sampled_digest(first.checkpoint.entries.values())
    for expert in adapters:
        folder = expert.checkpoint.folder
        if sampled_digest(expert.checkpoint.entries.values()) != expected:
            message = (
                f"is an adapter over {folder}, whose weights differ from those of {first.name} "
                f"({first.checkpoint.folder}). {remedy}"
            )
            report.add("error", "adapter", expert.name, message)
        elif expert.adapter.base_is_fallback:
            trained_on = expert.adapter.config.get("base_model_name_or_path")
            message = f"was trained on {trained_on!r}, which does not exist; {folder} is used instead."
            report.add("warning", "adapter", expert.name, message)
        else:
            report.add("ok", "adapter", expert.name, f"LoRA over {folder}")
        check_left_out(report, recipe, expert)


def check_left_out(report: Report, recipe: Recipe, expert: Source):
    """Warns if `average: base` drops what an adapter changes outside the routed layers."""
    if recipe.average != "base":
        return
    routed = [f".{module}." for module in routed_modules(recipe)]
    lost = [name for name in expert.adapter.changed if not any(module in name for module in routed)]
    if lost:
        message = (
            f"changes {lost[0]!r} and {len(lost) - 1} more tensors that are not routed, and average: base drops these "
            "changes. Use average: mean to include them."
        )
        report.add("warning", "adapter", expert.name, message)


def check_gates(report: Report, recipe: Recipe, base: Source):
    """Checks that prompts and samples for gates can be read and tokenized for the base."""
    if recipe.gate_mode not in (*WITH_PROMPTS, "centroid"):
        return
    texts = []
    for expert in recipe.experts:
        try:
            texts += [text for group in prompts_for(recipe, expert) for text in group]
        except MergeError as error:
            report.add("error", "gates", expert.name, str(error))
        except (OSError, ValueError) as error:
            report.add("error", "gates", expert.name, f"its samples cannot be read ({short_reason(error)}).")
    if any(finding.check in ("gates", "tokenizer") for finding in report.errors):
        return
    warn_of_equal_texts(report, recipe)
    try:
        tokens = tokenize(base, texts)
    except MergeError as error:
        report.add("error", "gates", base.name, str(error))
        return
    except Exception as error:  # tokenizers raises a bare Exception for JSON that is not a tokenizer
        message = f"its tokenizer cannot be opened ({short_reason(error)}). Copy it again."
        report.add("error", "gates", base.name, message)
        return
    last, rows = max(max(ids) for ids in tokens), Shape.from_config(base.config).vocab_size
    if last >= rows:
        message = f"a prompt has the token id {last}, but its embeddings have {rows} rows."
        report.add("error", "gates", base.name, message)
    else:
        report.add("ok", "gates", base.name, f"{len(texts)} texts with {sum(map(len, tokens)):,} tokens")


def warn_of_equal_texts(report: Report, recipe: Recipe):
    """Warns about experts whose gates are computed from the same texts."""
    known: dict[str, str] = {}
    for expert in recipe.experts:
        positive, negative = prompts_for(recipe, expert)
        other = known.setdefault(repr((sorted(positive), sorted(negative))), expert.name)
        if other != expert.name:
            message = f"has the same texts as {other}: their gates are equal, and routing between them is arbitrary."
            report.add("warning", "gates", expert.name, message)


def check_centroids(report: Report, recipe: Recipe):
    """Checks the file of centroids."""
    try:
        read_centroids(recipe)
    except MergeError as error:
        report.add("error", "centroids", "centroids", str(error))


def check_format(report: Report, recipe: Recipe, base: Source):
    """Checks that the format can represent the mixture, and which software can read it."""
    shape, rope = Shape.from_config(base.config), rope_parameters(base.config)
    if bad := [i for i in recipe.router_layers_index or [] if not 0 <= i < shape.num_hidden_layers]:
        message = f"layer {bad[0]} does not exist; the experts have layers 0 to {shape.num_hidden_layers - 1}."
        report.add("error", "recipe", "router_layers_index", message)
    if shape.mlp_bias and "mlp" in recipe.router_layers:
        message = "its MLPs have biases, which routed MLPs do not support. Route gate_proj, up_proj and down_proj."
        report.add("error", "format", base.name, message)
    mixture = shape.mixture
    if recipe.format not in ("auto", "lexicon", mixture.model_type):
        message = (
            f"format: {recipe.format} is not the mixture of a {shape.family.model_type}. Use {mixture.model_type}."
        )
        report.add("error", "format", base.name, message)
        return
    if recipe.format == "mixtral" and shape.attention_bias:
        message = "its attention has biases, which a Mixtral does not support. Use format: lexicon."
        report.add("error", "format", base.name, message)
    if output_format(recipe, base) == "lexicon":
        if reason := lexicon_problem(shape.family, base.config):
            report.add("error", "format", base.name, f"the mixture would be a LexiconForCausalLM: {reason}")
            return
        message = "LexiconForCausalLM: needs `import modeling_lexicon` or trust_remote_code=True"
        report.add("note", "format", "output", message)
        return
    report.add("ok", "format", "output", f"{mixture.architecture} of transformers")
    if mixture.model_type != "mixtral":
        return
    if rope["rope_type"] != "default":
        message = (
            f"Mixtral in transformers 4.x releases without RoPE scaling silently ignores {rope['rope_type']!r}: open the "
            "output with transformers 5."
        )
        report.add("warning", "rope", "output", message)
    if shape.head_dim * shape.num_attention_heads != shape.hidden_size:
        report.add("warning", "format", "output", f"only transformers 5 reads head_dim ({shape.head_dim}).")


def check_output_path(report: Report, out: Path, sources: OpenedSources):
    """Checks that the output folder is free and outside the sources."""
    try:
        problem = find_output_problem(expand_user(out).resolve(), sources)
    except (MergeError, ValueError, OSError) as error:  # an unknown user, a null character, a name that is too long
        problem = f"is not a path that can be written ({short_reason(error)}). Choose another folder."
    report.add("error" if problem else "ok", "output", str(out), problem or "is free")


def find_output_problem(target: Path, sources: OpenedSources) -> str | None:
    """Why nothing can be written to the folder, if so."""
    if not is_encodable(str(target)) or len(partial_folder(target).name.encode()) > LONGEST_NAME:
        return "is not UTF-8, or its name is too long. Choose another folder."
    for source in filter(None, [sources.base, *sources.experts]):
        for folder in {source.checkpoint.folder.resolve(), source.folder.resolve()}:
            relation = "is" if target == folder else "contains" if target in folder.parents else "is inside"
            if relation != "is inside" or folder in target.parents:
                return f"{relation} the source {source.name!r}, which must not be modified. Choose another folder."
    if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
        return "exists and is not empty. Choose another folder, or delete it first."
    parent = existing_parent(target)
    if not parent.is_dir():
        return f"cannot be created: {parent} is a file. Choose another folder."
    if not os.access(parent, os.W_OK | os.X_OK):
        return f"cannot be created: {parent} is not writable. Choose another folder."
    return find_staging_problem(partial_folder(target))


def uses_float16(recipe: Recipe, sources: OpenedSources) -> bool:
    """Whether a value may be converted to float16, or computed in it."""
    bases = [
        source.checkpoint.entries
        for source in [sources.base, *sources.experts]
        if source.adapter or source is sources.base
    ]
    return recipe.dtype == "float16" or any(entry.dtype == "F16" for entries in bases for entry in entries.values())


def plan_without_gates(recipe: Recipe, sources: OpenedSources) -> list[OutputTensor]:
    """All tensors of the mixture with zero gates, which have the same size in every mode."""
    recipe = with_zero_gates(recipe)
    return plan_tensors(recipe, sources.base, sources.experts, make_gates(recipe, sources.base).values)


def existing_parent(path: Path) -> Path:
    """The closest parent that exists."""
    return next((parent for parent in path.parents if os.path.lexists(parent)), path)


def check_disk(report: Report, out: Path, needed: int):
    """Checks the free disk space; the partial output of an interrupted run counts as free."""
    target = expand_user(out).resolve()
    free = shutil.disk_usage(existing_parent(target)).free
    partial = partial_folder(target)
    if partial.is_dir():  # find_staging_problem has looked at it
        free += sum(file.stat().st_blocks * 512 for file in partial.iterdir())
    if free < needed + SLACK:
        message = f"{format_size(needed + SLACK)} are needed, but {format_size(free)} are free. Free some disk space."
        report.add("error", "disk", str(out), message)
    else:
        report.add("ok", "disk", str(out), f"{format_size(needed)} of {format_size(free)} free")
