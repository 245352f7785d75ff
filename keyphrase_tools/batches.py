"""Batches of windows: how many fit, how they are padded, and what has been read."""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from .titles import MASKS
from .windows import Window

MAX_BATCH_GROWTH = 4  # a batch of short windows has at most 4 times as many rows as one of long windows

# for a window: probabilities (S, 3) of O, B and I; tags (S,); with hidden states also those, (S, d)
Values = tuple[np.ndarray, np.ndarray | None, *tuple[np.ndarray, ...]]


class BatchRead(NamedTuple):
    """The results of one batch of `KeyphraseExtractionPipeline.read_block`; documents are numbered within the block.

    Attributes:
        finished: the keyphrases of each document that this batch completes.
        shares: for each document in the batch, the share of its windows in it.
    """

    finished: dict[int, list[dict]]
    shares: dict[int, float]


def split_windows(windows: list[Window], batch_size: int, same_number: bool = False) -> Iterator[list[Window]]:
    """Splits windows, longest first, into batches that need no more memory, padded, than `batch_size` of the longest.

    Args:
        same_number: no batch has more than `batch_size` windows, as for a model whose generated weights take the same memory for
            windows of any length.
    """
    largest = batch_size if same_number else MAX_BATCH_GROWTH * batch_size
    room, start = batch_size * len(windows[0].word_starts) if windows else 0, 0
    while start < len(windows):
        count = min(max(batch_size, room // max(1, len(windows[start].word_starts))), largest)
        yield windows[start : start + count]
        start += count


def pad_windows(windows: list[Window], tokenizer, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Pads n windows on the right to tensors `(n, S)`, with the masks among `names`, the arguments of the model's forward."""
    lengths = [len(window.word_starts) for window in windows]
    kept = [name for name in windows[0].inputs if name not in MASKS or name in names]
    rows = {"attention_mask": [[1] * length for length in lengths]}
    rows |= {name: [window.inputs[name] for window in windows] for name in kept}
    if "word_start_mask" in names:
        rows["word_start_mask"] = [window.word_starts >= 0 for window in windows]
    padding = {"input_ids": tokenizer.pad_token_id or 0, "token_type_ids": tokenizer.pad_token_type_id}
    return {name: torch.from_numpy(pad(of, max(lengths), padding.get(name, 0))) for name, of in rows.items()}


def pad(rows: Sequence[Sequence[int]], length: int, value: int) -> np.ndarray:
    """Pads n rows on the right to an array `(n, length)`."""
    padded = np.full((len(rows), length), value, dtype=np.int64)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded
