"""The config.json of a mixture or an extracted expert, and the modeling code that is saved with it."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .checkpoints import Source
from .llama_layout import LlamaShape, rope_config_v4_and_v5
from .recipe import Recipe
from .tensor_files import TORCH_NAMES

COPIED_FIELDS = (
    "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "use_cache", "attention_dropout",
    "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
LLAMA_DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048}  # Mixtral has other defaults


def output_format(recipe: Recipe, base: Source) -> str:
    """The format to write, "mixtral" or "lexicon": `auto` is a Mixtral if that can represent the mixture."""
    if recipe.format != "auto":
        return recipe.format
    stock = recipe.is_stock and not LlamaShape.from_config(base.config).attention_bias
    return "mixtral" if stock else "lexicon"


def common_config(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The fields that a Llama and a mixture of Llamas have in common."""
    shape = asdict(LlamaShape.from_config(config))
    copied = {key: config[key] for key in COPIED_FIELDS if key in config}
    copied |= {key: value for key, value in shape.items() if not key.endswith("_bias")}
    return {**LLAMA_DEFAULTS, **copied, "dtype": dtype, "torch_dtype": dtype, **rope_config_v4_and_v5(config)}


def dense_config(config: dict[str, Any]) -> dict[str, Any]:
    """config.json of a dense Llama that is extracted from a mixture."""
    shape = LlamaShape.from_config(config)
    architecture = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    biases = {"attention_bias": shape.attention_bias, "mlp_bias": shape.mlp_bias}
    return architecture | common_config(config, config["dtype"]) | biases


def mixture_config(
    recipe: Recipe, base: Source, vocab_size: int, format: str, centroid_size: int | None
) -> dict[str, Any]:
    """config.json of a mixture; RoPE settings and dtype are written in the spellings of transformers 4 and 5."""
    shape = LlamaShape.from_config(base.config)
    config = {
        **common_config(base.config, recipe.dtype or TORCH_NAMES[base.entry("model.embed_tokens.weight").dtype]),
        "vocab_size": vocab_size,
        "num_local_experts": len(recipe.experts),
        "num_experts_per_tok": recipe.experts_per_token,
        "output_router_logits": False,
    }
    if format == "mixtral":
        kind = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
        return kind | {"router_aux_loss_coef": 0.001, "sliding_window": None} | config
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


def to_json_bytes(content: dict) -> bytes:
    """A dict as an indented JSON file."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def code_files() -> dict[str, bytes]:
    """The files of `modeling_lexicon`, which are saved with a mixture that only this class can open."""
    import modeling_lexicon

    folder = Path(modeling_lexicon.__file__).parent
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"}
