"""Pairs of meta-text and main text as rows, their collator, and a frozen backbone's states kept on disk.

Letters: S tokens of a pair, d the backbone's hidden size.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm
from transformers.utils import logging

from .labels_hypernet import check_labels, check_positions

logger = logging.get_logger(__name__)

PADDING = {"attention_mask": 0, "meta_mask": 0, "main_mask": 0, "word_start_mask": 0, "labels": -100}
POSITIONS = ("start_positions", "end_positions")
SHARD = 1024  # rows in a file of states
NOT_THE_BACKBONE = {  # of a configuration: what changes no state in eval mode; names with "dropout" do not either
    "_name_or_path", "_commit_hash", "architectures", "dtype", "id2label", "label2id", "output_attentions",
    "output_hidden_states", "problem_type", "return_dict", "transformers_version", "use_cache",
}  # fmt: skip


def cut_titles(titles: Sequence[str | None], tokenizer, max_title_length: int, what: str = "titles") -> list[str]:
    """Titles of at most so many tokens, "" for none; how many were cut is in the log."""
    titles = [(title or "").strip() for title in titles]
    if not titles:
        return []
    encoded = tokenizer(
        titles, add_special_tokens=False, truncation=True, max_length=max_title_length, return_offsets_mapping=True
    )
    ends = [offsets[-1][1] if offsets else 0 for offsets in encoded["offset_mapping"]]
    long = [len(tokenizer(title, add_special_tokens=False)["input_ids"]) > max_title_length for title in titles]
    if any(long):
        logger.warning(f"{sum(long)} of {len(titles)} {what} are longer than {max_title_length} tokens and were cut.")
    return [title[:end] if cut else title for title, end, cut in zip(titles, ends, long, strict=True)]


def segment_masks(sequence_ids: Sequence[int | None]) -> dict[str, list[int]]:
    """For each token the segment that it is from, None for special ones -> meta_mask and main_mask, H^u and H^v.

    >>> segment_masks([None, 0, None, 1, None])  # [CLS] u [SEP] v [SEP]
    {'meta_mask': [1, 1, 0, 0, 0], 'main_mask': [0, 0, 0, 1, 0]}
    """
    main = 1 if 1 in sequence_ids else 0
    meta = [int(main == 1 and i == 0) for i in sequence_ids]
    if sequence_ids and sequence_ids[0] is None:
        meta[0] = 1
    return {"meta_mask": meta, "main_mask": [int(i == main) for i in sequence_ids]}


def encode_pairs(
    titles: Sequence[str | None],
    texts: Sequence[str],
    tokenizer,
    *,
    max_length: int | None = None,
    max_title_length: int = 64,
) -> dict[str, list]:
    """Titles and texts -> rows of a tokenizer's pairs with `meta_mask` and `main_mask`; a text without a title alone.

    What is too long is cut, the title to `max_title_length` tokens, then the text; how many were is in the log.

    Args:
        tokenizer: a fast one.
        max_length: tokens of a pair; by default the tokenizer's `model_max_length`.

    Raises:
        ValueError: for a text that is empty; a title may be.

    Example:

    ```python
    >>> rows = dataset.map(lambda batch: encode_pairs(batch["title"], batch["text"], tokenizer, max_length=512), batched=True)
    ```
    """
    empty = [i for i, text in enumerate(texts) if not (text or "").strip()]
    if empty:
        raise ValueError(
            f"Text {empty[0]} is empty, and tokenizers would take its title for the text. Leave such rows out."
        )
    titles = cut_titles(titles, tokenizer, max_title_length)
    rows: dict[str, list] = {}
    long = 0
    for title, text in zip(titles, texts, strict=True):
        pair = (title, text) if title else (text,)
        encoded = tokenizer(*pair, truncation="only_second" if title else True, max_length=max_length)
        long += len(encoded.encodings[0].overflowing) > 0
        for name, values in {**encoded, **segment_masks(encoded.sequence_ids(0))}.items():
            rows.setdefault(name, []).append(values)
    if long:
        logger.warning(f"{long} of {len(texts)} texts are longer than their row and were cut.")
    return rows


class HypernetCollator:
    """Rows of `encode_pairs`, `encode_questions` or `keyphrase_tools.labels.encode` -> a padded batch, checked.

    Args:
        tokenizer: says how ids are padded, and on which side.
        pad_to_multiple_of: pads to a multiple of it.
        id2label: `model.config.id2label` of a model for token classification: labels are checked against it.

    Raises:
        ValueError: for an answer that is neither in the main text nor at the first token; with `id2label` for a label that
            does not exist, and an I that no B or I of its type comes before.
    """

    def __init__(self, tokenizer, pad_to_multiple_of: int | None = None, id2label: Mapping[int, str] | None = None):
        self.tokenizer, self.pad_to_multiple_of, self.id2label = tokenizer, pad_to_multiple_of, id2label

    def __call__(self, rows: Sequence[Mapping]) -> dict[str, torch.Tensor]:
        length = max(len(row["input_ids"]) for row in rows)
        if self.pad_to_multiple_of:
            length += -length % self.pad_to_multiple_of
        batch = {
            name: self._stacked(name, [row[name] for row in rows], length) for name in rows[0] if self._kept(rows, name)
        }
        if self.tokenizer.padding_side == "left":
            moved = torch.tensor([length - len(row["input_ids"]) for row in rows])
            batch |= {name: batch[name] + moved for name in POSITIONS if name in batch}
        self._check(batch)
        return batch

    def _check(self, batch: dict[str, torch.Tensor]):
        """Here and not in the model, where each check would wait for the device."""
        real = batch["attention_mask"] != 0 if "attention_mask" in batch else torch.ones_like(batch["input_ids"]) != 0
        main = batch["main_mask"] != 0 if "main_mask" in batch else real
        for name in POSITIONS:
            if name in batch:
                check_positions(batch[name], main, real)
        if self.id2label is not None and "labels" in batch and batch["labels"].shape == real.shape:
            check_labels(batch["labels"], main & (batch["labels"] != -100), self.id2label)

    @staticmethod
    def _kept(rows, name: str) -> bool:
        return not isinstance(rows[0][name], str)

    def _stacked(self, name: str, values: list, length: int) -> torch.Tensor:
        """One column; labels of whole texts and positions are numbers, all else has a value a token."""
        tensors = [torch.as_tensor(value) for value in values]
        if tensors[0].dim() == 0 or (name == "labels" and tensors[0].is_floating_point()):
            return torch.stack(tensors)
        return torch.stack([self._padded(name, tensor, length) for tensor in tensors])

    def _padded(self, name: str, x: torch.Tensor, length: int) -> torch.Tensor:
        missing = length - len(x)
        fill = {"input_ids": self.tokenizer.pad_token_id, "token_type_ids": self.tokenizer.pad_token_type_id}
        empty = x.new_full((missing, *x.shape[1:]), (fill | PADDING).get(name, 0))
        return torch.cat([x, empty] if self.tokenizer.padding_side == "right" else [empty, x])


def hash_of_backbone(model) -> str:
    """Of the backbone's configuration, and of its weights with their types."""
    backbone, digest = model.base_model.backbone, hashlib.sha256()
    config = backbone.config.to_dict().items()
    config = {name: value for name, value in config if name not in NOT_THE_BACKBONE and "dropout" not in name}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in sorted(backbone.state_dict().items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)} ".encode())
        exact = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))  # NumPy has no bfloat16
        digest.update(exact.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


class StatesDataset(torch.utils.data.Dataset):
    """A data set's rows with the frozen backbone's states of each, which are computed once and read from disk.

    Training then costs what the head costs. The Trainer takes it as it is:

    ```python
    >>> train = StatesDataset(model, rows, HypernetCollator(tokenizer), "runs/states")
    >>> Trainer(model, train_dataset=train, data_collator=HypernetCollator(tokenizer), ...)
    ```

    Interrupted, the same call resumes; states of another backbone or of other rows are refused.

    Args:
        model: with a frozen backbone.
        rows: a sequence or `datasets.Dataset` of rows with `input_ids`.
        collator: makes batches of them.
        folder: where the states are, or will be; 4 d bytes a token.
        batch_size: rows that are read at once.

    Raises:
        ValueError: for a model whose backbone is trained, and a folder that belongs to another model or to other rows.
    """

    def __init__(self, model, rows, collator: HypernetCollator, folder: str | Path, batch_size: int = 32):
        if not model.config.freeze_backbone:
            raise ValueError(
                "The backbone is fine-tuned (freeze_backbone=False), so that its states change with every step and cannot "
                "be kept. Train on the rows themselves."
            )
        self.rows, self.folder = rows, Path(folder)
        self.lengths = (
            [len(ids) for ids in rows["input_ids"]]
            if hasattr(rows, "column_names")
            else [len(row["input_ids"]) for row in rows]
        )
        self._check(model)
        for shard in tqdm(
            range(0, len(rows), SHARD), desc="backbone", unit=f"{SHARD} rows", disable=len(rows) <= SHARD
        ):
            self._compute(model, collator, shard, batch_size)
        self._files: dict[int, object] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict:
        shard = i // SHARD
        if shard not in self._files:
            self._files[shard] = safe_open(self._path(shard * SHARD), "pt")
        return {**self.rows[i], "backbone_states": self._files[shard].get_tensor(str(i))}

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_files": {}}  # workers open files of their own

    def _path(self, first: int) -> Path:
        return self.folder / f"states-{first:08d}.safetensors"

    def _check(self, model):
        """Records what the states are of, or compares."""
        found, path = {"backbone": hash_of_backbone(model), "rows": self._hash_of_rows()}, self.folder / "states.json"
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            for what in found:
                if before.get(what) != found[what]:
                    raise ValueError(
                        f"The states in {self.folder} are of other {what}. Remove it, or name another folder."
                    )
            return
        if next(self.folder.glob("states-*.safetensors"), None):
            raise ValueError(
                f"{self.folder} holds states without a record of what they are of (states.json). Remove it, or name another "
                "folder."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".part{os.getpid()}")
        part.write_text(json.dumps(found, indent=1), encoding="utf-8")
        part.rename(path)

    def _hash_of_rows(self) -> str:
        """Of all that the backbone reads of them, row by row."""
        digest = hashlib.sha256()
        for row in self.rows:
            for name in ("input_ids", "attention_mask", "token_type_ids"):
                if row.get(name) is not None:
                    digest.update(f"{name} {len(row[name])} ".encode())
                    digest.update(np.asarray(row[name], dtype=np.int64).tobytes())
        return digest.hexdigest()

    @torch.no_grad()
    def _compute(self, model, collator, first: int, batch_size: int):
        path = self._path(first)
        if path.exists():
            return
        was_training, kept = model.training, {}
        model.eval()
        places = sorted(range(first, min(first + SHARD, len(self.rows))), key=lambda i: self.lengths[i])
        for start in range(0, len(places), batch_size):
            chosen = places[start : start + batch_size]
            batch = {name: x.to(model.device) for name, x in collator([self.rows[i] for i in chosen]).items()}
            inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in batch}
            states = model.base_model.encode(**inputs).last_hidden_state
            for i, row, mask in zip(chosen, states, batch["attention_mask"].bool(), strict=True):
                kept[str(i)] = row[mask].contiguous().cpu()
        part = path.with_suffix(f".part{os.getpid()}")  # another process may be at the same
        save_file(kept, part)
        part.rename(path)
        model.train(was_training)
