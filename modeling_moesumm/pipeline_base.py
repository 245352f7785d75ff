"""What all pipelines have in common: the inputs that transformers' pipelines take, no default model, a card when saved.

The same file in every package with a pipeline, as it travels with checkpoints: edit modeling_lexicon's, then run
`make fix-copies`.
"""

import os
from collections.abc import Iterable, Mapping

from transformers import Pipeline
from transformers.pipelines import PIPELINE_REGISTRY

try:
    from run_tools.model_loading import checked_class
except ImportError:  # code of a checkpoint, on a machine without Lexperts
    checked_class = None  # type: ignore[assignment]


class TextPipeline(Pipeline):
    """A pipeline that tokenizes, batches and streams by itself."""

    _load_tokenizer = True
    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False

    def save_pretrained(self, save_directory, **kwargs):
        """As in transformers, with a model card unless the folder has one."""
        super().save_pretrained(save_directory, **kwargs)
        if hasattr(self.model, "write_model_card") and os.path.isdir(save_directory):
            self.model.write_model_card(save_directory)

    def iterate(self, inputs, expected: str) -> Iterable:
        """Several inputs, as transformers' pipelines take them: a list, a generator, a `datasets` column, or a data set of
        PyTorch, such as `KeyDataset`. A data set without `__iter__` is read by its indices.

        Raises:
            TypeError: for anything else; the message names what is `expected`.
        """
        if not isinstance(inputs, (str, bytes, Mapping)):
            if isinstance(inputs, Iterable):
                return inputs
            if hasattr(inputs, "__getitem__") and hasattr(inputs, "__len__"):
                return (inputs[i] for i in range(len(inputs)))
        raise TypeError(
            f"{self.task or type(self).__name__} needs {expected} or an iterable of them, got {inputs!r:.60} "
            f"({type(inputs).__name__})."
        )


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


def register_pipeline(task: str, pipeline_class: type, auto_class: type):
    """Registers a pipeline of texts that has no default model, and that refuses checkpoints which lack weights."""
    PIPELINE_REGISTRY.register_pipeline(task, pipeline_class=pipeline_class, pt_model=auto_class, type="text")
    opened = auto_class if checked_class is None else checked_class(auto_class)
    # a new entry, and not arguments of register_pipeline: saved models would record them
    entry = PIPELINE_REGISTRY.supported_tasks[task]
    PIPELINE_REGISTRY.supported_tasks[task] = entry | {"pt": (opened,), "default": NoDefaultModel(task)}
