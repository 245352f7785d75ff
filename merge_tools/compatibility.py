"""Compatibility of sources: each must be a supported model that matches its configuration, and all must agree with each other."""

import re
from typing import Any

from .checkpoints import Source
from .config_checks import find_value_errors
from .families import FAMILIES, Family, family_of
from .findings import Report, count_more
from .layout import Shape, rope_parameters
from .places import QUANTISED
from .tensor_files import TORCH_NAMES, equal_tensors

# Fields that determine shapes or results: experts that differ in one cannot be merged.
MUST_AGREE = {
    "family": "only models of one family can be merged",
    "hidden_size": "tensor shapes differ",
    "intermediate_size": "MLP shapes differ",
    "num_hidden_layers": "the number of layers differs",
    "num_attention_heads": "attention heads differ",
    "num_key_value_heads": "attention heads differ",
    "head_dim": "attention heads differ",
    "attention_bias": "biases would be lost or missing",
    "mlp_bias": "biases would be lost or missing",
    "hidden_act": "MLPs use different activations",
    "rms_norm_eps": "norms give different results",
    "tie_word_embeddings": "output layers are stored differently",
}
# Other fields, with the level of a difference.
SETTINGS = {
    "max_position_embeddings": "warning", "bos_token_id": "warning", "eos_token_id": "warning",
    "pad_token_id": "warning", "sliding_window": "warning", "pretraining_tp": "warning", "initializer_range": "note", "attention_dropout": "note", "dtype": "note",
}  # fmt: skip
# Settings that a Llama ignores, with the value that has no effect.
WITHOUT_EFFECT = {"sliding_window": None, "pretraining_tp": 1}
MAX_TENSOR_ERRORS = 3
# Part of a tensor's name -> what wrapped the model, and how to get the model in it.
WRAPPERS = {
    "_orig_mod.": ("torch.compile", "model._orig_mod"),
    "module.": ("DataParallel or DistributedDataParallel", "model.module"),
    "_fsdp_wrapped_module.": ("FSDP", "accelerator.unwrap_model(model)"),
    "base_model.model.": ("peft", "model.merge_and_unload()"),
}


def check_shapes(report: Report, source: Source) -> bool:
    """Checks that a source is of a supported family and has every tensor in its shape; False if it cannot be compared with others."""
    model_type = source.config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        message = f"model_type is {model_type!r:.60}; models of these types can be merged: {known}."
        report.add("error", "model type", source.name, message)
        return False
    if errors := find_value_errors(source.config):
        for error in errors:
            report.add("error", "configuration", source.name, f"config.json: {error}. Copy or download it again.")
        return False
    family = family_of(source.config)
    for key, allowed in {**family.refused, "layer_types": ()}.items():
        value = source.config.get(key)
        full = key == "layer_types" and isinstance(value, list) and set(map(str, value)) == {"full_attention"}
        if value is not None and value not in allowed and not full:
            message = f"{key}={value!r:.60} is not supported by a {family.mixture}, the mixture of a {model_type}."
            report.add("error", "configuration", source.name, message)
    for key, neutral in WITHOUT_EFFECT.items():
        if key in family.carried or source.config.get("use_sliding_window") is False:
            continue
        if (value := source.config.get(key, neutral)) not in (neutral, None):
            message = f"{key}={value!r:.60} has no effect in a {model_type}: the output does not have it."
            report.add("warning", "configuration", source.name, message)
    if rope_parameters(source.config).get("partial_rotary_factor", source.config.get("partial_rotary_factor", 1)) != 1:
        message = (
            f"partial_rotary_factor is not supported for a {model_type}. Remove it if the model was trained without."
        )
        report.add("error", "configuration", source.name, message)
    shape = source.shape
    errors = find_tensor_errors(report, source, shape)
    if source.config.get("quantization_config"):
        errors = [describe_quantised(source), *errors]
    for error in errors[:MAX_TENSOR_ERRORS]:
        report.add("error", "tensors", source.name, f"{error}.")
    more = len(errors) - MAX_TENSOR_ERRORS
    if more > 0:
        report.add("error", "tensors", source.name, f"{more} more such tensor{'s' * (more > 1)}.")
    if not errors:
        names = shape.tensors()
        dtypes = sorted({TORCH_NAMES[source.entry(name).dtype] for name in names})
        report.add("ok", "tensors", source.name, f"{len(names)} tensors, {', '.join(dtypes)}")
    return True


def describe_quantised(source: Source) -> str:
    """What to use instead of a quantised model."""
    named = source.adapter.config.get("base_model_name_or_path") if source.adapter else source.origin
    if isinstance(named, str) and QUANTISED.search(named):
        return f"{named} is a quantised copy. Use the model in 16 or 32 bits, such as {QUANTISED.sub('', named)}"
    return "config.json has a quantization_config; save the model in bfloat16, float16 or float32 first"


def lexicon_problem(family: Family, config: dict[str, Any]) -> str | None:
    """Why `format: lexicon` cannot represent a model, if so."""
    if family.lexicon is None:
        able = ", ".join(name for name, other in FAMILIES.items() if other.lexicon is not None)
        return f"it cannot represent the layers of {family.model_type}; experts of these types can be routed like this: {able}."
    if "sliding_window" in family.carried and (
        window := config.get("sliding_window", family.defaults["sliding_window"])
    ):
        return f"it has full attention, but sliding_window is {window}."
    return None


