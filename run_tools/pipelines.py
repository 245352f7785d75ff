"""Registers our pipelines with transformers: no default model, and no checkpoint that lacks weights."""

from collections.abc import Mapping
from typing import Any

from .model_loading import checked_class


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
    """As transformers' `PIPELINE_REGISTRY.register_pipeline`, for a pipeline without a default model. `pt_model` is an auto class,
    or two: one for models with an encoder and a decoder, and one for decoders.
    """
    from transformers.pipelines import PIPELINE_REGISTRY

    PIPELINE_REGISTRY.register_pipeline(task, pipeline_class=pipeline_class, pt_model=pt_model, type=type)
    # a new entry, and not arguments of register_pipeline: saved models would record them
    entry = PIPELINE_REGISTRY.supported_tasks[task]
    classes = pt_model if isinstance(pt_model, tuple) else (pt_model,)
    changed = {"pt": (checked_class(*classes),), "default": NoDefaultModel(task)}
    PIPELINE_REGISTRY.supported_tasks[task] = entry | changed
