"""Checks of configurations that come from others: misspelt fields, and references to code, which is neither fetched nor run."""

import difflib
from dataclasses import fields
from typing import Any

from .model_files import refuse_kernels

CODE_REFERENCES = ("auto_map", "custom_pipelines")


class CheckedConfigMixin:
    """The checks of a configuration class, where Lexperts is installed."""

    def __post_init__(self, **kwargs):
        kwargs = own_code_only(type(self), kwargs)
        refuse_misspelt_fields(type(self), kwargs)
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """As in transformers. Raises a `ValueError` for a misspelt field among `kwargs`, and a Hub kernel named in
        `config_dict`. A kernel passed in `kwargs` (`attn_implementation=...`) is accepted.
        """
        refuse_misspelt_fields(cls, kwargs)
        return super().from_dict(without_foreign_code(config_dict), **kwargs)


def own_code_only(config_class: type, values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a configuration without the code that its checkpoint brings, where the installed class is used.

    If a checkpoint lists its own pipeline, transformers asks for `trust_remote_code` even if the installed package has
    registered the pipeline. Saving adds the model's own class to `auto_map`; a class in a file of another name would not be
    saved. A class that was loaded from the checkpoint keeps both.
    """
    if config_class.__module__.startswith("transformers_modules"):
        return values
    suffix = f"_{config_class.model_type}"  # type: ignore[attr-defined]
    auto_map = values.get("auto_map") or {}
    kept = {name: path for name, path in auto_map.items() if str(path).partition(".")[0].endswith(suffix)}
    others = {name: value for name, value in values.items() if name not in CODE_REFERENCES}
    return others | ({"auto_map": kept} if kept else {})


def without_foreign_code(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration from a file. Those inside it, such as a backbone's, lose their references to code. Raises a
    `CheckpointError` for a Hub kernel.
    """
    refuse_kernels(config)
    return {
        name: {key: item for key, item in value.items() if key not in CODE_REFERENCES}
        if isinstance(value, dict) and "model_type" in value
        else value
        for name, value in config.items()
    }


def refuse_misspelt_fields(config_class: Any, values: dict[str, Any]) -> None:
    """Raises a `ValueError` for a name among `values` that is not a field of the configuration, but nearly one."""
    from transformers import GenerationConfig, PreTrainedConfig

    known = {field.name for field in fields(config_class)} | set(config_class.attribute_map)
    own = known - {field.name for field in fields(PreTrainedConfig)}
    generation = GenerationConfig._get_default_generation_params()
    for name, value in values.items():
        if name in known or name in generation or name.startswith("_") or hasattr(PreTrainedConfig, name):
            continue
        if (field := near_miss(name, own, known)) is not None:
            raise ValueError(f"{name}={value!r:.60} is not a field of {config_class.__name__}. Did you mean {field!r}?")


def near_miss(name: str, own: set[str], known: set[str]) -> str | None:
    """The known name that a name was probably meant to be: with other letters in its words (`num_expert`), or of a class's
    own names with words left out or moved (`deputy_size` for `deputy_intermediate_size`). Names with another word are new.
    """
    words = name.split("_")
    for field in sorted(known):
        others = field.split("_")
        if len(words) == len(others) and all(map(similar, words, others)):
            return field
        if field in own and len(words) > 1 and set(words) <= set(others):
            return field
    return next((field for field in sorted(own) if field.replace("_", "") == "".join(words)), None)


def similar(word: str, other: str) -> bool:
    """Whether two words are equal, or of at least four letters and alike but for about one."""
    if word == other or min(len(word), len(other)) < 3 or max(len(word), len(other)) < 4:
        return word == other
    return difflib.SequenceMatcher(None, word, other).ratio() >= 0.75
