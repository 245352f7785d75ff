"""New models over a pretrained backbone: what every `from_backbone` and `lora_config` does. A saved model opens without this module."""

import copy
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from .loading import hub_options, named_errors, open_config, open_tokenizer  # noqa: F401  (the last for `from_backbone`)
from .packaged import HUB_IDS, locate_model

# Query and value projections of encoders; the last four are fused QKV projections. A model has one pair, or one of them.
LORA_TARGETS = {"query", "value", "query_proj", "value_proj", "q_proj", "v_proj", "q_lin", "v_lin", "q", "v"}
LORA_TARGETS |= {"Wqkv", "in_proj", "query_key_value", "qkv_proj"}


def load_over_backbone(
    cls: Any,
    name_or_path: str | os.PathLike,
    make_config: Callable[[Any], Any],
    load_kwargs: dict[str, Any],
    dtype: Any = "float32",
    attention_dropout: float | None = None,
):
    """Builds a model of a class with a `BackboneMixin` by its `from_pretrained`, which takes `load_kwargs` and loads the backbone's weights:
    with one copy in memory, on any device map, quantised or not. Other modules are new, and not quantised. `make_config` makes
    its configuration from the backbone's. Raises a `CheckpointError` for what is no backbone, is not supported, or lacks weights.
    """
    import torch

    source, path = locate_model(name_or_path), cls.backbone_path
    inner = open_config(source, **hub_options(load_kwargs))
    with named_errors(source), torch.device("meta"):  # for the names of its parameters
        if inner.model_type == cls.config_class.model_type:
            raise ValueError(f"It is a {inner.model_type!r} model already. Use {cls.__name__}.from_pretrained().")
        skeleton = cls.build_backbone(copy.deepcopy(inner))
    if os.path.isdir(source):  # other machines, which open the checkpoint, do not have this folder
        inner.name_or_path = "" if source == str(name_or_path) else HUB_IDS.get(str(name_or_path), "")
    if attention_dropout is not None:
        names = [name for name in ("attention_probs_dropout_prob", "attention_dropout") if hasattr(inner, name)]
        if not names:
            raise ValueError(f"attention_dropout={attention_dropout}: a {inner.model_type!r} encoder has none.")
        setattr(inner, names[0], attention_dropout)
    config = make_config(inner)
    if (quantization := copy.deepcopy(load_kwargs.get("quantization_config"))) is not None:
        with torch.device("meta"):
            names = [name for name, _ in cls(copy.deepcopy(config)).named_modules()]
        new = [name for name in names if not (f"{name}.".startswith(f"{path}.") or f"{path}.".startswith(f"{name}."))]
        for name in {"modules_to_not_convert", "llm_int8_skip_modules"} & set(vars(quantization)):
            setattr(quantization, name, [*(getattr(quantization, name) or []), *filter(None, new)])
        load_kwargs = load_kwargs | {"quantization_config": quantization}
    load_kwargs = load_kwargs | {"config": config, "dtype": dtype, "key_mapping": key_mapping(skeleton, path)}
    report = logging.getLogger("transformers.modeling_utils")  # of all new modules as missing
    level = report.level
    report.setLevel(logging.ERROR)
    try:
        with named_errors(source):
            model, info = cls.from_pretrained(
                source, output_loading_info=True, ignore_mismatched_sizes=True, **load_kwargs
            )
            lost = {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}
            if lost := lost & {f"{path}.{name}" for name in skeleton.state_dict()}:
                raise ValueError(f"Its weights lack {min(lost)}, or have it in another shape.")
    finally:
        report.setLevel(level)
    draw_again(model, {name for name in model.state_dict() if not name.startswith(f"{path}.")} - info["missing_keys"])
    # A new model has no saved checkpoint yet, and its parameters keep their own names when it is saved.
    model.name_or_path = model.config.name_or_path = ""  # peft records the first as the base of an adapter
    model.__dict__.pop("_weight_conversions", None)
    return model


def split_options(options: dict[str, Any], config_fields: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of the configuration, and other keyword arguments of `from_backbone`, for `from_pretrained`."""
    fields = {name: options[name] for name in options.keys() & set(config_fields)}
    return fields, {name: value for name, value in options.items() if name not in fields}


def key_mapping(skeleton: Any, path: str) -> dict[str, str]:
    """Patterns of names in a backbone's checkpoint (`bert.encoder...` or `encoder...`) -> in a model with the backbone at `path`."""
    prefix, base, heads = skeleton.base_model_prefix, path, set()
    if skeleton.base_model is not skeleton:
        base, heads = f"{path}.{prefix}", {name.split(".")[0] for name in skeleton.state_dict()} - {prefix}
    mapping = {rf"^({name}(?:\..+)?)$": rf"{path}.\1" for name in sorted(heads)}
    return mapping | {rf"^(?!{re.escape(path)}\.)(?:{prefix}\.)?(.+)$": rf"{base}.\1"}


def draw_again(model: Any, names: Iterable[str]) -> None:
    """Initialises parameters outside the backbone that its checkpoint has under the same names: of a head that it was trained with."""
    for name in (names := set(names)):
        model.get_parameter_or_buffer(name)._is_hf_initialized = False
        while name:
            name = name.rpartition(".")[0]
            model.get_submodule(name)._is_hf_initialized = False
    if names:
        model.initialize_weights()


def make_lora_config(model: Any, overrides: dict[str, Any], backbone: Any = None, **defaults: Any):
    """A peft `LoraConfig` for the query and value projections of the backbone, with fields of the class and of the user in this order."""
    from peft import LoraConfig

    if backbone is not None:
        names = {name.rsplit(".", 1)[-1] for name, module in backbone.named_modules() if hasattr(module, "weight")}
        defaults = {"target_modules": sorted(names & LORA_TARGETS) or None, **defaults}
    if model.name_or_path in ("", None, getattr(getattr(model.config, "text_config", None), "name_or_path", "")):
        text = "An adapter records its base by name. Save this model and open it again first, or the adapter cannot be opened alone."
        warnings.warn(text, stacklevel=3)
    return LoraConfig(**{"r": 16, "lora_alpha": 16, "lora_dropout": 0.1, **defaults, **overrides})
