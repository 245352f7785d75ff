# SPDX-License-Identifier: Apache-2.0
"""Validation of configurations, also after fields were overridden. Copied by `make fix-copies`."""

import difflib
from collections.abc import Iterable
from math import inf

try:
    from run_tools.loading import CheckedConfigMixin
except ImportError:  # a checkpoint's own code, where Lexperts is not installed: its user has trusted the checkpoint
    CheckedConfigMixin = object  # type: ignore[assignment, misc]


class ValidatedConfigMixin(CheckedConfigMixin):
    """Validates a configuration after every kind of construction. Put it before `PreTrainedConfig` in the bases. Unknown
    fields are kept, as in transformers.

    The configuration has a method `check`, which raises a `ValueError` for a value out of range, and calls it at the end of
    its `__post_init__`. This class calls it again after `from_pretrained(..., field=value)`, which sets fields later.

    Attributes:
        readable_model_types: the values of `model_type` that this configuration accepts in files; its own by default.
        how_to_start: the end of the error message for a configuration of another model.
    """

    readable_model_types: tuple[str, ...] = ()
    how_to_start: str = ""

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """As in transformers; validated again after `kwargs` have replaced fields.

        Raises:
            ValueError: for the configuration of another model, a value out of range, and what `CheckedConfigMixin` refuses.
        """
        model_type = config_dict.get("model_type", cls.model_type)
        readable = cls.readable_model_types or (cls.model_type,)
        if model_type not in readable:
            raise ValueError(
                f"model_type={model_type!r} is not supported by {cls.__name__}, which reads "
                f"{' and '.join(map(repr, readable))}. {cls.how_to_start}"
            )
        loaded = super().from_dict({**config_dict, "model_type": cls.model_type}, **kwargs)
        (loaded[0] if isinstance(loaded, tuple) else loaded).check()
        return loaded


def did_you_mean(name, known: Iterable) -> str:
    """A sentence that suggests the nearest known name, or lists all."""
    known = list(known)
    close = difflib.get_close_matches(str(name), map(str, known), n=1)
    return f"Did you mean {close[0]!r}?" if close else f"Use one of {', '.join(map(repr, known))}."


def require_one_of(config, choices: dict[str, Iterable]):
    """Raises a `ValueError` for a field whose value is not among its choices; `choices` maps fields to values."""
    for name, known in choices.items():
        value = getattr(config, name)
        if value not in known:
            raise ValueError(f"{name}={value!r} is not known. {did_you_mean(value, known)}")


def require_range(config, names: Iterable[str], low: float, below: float = inf, *, above: bool = False):
    """Raises a `ValueError` for a field outside [low, below), or with `above` outside (low, below); `None` is accepted."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not (low < value < below if above else low <= value < below):
            limits = f"{'above' if above else 'at least'} {low} and {'finite' if below == inf else f'below {below}'}"
            raise ValueError(f"{name}={value} must be {limits}.")
