"""Opens models, tokenizers, configurations and pipelines: complete, from safetensors, without code of a checkpoint.

PyTorch and transformers are imported where they are used.
"""

import inspect
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from . import cards
from .errors import UserError, closest, one_line, short_repr
from .packaged import DEFAULT_MODELS, PACKAGED_MODELS, is_path, locate_model, resolve_model

HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
CODE_REFERENCES = ("auto_map", "custom_pipelines")
IMPLEMENTATION = re.compile(r"_?(attn|experts)_implementation(_internal)?")  # under which transformers looks up kernels
NO_CODE = {"trust_remote_code": False}
OUR_TASKS = {*DEFAULT_MODELS, "extractive-qa"}
KINDS = {int: Integral, float: Real}

# transformers warns of a default model without a revision: ours are packages with a version
logging.getLogger("transformers.pipelines").addFilter(
    lambda record: "defaulted to" not in (text := str(record.msg)) or "lexperts_" not in text
)


class CheckpointError(OSError, ValueError):
    """A checkpoint that cannot be opened: one line that names it."""


class PipelineLoadingError(Exception):
    """A `CheckpointError` inside `pipeline(...)`, which would catch an `OSError` and open the model by another class."""


@contextmanager
def named_errors(name: Any, in_pipeline: bool = False, kinds: type[Exception] = Exception) -> Iterator[None]:
    """Raises errors of these kinds again in one line that names the checkpoint; an `ImportError` says what to install, and a
    `TypeError` is of the caller.
    """
    try:
        yield
    except (ImportError, TypeError, PipelineLoadingError):
        raise
    except kinds as error:
        cause = one_line(error)
        text = f"{cause if str(name) in cause else f'{str(name)!r} cannot be opened: {cause}':.1000}"
        raise (PipelineLoadingError if in_pipeline else CheckpointError)(text) from error


def hub_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that locate a checkpoint, among arguments of `from_pretrained`."""
    return {name: value for name, value in options.items() if name in HUB_OPTIONS}


def read_config(name: str | os.PathLike, options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a checkpoint's config.json, if it has one. Raises a `CheckpointError` if they name a kernel on the Hub."""
    from transformers import PreTrainedConfig

    config = PreTrainedConfig.get_config_dict(name, **hub_options(options))[0]
    refuse_kernels(config)
    return config


def refuse_kernels(config: Mapping[str, Any]) -> None:
    """Raises a `CheckpointError` if a configuration, or one nested in it, names an implementation in a Hub repository."""
    for key, value in config.items():
        if IMPLEMENTATION.fullmatch(str(key)):
            for each in value.values() if isinstance(value, dict) else [value]:
                if "/" in str(each):
                    raise CheckpointError(
                        f"config.json: {key}={each!r:.200} names a kernel in a Hub repository, whose code would be run. Remove it; if you "
                        "trust the repository, pass attn_implementation=... in Python."
                    )
        elif isinstance(value, dict):
            refuse_kernels(value)


def open_config(name: Any, **options: Any):
    """`AutoConfig.from_pretrained` without code of the checkpoint, unless `trust_remote_code=True` is passed. All functions here raise a
    `CheckpointError`.
    """
    from transformers import AutoConfig

    name = resolve_model(name)
    with named_errors(name):
        read_config(name, options)
        return AutoConfig.from_pretrained(name, **NO_CODE | options)


def open_tokenizer(name: Any, **options: Any):
    """`AutoTokenizer.from_pretrained`, as `open_config`."""
    from transformers import AutoTokenizer

    name = resolve_model(name)
    with named_errors(name):
        return AutoTokenizer.from_pretrained(name, **NO_CODE | options)


def open_model(cls: Any, name: Any, *args: Any, new: Sequence[str] = (), **options: Any):
    """`cls.from_pretrained` of a class or an auto class: from safetensors, without code of the checkpoint, and with all weights but those
    whose names begin as one of `new`, such as "score." for a head that will be trained.
    """
    name = resolve_model(name)
    with named_errors(name, "_from_pipeline" in options):
        read_config(name, options)
        options = {"use_safetensors": True, **NO_CODE} | options
        model, info = cls.from_pretrained(name, *args, output_loading_info=True, **options)
        if missing := sorted(key for key in info["missing_keys"] if not key.startswith(tuple(new))):
            raise CheckpointError(
                f"{name}: the weights lack {short_repr(missing)}, which would stay at random values. Pass a checkpoint of this kind of model."
            )
    return model


