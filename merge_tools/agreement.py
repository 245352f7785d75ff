"""Whether sources fit together: each a Llama as its configuration says, and all of them alike where they must be."""

import hashlib
import re
from typing import Any

from .errors import MergeError
from .llama import LlamaShape, rope_parameters
from .report import Report
from .sources import Source
from .tensor_files import TORCH_NAMES
from .tokenizers import compare, read_tokenizer, tokenizer_file, vocabulary

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
# What decides neither: the level of a difference.
SETTINGS = {
    "max_position_embeddings": "warning",
    "bos_token_id": "warning",
    "eos_token_id": "warning",
    "pad_token_id": "warning",
    "initializer_range": "note",
    "attention_dropout": "note",
    "dtype": "note",
}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
OPTIONAL_SIZES = ("num_key_value_heads", "head_dim")
TENSOR_FAULTS_SHOWN = 3


def check_shapes(report: Report, source: Source) -> bool:
    """A Llama by its configuration, and every tensor there in its shape. False where nothing more can be compared."""
    kind = source.config.get("model_type")
    if kind != "llama":
        report.add(
            "error",
            "model type",
            source.name,
            f"model_type is {kind!r}, and experts are Llamas: no other architecture is merged here.",
        )
        return False
    faults = configuration_faults(source.config)
    for fault in faults:
        report.add("error", "configuration", source.name, f"{fault} in its config.json. Copy or download it again.")
    if faults:
        return False
    shape = LlamaShape.of(source.config)
    faults = tensor_faults(report, source, shape)
    for fault in faults[:TENSOR_FAULTS_SHOWN]:
        report.add("error", "tensors", source.name, f"{fault}.")
    more = len(faults) - TENSOR_FAULTS_SHOWN
    if more > 0:
        report.add("error", "tensors", source.name, f"{more} more such tensor{'s' * (more > 1)}.")
    if not faults:
        names = shape.tensors()
        dtypes = sorted({TORCH_NAMES[source.entry(name).dtype] for name in names})
        report.add("ok", "tensors", source.name, f"{len(names)} tensors, {', '.join(dtypes)}")
    return True


def configuration_faults(config: dict[str, Any]) -> list[str]:
    """Fields that are missing, or no sizes and settings of a Llama at all."""
    faults = [f"{key} is missing" for key in SIZES if config.get(key) is None]
    for key in (*SIZES, *OPTIONAL_SIZES):
        value = config.get(key)
        if value is not None and (type(value) is not int or value < 1):
            faults.append(f"{key} is {value!r:.60}, no size")
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, dict):
            faults.append(f"{key} is {value!r:.60}, no rotary settings")
        elif not isinstance(value.get("rope_theta", 1.0), int | float | None):
            faults.append(f"{key} has the rope_theta {value['rope_theta']!r:.60}, no number")
    if not isinstance(config.get("rope_theta"), int | float | None):
        faults.append(f"rope_theta is {config['rope_theta']!r:.60}, no number")
    return faults


def tensor_faults(report: Report, source: Source, shape: LlamaShape) -> list[str]:
    """What stands between the tensors in the files and those that the configuration speaks of."""
    entries = source.checkpoint.entries
    layers = len({match[1] for name in entries if (match := re.match(r"model\.layers\.(\d+)\.", name))})
    if layers != shape.layers:
        return [f"its configuration says num_hidden_layers {shape.layers}, and its files hold the tensors of {layers}"]
    expected, faults = shape.tensors(), []
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
    return faults


def check_configuration(report: Report, first: Source, other: Source):
    """Field by field: what decides shapes or arithmetic must agree, what does not is listed."""
    ours, theirs = resolved(first.config), resolved(other.config)
    differing = [key for key in MUST_AGREE if ours.get(key) != theirs.get(key)]
    for key in differing:
        report.add("error", "configuration", other.name, f"{said(key, theirs, ours, first)}: {MUST_AGREE[key]}.")
    for key, level in SETTINGS.items():
        if ours.get(key) != theirs.get(key):
            kept = (report.recipe and report.recipe.dtype if key == "dtype" else None) or ours.get(key)
            written = "it is left out" if kept is None else f"{kept} is written"
            report.add(level, "configuration", other.name, f"{said(key, theirs, ours, first)}: {written}.")
    if not differing:
        report.add(
            "ok", "configuration", other.name, f"agrees with {first.name} in all that decides a shape or a result"
        )


