# SPDX-License-Identifier: Apache-2.0
"""What all pipelines share: checked options, inputs as transformers' pipelines take them, a card when saved. Copied by
`make fix-copies`."""

import difflib
import inspect
import math
import os
from collections.abc import Iterable, Mapping
from numbers import Integral, Real

from transformers import GenerationConfig, GenerationMixin, Pipeline

KINDS = {
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a string"),
    bool: (bool, "True or False"),
}


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


def check_call_options(task: str, options: Mapping, kinds: Mapping[str, type], generator=None) -> None:
    """Raises an error for options that a pipeline does not take.

    Args:
        task: of the pipeline, for messages.
        options: of a call. `None` is taken for every option: its default.
        kinds: the type of each option's value; `object` for any.
        generator: the model whose `generate` takes all other options, and checks their values.

    Raises:
        TypeError: for an unknown name, and for a value of another type.
        ValueError: for NaN, and for a batch of no inputs.
    """
    also: set[str] = set()
    if generator is not None:
        also.update(GenerationConfig().to_dict())
        for method in (GenerationMixin.generate, generator.generate, generator.forward):
            also.update(inspect.signature(method).parameters)
    for name, value in options.items():
        if name not in kinds and name not in also:
            close = difflib.get_close_matches(name, [*kinds, *also], n=1)
            known = f"Its options are {', '.join(kinds)}{', and those of generate' if also else ''}."
            hint = f"Did you mean {close[0]!r}?" if close else known
            raise TypeError(f"{task} got an unexpected argument {name!r}. {hint}")
        accepted, described = KINDS.get(kinds.get(name, object), (object, ""))
        is_other = not isinstance(value, accepted) or (isinstance(value, bool) and accepted in (Integral, Real))
        if value is not None and is_other:
            raise TypeError(f"{name}={value!r:.60} must be {described}, not {type(value).__name__}.")
        if accepted is Real and value is not None and math.isnan(value):
            raise ValueError(f"{name}={value} must be {described}.")
    if (batch_size := options.get("batch_size")) is not None and batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1.")
