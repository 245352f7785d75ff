"""Rows of `encode` as batches.

Letters: B documents, L source words, T words of a target, N windows of S sub-words of a second tokenizer.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from .tokenization_exhird import ExHirdTokenizer


class ExHirdCollator:
    """Rows of `encode` -> `input_ids`, `attention_mask`, `copy_ids` (B, L) and `labels` (B, T), -100 where padded.

    A document's rows of labels are put one after the other, as `generate` gives them.

    Rows of a tokenizer with a second one also give `piece_ids`, `piece_mask`, `piece_words` (B, N, S). Sources are padded
    on the tokenizer's padding side, `piece_words` then counting from the padded row's beginning, sub-words on the
    second tokenizer's side, and labels on the right. Rows to predict have no labels. All other columns are left out.

    Args:
        tokenizer: the model's.
        pad_to_multiple_of: pads sources and sub-words to a multiple of it.

    Raises:
        ValueError: for a row that `encode` has not made, or that is empty.
    """

    def __init__(self, tokenizer: ExHirdTokenizer, pad_to_multiple_of: int | None = None):
        self.tokenizer, self.pad_to_multiple_of = tokenizer, pad_to_multiple_of

    def __call__(self, rows: Sequence[Mapping]) -> dict[str, torch.Tensor]:
        for place, row in enumerate(rows):
            if row.get("input_ids") is None or row.get("copy_ids") is None:
                raise ValueError(
                    f"Row {place} of the batch has no input_ids and copy_ids; it has {', '.join(map(repr, row))}. "
                    "Make rows with encode, or with tokenizer.read_source."
                )
            if not len(row["input_ids"]):
                raise ValueError(f"Row {place} of the batch has no words. Leave out empty rows.")
        side, pad = self.tokenizer.padding_side, self.tokenizer.pad_token_id
        sources = [row["input_ids"] for row in rows]
        batch = {
            "input_ids": self.padded(sources, pad, side),
            "attention_mask": self.padded([[1] * len(source) for source in sources], 0, side),
            "copy_ids": self.padded([row["copy_ids"] for row in rows], pad, side),
        }
        if all(row.get("labels") is not None for row in rows):
            targets = [torch.cat([numbers(row) for row in target["labels"]]) for target in rows]
            batch["labels"] = pad_sequence(targets, batch_first=True, padding_value=-100)
        if all(row.get("piece_ids") is not None for row in rows):
            batch |= self.padded_pieces(rows, batch["attention_mask"])
        return batch

    def padded(self, values: Sequence[Sequence[int]], fill: int, side: str) -> torch.Tensor:
        """Rows of numbers -> (B, L)."""
        length = max(map(len, values))
        length += -length % (self.pad_to_multiple_of or 1)
        table = torch.full((len(values), length), fill)
        for own, row in zip(values, table, strict=True):
            (row[: len(own)] if side == "right" else row[length - len(own) :])[:] = numbers(own)
        return table

    def padded_windows(self, values: Sequence[Sequence[Sequence[int]]], fill: int, side: str) -> torch.Tensor:
        """Each document's windows -> (B, N, S); a window that a document lacks is all padding."""
        count = max(map(len, values))
        windows = [window for own in values for window in [*own, *([[]] * (count - len(own)))]]
        return self.padded(windows, fill, side).unflatten(0, (len(values), count))

    def padded_pieces(self, rows: Sequence[Mapping], mask: torch.Tensor) -> dict[str, torch.Tensor]:
        pieces = self.tokenizer.pieces
        side = "right" if pieces is None else pieces.padding_side
        pad = None if pieces is None else pieces.pad_token_id
        words = self.padded_windows([row["piece_words"] for row in rows], -1, side)
        before = mask.argmax(1)[:, None, None]  # padding on the left
        return {
            "piece_ids": self.padded_windows([row["piece_ids"] for row in rows], 0 if pad is None else pad, side),
            "piece_mask": self.padded_windows([row["piece_mask"] for row in rows], 0, side),
            "piece_words": torch.where(words < 0, words, words + before),
        }


def numbers(values: Sequence[int] | np.ndarray | torch.Tensor) -> torch.Tensor:
    """Of a data set in any format; its arrays may not be written to, so that they are copied."""
    return values if torch.is_tensor(values) else torch.from_numpy(np.array(values, dtype=np.int64))
