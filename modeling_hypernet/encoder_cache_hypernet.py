# SPDX-License-Identifier: Apache-2.0
"""The frozen backbone's states of a data set, computed once and kept on disk.

Letters: d the backbone's hidden size.
"""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from .data_hypernet import DataCollatorForTextPairs

ROWS_PER_FILE = 1024
# Fields of a configuration that do not change states in eval mode; so do names with "dropout".
IGNORED_FIELDS = {
    "_name_or_path", "_commit_hash", "architectures", "dtype", "id2label", "label2id", "output_attentions",
    "output_hidden_states", "problem_type", "return_dict", "transformers_version", "use_cache",
}  # fmt: skip


def hash_backbone(model) -> str:
    """SHA-256 of the backbone's configuration and of its weights with their dtypes."""
    backbone, digest = model.base_model.backbone, hashlib.sha256()
    config = backbone.config.to_dict().items()
    config = {name: value for name, value in config if name not in IGNORED_FIELDS and "dropout" not in name}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in sorted(backbone.state_dict().items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)} ".encode())
        exact = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))  # NumPy has no bfloat16
        digest.update(exact.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


class CachedEncoderDataset(torch.utils.data.Dataset):
    """Adds to each row of a data set the frozen backbone's states, which are computed once and read from disk.

    A training step then only computes the head:

    ```python
    >>> train = CachedEncoderDataset(model, rows, DataCollatorForTextPairs(tokenizer), "runs/states")
    >>> Trainer(model, train_dataset=train, data_collator=DataCollatorForTextPairs(tokenizer), ...)
    ```

    After an interruption the same call resumes.

    Args:
        model: a model with a frozen backbone.
        rows: a sequence or `datasets.Dataset` of rows with `input_ids`.
        collator: makes padded batches of rows.
        folder: folder for the states; they need 4 d bytes per token.
        batch_size: rows per batch of the backbone.

    Raises:
        ValueError: for a model whose backbone is trained, and a folder with states of another backbone or other rows.
    """

    def __init__(self, model, rows, collator: DataCollatorForTextPairs, folder: str | Path, batch_size: int = 32):
        if not model.config.freeze_backbone:
            raise ValueError(
                "freeze_backbone=False: the backbone's states change with every step and cannot be cached. Train on the rows "
                "themselves, or freeze the backbone."
            )
        self.rows, self.folder = rows, Path(folder)
        columns = hasattr(rows, "column_names")
        self.lengths = [*map(len, rows["input_ids"] if columns else (row["input_ids"] for row in rows))]
        self._check_record(model)
        progress = {"desc": "backbone", "unit": f"{ROWS_PER_FILE} rows", "disable": len(rows) <= ROWS_PER_FILE}
        for first in tqdm(range(0, len(rows), ROWS_PER_FILE), **progress):
            self._compute(model, collator, first, batch_size)
        self._files: dict[int, safe_open] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict:
        first = i // ROWS_PER_FILE * ROWS_PER_FILE
        if first not in self._files:
            self._files[first] = safe_open(self._path(first), "pt")
        return {**self.rows[i], "encoder_hidden_states": self._files[first].get_tensor(str(i))}

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_files": {}}  # each worker process opens the files itself

    def _path(self, first: int) -> Path:
        return self.folder / f"states-{first:08d}.safetensors"

    def _check_record(self, model):
        """Writes the hashes of backbone and rows, or compares them with those in the folder."""
        hashes, path = {"backbone": hash_backbone(model), "rows": self._hash_rows()}, self.folder / "states.json"
        if path.exists():
            recorded = json.loads(path.read_text(encoding="utf-8"))
            for name, value in hashes.items():
                if recorded.get(name) != value:
                    raise ValueError(
                        f"The states in {self.folder} are of other {name}. Remove it or use another folder."
                    )
            return
        if next(self.folder.glob("states-*.safetensors"), None):
            raise ValueError(
                f"{self.folder} has states but no states.json, which records their backbone and rows. Remove it or use "
                "another folder."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".part{os.getpid()}")
        part.write_text(json.dumps(hashes, indent=1), encoding="utf-8")
        part.rename(path)

    def _hash_rows(self) -> str:
        """SHA-256 of the backbone's inputs, row by row."""
        digest = hashlib.sha256()
        for row in self.rows:
            for name in ("input_ids", "attention_mask", "token_type_ids"):
                if row.get(name) is not None:
                    digest.update(f"{name} {len(row[name])} ".encode())
                    digest.update(np.asarray(row[name], dtype=np.int64).tobytes())
        return digest.hexdigest()

    @torch.no_grad()
    def _compute(self, model, collator, first: int, batch_size: int):
        """Writes the file whose first row is `first`, unless it exists."""
        path = self._path(first)
        if path.exists():
            return
        was_training, states_by_row = model.training, {}
        model.eval()
        by_length = sorted(range(first, min(first + ROWS_PER_FILE, len(self.rows))), key=lambda i: self.lengths[i])
        for start in range(0, len(by_length), batch_size):
            indices = by_length[start : start + batch_size]
            batch = {name: x.to(model.device) for name, x in collator([self.rows[i] for i in indices]).items()}
            inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in batch}
            states = model.base_model.encode(**inputs).last_hidden_state
            for i, row, mask in zip(indices, states, batch["attention_mask"].bool(), strict=True):
                states_by_row[str(i)] = row[mask].contiguous().cpu()
        part = path.with_suffix(f".part{os.getpid()}")  # another process may be writing the same file
        save_file(states_by_row, part)
        part.rename(path)
        model.train(was_training)
