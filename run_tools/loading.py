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
from .errors import UserError, closest, join_names, one_line
from .packaged import DEFAULT_MODELS, PACKAGED_MODELS, is_path, locate_model, resolve_model

HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
CODE_REFERENCES = ("auto_map", "custom_pipelines")
IMPLEMENTATION = re.compile(r"_?(attn|experts)_implementation(_internal)?")  # under which transformers looks up kernels
OUR_TASKS = {*DEFAULT_MODELS, "extractive-qa"}
KINDS = {int: Integral, float: Real}


class CheckpointError(OSError, ValueError):
    """A checkpoint that cannot be opened: one line that names it."""


class PipelineLoadingError(Exception):
    """A `CheckpointError` inside `pipeline(...)`, which would catch an `OSError` and open the model by another class."""


@contextmanager
def named_errors(name: Any, in_pipeline: bool = False, kinds: type[BaseException] = Exception) -> Iterator[None]:
    """Raises errors of these kinds again in one line that names the checkpoint, as a `CheckpointError`, or in a pipeline as a
    `PipelineLoadingError`; an `ImportError` says what to install, and a `TypeError` is of the caller.
    """
    try:
        yield
    except (ImportError, PipelineLoadingError):
        raise
    except kinds as error:
        cause = one_line(error)
        text = f"{cause if str(name) in cause else f'{str(name)!r} cannot be opened: {cause}':.1000}"
        raise (PipelineLoadingError if in_pipeline else CheckpointError)(text) from error


def find_file(name: str | os.PathLike, file: str, **options: Any) -> Path | None:
    """The path of a checkpoint's file in a folder, or in the cache, to which it is downloaded; `None` if there is none. `options` are those
    of `from_pretrained`.
    """
    from transformers.utils import cached_file

    hub = {key: value for key, value in options.items() if key in HUB_OPTIONS and value is not None}
    errors = ("missing_entries", "gated_repo", "connection_errors")
    found = cached_file(str(name), file, **hub, **{f"_raise_exceptions_for_{error}": False for error in errors})
    return None if found is None else Path(found)


def check_config(name: str | os.PathLike, **options: Any) -> None:
    """Raises a `CheckpointError` for a checkpoint whose configuration, if it has one, names a kernel on the Hub."""
    from transformers import PreTrainedConfig

    if find_file(name, "config.json", **options) is not None:
        hub = {key: value for key, value in options.items() if key in HUB_OPTIONS}
        refuse_kernels(PreTrainedConfig.get_config_dict(name, **hub)[0])


def refuse_kernels(config: dict[str, Any]) -> None:
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
    """`AutoConfig.from_pretrained` without code of the checkpoint, unless `trust_remote_code=True` is passed. Raises a
    `CheckpointError` in one line, as all functions here.
    """
    from transformers import AutoConfig

    name = resolve_model(name)
    with named_errors(name):
        check_config(name, **options)
        return AutoConfig.from_pretrained(name, **{"trust_remote_code": False} | options)


def open_tokenizer(name: Any, **options: Any):
    """`AutoTokenizer.from_pretrained`, as `open_config`."""
    from transformers import AutoTokenizer

    name = resolve_model(name)
    with named_errors(name):
        return AutoTokenizer.from_pretrained(name, **{"trust_remote_code": False} | options)


def open_model(cls: Any, name: Any, *args: Any, new: Sequence[str] = (), **options: Any):
    """`cls.from_pretrained` of a class or an auto class: from safetensors, without code of the checkpoint, and with all weights.

    Args:
        name: folder or Hub id, or the name of a packaged model.
        new: beginnings of the names of weights that the checkpoint may lack, such as "score." for a head that will be trained.
        args, options: of `from_pretrained`.
    """
    name = resolve_model(name)
    with named_errors(name, "_from_pipeline" in options):
        check_config(name, **options)
        options = {"use_safetensors": True, "trust_remote_code": False} | options
        model, info = cls.from_pretrained(name, *args, output_loading_info=True, **options)
        if missing := sorted(key for key in info["missing_keys"] if not key.startswith(tuple(new))):
            raise CheckpointError(
                f"{name}: the weights lack {join_names(missing, 5)}, which would stay at random values. Pass a checkpoint of this kind of model."
            )
    return model


