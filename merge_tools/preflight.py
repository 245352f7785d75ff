"""The preflight: finds everything that would spoil a merge, all at once, before the first byte is written, and plans the mixture."""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from run_tools.errors import expand_user, format_size, short_reason

from .anchors import open_anchor
from .averages import AVERAGES
from .checkpoints import Source, open_source, sampled_digest
from .compatibility import check_shapes, check_with, lexicon_problem
from .config_checks import find_opening_errors, is_plain
from .errors import MergeError
from .families import ATTENTION, MLP
from .findings import Report, count_more
from .gate_modes import GATE_MODES, AnchorMode, RidgeMode, TextMode
from .gate_statistics import size_of_statistics
from .gate_texts import encode_texts, texts_of
from .gates import make_gates
from .layout import rope_parameters
from .low_rank import check_rank, rank_for
from .mergekit import USE_FORMAT, formats_of
from .output_config import output_format, special_ids
from .output_folder import check_disk, check_output_path
from .plan import Plan, make_plan, read_centroids
from .recipe import Recipe, all_parts, read_recipe
from .tokenizer_checks import check_tokenizers
from .tokenizers import named_source
from .value_checks import check_float16, check_values


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
    report, plan = run_preflight(recipe, out, deep=deep, thorough=True, **changes)
    if plan and isinstance(GATE_MODES[plan.recipe.gate_mode], RidgeMode):
        check_routing(report, plan)
    return report


def check_routing(report: Report, plan: Plan) -> None:
    """Says for each expert where gates of ridge regression route its held-out tokens."""
    try:
        gates = make_gates(plan.recipe, plan.base, plan.experts)
    except MergeError as error:
        report.add("error", "gates", "gates", str(error))
        return
    for warning in gates.warnings:
        report.add("warning", "gates", "gates", warning)
    names, own = plan.recipe.names, []
    for number, (name, shares) in enumerate(zip(plan.recipe.names, gates.info["confusion"], strict=True)):
        others = sorted((e for e in range(len(names)) if e != number and shares[e] > 0), key=lambda e: -shares[e])
        elsewhere = ", ".join(f"{shares[e]:.1%} to {names[e]}" for e in others)
        own.append(f"{name} {shares[number]:.1%}" + (f" ({elsewhere})" if elsewhere else ""))
        if shares[number] < max(shares):
            report.add(
                "warning", "routing", name, f"most of its held-out tokens are routed to {names[others[0]]} first."
            )
    report.add("ok", "routing", "gates", f"held-out tokens that are routed to their own expert first: {'; '.join(own)}")


def run_preflight(
    recipe: Recipe | dict | str | Path,
    out: str | Path | None = None,
    *,
    deep: bool = False,
    thorough: bool = False,
    **changes,
) -> tuple[Report, Plan | None]:
    """Like `check`, but also returns the plan of the mixture with gates of zeros, or None if there are errors.

    With `thorough`, every configuration is tried in transformers; otherwise those that are not ordinary.
    """
    report = Report()
    try:
        recipe = read_recipe(recipe, **changes)
    except MergeError as error:
        for line in str(error).splitlines():
            report.add("error", "recipe", "recipe", line)
        return report, None
    report.allow = recipe.allow
    check_sparsity(report, recipe)
    base, experts = open_sources(report, recipe)
    sources = distinct([base, *experts])
    usable = [source for source in sources if check_shapes(report, source)]
    check_agreement(report, recipe, base, usable)
    check_values(report, sources, deep, recipe.dtype)
    check_distinct(report, recipe, experts)
    check_task_vectors(report, recipe, base, experts)
    check_adapters(report, recipe, base, experts)
    if base is not None and any(source.checkpoint is base.checkpoint for source in usable):
        check_architecture(report, recipe, base)
        check_format(report, recipe, base)
        check_gates(report, recipe, base, experts)
    centroids = check_centroids(report, recipe)
    plan = None
    if report.ok and base is not None:
        if isinstance(recipe.rank, float):
            parts = all_parts(replace(recipe, rank=1), base.shape)
            recipe.rank = rank_for(recipe.rank, parts, base.shape, base, experts)
        plan = make_plan(recipe, base, experts, centroids)
        plan.report = report
        if uses_float16(recipe, base, experts):
            check_float16(report, plan.tensors)
    if report.ok and plan:
        check_opening(report, plan, sources, thorough)
    if out is not None:
        check_output_path(report, Path(out), [source for source in (base, *experts) if source])
        if report.ok and plan:
            check_disk(report, Path(out), plan.sizes["bytes"] + size_of_statistics(plan.recipe, plan.base))
    return report, plan if report.ok else None


