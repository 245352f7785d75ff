"""Models that are packages: the one of `pipeline("keyphrase-extraction")` without a model argument, and a small one."""

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from run_tools.model_options import PACKAGED_MODELS, is_packaged

PACKAGE = PACKAGED_MODELS["default"]
logger = logging.getLogger(__name__)


def find_default_model() -> str:
    """The folder of the installed default model.

    Raises:
        ImportError: if the package is not installed.
    """
    return find_packaged("default")


def find_packaged(name: str) -> str:
    """The folder of an installed model of PACKAGED_MODELS. Raises an `ImportError` if its package is not installed."""
    spec = find_spec(PACKAGED_MODELS[name])
    if spec is None or not spec.submodule_search_locations:
        package = PACKAGED_MODELS[name].replace("_", "-")
        raise ImportError(
            f"The {name} model, {package}, is not installed. Install it in the clone with `pip install --no-build-isolation "
            f"./models/{package.removeprefix('lexperts-')}`, or pass another model: a folder or Hub id."
        )
    return str(Path(spec.submodule_search_locations[0]))


def locate_model(model: str | Path | None) -> str:
    """The folder of a model of PACKAGED_MODELS by its name, that of the default model for `None`; any other text is returned.

    A folder of that name is a folder: its full path is returned, since another process may work elsewhere, with a warning.
    """
    if not model or is_packaged(model):
        return find_packaged(str(model or "default"))
    if str(model) not in PACKAGED_MODELS:
        return str(model)
    folder = Path(model).resolve()
    logger.warning(
        f"{str(model)!r} is the folder {folder} here, not the model of that name. Pass './{model}' for the folder, or rename it."
    )
    return str(folder)


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
