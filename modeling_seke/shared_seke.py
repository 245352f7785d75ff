# SPDX-License-Identifier: Apache-2.0
"""What all models of Lexperts share: complete checkpoints, configurations that are checked, backbones, pipelines. Copied by `make fix-copies`."""

import importlib
import os
from collections.abc import Iterable, Mapping
from math import inf

import torch
from transformers import AutoModel, AutoModelForTextEncoding, Pipeline, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING

try:
    from run_tools.loading import CheckedConfigMixin, CheckedModelMixin
except ImportError:  # a checkpoint's own code, where Lexperts is not installed: its user has trusted the checkpoint
    CheckedConfigMixin = CheckedModelMixin = object  # type: ignore[assignment, misc]

IGNORED = -100  # a label that is not scored
if hasattr(os, "register_at_fork"):  # not on Windows; a child lacks the other threads, and would wait
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


def lexperts_tools(module: str, what: str):
    """`run_tools.MODULE`, for what a saved model does not need. Raises an `ImportError` where Lexperts is not installed."""
    try:
        return importlib.import_module(f"run_tools.{module}")
    except ImportError as error:
        raise ImportError(f"{what} needs Lexperts: https://github.com/lexperts/lexperts") from error


class ValidatedConfigMixin(CheckedConfigMixin):
    """A configuration with a method `check`, which raises a `ValueError` for a value out of range and is called at the end of its
    `__post_init__`, and here after `from_pretrained(..., field=value)`, which sets fields later. Put it before `PreTrainedConfig`.

    Attributes:
        readable_model_types: the values of `model_type` that this configuration accepts in files; its own by default.
        how_to_start: the end of the error message for a configuration of another model.
    """

    readable_model_types: tuple[str, ...] = ()
    how_to_start: str = ""

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """As in transformers. Raises a `ValueError` for the configuration of another model, or a value out of range."""
        model_type = config_dict.get("model_type", cls.model_type)
        readable = cls.readable_model_types or (cls.model_type,)
        if model_type not in readable:
            raise ValueError(f"model_type={model_type!r}, but {cls.__name__} reads {readable}. {cls.how_to_start}")
        loaded = super().from_dict({**config_dict, "model_type": cls.model_type}, **kwargs)
        (loaded[0] if isinstance(loaded, tuple) else loaded).check()
        return loaded


def require_one_of(config, choices: Mapping[str, Iterable]):
    """Raises a `ValueError` for a field whose value is not among its choices; `choices` maps fields to values."""
    for name, known in choices.items():
        if (value := getattr(config, name)) not in known:
            raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, known))}.")


def require_range(config, names: Iterable[str], low: float, below: float = inf, *, above: bool = False):
    """Raises a `ValueError` for a field outside [low, below), or with `above` outside (low, below); `None` is accepted."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not (low < value < below if above else low <= value < below):
            limits = f"{'above' if above else 'at least'} {low} and {'finite' if below == inf else f'below {below}'}"
            raise ValueError(f"{name}={value} must be {limits}.")


class LexpertsModelMixin(CheckedModelMixin):
    """Checkpoints with the class's pipelines, and what `run_tools.backbones` reads of a class. Put it before `PreTrainedModel`."""

    backbone_path = "backbone"  # attributes that lead to the pretrained model
    lora_task: str | None = None  # peft's name of the task

    @classmethod
    def pipelines(cls) -> dict[str, type]:
        """The pipeline of each task. The class imports it by `from .file import ...`, so that its file travels with the others."""
        return {}

    def save_pretrained(self, save_directory, *args, **kwargs):
        """As in transformers, with the pipelines in config.json, unless the class has no auto class by which they would open it."""
        self.config.__dict__.pop("custom_pipelines", None)
        if self._auto_class and (pipelines := self.pipelines()):
            self.config.custom_pipelines = {
                task: {
                    "impl": f"{c.__module__.rpartition('.')[2]}.{c.__name__}",
                    "pt": [self._auto_class],
                    "type": "text",
                }
                for task, c in pipelines.items()
            }
        return super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def build_backbone(cls, config: PreTrainedConfig) -> PreTrainedModel:
        """The backbone of its configuration. Raises a `ValueError` for a configuration that is not supported."""
        return build_encoder(config)


def build_encoder(config: PreTrainedConfig) -> PreTrainedModel:
    """The encoder of a configuration, for T5 without the decoder, and without a pooler, which would not be trained."""
    auto_class = AutoModelForTextEncoding if type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING else AutoModel
    if auto_class is AutoModel and config.is_encoder_decoder:
        raise ValueError(f"{config.model_type!r} is an encoder with a decoder. Use a model with an encoder only.")
    encoder = auto_class.from_config(config, trust_remote_code=False)
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None
    return encoder


def score_answers_only(batch: dict) -> dict:
    """Labels (B, T) -> (B, K), with `logits_to_keep` K, from the position that predicts the first label of the batch. The loss is the same."""
    first = (batch["labels"] != IGNORED).any(0).int().argmax().item()  # of the positions with a label
    kept = batch["labels"][:, max(int(first) - 1, 0) :]
    return batch | {"labels": kept, "logits_to_keep": kept.shape[1]}


class TextPipeline(Pipeline):
    """A pipeline that tokenizes, batches and streams by itself."""

    _load_tokenizer, _load_processor, _load_image_processor, _load_feature_extractor = True, False, False, False

    def save_pretrained(self, save_directory, **kwargs):
        """As in transformers, with a model card unless the folder has one."""
        super().save_pretrained(save_directory, **kwargs)
        if hasattr(self.model, "write_model_card") and os.path.isdir(save_directory):
            self.model.write_model_card(save_directory)

    def _upload_modified_files(self, working_dir, repo_id: str, *args, **kwargs):
        if hasattr(self.model, "write_model_card"):  # in place of transformers' blank one
            self.model.write_model_card(working_dir, repo_id=repo_id)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

    def check_options(self, options: Mapping, known: Iterable[str]):
        """Raises a `TypeError` for an unknown option."""
        if unknown := [name for name in options if name not in known]:
            raise TypeError(f"{self.task} got an unexpected argument {unknown[0]!r}. Its options: {', '.join(known)}.")

    def iterate(self, inputs, expected: str) -> Iterable:
        """Several inputs: any iterable, or a data set of PyTorch without `__iter__`. Raises a `TypeError` that names what is `expected`."""
        if not isinstance(inputs, (str, bytes, Mapping)):
            if isinstance(inputs, Iterable):
                return inputs
            if hasattr(inputs, "__getitem__") and hasattr(inputs, "__len__"):
                return (inputs[i] for i in range(len(inputs)))
        got = f"{inputs!r:.60} ({type(inputs).__name__})"
        raise TypeError(f"{self.task or type(self).__name__} needs {expected} or an iterable of them, got {got}.")