def check_sparsity(report: Report, recipe: Recipe) -> None:
    """Notes that every token uses every expert, which the default of two does with two experts."""
    count = len(recipe.experts)
    if recipe.routing_policy == "token" and recipe.experts_per_token == count:
        message = (
            f"every token uses all experts ({count}), so the mixture is as slow as all of them together; experts_per_token: 1 makes "
            "it sparse."
        )
        report.add("note", "recipe", "experts_per_token", message)


def open_sources(report: Report, recipe: Recipe) -> tuple[Source | None, list[Source]]:
    """Opens base and experts, as far as that is possible. A base that is one of the experts is opened once."""

    def try_open(name: str, origin: str, base: str | None) -> Source | None:
        try:
            source = open_source(name, origin, base)
        except MergeError as error:
            report.add("error", "files", name, str(error))
            return None
        except OSError as error:
            report.add("error", "files", name, f"{origin} cannot be read: {error.strerror or error}.")
            return None
        count, total = len(source.files), sum(file.stat().st_size for file in source.files)
        report.add("ok", "files", name, f"{count} file{'s' * (count > 1)}, {format_size(total)}")
        return source

    opened = [try_open(expert.name, expert.source_model, recipe.base_model) for expert in recipe.experts]
    experts = [source for source in opened if source]
    if recipe.base_model is None:
        return opened[0], experts
    by_path = dict(zip((os.path.realpath(expand_user(e.source_model)) for e in recipe.experts), opened, strict=True))
    path = os.path.realpath(expand_user(recipe.base_model))
    if path not in by_path:
        return try_open("base", recipe.base_model, None), experts
    same = by_path[path]
    return same and replace(same, name="base", origin=recipe.base_model), experts


def distinct(sources: Iterable[Source | None]) -> list[Source]:
    """The sources, base first, without a base that is one of the experts."""
    base, *experts = sources
    separate = base is not None and not any(e and e.checkpoint is base.checkpoint for e in experts)
    return [source for source in (base if separate else None, *experts) if source]


def check_opening(report: Report, plan: Plan, sources: list[Source], thorough: bool) -> None:
    """Checks that transformers can open models with the configurations of the sources and of the mixture.

    Unless `thorough`, configurations that `is_plain` recognises are not tried.
    """
    configs = {**{source.name: source.config for source in sources}, "output": plan.config}
    if not thorough:
        configs = {name: config for name, config in configs.items() if not is_plain(config)}
    for name, error in zip(configs, find_opening_errors(list(configs.values())) if configs else (), strict=True):
        if error:
            problem = f"transformers cannot open its config.json: {error:.300}."
            report.add("error", "configuration", name, f"{problem} Correct the value, or copy the file again.")


def check_agreement(report: Report, recipe: Recipe, base: Source | None, sources: list[Source]) -> None:
    """Compares every source with the base, or with the first source if the base cannot be used."""
    if not sources:
        return
    first = base if base and any(source.checkpoint is base.checkpoint for source in sources) else sources[0]
    provider = named_source(recipe, sources)
    changed = {"dtype": recipe.dtype} | (special_ids(provider) if provider else {})
    for source in sources:
        check_with(report, first, source, changed)
    check_tokenizers(report, recipe, first, sources)


