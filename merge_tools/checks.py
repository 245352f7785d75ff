"""The preflight: everything that would spoil a merge, found before the first byte is written, and all of it at once."""

import hashlib
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .errors import MergeError, size
from .llama import LINEARS, LlamaShape, rope_parameters
from .recipe import Recipe, read_recipe
from .sources import Checkpoint, Source, open_source
from .tensor_files import TORCH_NAMES, audit, sampled_nonfinite
from .tokenizers import compare, tokenizer_file

# What decides the shapes or the arithmetic: experts that differ here do not fit together.
MUST_AGREE = {
    "hidden_size": "its tensors have other shapes",
    "intermediate_size": "its MLPs have another width",
    "num_hidden_layers": "it has another number of layers",
    "num_attention_heads": "its attention is divided otherwise",
    "num_key_value_heads": "its attention is divided otherwise",
    "head_dim": "its attention is divided otherwise",
    "attention_bias": "its biases would be lost, or missing",
    "mlp_bias": "its biases would be lost, or missing",
    "hidden_act": "its MLPs apply another function",
    "rms_norm_eps": "its norms compute something else",
    "tie_word_embeddings": "its output layer is stored otherwise",
}
SETTINGS = (
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "initializer_range",
    "attention_dropout",
    "torch_dtype",
    "dtype",
)


@dataclass(frozen=True)
class Finding:
    """One result of the preflight: `level` is "ok", "note", "warning" or "error"."""

    level: str
    check: str
    subject: str
    message: str
    allow: str | None = None  # the option that would accept it


@dataclass
class Report:
    """All findings, and the sources that could be opened."""

    findings: list[Finding] = field(default_factory=list)
    recipe: Recipe | None = None
    base: Source | None = None
    experts: list[Source] = field(default_factory=list)

    def add(self, level: str, check: str, subject: str, message: str, allow: str | None = None):
        if level == "error" and allow and self.recipe and allow in self.recipe.allow:
            level, message = "warning", f"{message} (allowed: {allow})"
        self.findings.append(Finding(level, check, subject, message, allow))

    @property
    def errors(self) -> list[Finding]:
        return [f for f in self.findings if f.level == "error"]

    @property
    def warnings(self) -> list[Finding]:
        return [f for f in self.findings if f.level == "warning"]

    @property
    def ok(self) -> bool:
        return not self.errors

    def to_dict(self) -> dict:
        return {"ok": self.ok, "findings": [asdict(finding) for finding in self.findings]}

    def raise_for_errors(self):
        """One message with every error, each with its mend.

        Raises:
            MergeError: unless there is none.
        """
        if self.errors:
            lines = []
            for f in self.errors:
                option = f" Accept it with --allow {f.allow}." if f.allow else ""
                lines.append(f"{f.subject}: {f.message}{option}")
            raise MergeError("\n".join(lines))


