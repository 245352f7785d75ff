"""Saving and opening a checkpoint that is complete: code, pipelines, an endpoint's handler, a model card.

The same file in every modeling package, which travels alone: edit modeling_seke's, then run `make fix-copies`.
"""

import functools
import importlib
import os
import shutil
from contextlib import suppress
from pathlib import Path

from huggingface_hub import HfApi
from safetensors import SafetensorError
from transformers.dynamic_module_utils import custom_object_save, get_cached_module_file, get_relative_import_files
from transformers.utils import HF_MODULES_CACHE, logging

from .card import write_model_card

try:  # where Lexperts is installed
    from run_tools.model_loading import open_checked
except ImportError:
    open_checked = None

logger = logging.get_logger(__name__)


class CompleteCheckpointMixin:
    """Saves everything that a user with only transformers needs: the model's code, its pipelines and `handler.py`; on the Hub
    also a model card. Holds for `save_pretrained`, `push_to_hub` and the Trainer. Put it before `PreTrainedModel` in the bases.

    Attributes:
        pipeline_requirements: packages that the pipelines import besides transformers, as lines of `requirements.txt`.
    """

    pipeline_requirements: tuple[str, ...] = ()

    @classmethod
    def pipelines(cls) -> dict[str, type | str]:
        """The package's pipelines by task: a class, or "module.Class" of an optional package."""
        return {}

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """As in transformers, from safetensors only, with clear errors for damaged files. Weights that are missing are new, as those of
        a head that will be trained, and transformers warns; pipelines and commands refuse them.
        """
        load = super().from_pretrained
        kwargs["use_safetensors"] = kwargs.get("use_safetensors") is not False  # False: the caller trusts a pickle file
        try:
            if open_checked is not None:
                return open_checked(cls, load, pretrained_model_name_or_path, *args, complete=False, **kwargs)
            return load(pretrained_model_name_or_path, *args, **kwargs)
        except SafetensorError as error:
            raise OSError(
                f"The weights in {str(pretrained_model_name_or_path)!r} cannot be read ({error}): the file is truncated "
                "or damaged. Save or copy the checkpoint again; for a Hub repository pass force_download=True."
            ) from error

    def save_pretrained(self, save_directory, is_main_process: bool = True, **kwargs):
        """As in transformers, with the pipelines and `handler.py`; a `requirements.txt` in the folder is kept."""
        let_pipelines_push_cards()
        previous = self.config.__dict__.get("custom_pipelines")
        self.config.custom_pipelines = self._custom_pipelines(Path(save_directory))
        try:
            if is_main_process and not os.path.isfile(save_directory):
                self._save_companions(Path(save_directory))
            return super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        finally:
            self.config.custom_pipelines = previous
            if previous is None:
                del self.config.custom_pipelines

    def _custom_pipelines(self, folder: Path) -> dict[str, dict]:
        """The pipelines for config.json: those whose code is in the folder already, or else those of this class."""
        saved = self.config.__dict__.get("custom_pipelines") or {}
        if saved and all((folder / f"{info['impl'].partition('.')[0]}.py").exists() for info in saved.values()):
            return saved
        return {
            task: {"impl": f"{Path(file).stem}.{name}", "pt": [self._auto_class], "type": "text"}
            for task, (file, name) in self._pipeline_files().items()
        }

    def _pipeline_files(self) -> dict[str, tuple[str, str]]:
        """File and class name of each task's pipeline, from its package or else from the model's checkpoint. Empty for a model
        class without an auto class.
        """
        files = {}
        for task, pipeline in self.pipelines().items() if self._auto_class else ():
            path = pipeline if isinstance(pipeline, str) else f"{pipeline.__module__}.{pipeline.__name__}"
            module, _, name = path.rpartition(".")
            if (file := code_file(module, self.config.name_or_path)) is not None:
                files[task] = file, name
            else:
                logger.warning(f"pipeline({task!r}) is not saved: {module} cannot be imported. Install lexperts.")
        return files

    def _save_companions(self, folder: Path):
        """Writes the pipelines with their relative imports, `handler.py`, and `requirements.txt` unless it exists."""
        from .handler import EndpointHandler

        folder.mkdir(parents=True, exist_ok=True)
        files = [file for file, _ in self._pipeline_files().values()]
        imported = {other for file in files for other in get_relative_import_files(file)}
        for file in {*files, *imported}:
            shutil.copyfile(file, folder / Path(file).name)
        if files:
            custom_object_save(EndpointHandler, folder)
        requirements = folder / "requirements.txt"
        if files and self.pipeline_requirements and not requirements.exists():
            requirements.write_text("\n".join(self.pipeline_requirements) + "\n", encoding="utf-8")

    write_model_card = write_model_card

    def _get_files_timestamps(self, working_dir) -> dict[str, float]:
        # save_pretrained(push_to_hub=True) uploads files that are newer than this; ours were written just before.
        timestamps = super()._get_files_timestamps(working_dir)
        return {name: time for name, time in timestamps.items() if not name.endswith((".py", "requirements.txt"))}

    def _upload_modified_files(self, working_dir, repo_id: str, *args, **kwargs):
        # A card on the Hub is kept. push_to_hub has put it here, or transformers' blank one, which is replaced.
        is_here = (Path(working_dir) / "README.md").exists()
        if is_here or not HfApi().file_exists(repo_id, "README.md", token=kwargs.get("token")):
            self.write_model_card(working_dir, repo_id=repo_id)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)


def let_pipelines_push_cards():
    """Makes every pipeline's `push_to_hub`, also a stock one's, upload the card of a model that writes one: its last step
    finds transformers' blank card in the folder. `push_to_hub` saves the model before that step.
    """
    from transformers import Pipeline

    upload = Pipeline._upload_modified_files
    if hasattr(upload, "writes_cards"):
        return

    @functools.wraps(upload)
    def upload_with_card(self, working_dir, repo_id, *args, **kwargs):
        if hasattr(self.model, "write_model_card"):
            self.model.write_model_card(working_dir, repo_id=repo_id)
        return upload(self, working_dir, repo_id, *args, **kwargs)

    upload_with_card.writes_cards = True
    Pipeline._upload_modified_files = upload_with_card


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
