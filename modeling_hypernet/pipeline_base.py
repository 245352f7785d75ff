# SPDX-License-Identifier: Apache-2.0
"""What all pipelines share: inputs as transformers' pipelines take them, a card when saved. Copied by `make fix-copies`."""

import os
from collections.abc import Iterable, Mapping

from transformers import Pipeline


class TextPipeline(Pipeline):
    """A pipeline that tokenizes, batches and streams by itself."""

    _load_tokenizer, _load_processor, _load_image_processor, _load_feature_extractor = True, False, False, False

    def save_pretrained(self, save_directory, **kwargs):
        """As in transformers, with a model card unless the folder has one."""
        super().save_pretrained(save_directory, **kwargs)
        if hasattr(self.model, "write_model_card") and os.path.isdir(save_directory):
            self.model.write_model_card(save_directory)

    def _upload_modified_files(self, working_dir, repo_id: str, *args, **kwargs):
        if hasattr(self.model, "write_model_card"):  # in place of transformers' blank one
            self.model.write_model_card(working_dir, repo_id=repo_id)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

    def check_options(self, options: Mapping, known: Iterable[str]):
        """Raises a `TypeError` for an unknown option."""
        for name in options:
            if name not in known:
                raise TypeError(f"{self.task} got an unexpected argument {name!r}. Its options are {', '.join(known)}.")

    def iterate(self, inputs, expected: str) -> Iterable:
        """Several inputs, as transformers' pipelines take them: a list, a generator, a `datasets` column, or a data set of
        PyTorch, such as `KeyDataset`. A data set without `__iter__` is read by its indices.

        Raises:
            TypeError: for anything else; the message names what is `expected`.
        """
        if not isinstance(inputs, (str, bytes, Mapping)):
            if isinstance(inputs, Iterable):
                return inputs
            if hasattr(inputs, "__getitem__") and hasattr(inputs, "__len__"):
                return (inputs[i] for i in range(len(inputs)))
        got = f"{inputs!r:.60} ({type(inputs).__name__})"
        raise TypeError(f"{self.task or type(self).__name__} needs {expected} or an iterable of them, got {got}.")