def check(
    recipe: Recipe | dict | str | Path, out: str | Path | None = None, *, deep: bool = False, **changes
) -> Report:
    """Looks at everything a compose would need, and writes nothing.

    Args:
        recipe: YAML file, dict or `Recipe`.
        out: where the mixture is to go; its place and the free disk are then looked at too.
        deep: looks for NaN and infinities in every element, not in samples.
        changes: keys of the recipe to replace.

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
    if not report.experts:
        return report
    usable = [source for source in [report.base, *report.experts] if check_shapes(report, source)]
    reference = report.base if report.base in usable else None
    for source in usable:
        if reference is None or source is reference:
            reference = reference or source
            continue
        check_configuration(report, reference, source)
        check_rope(report, reference, source)
        check_vocabulary(report, reference, source)
    check_values(report, usable, deep)
    check_distinct(report, usable)
    check_adapters(report)
    if reference is not None:
        check_format(report, reference)
    if out is not None:
        check_place(report, Path(out))
    return report


def open_sources(report: Report):
    """Base and experts, as far as they can be opened; a base that is one of the experts is opened once."""
    recipe, opened = report.recipe, {}
    places = [(e.name, e.source_model, recipe.base_model) for e in recipe.experts]
    if recipe.base_model is not None:
        places.insert(0, ("base", recipe.base_model, None))
    for name, given, base in places:
        try:
            opened[name] = open_source(name, given, base)
        except MergeError as error:
            report.add("error", "files", name, str(error))
            continue
        count = len(opened[name].files)
        report.add(
            "ok",
            "files",
            name,
            f"{count} file{'s' * (count > 1)}, {size(sum(f.stat().st_size for f in opened[name].files))}",
        )
    report.experts = [opened[name] for name in recipe.names if name in opened]
    report.base = opened.get("base") if recipe.base_model is not None else next(iter(report.experts), None)


def check_shapes(report: Report, source: Source) -> bool:
    """A Llama by its configuration, and every tensor there in its shape. False where nothing more can be compared."""
    kind = source.config.get("model_type")
    if kind != "llama":
        report.add("error", "model type", source.name, f"model_type is {kind!r}: experts are Llamas.")
        return False
    try:
        shape = LlamaShape.of(source.config)
    except MergeError as error:
        report.add("error", "configuration", source.name, str(error))
        return False
    expected, entries = shape.tensors(), source.checkpoint.entries
    faults = []
    for name, dims in expected.items():
        if name not in entries:
            faults.append(f"lacks the tensor {name!r}")
        elif entries[name].shape != dims:
            faults.append(f"{name!r} has shape {list(entries[name].shape)} where its configuration says {list(dims)}")
        elif entries[name].dtype not in TORCH_NAMES:
            faults.append(f"{name!r} has dtype {entries[name].dtype}: quantised weights cannot be merged")
    for name in sorted(set(entries) - set(expected)):
        if name.endswith(".bias"):
            faults.append(f"holds {name!r}, a bias that its configuration does not know and the merge would drop")
        elif name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq"):
            report.add("note", "tensors", source.name, f"{name!r} is not used: the configuration does without it.")
        else:
            faults.append(f"holds {name!r}, which is no tensor of a Llama")
    for fault in faults[:3]:
        report.add("error", "tensors", source.name, f"{fault}.")
    if len(faults) > 3:
        report.add("error", "tensors", source.name, f"{len(faults) - 3} more such tensors.")
    if not faults:
        dtypes = sorted({TORCH_NAMES[entries[name].dtype] for name in expected})
        report.add("ok", "tensors", source.name, f"{len(expected)} tensors, {', '.join(dtypes)}")
    return not faults


def check_configuration(report: Report, first: Source, other: Source):
    """Field by field: what decides shapes or arithmetic must agree, what does not is listed."""
    ours, theirs = resolved(first.config), resolved(other.config)
    differing = [key for key in MUST_AGREE if ours.get(key) != theirs.get(key)]
    for key in differing:
        report.add(
            "error",
            "configuration",
            other.name,
            f"{key} is {theirs.get(key)}, and {ours.get(key)} in {first.name}: {MUST_AGREE[key]}.",
        )
    for key in SETTINGS:
        if ours.get(key) != theirs.get(key):
            level = "warning" if key.endswith("token_id") or key == "max_position_embeddings" else "note"
            report.add(
                level,
                "configuration",
                other.name,
                f"{key} is {theirs.get(key)}, and {ours.get(key)} in {first.name}, which is written.",
            )
    if not differing:
        report.add(
            "ok", "configuration", other.name, f"agrees with {first.name} in all that decides a shape or a result"
        )


def resolved(config: dict) -> dict:
    """The fields with what Llama takes where they are left out."""
    shape = LlamaShape.of(config)
    defaults = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "attention_dropout": 0.0}
    return {
        **defaults,
        "initializer_range": 0.02,
        **{key: value for key, value in config.items() if value is not None},
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "attention_bias": shape.attention_bias,
        "mlp_bias": shape.mlp_bias,
        "tie_word_embeddings": shape.tied,
    }


def check_rope(report: Report, first: Source, other: Source):
    ours, theirs = rope_parameters(first.config), rope_parameters(other.config)
    if ours == theirs:
        report.add("ok", "rope", other.name, f"{ours['rope_type']}, base {ours['rope_theta']:g}")
        return
    changed = ", ".join(
        f"{key} {theirs.get(key)} and {ours.get(key)}"
        for key in sorted({*ours, *theirs})
        if ours.get(key) != theirs.get(key)
    )
    report.add(
        "error",
        "rope",
        other.name,
        f"its rotary embedding differs from that of {first.name} ({changed}): its attention means other positions.",
        "rope",
    )


def check_vocabulary(report: Report, first: Source, other: Source):
    """Rows of the embeddings, and the tokenizers that say what they mean."""
    ours, theirs = (LlamaShape.of(source.config).vocab_size for source in (first, other))
    if ours != theirs:
        report.add(
            "error",
            "vocabulary",
            other.name,
            f"vocab_size is {theirs}, and {ours} in {first.name}: their embeddings have other rows.",
            "vocab",
        )
    one, two = (tokenizer_file(source.folder) or tokenizer_file(source.checkpoint.folder) for source in (first, other))
    if one is None or two is None:
        lacking = first.name if one is None else other.name
        report.add("note", "tokenizer", other.name, f"{lacking} brings no tokenizer: not compared.")
        return
    try:
        difference = compare(one, two)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        report.add("error", "tokenizer", other.name, f"{two} or {one} cannot be read ({error!r:.80}).", "tokenizer")
        return
    if difference is None:
        report.add("ok", "tokenizer", other.name, f"the same as that of {first.name}")
    elif difference.kind == "longer":
        report.add("error", "tokenizer", other.name, f"against {first.name}, {difference.text}.", "vocab")
    else:
        report.add(
            "error",
            "tokenizer",
            other.name,
            f"against {first.name}, {difference.text}: the same ids mean other texts.",
            "tokenizer",
        )


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
    more = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
    return f"{names[0]!r}{more} hold NaN or infinite values: the expert is broken. Take an earlier checkpoint."


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


def check_distinct(report: Report, sources: list[Source]):
    """Experts that are the same where they are routed make a mixture that routes for nothing."""
    parts = tuple(LINEARS[4:]) if report.recipe.router_layers == ["mlp"] else tuple(report.recipe.router_layers)
    seen: dict[tuple[str, str], str] = {}
    for source in sources:
        if source not in report.experts:
            continue
        adapter = str(source.adapter.folder) if source.adapter else ""
        key = (adapter, sampled_digest(source.checkpoint, parts))
        if key in seen:
            report.add(
                "warning",
                "experts",
                source.name,
                f"has the same weights as {seen[key]} in every sample of its routed layers: routing between them changes nothing.",
            )
        seen.setdefault(key, source.name)


def check_adapters(report: Report):
    """Adapters belong to one base: to the recipe's, or all to the same."""
    if not any(expert.adapter for expert in report.experts):
        return
    wanted = sampled_digest(report.base.checkpoint) if report.base else None
    for expert in report.experts:
        if expert.adapter and wanted and sampled_digest(expert.checkpoint) != wanted:
            report.add(
                "error",
                "adapter",
                expert.name,
                f"is an adapter over {expert.checkpoint.folder}, whose weights are not those of {report.base.name} "
                f"({report.base.checkpoint.folder}). Name its own base as base_model, or merge it with peft first.",
            )


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
        if any(target == folder or target in folder.parents or folder in target.parents for folder in folders):
            report.add(
                "error",
                "output",
                str(out),
                f"is, holds or lies in the source {source.name!r}, which is never written to.",
            )
            return
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        report.add("error", "output", str(out), "is occupied already. Choose another place, or remove it first.")
        return
    parent = next(p for p in target.parents if p.exists())
    if not os.access(parent, os.W_OK):
        report.add("error", "output", str(out), f"cannot be made: {parent} is not writable.")
        return
    report.add("ok", "output", str(out), "is free")


def check_disk(report: Report, out: Path, needed: int):
    """Room for what will be written, and some over."""
    parent = next(p for p in out.expanduser().resolve().parents if p.exists())
    free = shutil.disk_usage(parent).free
    wanted = needed + (16 << 20)
    if free < wanted:
        report.add(
            "error",
            "disk",
            str(out),
            f"{size(free)} are free where {size(wanted)} are needed. Make room, or write elsewhere.",
        )
    else:
        report.add("ok", "disk", str(out), f"{size(needed)} of {size(free)} free")
