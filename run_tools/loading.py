"""Opens models, tokenizers, configurations and pipelines: complete, from safetensors, without code of a checkpoint."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from . import cards
from .errors import UserError, one_line, short_repr
from .packaged import DEFAULT_MODELS, locate_model

HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
NO_CODE = {"trust_remote_code": False}

# transformers warns of a default model without a revision: ours are packages with a version
logging.getLogger("transformers.pipelines").addFilter(lambda record: "lexperts_" not in str(record.msg))


class CheckpointError(OSError, ValueError):
    """A checkpoint that cannot be opened: one line that names it."""


class PipelineLoadingError(Exception):
    """A `CheckpointError` inside `pipeline(...)`, which would catch an `OSError` and open the model by another class."""


@contextmanager
def named_errors(name: Any, kind: type[Exception] = CheckpointError) -> Iterator[None]:
    """Raises errors again in one line that names the checkpoint."""
    try:
        yield
    except (ImportError, TypeError):  # of a package that is not installed, and of the caller
        raise
    except Exception as error:
        cause = str(error) if isinstance(error, PipelineLoadingError) else one_line(error)
        raise kind(f"{cause if str(name) in cause else f'{str(name)!r} cannot be opened: {cause}':.1000}") from error


def hub_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that locate a checkpoint, among arguments of `from_pretrained`."""
    return {name: value for name, value in options.items() if name in HUB_OPTIONS}


def without_code(config: Mapping[Any, Any]) -> dict[Any, Any]:
    """The fields of a configuration and those nested in it, without the code that they name. Raises a `CheckpointError` for a Hub kernel."""
    fields = {key: value for key, value in config.items() if key not in ("auto_map", "custom_pipelines")}
    for key, value in fields.items():
        if "_implementation" in str(key) and "/" in str(value):
            raise CheckpointError(f"config.json: {key}={value!r:.200} names a kernel of the Hub. Remove the field.")
    return {key: without_code(value) if isinstance(value, dict) else value for key, value in fields.items()}


def read_config(name: str | os.PathLike, options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a checkpoint's config.json, if it has one, as `without_code`."""
    from transformers import PreTrainedConfig

    return without_code(PreTrainedConfig.get_config_dict(name, **hub_options(options))[0])


def open_config(name: Any, **options: Any):
    """`AutoConfig.from_pretrained`, also of a packaged model, without the checkpoint's code by default. Raises a `CheckpointError`."""
    from transformers import AutoConfig

    name = locate_model(name)
    with named_errors(name):
        read_config(name, options)
        return AutoConfig.from_pretrained(name, **NO_CODE | options)


def open_tokenizer(name: Any, **options: Any):
    """`AutoTokenizer.from_pretrained`, as `open_config`."""
    from transformers import AutoTokenizer

    name = locate_model(name)
    with named_errors(name):
        return AutoTokenizer.from_pretrained(name, **NO_CODE | options)


def open_model(cls: Any, name: Any, *args: Any, **options: Any):
    """`cls.from_pretrained` of a class or an auto class, as `open_config`: from safetensors, and with all weights."""
    name = locate_model(name)
    with named_errors(name):
        read_config(name, options)
        options = {"use_safetensors": True, **NO_CODE} | options
        model, info = cls.from_pretrained(name, *args, output_loading_info=True, **options)
        if missing := sorted(info["missing_keys"]):
            raise CheckpointError(f"{name}: the weights lack {short_repr(missing)}, which would be random.")
        return model


def open_pipeline(task: str, name: Any, **options: Any):
    """`transformers.pipeline(task, model=name)`, as `open_model`."""
    from transformers import pipeline

    with named_errors(name):
        opened = pipeline(task, model=str(name), **NO_CODE | options)
        if (purpose := getattr(opened.model, "card_use", {}).get("task") or task) != task:
            raise CheckpointError(f"{name}, a {type(opened.model).__name__}, is for {purpose!r}, not for {task!r}.")
        return opened


class DefaultModel(dict):
    """`{"model": task}`, whose value is the folder of the task's default model, found on first use, and its revision."""

    def __getitem__(self, key: str) -> tuple[str, None]:
        if (task := self.get(key)) not in DEFAULT_MODELS:
            raise UserError(f"pipeline({task!r}) has no default model. Pass model=..., a folder or Hub id.")
        return locate_model(None, task), None


def register_pipeline(task: str, *, pipeline_class: type, pt_model: Any, type: str = "text") -> None:
    """As in transformers' `PIPELINE_REGISTRY`, with the default model of `DEFAULT_MODELS`, and models opened by `open_model`."""
    from transformers.pipelines import PIPELINE_REGISTRY

    PIPELINE_REGISTRY.register_pipeline(task, pipeline_class=pipeline_class, pt_model=pt_model, type=type)
    opens = checked_class(*(pt_model if isinstance(pt_model, tuple) else (pt_model,)))
    tasks = PIPELINE_REGISTRY.supported_tasks  # saved models would record a change of the entry itself
    tasks[task] = tasks[task] | {"pt": (opens,), "default": DefaultModel(model=task)}


def checked_class(*classes: Any) -> Any:
    """An auto class that opens models by `open_model`, with the auto class that has the checkpoint's architecture, or else its type."""

    def from_pretrained(cls, name, *args, **options):
        with named_errors(name, PipelineLoadingError):
            if len(classes) == 1:  # also of an adapter, whose folder has no configuration
                return open_model(classes[0], name, *args, **options)
            config = open_config(name, trust_remote_code=options.get("trust_remote_code"), **hub_options(options))
            named = getattr(config, "auto_map", None) or ()
            fitting = [each for each in classes if type(config) in each._model_mapping or each.__name__ in named]
            models = [(each._model_mapping.get(type(config), None), each) for each in fitting or classes]
            own = [each for model, each in models if getattr(model, "__name__", "") in (config.architectures or ())]
            return open_model([*own, *fitting, *classes][0], name, *args, **options)

    return type(classes[0].__name__, (classes[0],), {"from_pretrained": classmethod(from_pretrained)})


class CheckedConfigMixin:
    """What configuration classes gain where Lexperts is installed: code that a checkpoint names is neither fetched nor run."""

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """As in transformers, `without_code`, unless the class itself was loaded from a checkpoint."""
        fields, is_remote = without_code(config_dict), cls.__module__.startswith("transformers_modules")
        return super().from_dict(config_dict if is_remote else fields, **kwargs)


class CheckedModelMixin:
    """What model classes gain where Lexperts is installed: they open safetensors only, and get a model card."""

    write_model_card = cards.write_model_card

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """As in transformers, from safetensors unless `use_safetensors=False` is passed."""
        return super().from_pretrained(
            *args, **{**kwargs, "use_safetensors": kwargs.get("use_safetensors") is not False}
        )

    def _upload_modified_files(self, working_dir, repo_id: str, *args, **kwargs):
        self.write_model_card(working_dir, repo_id=repo_id)  # in place of transformers' blank one
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)  # type: ignore[misc]