def is_routed(recipe: Recipe, tensor: str) -> bool:
    """Whether a tensor of a dense model belongs to a linear layer that the recipe routes."""
    linears = (name for part in recipe.router_layers for name in (MLP if part == "mlp" else (part,)))
    return any(f".{name}." in tensor for name in linears)


def check_distinct(report: Report, recipe: Recipe, experts: list[Source]) -> None:
    """Warns about experts whose routed weights are equal: routing between them has no effect."""
    names: dict[tuple, str] = {}
    for source in experts:
        adapter, entries = source.adapter, source.checkpoint.entries.values()
        weights = sampled_digest(entry for entry in entries if is_routed(recipe, entry.name))
        changes = [entry for entry in adapter.entries if is_routed(recipe, entry.name)] if adapter else []
        scalings = [pair[2] for name, pair in sorted(adapter.lora_pairs.items())] if adapter and changes else []
        key = (weights, sampled_digest(changes), str(scalings))
        other = names.setdefault(key, source.name)
        if other == source.name:
            continue
        message = f"has the same routed weights as {other} (in all samples): routing between them has no effect."
        if adapter and not changes:
            message += f" Its adapter changes {adapter.changed[0]!r}, but no routed weight"
            attention = any(f".{name}." in weight for name in ATTENTION for weight in adapter.changed)
            message += ". Use attention: routed." if attention else "."
        report.add("warning", "experts", source.name, message)


def check_task_vectors(report: Report, recipe: Recipe, base: Source | None, experts: list[Source]) -> None:
    """Warns about an expert that is the base itself if differences from the base are merged."""
    if base is None or not AVERAGES[recipe.average].of_differences:
        return
    for source in experts:
        if source.checkpoint is base.checkpoint and source.adapter is None:
            message = f"is the base model: its task vector is zero, which weakens the others with {recipe.average}."
            report.add("warning", "experts", source.name, message)


def check_adapters(
    report: Report,
    recipe: Recipe,
    base: Source | None,
    experts: list[Source],
    remedy: str = "Set base_model to its own base, or merge it with peft first.",
) -> None:
    """Checks that all adapters belong to the same base: the recipe's, if it names one."""
    with_adapter = [(expert, expert.adapter) for expert in experts if expert.adapter]
    if not with_adapter:
        return
    first = base if base and (recipe.base_model or base.adapter) else with_adapter[0][0]
    expected = sampled_digest(first.checkpoint.entries.values())
    for expert, adapter in with_adapter:
        folder = expert.checkpoint.folder
        if sampled_digest(expert.checkpoint.entries.values()) != expected:
            message = (
                f"is an adapter over {folder}, whose weights differ from those of {first.name} "
                f"({first.checkpoint.folder}). {remedy}"
            )
            report.add("error", "adapter", expert.name, message)
        elif adapter.base_is_fallback:
            trained_on = adapter.config.get("base_model_name_or_path")
            message = f"was trained on {trained_on!r}, which does not exist; {folder} is used instead."
            report.add("warning", "adapter", expert.name, message)
        else:
            report.add("ok", "adapter", expert.name, f"LoRA over {folder}")
        lost = [name for name in adapter.changed if not is_routed(recipe, name)]
        if lost and recipe.average == "base":
            tensors = repr(lost[0]) if len(lost) == 1 else f"{lost[0]!r} and {count_more(lost, 'tensor')}"
            verb = "is" if len(lost) == 1 else "are"
            message = (
                f"changes {tensors} that {verb} not routed, and average: base drops these changes. Use average: mean to "
                "include them."
            )
            report.add("warning", "adapter", expert.name, message)


