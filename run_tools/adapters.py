"""The `LoraConfig` of a model of ours: `lora_config()` of every class. Imports neither PyTorch nor transformers."""

import warnings
from typing import Any

# Names of the query and value projections in encoders; the last four are fused QKV projections.
LORA_TARGETS = (
    ("query", "value"), ("query_proj", "value_proj"), ("q_proj", "v_proj"), ("q_lin", "v_lin"), ("q", "v"),
    ("Wqkv",), ("in_proj",), ("query_key_value",), ("qkv_proj",),
)  # fmt: skip


def make_lora_config(model: Any, overrides: dict[str, Any], backbone: Any = None, **defaults: Any):
    """A peft `LoraConfig`: r = 16, alpha = 16 and dropout 0.1 on the query and value projections, unless told otherwise.

    Args:
        model: the model that the adapter is for.
        overrides: fields of `LoraConfig` that the user passes.
        backbone: the module whose projections are adapted, if neither `overrides` nor `defaults` have `target_modules`.
        defaults: fields of `LoraConfig` that differ for the class.

    Warns:
        UserWarning: if the model has not been saved; the adapter could not be opened again.

    Raises:
        ImportError: if peft is not installed.
        ValueError: if the backbone's projections have unknown names.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ImportError("lora_config() needs peft. Install it with: pip install 'lexperts[train]'") from error
    options = {"r": 16, "lora_alpha": 16, "lora_dropout": 0.1, **defaults, **overrides}
    if "target_modules" not in options and backbone is not None:
        options["target_modules"] = find_lora_targets(backbone)
    warn_if_unsaved(model)
    return LoraConfig(**options)


def find_lora_targets(backbone: Any) -> list[str]:
    """Names of the query and value projections of a module, or of the fused projection, such as `Wqkv`."""
    names = {name.rsplit(".", 1)[-1] for name, module in backbone.named_modules() if hasattr(module, "weight")}
    for targets in LORA_TARGETS:
        if names.issuperset(targets):
            return list(targets)
    raise ValueError(
        f"No query and value projections were found in {type(backbone).__name__}. "
        "Pass their names: model.lora_config(target_modules=[...])."
    )


def warn_if_unsaved(model: Any) -> None:
    """Warns about a model that was never saved: an adapter records its base model by name, and this one has none."""
    backbone = getattr(getattr(model.config, "text_config", None), "name_or_path", "")
    if model.name_or_path in ("", None, backbone):
        name = type(model).__name__
        warnings.warn(
            f"An adapter over this {name} records no base model, because the model has not been saved: pipeline() and "
            "AutoPeftModel will not open the adapter, nor checkpoints of the Trainer. Save the model with its tokenizer "
            f"and load it again first: model.save_pretrained('base'); model = {name}.from_pretrained('base'). "
            "merge_and_unload() is not affected.",
            UserWarning,
            stacklevel=4,
        )