def open_pipeline(task: str, name: Any, **options: Any):
    """`transformers.pipeline(task, model=name)`, as `open_model`."""
    from transformers import pipeline

    try:
        with named_errors(name):
            return pipeline(task, model=str(name), **{"trust_remote_code": False} | options)
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
            raise FileNotFoundError("there is no such folder.")
        yield
    except Exception as error:
        near = None if is_path(name) else closest(name, (*PACKAGED_MODELS, "minilm"))
        hint = f" Did you mean {near!r}?" if near else ""
        raise CheckpointError(f"{option} {name!r} could not be opened: {one_line(error):.500}{hint}") from error


def check_model(option: str, name: str) -> None:
    """Raises a `CheckpointError` for a model without a configuration, in a folder or on the Hub, without loading it."""
    from transformers.utils import cached_file

    with describe_load_errors(option, name):
        if find_file(name, "config.json") is None and find_file(name, "adapter_config.json") is None:
            cached_file(str(name), "config.json")
            raise FileNotFoundError("it has no config.json.")


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
    """The name of the device of computations that pick one themselves: a GPU if there is one."""
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


# transformers warns of a default model without a revision: ours are packages with a version
logging.getLogger("transformers.pipelines").addFilter(
    lambda record: "defaulted to" not in (text := str(record.msg)) or "lexperts_" not in text
)


def checked_class(*auto_classes: Any) -> Any:
    """An auto class that opens models by `open_model`; of several, by the one for the checkpoint's architecture, or else for its type."""

    def from_pretrained(cls, name, *args, **options):
        chosen = auto_classes[0]
        if len(auto_classes) > 1:
            hub = {key: options[key] for key in (*HUB_OPTIONS, "trust_remote_code") if key in options}
            with named_errors(name, "_from_pipeline" in options):
                config = open_config(name, **hub)
            kind, names = type(config), (*(config.architectures or ()), *(getattr(config, "auto_map", None) or ()))
            mapped = {each: each._model_mapping[kind].__name__ for each in auto_classes if kind in each._model_mapping}
            chosen = max(
                auto_classes, key=lambda each: (mapped.get(each) in names, each.__name__ in names, each in mapped)
            )
        return open_model(chosen, name, *args, **options)

    first = auto_classes[0]
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
    task, known = pipeline.task or type(pipeline).__name__, set(kinds)
    if generates:
        from transformers import GenerationConfig, GenerationMixin

        model = getattr(pipeline.model, "_orig_mod", pipeline.model)  # inside torch.compile, and peft
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        known |= {"trust_remote_code", *GenerationConfig().to_dict()}
        for method in (GenerationMixin.generate, model.generate, model.forward):
            known.update(inspect.signature(method).parameters)
    for name, value in options.items():
        if name not in known and not (generates and options.get("custom_generate")):
            raise TypeError(f"{task} got an unexpected argument {name!r}. Its options are {', '.join(kinds)}.")
        kind = kinds.get(name, object)
        single = value.item() if getattr(value, "ndim", None) == 0 else value  # of numpy and torch
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
        """As in transformers. Raises a `CheckpointError` for a Hub kernel in `config_dict`; one in `kwargs` is accepted. Configurations inside
        it, such as a backbone's, lose their references to code.
        """
        refuse_kernels(config_dict)
        cleaned = {
            name: {key: item for key, item in value.items() if key not in CODE_REFERENCES}
            if isinstance(value, dict) and "model_type" in value
            else value
            for name, value in config_dict.items()
        }
        return super().from_dict(cleaned, **kwargs)


def own_code_only(config_class: Any, values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a configuration without the code that its checkpoint brings, where the installed class is used.

    If a checkpoint lists its own pipeline, transformers asks for `trust_remote_code` even if the installed package has
    registered the pipeline. Saving adds the model's own class to `auto_map`; a class in a file of another name would not be
    saved. A class that was loaded from the checkpoint keeps both.
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
