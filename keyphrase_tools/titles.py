"""Titles as meta-text: each beside its text as the tokenizer's pair, cut to what may be read, and what room it leaves."""

from collections.abc import Sequence

import numpy as np
from transformers.utils import logging

MASKS = ("meta_mask", "main_mask")
MAX_TITLE_LENGTH = 64

logger = logging.get_logger(__name__)


def cut_titles(
    titles: Sequence[str | None], tokenizer, max_title_length: int = MAX_TITLE_LENGTH
) -> tuple[list[str], list[int]]:
    """Titles -> as the model reads them, and how many sub-tokens each has: `""` and 0 where there is none.

    A title is stripped and, where it has more than `max_title_length` sub-tokens, cut between two of them; a warning says
    how many were.

    Raises:
        ValueError: for a `max_title_length` below 1.
    """
    if max_title_length < 1:
        raise ValueError(
            f"max_title_length={max_title_length} leaves nothing of a title. Use 1 or more; to read no titles, pass none."
        )
    read, lengths = [(title or "").strip() for title in titles], [0] * len(titles)
    given = [number for number, title in enumerate(read) if title]
    if not given:
        return read, lengths
    encoded = _pieces([read[number] for number in given], tokenizer, return_offsets_mapping=True)
    too_long = 0
    for number, ids, offsets in zip(given, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        lengths[number] = len(ids)
        if len(ids) > max_title_length:
            too_long += 1
            read[number], lengths[number] = _cut(read[number], offsets, tokenizer, max_title_length)
        if not lengths[number]:
            read[number] = ""  # the tokenizer sees nothing in it
    if too_long:
        logger.warning(f"{too_long} of {len(given)} titles are longer than {max_title_length} sub-tokens and were cut.")
    return read, lengths


def _cut(title: str, offsets: Sequence[tuple[int, int]], tokenizer, length: int) -> tuple[str, int]:
    """A title of more than `length` sub-tokens -> its beginning, and how many the tokenizer makes of that."""
    for kept in range(length, 0, -1):  # a beginning may be tokenised otherwise than in the whole, and into more
        beginning = title[: offsets[kept][0]].rstrip()
        (ids,) = _pieces([beginning], tokenizer)["input_ids"]
        if len(ids) <= length:
            return beginning, len(ids)
    return "", 0


def _pieces(titles: list[str], tokenizer, **options):
    """Titles as sub-tokens, without special ones."""
    return tokenizer(titles, add_special_tokens=False, truncation=False, verbose=False, **options)


def title_overlaps(
    lengths: Sequence[int], tokenizer, max_length: int, overlap: int, *, asked: bool = False, first: int = 0
) -> list[int]:
    """Sub-tokens of titles (0 for none) -> how many sub-tokens the windows of each document share.

    Args:
        max_length: sub-tokens a window.
        overlap: what windows without a title share. Where a title leaves less room, its document's windows share less.
        asked: the caller asked for this overlap, and gets no other.
        first: the number of the first document, for messages.

    Raises:
        ValueError: for a title that leaves no room for the text, or none beside the overlap that was asked for.
    """
    special, overlaps = tokenizer.num_special_tokens_to_add(pair=True), []
    for number, length in enumerate(lengths, start=first):
        room = max_length - special - length
        if length and room < 1:
            most = max_length - special - 1
            shorter = f"max_title_length={most} or less, or " if most > 0 else ""
            raise ValueError(
                f"The title of document {number} ({length} sub-tokens) leaves no room for its text in windows of "
                f"max_length={max_length}, {special} of which are special tokens. Use {shorter}a larger max_length."
            )
        if length and asked and overlap >= room:
            raise ValueError(
                f"overlap={overlap} does not fit beside the title of document {number} ({length} sub-tokens) into windows "
                f"of max_length={max_length}: windows must move on. Use 0 to {room - 1}, or a smaller max_title_length."
            )
        overlaps.append(min(overlap, room - 1) if length else overlap)
    return overlaps


def title_masks(sequences: Sequence[int | None], special: np.ndarray, *, paired: bool) -> tuple[np.ndarray, np.ndarray]:
    """A window's `sequence_ids` (S) and special tokens (S) -> what is meta-text and what is main text, two masks (S).

    Meta-text is the first token, if it is special, and the title; the main text is the text. Separators are neither.
    """
    sequences = np.array([-1 if sequence is None else sequence for sequence in sequences])
    meta = (sequences == 0) & paired
    meta[:1] |= special[:1]
    return meta, (sequences == int(paired)) & ~special


def pad_masks(rows: Sequence[Sequence[int]], length: int) -> np.ndarray:
    """Masks of some windows -> one array (n, length) with 0 on the right: `tokenizer.pad` does not know them."""
    padded = np.zeros((len(rows), length), dtype=np.int64)
    for mask, row in zip(padded, rows, strict=True):
        mask[: len(row)] = row
    return padded