def open_pipeline(task: str, name: Any, **options: Any):
    """`transformers.pipeline(task, model=name)`, as `open_model`."""
    from transformers import pipeline

    try:
        with named_errors(name):
            return pipeline(task, model=str(name), **NO_CODE | options)
    except PipelineLoadingError as error:
        raise CheckpointError(str(error)) from error


def open_with_tokenizer(option: str, cls: Any, name: str, **options: Any) -> tuple[Any, Any]:
    """The model and the tokenizer that an option names, with errors as in `describe_load_errors`."""
    with describe_load_errors(option, name):
        return open_model(cls, name, **options), open_tokenizer(name)


@contextmanager
def describe_load_errors(option: str, name: str | os.PathLike) -> Iterator[None]:
    """Raises any error of opening a model as a `CheckpointError` of one line that names the command's option and the model."""
    name = str(name)
    try:
        if is_path(name) and not os.path.isdir(name):  # transformers would ask the Hub, and blame the connection
            raise ValueError("there is no such folder.")
        yield
    except Exception as error:
        near = None if is_path(name) else closest(name, (*PACKAGED_MODELS, "minilm"))
        cause, hint = (
            one_line(error).removeprefix(f"{name!r} cannot be opened: "),
            f" Did you mean {near!r}?" if near else "",
        )
        raise CheckpointError(f"{option} {name!r} could not be opened: {cause:.500}{hint}") from error


def check_model(option: str, name: str) -> None:
    """Raises a `CheckpointError` for a model without a configuration, in a folder or on the Hub, without loading it."""
    with describe_load_errors(option, name):
        if not read_config(name, {}) and not Path(name, "adapter_config.json").is_file():
            raise ValueError("it has no config.json.")


def parse_device(name: str | None):
    """The `torch.device` of a name, by default an accelerator if there is one. Raises a `UserError` if it is not available."""
    import torch

    if name is None:
        return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"--device {name!r} is not available: {cause}") from error
    return torch.device(name)


def gpu_or_cpu() -> str:
    """The name of the device of computations that pick one themselves."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


class DefaultModel(dict):
    """What transformers' registry has as the `default` of a task, `{"model": (folder, revision)}`; found on first use."""

    def __init__(self, task: str):
        super().__init__(model=None)
        self.task = task

    def __getitem__(self, key: str) -> tuple[str, None]:
        if self.task not in DEFAULT_MODELS:
            raise UserError(f"pipeline({self.task!r}) has no default model. Pass model=..., a folder or Hub id.")
        return locate_model(None, self.task), None


def register_pipeline(task: str, *, pipeline_class: type, pt_model: Any, type: str = "text") -> None:
    """As transformers' `PIPELINE_REGISTRY.register_pipeline`, with the default model of `DEFAULT_MODELS`, and models opened by `open_model`.
    `pt_model` is an auto class, or a tuple of them.
    """
    from transformers.pipelines import PIPELINE_REGISTRY

    PIPELINE_REGISTRY.register_pipeline(task, pipeline_class=pipeline_class, pt_model=pt_model, type=type)
    classes = pt_model if isinstance(pt_model, tuple) else (pt_model,)
    # a new entry, and not arguments of register_pipeline: saved models would record them
    changed = {"pt": (checked_class(*classes),), "default": DefaultModel(task)}
    PIPELINE_REGISTRY.supported_tasks[task] = PIPELINE_REGISTRY.supported_tasks[task] | changed


def checked_class(first: Any, *others: Any) -> Any:
    """An auto class that opens models by `open_model`; of several, by the one for the checkpoint's architecture, or else for its type."""

    def from_pretrained(cls, name, *args, **options):
        chosen = first
        if others:
            with named_errors(name, "_from_pipeline" in options):
                config = open_config(name, trust_remote_code=options.get("trust_remote_code"), **hub_options(options))
            kind, names = type(config), (*(config.architectures or ()), *(getattr(config, "auto_map", None) or ()))
            mapped = {
                each: each._model_mapping[kind].__name__ for each in (first, *others) if kind in each._model_mapping
            }
            chosen = max(
                (first, *others), key=lambda each: (mapped.get(each) in names, each.__name__ in names, each in mapped)
            )
        return open_model(chosen, name, *args, **options)

    return type(first.__name__, (first,), {"from_pretrained": classmethod(from_pretrained)})


