"""What a model class gains where Lexperts is installed: checkpoints are checked when they are opened, and get a model card.

A checkpoint's own code does without this class where Lexperts is not installed: transformers opens and saves the model.
"""

import os
from contextvars import ContextVar
from pathlib import Path

from huggingface_hub import HfApi

from . import cards
from .model_files import KEY_MAPPING, read_key_mapping
from .model_loading import open_checked

# Whether the model that is being loaded starts from a backbone's checkpoint, which lacks all new modules.
NEW_MODULES_EXPECTED: ContextVar[bool] = ContextVar("new_modules_expected", default=False)


class CheckedModelMixin:
    """Checks files before a model is built from them, and writes model cards.

    Attributes:
        new_in_backbone: part of the names of the weights that a new model has inside its backbone, such as adapters; "" for none.
    """

    new_in_backbone: str = ""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """As in transformers, from safetensors only, with clear errors for damaged files. Weights that are missing are new, as those of
        a head that will be trained, and transformers warns; pipelines and commands refuse them.
        """
        kwargs["use_safetensors"] = kwargs.get("use_safetensors") is not False  # False: the caller trusts a pickle file
        load, name = super().from_pretrained, pretrained_model_name_or_path
        mapping = read_key_mapping(name) if isinstance(name, (str, os.PathLike)) and os.path.isdir(name) else {}
        if not mapping or KEY_MAPPING in kwargs:
            return open_checked(cls, load, name, *args, complete=False, **kwargs)
        opened = open_checked(cls, load, name, *args, complete=False, key_mapping=mapping, **kwargs)
        model = opened[0] if isinstance(opened, tuple) else opened
        model.__dict__.pop("_weight_conversions", None)  # saved under its own names
        return opened

    def _adjust_missing_and_unexpected_keys(self, loading_info):
        # The remaining keys are reported as a warning. A table of all new modules would hide real problems.
        super()._adjust_missing_and_unexpected_keys(loading_info)
        if NEW_MODULES_EXPECTED.get():
            new = self.new_in_backbone
            for keys in (loading_info.missing_keys, loading_info.unexpected_keys):
                inside = {key for key in keys if key.startswith(f"{self.backbone_path}.") and not (new and new in key)}
                keys.intersection_update(inside)

    def save_pretrained(self, *args, **kwargs):
        """As in transformers."""
        cards.let_pipelines_push_cards()
        return super().save_pretrained(*args, **kwargs)

    def write_model_card(self, folder: str | os.PathLike, **options) -> Path | None:
        """Writes a card unless the folder has one: see `run_tools.cards.write_model_card`."""
        return cards.write_model_card(self, folder, **options)

    def _upload_modified_files(self, working_dir, repo_id: str, *args, **kwargs):
        # A card on the Hub is kept. push_to_hub has put it here, or transformers' blank one, which is replaced.
        is_here = (Path(working_dir) / "README.md").exists()
        if is_here or not HfApi().file_exists(repo_id, "README.md", token=kwargs.get("token")):
            self.write_model_card(working_dir, repo_id=repo_id)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)  # type: ignore[misc]
