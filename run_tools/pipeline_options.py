"""Options of a call of our pipelines, and the models that a pipeline takes: errors that name them."""

import inspect
import math
from collections.abc import Mapping
from numbers import Integral, Real

from .errors import closest

KINDS = {
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a string"),
    bool: (bool, "True or False"),
}


def check_purpose(model, task: str) -> None:
    """Raises a `ValueError` for a model of ours that is for another pipeline."""
    purpose = getattr(model, "card_use", {}).get("task", task)
    if task and purpose != task:
        raise ValueError(f"{type(model).__name__} is for pipeline({purpose!r}), not for {task!r}. Pass another model.")


def inside_wrappers(model):
    """The model inside those of torch.compile and peft, whose methods have no argument names of their own."""
    model = getattr(model, "_orig_mod", model)
    get_base_model = getattr(model, "get_base_model", None)
    return get_base_model() if callable(get_base_model) else model


def check_call_options(pipeline, options: Mapping, kinds: Mapping[str, type], generates: bool = False) -> None:
    """Raises an error for options that a pipeline does not take, and for a pipeline with a model that is for another one.

    Args:
        options: of a call. `None` is taken for every option: its default.
        kinds: the type of each option's value; `object` for any.
        generates: whether the model's `generate` takes all other options, and checks their values.

    Raises:
        TypeError: for an unknown name, and for a value of another type.
        ValueError: for NaN, a batch of no inputs, and a model for another pipeline.
    """
    task, also = pipeline.task, set[str]()
    check_purpose(pipeline.model, task)
    if generates:
        from transformers import GenerationConfig, GenerationMixin

        also.update(GenerationConfig().to_dict())
        model = inside_wrappers(pipeline.model)
        for method in (GenerationMixin.generate, model.generate, model.forward):
            also.update(inspect.signature(method).parameters)
    for name, value in options.items():
        if name not in kinds and name not in also:
            close = closest(name, [*kinds, *also])
            known = f"Its options are {', '.join(kinds)}{', and those of generate' if also else ''}."
            raise TypeError(
                f"{task} got an unexpected argument {name!r}. {f'Did you mean {close!r}?' if close else known}"
            )
        accepted, described = KINDS.get(kinds.get(name, object), (object, ""))
        is_other = not isinstance(value, accepted) or (isinstance(value, bool) and accepted in (Integral, Real))
        if value is not None and is_other:
            raise TypeError(f"{name}={value!r:.60} must be {described}, not {type(value).__name__}.")
        if accepted is Real and value is not None and math.isnan(value):
            raise ValueError(f"{name}={value} must be {described}.")
    if (batch_size := options.get("batch_size")) is not None and batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1.")
