"""The model of `pipeline("keyphrase-extraction")` without a model argument: the package lexperts-seke-minilm."""

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "lexperts_seke_minilm"


def find_default_model() -> str:
    """The folder of the installed default model.

    Raises:
        ImportError: if the package is not installed.
    """
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(
            "No model was given, and the default model, lexperts-seke-minilm, is not installed. Install it in the clone "
            "with `pip install --no-build-isolation ./models/seke-minilm`, or pass model=..., a folder or Hub id."
        )
    return str(Path(spec.submodule_search_locations[0]))


class DefaultModel(Mapping):
    """What transformers' registry expects as the `default` of a task, `{"model": (name, revision)}`, found on first use."""

    def __getitem__(self, key: str) -> tuple[str, None]:
        if key != "model":
            raise KeyError(key)
        return find_default_model(), None

    def __contains__(self, key: object) -> bool:
        return key == "model"

    def __iter__(self):
        return iter(("model",))

    def __len__(self) -> int:
        return 1


class NoDefaultWarning(logging.Filter):
    """Drops transformers' warning that a default model was taken: this one is a package with a version."""

    def filter(self, record: logging.LogRecord) -> bool:
        """False for that warning."""
        return not (
            record.levelno == logging.WARNING and PACKAGE in str(record.msg) and "defaulted to" in str(record.msg)
        )
