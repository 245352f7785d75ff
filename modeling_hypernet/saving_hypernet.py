# SPDX-License-Identifier: Apache-2.0
"""Saves checkpoints that are complete: with code and pipelines. Copied by `make fix-copies`."""

import importlib
import os
import shutil
from contextlib import suppress
from pathlib import Path

from transformers.dynamic_module_utils import get_cached_module_file, get_relative_import_files
from transformers.utils import HF_MODULES_CACHE, logging

try:
    from run_tools.loading import CheckedModelMixin
except ImportError:  # a checkpoint's own code, where Lexperts is not installed
    CheckedModelMixin = object  # type: ignore[assignment, misc]

logger = logging.get_logger(__name__)


class SelfContainedCheckpointMixin(CheckedModelMixin):
    """Saves everything that a user with only transformers needs: the model's code and its pipelines. Applies to `save_pretrained`,
    `push_to_hub` and the Trainer. Put it before `PreTrainedModel` in the bases.

    Attributes:
        pipeline_requirements: packages that the pipelines import besides transformers, as lines of `requirements.txt`.
    """

    pipeline_requirements: tuple[str, ...] = ()

    @classmethod
    def pipelines(cls) -> dict[str, type | str]:
        """The package's pipelines by task: a class, or "module.Class" of an optional package."""
        return {}

    def save_pretrained(self, save_directory, is_main_process: bool = True, **kwargs):
        """As in transformers, with the pipelines; a `requirements.txt` in the folder is kept."""
        previous = self.config.__dict__.get("custom_pipelines")
        files = self._pipeline_files()
        self.config.custom_pipelines = self._custom_pipelines(Path(save_directory), files)
        try:
            if is_main_process and not os.path.isfile(save_directory):
                self._save_companions(Path(save_directory), [file for file, _ in files.values()])
            return super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        finally:
            self.config.custom_pipelines = previous
            if previous is None:
                del self.config.custom_pipelines

    def _pipeline_files(self) -> dict[str, tuple[str, str]]:
        """File and class name of each task's pipeline. Empty for a model class without an auto class."""
        files = {}
        for task, pipeline in self.pipelines().items() if self._auto_class else ():
            path = pipeline if isinstance(pipeline, str) else f"{pipeline.__module__}.{pipeline.__name__}"
            module, _, name = path.rpartition(".")
            if (file := code_file(module, self.config.name_or_path)) is not None:
                files[task] = file, name
            else:
                logger.warning(f"pipeline({task!r}) is not saved: {module} cannot be imported. Install lexperts.")
        return files

    def _custom_pipelines(self, folder: Path, files: dict[str, tuple[str, str]]) -> dict[str, dict]:
        """The pipelines for config.json: those whose code is in the folder already, or else those of this class."""
        saved = self.config.__dict__.get("custom_pipelines") or {}
        if saved and all((folder / f"{info['impl'].partition('.')[0]}.py").exists() for info in saved.values()):
            return saved
        entry = {"pt": [self._auto_class], "type": "text"}
        return {task: {"impl": f"{Path(file).stem}.{name}", **entry} for task, (file, name) in files.items()}

    def _save_companions(self, folder: Path, files: list[str]):
        """Writes the pipelines with their relative imports, and `requirements.txt` unless it exists."""
        folder.mkdir(parents=True, exist_ok=True)
        for file in {*files, *(other for each in files for other in get_relative_import_files(each))}:
            shutil.copyfile(file, folder / Path(file).name)
        requirements = folder / "requirements.txt"
        if files and self.pipeline_requirements and not requirements.exists():
            requirements.write_text("\n".join(self.pipeline_requirements) + "\n", encoding="utf-8")

    def _get_files_timestamps(self, working_dir) -> dict[str, float]:
        # save_pretrained(push_to_hub=True) uploads files that are newer than this; ours were written just before.
        timestamps = super()._get_files_timestamps(working_dir)
        return {name: time for name, time in timestamps.items() if not name.endswith((".py", "requirements.txt"))}


def code_file(module: str, name_or_path: str) -> str | None:
    """A module's file; if it cannot be imported, the file of its name in the checkpoint that the model was loaded from, whose
    code is not run; `None` without either.
    """
    with suppress(ImportError):
        return importlib.import_module(module).__file__
    with suppress(OSError):
        name = f"{module.rpartition('.')[2]}.py"
        return os.path.join(HF_MODULES_CACHE, get_cached_module_file(name_or_path, name)) if name_or_path else None
    return None


def lexperts_tools(module: str, what: str):
    """`run_tools.MODULE`, for what a saved model does not need. Raises an `ImportError` where Lexperts is not installed."""
    try:
        return importlib.import_module(f"run_tools.{module}")
    except ImportError as error:
        raise ImportError(f"{what} needs Lexperts. Install it with: pip install lexperts") from error