def check_purpose(model: Any, task: str) -> None:
    """Raises a `ValueError` for a model of ours that is for another of our pipelines; under a name of its own a pipeline takes any."""
    purpose = getattr(model, "card_use", {}).get("task", task)
    if task in OUR_TASKS and purpose != task:
        raise ValueError(f"{type(model).__name__} is for pipeline({purpose!r}), not for {task!r}. Pass another model.")


def check_option_types(pipeline, options: Mapping, kinds: Mapping[str, type], generates: bool = False) -> None:
    """Raises a `TypeError` for an option of a call that a pipeline does not take, or whose value is of another type than in `kinds`, where
    `object` is any. `None` is the default of every option. With `generates`, the model's `generate` takes and checks all others of its own.
    """
    check_purpose(pipeline.model, pipeline.task)
    known = set(kinds)
    if generates:
        from transformers import GenerationConfig, GenerationMixin

        model = getattr(pipeline.model, "_orig_mod", pipeline.model)  # inside torch.compile, and peft
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        known |= {"trust_remote_code", *GenerationConfig().to_dict()}
        known.update(
            *(inspect.signature(each).parameters for each in (GenerationMixin.generate, model.generate, model.forward))
        )
    for name, value in options.items():
        if name not in known and not (generates and options.get("custom_generate")):
            task = pipeline.task or type(pipeline).__name__
            raise TypeError(f"{task} got an unexpected argument {name!r}. Its options are {', '.join(kinds)}.")
        kind, single = kinds.get(name, object), value.item() if getattr(value, "ndim", None) == 0 else value
        fits = isinstance(single, KINDS.get(kind, kind)) and not (isinstance(single, bool) and kind in KINDS)
        if value is not None and not fits:
            raise TypeError(f"{name}={value!r:.60} must be of type {kind.__name__}, not {type(value).__name__}.")
        if name == "batch_size" and value is not None and value < 1:
            raise ValueError(f"batch_size={value} must be at least 1.")


class CheckedConfigMixin:
    """What configuration classes gain where Lexperts is installed: code that a checkpoint names is neither fetched nor run."""

    def __post_init__(self, **kwargs):
        super().__post_init__(**own_code_only(type(self), kwargs))

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """As in transformers, without the code of nested configurations, such as a backbone's. Raises a `CheckpointError` for a Hub kernel in
        `config_dict`; one in `kwargs` is accepted.
        """
        refuse_kernels(config_dict)
        nested = {
            name: value for name, value in config_dict.items() if isinstance(value, dict) and "model_type" in value
        }
        cleaned = {
            name: {key: x for key, x in value.items() if key not in CODE_REFERENCES} for name, value in nested.items()
        }
        return super().from_dict(config_dict | cleaned, **kwargs)


def own_code_only(config_class: Any, values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a configuration without the code that its checkpoint brings, unless its class was loaded from there.

    If a checkpoint lists its own pipeline, transformers asks for `trust_remote_code` even if the installed package has
    registered the pipeline. Saving adds the model's own class to `auto_map`; one in a file of another name would not be saved.
    """
    if config_class.__module__.startswith("transformers_modules"):
        return values
    suffix, auto_map = f"_{config_class.model_type}", values.get("auto_map") or {}
    kept = {name: path for name, path in auto_map.items() if str(path).partition(".")[0].endswith(suffix)}
    others = {name: value for name, value in values.items() if name not in CODE_REFERENCES}
    return others | ({"auto_map": kept} if kept else {})


class CheckedModelMixin:
    """What model classes gain where Lexperts is installed: they open safetensors only, and get a model card."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """As in transformers, from safetensors unless `use_safetensors=False` is passed. A damaged file raises a `CheckpointError`."""
        from safetensors import SafetensorError

        kwargs["use_safetensors"] = kwargs.get("use_safetensors") is not False
        with named_errors(pretrained_model_name_or_path, kinds=SafetensorError):
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    def write_model_card(self, folder: str | os.PathLike, **options) -> Path | None:
        """Writes a card unless the folder has one: see `run_tools.cards.write_model_card`."""
        return cards.write_model_card(self, folder, **options)

    def _upload_modified_files(self, working_dir, repo_id: str, *args, **kwargs):
        from huggingface_hub import HfApi

        # A card on the Hub is kept. push_to_hub has put it here, or transformers' blank one, which is replaced.
        is_here = (Path(working_dir) / "README.md").exists()
        if is_here or not HfApi().file_exists(repo_id, "README.md", token=kwargs.get("token")):
            self.write_model_card(working_dir, repo_id=repo_id)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)  # type: ignore[misc]