def check_gates(report: Report, recipe: Recipe, base: Source, experts: list[Source]) -> None:
    """Checks that the texts or anchors that gates are made from can be read, and that texts differ between experts."""
    mode = GATE_MODES[recipe.gate_mode]
    if isinstance(mode, AnchorMode):
        for source in experts:
            try:
                open_anchor(source, base)
            except MergeError as error:
                report.add("error", "gates", source.name, str(error))
    if not isinstance(mode, TextMode):
        return
    groups = {}
    for expert in recipe.experts:
        try:
            groups[expert.name] = texts_of(recipe, expert)
        except MergeError as error:
            report.add("error", "gates", expert.name, str(error))
        except (OSError, ValueError) as error:
            report.add("error", "gates", expert.name, f"its samples cannot be read ({short_reason(error)}).")
    if any(finding.check in ("gates", "tokenizer") for finding in report.errors):
        return
    known: dict[str, str] = {}
    for name, (positive, negative) in groups.items():
        other = known.setdefault(repr((sorted(positive), sorted(negative))), name)
        if other != name:
            message = f"has the same texts as {other}: their gates are equal, and routing between them is arbitrary."
            report.add("error" if isinstance(mode, RidgeMode) else "warning", "gates", name, message)
    try:
        tokens = [text.tokens for text in encode_texts(recipe, base, list(groups.values()))]
    except MergeError as error:
        report.add("error", "gates", base.name, str(error))
        return
    except Exception as error:  # tokenizers raises a bare Exception for JSON that is not a tokenizer
        message = f"its tokenizer cannot be opened ({short_reason(error)}). Copy it again."
        report.add("error", "gates", base.name, message)
        return
    last, rows = max(max(ids) for ids in tokens), base.shape.vocab_size
    if last >= rows:
        message = f"a prompt has the token id {last}, but its embeddings have {rows} rows."
        report.add("error", "gates", base.name, message)
    else:
        report.add("ok", "gates", base.name, f"{len(tokens)} texts with {sum(map(len, tokens)):,} tokens")


def check_centroids(report: Report, recipe: Recipe) -> np.ndarray | None:
    """Checks and reads the file of centroids."""
    try:
        return read_centroids(recipe)
    except MergeError as error:
        report.add("error", "centroids", "centroids", str(error))
        return None


def check_architecture(report: Report, recipe: Recipe, base: Source) -> None:
    """Checks that mergekit-moe's key `architecture` names the format that is written anyway, and drops it."""
    architecture, recipe.architecture = recipe.architecture, None
    if architecture and (format := output_format(recipe, base)) not in formats_of(architecture):
        message = f"architecture: {architecture} is not the format of this mixture, which is {format}. {USE_FORMAT}"
        report.add("error", "recipe", "architecture", message)


def check_format(report: Report, recipe: Recipe, base: Source) -> None:
    """Checks that the format can represent the mixture, and which software can read it."""
    shape, rope, mixture = base.shape, rope_parameters(base.config), base.shape.mixture
    if bad := [i for i in recipe.router_layers_index or [] if not 0 <= i < shape.num_hidden_layers]:
        message = f"layer {bad[0]} does not exist; the experts have layers 0 to {shape.num_hidden_layers - 1}."
        report.add("error", "recipe", "router_layers_index", message)
    try:
        check_rank(int(recipe.rank or 0), shape)
    except MergeError as error:
        report.add("error", "recipe", "rank", str(error))
    if shape.mlp_bias and "mlp" in recipe.router_layers:
        message = "its MLPs have biases, which routed MLPs do not support. Route gate_proj, up_proj and down_proj."
        report.add("error", "format", base.name, message)
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
    if recipe.centroids:
        message = f"A {mixture.architecture} cannot store centroids. Use format: lexicon, or remove the key centroids."
        report.add("error", "centroids", "centroids", message)
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


def uses_float16(recipe: Recipe, base: Source, experts: list[Source]) -> bool:
    """Whether a value may be converted to float16, or computed in it."""
    dense = [base, *(source for source in experts if source.adapter)]
    entries = (entry for source in dense for entry in source.checkpoint.entries.values())
    return recipe.dtype == "float16" or any(entry.dtype == "F16" for entry in entries)
