"""The config.json of a mixture or an extracted expert, and the modeling code that is saved with it."""

import json
from pathlib import Path
from typing import Any

from .checkpoints import Source
from .families import MIXTURES
from .layout import rope_config_v4_and_v5
from .recipe import Recipe
from .tensor_files import TORCH_NAMES

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
COPIED_FIELDS = (
    "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "use_cache", "attention_dropout", *SPECIAL_IDS,
)  # fmt: skip


def special_ids(source: Source) -> dict[str, Any]:
    """The ids of special tokens in the configuration of a source."""
    return {key: source.config[key] for key in SPECIAL_IDS if source.config.get(key) is not None}


def output_format(recipe: Recipe, base: Source) -> str:
    """The model_type of the mixture: `auto` is the family's class of transformers if it can represent the mixture."""
    if recipe.format != "auto":
        return recipe.format
    shape = base.shape
    stock = recipe.is_stock and (shape.mixture.attention_biases or not shape.attention_bias)
    return shape.mixture.model_type if stock else "lexicon"


def common_config(source: Source, dtype: str) -> dict[str, Any]:
    """The fields that a dense model and a mixture of such models have in common; a mixture has the defaults of its class."""
    config, family = source.config, source.shape.family
    is_dense = config["model_type"] == family.model_type
    known = {**family.defaults, **({} if is_dense else source.shape.mixture.settings), **config}
    copied = {key: known[key] for key in (*COPIED_FIELDS, *family.carried) if key in known}
    copied |= {key: value for key, value in source.shape.sizes().items() if not key.endswith("_bias")}
    return {**copied, "dtype": dtype, "torch_dtype": dtype, **rope_config_v4_and_v5(config)}


def dense_config(mixture: Source) -> dict[str, Any]:
    """config.json of a dense model that is extracted from a mixture."""
    shape = mixture.shape
    architecture = {"architectures": [shape.family.architecture], "model_type": shape.family.model_type}
    biases = {field: getattr(shape, field) for field in shape.family.biases.values() if isinstance(field, str)}
    return architecture | common_config(mixture, mixture.config["dtype"]) | biases


def mixture_config(
    recipe: Recipe,
    base: Source,
    format: str,
    vocab_size: int,
    centroid_size: int | None = None,
    special: Source | None = None,
) -> dict[str, Any]:
    """config.json of a mixture; RoPE settings and dtype are written in the spellings of transformers 4 and 5.

    The ids of special tokens are those of `special`, or the base's.
    """
    shape = base.shape
    config = {
        **common_config(base, recipe.dtype or TORCH_NAMES[base.entry("model.embed_tokens.weight").dtype]),
        "vocab_size": vocab_size,
        "num_experts_per_tok": recipe.experts_per_token,
        "output_router_logits": False,
    }
    if special:
        config |= special_ids(special)
    if format != "lexicon":
        mixture = MIXTURES[format]
        return {
            "architectures": [mixture.architecture],
            "model_type": format,
            **mixture.settings,
            **config,
            **dict.fromkeys(mixture.counts, len(recipe.experts)),
            **dict.fromkeys(mixture.sizes, shape.intermediate_size),
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
        **(shape.family.lexicon or {}),
        **({"expert_rank": recipe.rank} if recipe.rank else {}),
        "router_layers": recipe.router_layers,
        "router_layers_index": recipe.router_layers_index,
        "routing_policy": recipe.routing_policy,
        "router_aux_loss_coef": 0.0,
        "domain_gate": recipe.routing_policy == "domain" and recipe.gate_mode != "none",
        "expert_names": recipe.names,
        "centroid_size": centroid_size,
        "embedder": recipe.embedder,
        **config,
        "num_local_experts": len(recipe.experts),
    }


def to_json_bytes(content: dict) -> bytes:
    """A dict as an indented JSON file."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def code_files() -> dict[str, bytes]:
    """The files of `modeling_lexicon`, which are saved with a mixture that only this class can open."""
    import modeling_lexicon

    folder = Path(modeling_lexicon.__file__).parent
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"}
