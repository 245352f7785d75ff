"""Models that are packages, by their names: those of pipelines without a model argument, and others."""

import logging
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from .joined import backbone_of, is_partial, joined
from .model_options import DEFAULT_MODELS, PACKAGED_MODELS, is_packaged
from .pretrained import PACKAGED, unpacked

logger = logging.getLogger(__name__)


def find_packaged(name: str) -> str:
    """The folder of an installed model of PACKAGED_MODELS; of one that is kept without its backbone, that in the cache.

    Raises:
        ImportError: if its package is not installed.
        UserError: as `joined`.
    """
    spec = find_spec(PACKAGED_MODELS[name])
    if spec is None or not spec.submodule_search_locations:
        package = PACKAGED_MODELS[name].replace("_", "-")
        model = package.removeprefix("lexperts-")
        places = f"./models/smollm2 ./models/{model}" if model.endswith("-smollm2") else f"./models/{model}"
        raise ImportError(
            f"The {name} model, {package}, is not installed. Install it in the clone with `pip install {places}`, "
            "or pass another model: a folder or Hub id."
        )
    folder = Path(spec.submodule_search_locations[0])
    return str(joined(folder) if is_partial(folder) else folder)


def is_installed(name: str) -> bool:
    """Whether the package of a model of PACKAGED_MODELS is installed, with that of its backbone if it has one."""
    spec = find_spec(PACKAGED_MODELS[name])
    if spec is None or not spec.submodule_search_locations:
        return False
    folder = Path(spec.submodule_search_locations[0])
    return not is_partial(folder) or any(map(find_spec, PACKAGED[backbone_of(folder)].packages))


def locate_model(model: str | Path | None, task: str = "keyphrase-extraction") -> str:
    """The folder of a packaged model by its name, that of the task's default for `None`; any other text is returned.

    A folder of that name is a folder: its full path is returned, since another process may work elsewhere, with a warning.
    """
    if not model or is_packaged(model):
        return find_packaged(str(model or DEFAULT_MODELS[task]))
    if str(model) not in PACKAGED_MODELS:
        return resolve_model(model)
    folder = Path(model).resolve()
    logger.warning(
        f"{str(model)!r} is the folder {folder} here, not the model of that name. Pass './{model}' for the folder, or rename it."
    )
    return str(folder)


def is_name(model: str | os.PathLike) -> bool:
    """Whether a model, or a backbone of PACKAGED, is given by its name; a folder of that name is a folder."""
    return is_packaged(str(model)) or (str(model) in PACKAGED and not os.path.isdir(model))


def resolve_model(name_or_path: str | os.PathLike) -> str:
    """The folder of a packaged model by its name, a backbone's included; any other text, and a folder of that name, is returned."""
    name = str(name_or_path)
    if is_packaged(name):
        return find_packaged(name)
    return str(unpacked(name)) if is_name(name) else name


class DefaultModel(Mapping):
    """What transformers' registry expects as the `default` of a task, `{"model": (name, revision)}`, found on first use.

    Args:
        name: one of PACKAGED_MODELS.
    """

    def __init__(self, name: str = "default"):
        self.name = name

    def __getitem__(self, key: str) -> tuple[str, None]:
        if key != "model":
            raise KeyError(key)
        return find_packaged(self.name), None

    def __contains__(self, key: object) -> bool:
        return key == "model"

    def __iter__(self):
        return iter(("model",))

    def __len__(self) -> int:
        return 1


class NoDefaultWarning(logging.Filter):
    """Drops transformers' warning that a default model was taken: ours are packages with a version."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is any other."""
        if record.levelno != logging.WARNING or "defaulted to" not in (text := str(record.msg)):
            return True
        return not any(package in text for package in PACKAGED_MODELS.values())


logging.getLogger("transformers.pipelines").addFilter(NoDefaultWarning())
