"""Options of a call of our pipelines, and the models that a pipeline takes: errors that name them."""

import inspect
import math
from collections.abc import Mapping
from numbers import Integral, Real

from .errors import closest
from .model_options import DEFAULT_MODELS

KINDS = {
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a string"),
    bool: (Integral, "True or False"),
}
OUR_TASKS = {*DEFAULT_MODELS, "extractive-qa"}


def check_purpose(model, task: str) -> None:
    """Raises a `ValueError` for a model of ours that is for another of our pipelines; under a name of its own a pipeline takes any."""
    purpose = getattr(model, "card_use", {}).get("task", task)
    if task in OUR_TASKS and purpose != task:
        raise ValueError(f"{type(model).__name__} is for pipeline({purpose!r}), not for {task!r}. Pass another model.")


def inside_wrappers(model):
    """The model inside those of torch.compile and peft, whose methods have no argument names of their own."""
    model = getattr(model, "_orig_mod", model)
    get_base_model = getattr(model, "get_base_model", None)
    return get_base_model() if callable(get_base_model) else model


def check_kind(name: str, value, kind: type) -> None:
    """Raises a `TypeError` for a value of another kind, and a `ValueError` for NaN. Scalars of numpy and torch are what they hold."""
    accepted, described = KINDS[kind]
    single = value.item() if getattr(value, "ndim", None) == 0 else value
    fits = isinstance(single, accepted) and (kind in (bool, str) or not isinstance(single, bool))
    if not fits or (kind is bool and single not in (0, 1)):
        raise TypeError(f"{name}={value!r:.60} must be {described}, not {type(value).__name__}.")
    if kind is float and math.isnan(single):
        raise ValueError(f"{name}={value} must be {described}.")


def check_option_types(pipeline, options: Mapping, kinds: Mapping[str, type], generates: bool = False) -> None:
    """Raises an error for options that a pipeline does not take, and for a pipeline with a model that is for another one.

    Args:
        options: of a call. `None` is taken for every option: its default.
        kinds: the type of each option's value; `object` for any.
        generates: whether the model's `generate` takes all other options, and checks their values.

    Raises:
        TypeError: for an unknown name, and for a value of another type.
        ValueError: for NaN, a batch of no inputs, and a model for another pipeline.
    """
    task, also = pipeline.task or type(pipeline).__name__, {"trust_remote_code"} if generates else set[str]()
    check_purpose(pipeline.model, pipeline.task)
    if generates:
        from transformers import GenerationConfig, GenerationMixin

        also.update(GenerationConfig().to_dict())
        model = inside_wrappers(pipeline.model)
        for method in (GenerationMixin.generate, model.generate, model.forward):
            also.update(inspect.signature(method).parameters)
    for name, value in options.items():
        if name not in kinds and name not in also and not (generates and options.get("custom_generate")):
            close = closest(name, [*kinds, *also])
            known = f"Its options are {', '.join(kinds)}{', and those of generate' if also else ''}."
            raise TypeError(
                f"{task} got an unexpected argument {name!r}. {f'Did you mean {close!r}?' if close else known}"
            )
        if value is not None and (kind := kinds.get(name, object)) is not object:
            check_kind(name, value, kind)
    if (batch_size := options.get("batch_size")) is not None and batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1.")