def said(key: str, theirs: dict[str, Any], ours: dict[str, Any], first: Source) -> str:
    """'hidden_size is 64, and 32 in birds'."""
    here, there = ("not set" if config.get(key) is None else f"{config[key]!s:.60}" for config in (theirs, ours))
    return f"{key} is {here}, and {there} in {first.name}"


def resolved(config: dict[str, Any]) -> dict[str, Any]:
    """The fields with what Llama takes where they are left out."""
    shape = LlamaShape.of(config)
    defaults = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "attention_dropout": 0.0}
    return {
        **defaults,
        "initializer_range": 0.02,
        "dtype": config.get("torch_dtype"),
        **{key: value for key, value in config.items() if value is not None},
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "attention_bias": shape.attention_bias,
        "mlp_bias": shape.mlp_bias,
        "tie_word_embeddings": shape.tied,
    }


def check_rope(report: Report, first: Source, other: Source):
    ours, theirs = rope_parameters(first.config), rope_parameters(other.config)
    changed = [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
    if not changed:
        report.add("ok", "rope", other.name, f"{ours['rope_type']}, base {ours['rope_theta']:g}")
        return
    what = ", ".join(said(key, theirs, ours, first) for key in changed)
    report.add(
        "error",
        "rope",
        other.name,
        f"its rotary embedding is another: {what}. Its attention means other positions.",
        "rope",
    )


def check_vocabulary(report: Report, first: Source, other: Source):
    """Rows of the embeddings, and the tokenizers that say what they mean."""
    check_rows(report, first, other)
    check_tokenizer(report, first, other)


def check_rows(report: Report, first: Source, other: Source):
    ours, theirs = (LlamaShape.of(source.config).vocab_size for source in (first, other))
    if ours != theirs:
        report.add(
            "error",
            "vocabulary",
            other.name,
            f"vocab_size is {theirs}, and {ours} in {first.name}: their embeddings have other rows.",
            "vocab",
        )


def tokenizer_of(source: Source):
    """The file that holds its tokens: an adapter's own, or its base's; None where it brings none."""
    return tokenizer_file(source.folder) or tokenizer_file(source.checkpoint.folder)


def check_own_tokenizers(report: Report, sources: list[Source]):
    """They can be read, and every token has a row in the embeddings."""
    known: dict[bytes, int] = {}  # a file's digest -> its last id; most experts share one tokenizer
    for source in sources:
        file = tokenizer_of(source)
        if file is None or file.suffix != ".json":
            continue
        try:
            digest = hashlib.sha256(file.read_bytes()).digest()
            if digest not in known:
                known[digest] = max(vocabulary(read_tokenizer(file)).values(), default=-1)
        except (MergeError, OSError) as error:
            report.add("error", "tokenizer", source.name, str(error))
            continue
        rows = source.config["vocab_size"]
        if known[digest] >= rows:
            report.add(
                "warning",
                "tokenizer",
                source.name,
                f"its tokenizer gives ids up to {known[digest]}, and its embeddings have {rows} rows: such a token fails in "
                "the model.",
            )


def check_tokenizer(report: Report, first: Source, other: Source):
    """The same ids mean the same texts."""
    one, two = tokenizer_of(first), tokenizer_of(other)
    if one is None or two is None:
        lacking = first.name if one is None else other.name
        report.add("note", "tokenizer", other.name, f"{lacking} brings no tokenizer: not compared.")
        return
    try:
        difference = compare(one, two)
    except MergeError as error:
        if not any(finding.message == str(error) for finding in report.findings):
            report.add("error", "tokenizer", other.name, str(error))
        return
    if difference is None:
        report.add("ok", "tokenizer", other.name, f"the same as that of {first.name}")
        return
    message = f"against {first.name}, {difference.text}"
    if difference.kind == "longer":
        report.add("error", "tokenizer", other.name, f"{message}.", "vocab")
    elif difference.kind == "around":
        report.add("warning", "tokenizer", other.name, f"{message}: that of the base is written.")
    elif difference.kind == "harmless":
        report.add("note", "tokenizer", other.name, f"{message}: that of the base is written.")
    else:
        meaning = "the same text becomes other ids" if difference.kind != "tokens" else "the same ids mean other texts"
        report.add("error", "tokenizer", other.name, f"{message}: {meaning}.", "tokenizer")