def find_tensor_errors(report: Report, source: Source, shape: Shape) -> list[str]:
    """Differences between the stored tensors and those that the configuration requires."""
    entries = source.checkpoint.entries
    for wrapper, (kind, inner) in WRAPPERS.items():
        if wrapped := [name for name in entries if name.startswith(wrapper) or f".{wrapper}" in name]:
            return [
                f"tensor {wrapped[0]!r} is of a model that {kind} has wrapped, as {count_more(wrapped, 'tensor')}. Save the model in it: "
                f"{inner}.save_pretrained(FOLDER)"
            ]
    layers = len({match[1] for name in entries if (match := re.match(r"model\.layers\.(\d+)\.", name))})
    if layers != shape.num_hidden_layers:
        return [
            f"num_hidden_layers is {shape.num_hidden_layers} in config.json, but the files have tensors of {layers} layers"
        ]
    expected, errors = shape.tensors(), []
    for name, dims in expected.items():
        if name not in entries:
            errors.append(f"tensor {name!r} is missing")
        elif entries[name].shape != dims:
            errors.append(f"{name!r} has shape {list(entries[name].shape)}, but config.json requires {list(dims)}")
        elif entries[name].dtype not in TORCH_NAMES:
            errors.append(f"{name!r} has dtype {entries[name].dtype}; quantised weights cannot be merged")
    for name in sorted(set(entries) - set(expected)):
        if name.endswith(".bias"):
            errors.append(f"{name!r} is a bias that config.json does not enable, and so the merge would drop it")
        elif name == "lm_head.weight" and not equal_tensors(entries[name], entries.get("model.embed_tokens.weight")):
            errors.append(
                "'lm_head.weight' differs from the embeddings, and tie_word_embeddings is true: transformers 5 uses it, a merge "
                "would drop it. Set tie_word_embeddings to false in config.json"
            )
        elif name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq"):
            report.add("note", "tensors", source.name, f"{name!r} is ignored: the configuration does not use it.")
        else:
            errors.append(f"{name!r} is not a tensor of a {shape.family.model_type}")
    return errors


def check_with(report: Report, first: Source, other: Source, changed: dict[str, Any]):
    """Compares a source with the first one: configurations, embedding rows and RoPE settings.

    `changed` are the fields that the output does not have from the first one.
    """
    if other.checkpoint is not first.checkpoint:
        check_configuration(report, first, other, changed)
        ours, theirs = first.shape.vocab_size, other.shape.vocab_size
        if ours != theirs:
            message = f"vocab_size is {theirs} ({ours} in {first.name}): embeddings have different numbers of rows."
            report.add("error", "vocabulary", other.name, message, "vocab")
    check_rope(report, first, other)


def check_configuration(report: Report, first: Source, other: Source, changed: dict[str, Any]):
    """Compares configurations field by field: differences in MUST_AGREE are errors, those in SETTINGS are reported."""
    ours, theirs = with_defaults(first.config), with_defaults(other.config)
    types = [source.config["model_type"] for source in (first, other)]
    if not FAMILIES.keys() >= set(types):  # one is a mixture, whose class several families can have
        types = [family_of(source.config).mixture for source in (first, other)]
    ours["family"], theirs["family"] = types
    differing = [key for key in MUST_AGREE if ours.get(key) != theirs.get(key)]
    for key in differing:
        message = f"{describe_difference(key, theirs, ours, first)}: {MUST_AGREE[key]}."
        report.add("error", "configuration", other.name, message)
    for key, level in SETTINGS.items():
        if ours.get(key) != theirs.get(key):
            kept = changed.get(key) or ours.get(key)
            result = "the output has none" if kept is None else f"the output has {kept}"
            message = f"{describe_difference(key, theirs, ours, first)}: {result}."
            report.add(level, "configuration", other.name, message)
    if not differing:
        report.add("ok", "configuration", other.name, f"compatible with {first.name}")


def describe_difference(key: str, theirs: dict[str, Any], ours: dict[str, Any], first: Source) -> str:
    """'hidden_size is 64 (32 in birds)'."""
    value, expected = ("not set" if config.get(key) is None else f"{config[key]!s:.60}" for config in (theirs, ours))
    return f"{key} is {value} ({expected} in {first.name})"


def with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with its class's defaults for missing fields."""
    shape = Shape.from_config(config)
    defaults = {"hidden_act": "silu", "attention_dropout": 0.0, "initializer_range": 0.02, **shape.family.defaults}
    values = {key: value for key, value in config.items() if value is not None or key in shape.family.carried}
    return {"dtype": config.get("torch_dtype"), **defaults, **values, **shape.sizes()}


def check_rope(report: Report, first: Source, other: Source):
    """Compares RoPE settings."""
    ours, theirs = rope_parameters(first.config), rope_parameters(other.config)
    changed = [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
    if not changed:
        report.add("ok", "rope", other.name, f"{ours['rope_type']}, base {ours['rope_theta']:g}")
        return
    differences = ", ".join(describe_difference(key, theirs, ours, first) for key in changed)
    message = f"its RoPE settings differ: {differences}. Merged attention would use inconsistent positions."
    report.add("error", "rope", other.name, message, "rope")
