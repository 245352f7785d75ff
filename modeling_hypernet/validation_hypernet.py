"""Shared by all configurations: overrides are validated, and no configuration downloads or runs code.

The same file in every modeling package, which travels alone: edit modeling_seke's, then run `make fix-copies`.
"""

import difflib
from collections.abc import Iterable
from dataclasses import fields

from transformers import GenerationConfig, PreTrainedConfig

# Keys by which transformers looks up an implementation. Its value may name a kernel in a Hub repository.
KINDS = ("attn", "_attn", "experts", "_experts")
IMPLEMENTATION_KEYS = tuple(f"{kind}_implementation{suffix}" for kind in KINDS for suffix in ("", "_internal"))
CODE_REFERENCES = ("auto_map", "custom_pipelines")


class ValidatedConfigMixin:
    """Validates a configuration after every kind of construction. Put it before `PreTrainedConfig` in the bases. Unknown
    fields are kept, as in transformers, unless they are near misses of known ones.

    The configuration has a method `check`, which raises a `ValueError` for a value out of range, and calls it at the end of
    its `__post_init__`. This class calls it again after `from_pretrained(..., field=value)`, which sets fields later.

    Attributes:
        readable_model_types: the values of `model_type` that this configuration accepts in files; its own by default.
        how_to_start: the end of the error message for a configuration of another model.
    """

    readable_model_types: tuple[str, ...] = ()
    how_to_start: str = ""

    def __post_init__(self, **kwargs):
        if not type(self).__module__.startswith("transformers_modules"):
            # If a checkpoint lists its own pipeline, transformers asks for trust_remote_code even if this package is
            # imported and has registered the pipeline. Code that was loaded from the checkpoint keeps the list.
            kwargs.pop("custom_pipelines", None)
            # Saving adds the model's own class; a class in a file of another name would not be saved.
            suffix = f"_{self.model_type}"
            auto_map = kwargs.pop("auto_map", None) or {}
            kept = {name: path for name, path in auto_map.items() if str(path).partition(".")[0].endswith(suffix)}
            kwargs |= {"auto_map": kept} if kept else {}
        refuse_misspelt_fields(type(self), kwargs)
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """As in transformers; validated again after `kwargs` have replaced fields.

        Raises:
            ValueError: for the configuration of another model, a misspelt field, a value out of range, and a Hub kernel named
                in `config_dict`. A kernel passed in `kwargs` (`attn_implementation=...`) is accepted.
        """
        refuse_misspelt_fields(cls, kwargs)
        model_type = config_dict.get("model_type", cls.model_type)
        readable = cls.readable_model_types or (cls.model_type,)
        if model_type not in readable:
            raise ValueError(
                f"model_type={model_type!r} is not supported by {cls.__name__}, which reads "
                f"{' and '.join(map(repr, readable))}. {cls.how_to_start}"
            )
        refuse_remote_kernels(config_dict)
        config_dict = {name: without_code_references(value) for name, value in config_dict.items()}
        loaded = super().from_dict({**config_dict, "model_type": cls.model_type}, **kwargs)
        config = loaded[0] if isinstance(loaded, tuple) else loaded
        config.check()
        return loaded


def refuse_remote_kernels(config: dict, path: str = ""):
    """Raises a `ValueError` if a configuration, or one nested in it, names an implementation in a Hub repository."""
    for name, value in config.items():
        if name in IMPLEMENTATION_KEYS:
            for implementation in value.values() if isinstance(value, dict) else [value]:
                if "/" in str(implementation):
                    raise ValueError(
                        f"{path}{name}={implementation!r} in the configuration names a kernel in a Hub repository, whose code "
                        "would be run. Remove it from config.json; if you trust the repository, pass "
                        f"attn_implementation={implementation!r} yourself."
                    )
        elif isinstance(value, dict):
            refuse_remote_kernels(value, f"{path}{name}.")


def without_code_references(value):
    """A value of a configuration. If it is itself a configuration, such as a backbone's, its references to code are removed."""
    if not isinstance(value, dict) or "model_type" not in value:
        return value
    return {name: without_code_references(item) for name, item in value.items() if name not in CODE_REFERENCES}


def refuse_misspelt_fields(config_class: type, values: dict):
    """Raises a `ValueError` for a name among `values` that is no field of the configuration, but nearly one."""
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


def require_at_least(config, minimum: float, names: Iterable[str]):
    """Raises a `ValueError` for a field below a minimum; `None` is accepted."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not minimum <= value < float("inf"):
            raise ValueError(f"{name}={value} must be a finite number of at least {minimum}.")


def require_fraction(config, names: Iterable[str]):
    """Raises a `ValueError` for a field outside [0, 1), such as a dropout rate."""
    for name in names:
        value = getattr(config, name)
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value} must be at least 0 and below 1.")
