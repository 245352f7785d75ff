"""Recognises configurations that transformers opens, by their values alone.

Importing transformers costs seconds of processor time. A configuration whose fields all have ordinary values needs no trial: it
differs from one that was tried only in sizes. Fields that the class does not have change nothing. Everything else is tried, see
`opening`.
"""

from typing import Any

from .config_values import FLAGS, OPTIONAL_SIZES, find_value_errors, is_token_id

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
# Fields whose values are checked elsewhere, or that `opening` leaves out.
IGNORED = {
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "auto_map", "rms_norm_eps",
    "attention_dropout", "initializer_range", "rope_theta", "bos_token_id", "eos_token_id", "pad_token_id",
    "attn_implementation", "rope_parameters", "rope_scaling",
}  # fmt: skip
# Value or values of other fields that need no trial.
ORDINARY: dict[str, tuple] = {
    "hidden_act": ACTIVATIONS, "pretraining_tp": (1,), "output_router_logits": (False,), "router_jitter_noise": (0.0,),
    "router_aux_loss_coef": (0.0, 0.001), "use_sliding_window": (False,), "qkv_bias": (True,), "norm_topk_prob": (True,),
    "decoder_sparse_step": (1,), "mlp_only_layers": ([], None), "return_dict": (True,), "use_return_dict": (True,),
    "output_hidden_states": (False,), "output_attentions": (False,), "is_encoder_decoder": (False,),
    "chunk_size_feed_forward": (0,), "problem_type": (None,), "quantization_config": (None,), "per_layer_config": (None,),
    "partial_rotary_factor": (None, 1, 1.0), "original_max_position_embeddings": (None,),
}  # fmt: skip
COUNTS = (
    "num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
    "max_window_layers",
)  # fmt: skip
# Other fields that the classes or their base class read: a configuration that has one is tried.
TRIED = {"id2label", "label2id", "num_labels", "experts_implementation", "embed_dim", "num_heads", "mtp_layer_types"}
LENGTH = "original_max_position_embeddings"
LLAMA3 = {"factor", "low_freq_factor", "high_freq_factor", LENGTH}
MODEL_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")


def is_plain(config: dict[str, Any]) -> bool:
    """Whether a model of a known type has ordinary values in all fields that its class reads."""
    if config.get("model_type") not in MODEL_TYPES or find_value_errors(config) or TRIED & set(config):
        return False
    if any(config[key] not in values for key, values in ORDINARY.items() if key in config):
        return False
    if any(type(config[key]) is not int or config[key] < 1 for key in COUNTS if key in config):
        return False
    if any(config[key] is None for key in (*OPTIONAL_SIZES, *FLAGS, "rms_norm_eps", "rope_theta") if key in config):
        return False
    window, layers = config.get("sliding_window"), config.get("layer_types")
    if window is not None and (type(window) is not int or window < 1):
        return False
    if layers is not None and layers != ["full_attention"] * config["num_hidden_layers"]:
        return False
    padding, heads = config.get("pad_token_id"), config["num_attention_heads"]
    return (
        (padding is None or (is_token_id(padding) and 0 <= padding < config["vocab_size"]))
        and (config["hidden_size"] % heads == 0)
        and config.get("head_dim", config["hidden_size"] // heads) % 2 == 0
        and all(
            config.get(key) is None or is_plain_rope(config[key], config.get("max_position_embeddings", 0))
            for key in ("rope_parameters", "rope_scaling")
        )
    )


def is_plain_rope(settings: dict[str, Any], positions: int) -> bool:
    """Whether RoPE settings are the default ones, or complete ones of llama3."""
    names = {key for key, value in settings.items() if value is not None} - {"rope_theta", "type", "rope_type"}
    kinds = {settings[key] for key in ("type", "rope_type") if settings.get(key) is not None}
    if not kinds <= {"default", "llama3"} or len(kinds) > 1:
        return False
    if "llama3" not in kinds:
        return not names
    if names != LLAMA3 or not all(type(settings[key]) is float for key in LLAMA3 - {LENGTH}):
        return False
    rising = 0 < settings["low_freq_factor"] < settings["high_freq_factor"]
    return rising and settings["factor"] >= 1 and type(settings[LENGTH]) is int and 0 < settings[LENGTH] < positions
