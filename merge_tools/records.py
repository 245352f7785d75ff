"""What travels with a mixture beside its weights: configuration, record of its origin, tokenizer, code."""

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .errors import MergeError
from .llama import LlamaShape, both_ropes
from .recipe import Recipe
from .sources import Source
from .tensor_files import TORCH_NAMES, Audit
from .tokenizers import compare, read_tokenizer, tokenizer_file, tokenizer_files, vocabulary

RECORD = "merge_record.json"
RECORD_KEYS = ("made_by", "format", "recipe", "base", "experts", "gates")
CARRIED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
LLAMA_DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048}  # where a Mixtral's are others


def carried_config(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """What a Llama and a mixture of Llamas say alike."""
    shape = LlamaShape.of(config)
    return {
        **LLAMA_DEFAULTS,
        **{key: config[key] for key in CARRIED if key in config},
        "vocab_size": shape.vocab_size,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "tie_word_embeddings": shape.tied,
        "dtype": dtype,
        "torch_dtype": dtype,
        **both_ropes(config),
    }


def dense_config(config: dict[str, Any]) -> dict[str, Any]:
    """config.json of a dense Llama taken out of a mixture."""
    shape = LlamaShape.of(config)
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    biases = {"attention_bias": shape.attention_bias, "mlp_bias": shape.mlp_bias}
    return kind | carried_config(config, config["dtype"]) | biases


def mixture_config(
    recipe: Recipe, base: Source, vocab_size: int, kind: str, centroid_size: int | None
) -> dict[str, Any]:
    """config.json of the mixture; the rotary settings and the dtype in the spellings of transformers 4 and 5."""
    shape = LlamaShape.of(base.config)
    config = {
        **carried_config(base.config, recipe.dtype or TORCH_NAMES[base.entry("model.embed_tokens.weight").dtype]),
        "vocab_size": vocab_size,
        "num_local_experts": len(recipe.experts),
        "num_experts_per_tok": recipe.experts_per_token,
        "output_router_logits": False,
    }
    if kind == "mixtral":
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "router_aux_loss_coef": 0.001,
            "sliding_window": None,
            **config,
        }
    return {
        "architectures": ["LexiconForCausalLM"],
        "model_type": "lexicon",
        "auto_map": {
            "AutoConfig": "configuration_lexicon.LexiconConfig",
            "AutoModel": "modeling_lexicon.LexiconModel",
            "AutoModelForCausalLM": "modeling_lexicon.LexiconForCausalLM",
            "AutoModelForSequenceClassification": "modeling_lexicon.LexiconForSequenceClassification",
        },
        "attention_bias": shape.attention_bias,
        "mlp_bias": shape.mlp_bias,
        "router_layers": recipe.router_layers,
        "router_layers_index": recipe.router_layers_index,
        "routing_policy": recipe.routing_policy,
        "router_aux_loss_coef": 0.0,
        "domain_gate": recipe.routing_policy == "domain" and recipe.gate_mode != "none",
        "expert_names": recipe.names,
        "centroid_size": centroid_size,
        "embedder": recipe.embedder,
        **config,
    }


def source_record(source: Source, audits: dict[Path, Audit]) -> dict[str, Any]:
    """Where a source lay, and the sha256 of every file of it that was read."""
    record = {"name": source.name, "source": source.given}
    if source.adapter:
        record["adapter_over"] = str(source.checkpoint.folder)
    licence = licence_of(source.folder) or licence_of(source.checkpoint.folder)
    if licence:
        record["license"] = licence
    record["files"] = [
        {"name": file.name, "bytes": audits[file].nbytes, "sha256": audits[file].sha256} for file in source.files
    ]
    return record


def licence_of(folder: Path) -> str | None:
    """The licence in the metadata of the source's README; the line unparsed if that is not valid YAML."""
    readme = folder / "README.md"
    if not readme.is_file():
        return None
    lines = readme.read_text(encoding="utf-8", errors="replace").split("\n")
    end = next((i for i, line in enumerate(lines[1:], 1) if line.strip() == "---"), None)
    if lines[0].strip() != "---" or end is None:
        return None
    import yaml  # a dependency of huggingface_hub

    try:
        metadata = yaml.safe_load("\n".join(lines[1:end]))
        licence = metadata.get("license") if isinstance(metadata, dict) else None
    except yaml.YAMLError:
        line = next((line for line in lines[1:end] if line.startswith("license:")), ":")
        licence = line.split(":", 1)[1].strip().strip("\"'")
    return ", ".join(map(str, licence)) if isinstance(licence, list) else str(licence or "") or None


def merge_record(
    recipe: Recipe, kind: str, base: Source, experts: list[Source], audits: dict[Path, Audit], gates: dict[str, Any]
) -> dict[str, Any]:
    """merge_record.json: enough to verify the mixture, to add to it, and to take it apart."""
    return {
        "made_by": f"lexperts {own_version()}",
        "format": kind,
        "recipe": recipe.to_dict(),
        "base": source_record(base, audits),
        "experts": [source_record(expert, audits) for expert in experts],
        "gates": gates,
    }


def own_version() -> str:
    try:
        return version("lexperts")
    except PackageNotFoundError:
        return "unknown"


def read_record(folder: Path) -> dict[str, Any]:
    """The record of a mixture of ours.

    Raises:
        MergeError: for a folder that has none, or one that is not whole.
    """
    path = folder / RECORD
    if not folder.is_dir():
        raise MergeError(f"There is no folder {str(folder)!r}.")
    if not path.is_file():
        raise MergeError(f"{folder} holds no {RECORD}: it is no mixture made by merge-experts.")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise MergeError(f"{path} cannot be read ({error}).") from error
    missing = [key for key in RECORD_KEYS if not isinstance(record, dict) or key not in record]
    if missing:
        raise MergeError(
            f"{path} lacks {missing[0]!r}: it is not as merge-experts wrote it. Compose the mixture again."
        )
    return record


def dump(content: dict) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def tokenizer_contents(base: Source, experts: list[Source]) -> dict[str, bytes]:
    """The tokenizer's files: the base's, or the longest that goes on where it ends (`--allow vocab`)."""
    best = None
    for source in [base, *experts]:
        folder = tokenizer_folder(source)
        if folder is not None and (best is None or goes_on(best, folder)):
            best = folder
    contents = {path.name: path.read_bytes() for path in (tokenizer_files(best) if best else [])}
    for folder in (base.folder, base.checkpoint.folder):
        path = folder / "generation_config.json"
        if path.is_file():
            contents[path.name] = path.read_bytes()
            break
    return contents


def tokenizer_folder(source: Source) -> Path | None:
    """Where a source's tokenizer lies: an adapter's own, or that of the checkpoint below it."""
    folders = (source.folder, source.checkpoint.folder)
    return next((folder for folder in folders if tokenizer_file(folder) is not None), None)


def goes_on(folder: Path, other: Path) -> bool:
    """Whether the other folder's tokenizer is this one's with more tokens at its end."""
    ours, theirs = tokenizer_file(folder), tokenizer_file(other)
    difference = compare(ours, theirs)
    if difference is None or difference.kind != "longer":
        return False
    return len(vocabulary(read_tokenizer(theirs))) > len(vocabulary(read_tokenizer(ours)))


def code_files() -> dict[str, bytes]:
    """The files of `modeling_lexicon`, which travel with what only it can open."""
    import modeling_lexicon

    folder = Path(modeling_lexicon.__file__).parent
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"}
