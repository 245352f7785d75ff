"""Registers our pipelines with transformers: with our own default models or none, and no checkpoint that lacks weights."""

from collections.abc import Mapping
from typing import Any

from .model_loading import checked_class
from .model_options import DEFAULT_MODELS
from .packaged import DefaultModel


class NoDefaultModel(Mapping):
    """The `default` of a task in transformers' registry. Reading it raises a `ValueError` that says what to pass."""

    def __init__(self, task: str):
        self.task = task

    def __getitem__(self, key):
        raise ValueError(
            f"pipeline({self.task!r}) has no default model. Pass model=..., the folder of a checkpoint or its Hub id: "
            f"pipeline({self.task!r}, model='runs/mine/final')."
        )

    def __iter__(self):
        return iter(("model",))

    def __len__(self) -> int:
        return 1


def register_pipeline(task: str, *, pipeline_class: type, pt_model: Any, type: str = "text") -> None:
    """As transformers' `PIPELINE_REGISTRY.register_pipeline`, with the default model of `DEFAULT_MODELS`, if any. `pt_model` is an auto
    class, or a tuple of them, of which the one for a checkpoint's architecture opens it.
    """
    from transformers.pipelines import PIPELINE_REGISTRY

    PIPELINE_REGISTRY.register_pipeline(task, pipeline_class=pipeline_class, pt_model=pt_model, type=type)
    # a new entry, and not arguments of register_pipeline: saved models would record them
    entry = PIPELINE_REGISTRY.supported_tasks[task]
    default = DefaultModel(DEFAULT_MODELS[task]) if task in DEFAULT_MODELS else NoDefaultModel(task)
    classes = pt_model if isinstance(pt_model, tuple) else (pt_model,)
    changed = {"pt": (checked_class(*classes),), "default": default}
    PIPELINE_REGISTRY.supported_tasks[task] = entry | changed
