"""Recognises configurations that transformers opens, by their values alone.

Importing transformers costs seconds of processor time. A configuration whose every field is known, and whose every value is
ordinary, needs no trial: it differs from one that was tried only in sizes. Everything else is tried, see `opening`.
"""

from typing import Any

from .config_values import FLAGS, OPTIONAL_SIZES, SIZES, find_value_errors, is_token_id

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
IGNORED = {
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "_name_or_path", "auto_map",
    "rms_norm_eps", "attention_dropout", "initializer_range", "rope_theta", "bos_token_id", "eos_token_id",
}  # fmt: skip
# Value or values of other fields that need no trial.
ORDINARY: dict[str, tuple] = {
    "hidden_act": ACTIVATIONS, "pretraining_tp": (1,), "sliding_window": (None,), "output_router_logits": (False,),
    "max_window_layers": (), "router_aux_loss_coef": (0.0, 0.001), "rope_scaling": (None,), "use_return_dict": (True,),
}  # fmt: skip
COUNTS = ("num_local_experts", "num_experts", "num_experts_per_tok")
LENGTH = "original_max_position_embeddings"
LLAMA3 = {"factor", "low_freq_factor", "high_freq_factor", LENGTH}
MODEL_TYPES = ("llama", "mistral", "mixtral")


def is_plain(config: dict[str, Any]) -> bool:
    """Whether a Llama, Mistral or Mixtral has known fields with ordinary values only."""
    if config.get("model_type") not in MODEL_TYPES or find_value_errors(config):
        return False
    known = {*SIZES, *OPTIONAL_SIZES, *FLAGS, *IGNORED, *ORDINARY, *COUNTS, "rope_parameters", "pad_token_id"}
    if set(config) - known:
        return False
    if any(config[key] not in values for key, values in ORDINARY.items() if key in config and key != "rope_scaling"):
        return False
    if any(type(config[key]) is not int or config[key] < 1 for key in COUNTS if key in config):
        return False
    if any(config[key] is None for key in (*OPTIONAL_SIZES, *FLAGS, "rms_norm_eps", "rope_theta") if key in config):
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
