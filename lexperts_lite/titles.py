# SPDX-License-Identifier: Apache-2.0
"""Titles as meta-text, the first sequence of the tokenizer's pair: truncation, overlaps of windows, and masks."""

import logging
from collections.abc import Sequence

import numpy as np

MASKS = ("meta_mask", "main_mask")
MAX_TITLE_LENGTH = 64

logger = logging.getLogger(__name__)


def truncate_titles(
    titles: Sequence[str | None], tokenizer, max_title_length: int = MAX_TITLE_LENGTH
) -> tuple[list[str], list[int]]:
    """Strips titles and truncates them to `max_title_length` sub-tokens; a warning gives the number of truncated titles.

    Returns:
        The titles and their numbers of sub-tokens; `""` and 0 for a document without a title.

    Raises:
        ValueError: if `max_title_length` is less than 1.
    """
    if max_title_length < 1:
        raise ValueError(f"max_title_length={max_title_length} must be at least 1. To ignore titles, do not pass them.")
    stripped, lengths = [(title or "").strip() for title in titles], [0] * len(titles)
    numbers = [number for number, title in enumerate(stripped) if title]
    if not numbers:
        return stripped, lengths
    encoded = _tokenize([stripped[number] for number in numbers], tokenizer, return_offsets_mapping=True)
    too_long = 0
    for number, ids, offsets in zip(numbers, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        lengths[number] = len(ids)
        if len(ids) > max_title_length:
            too_long += 1
            stripped[number], lengths[number] = _truncate(stripped[number], offsets, tokenizer, max_title_length)
        if not lengths[number]:
            stripped[number] = ""  # no sub-tokens
    if too_long:
        logger.warning(
            f"{too_long} of {len(numbers)} titles are longer than {max_title_length} sub-tokens and were truncated."
        )
    return stripped, lengths


def _truncate(title: str, offsets: Sequence[tuple[int, int]], tokenizer, length: int) -> tuple[str, int]:
    """The longest beginning of a title that has at most `length` sub-tokens, and their number."""
    for kept in range(length, 0, -1):  # a beginning may have more sub-tokens than it has within the whole title
        beginning = title[: offsets[kept][0]].rstrip()
        (ids,) = _tokenize([beginning], tokenizer)["input_ids"]
        if len(ids) <= length:
            return beginning, len(ids)
    return "", 0


def _tokenize(titles: list[str], tokenizer, **options):
    """Sub-tokens of titles, without special tokens."""
    return tokenizer(titles, add_special_tokens=False, truncation=False, verbose=False, **options)


def title_overlaps(
    lengths: Sequence[int], tokenizer, max_length: int, overlap: int, *, fixed: bool = False, first: int = 0
) -> list[int]:
    """For each document, the number of sub-tokens that its neighbouring windows share.

    Args:
        lengths: sub-tokens of the titles, 0 for none.
        max_length: sub-tokens per window.
        overlap: shared sub-tokens of windows without a title. If a title leaves less room, the windows share fewer.
        fixed: the user chose the overlap; raise an error instead of reducing it.
        first: the index of the first document, for error messages.

    Raises:
        ValueError: if a title leaves no room for the text, or not enough for a fixed overlap.
    """
    special, overlaps = tokenizer.num_special_tokens_to_add(pair=True), []
    for number, length in enumerate(lengths, start=first):
        room = max_length - special - length
        if length and room < 1:
            longest = max_length - special - 1
            shorter = f"max_title_length={longest} or less, or " if longest > 0 else ""
            raise ValueError(
                f"The title of document {number} ({length} sub-tokens) leaves no room for its text in windows of "
                f"max_length={max_length}, {special} of which are special tokens. Use {shorter}a larger max_length."
            )
        if length and fixed and overlap >= room:
            raise ValueError(
                f"overlap={overlap} is too large for windows of max_length={max_length} with the title of document {number} "
                f"({length} sub-tokens). Use 0 to {room - 1}, or a smaller max_title_length."
            )
        overlaps.append(min(overlap, room - 1) if length else overlap)
    return overlaps


def title_masks(sequences: Sequence[int | None], special: np.ndarray, *, paired: bool) -> tuple[np.ndarray, np.ndarray]:
    """Two masks `(S,)` of a window: meta-text and main text.

    Meta-text is the title, and the first token if it is special; the main text is the text. Separators belong to neither.

    Args:
        sequences: `sequence_ids` of the S sub-tokens.
        special (`(S,)`): which sub-tokens are special.
        paired: the window is a pair of title and text.
    """
    sequences = np.array([-1 if sequence is None else sequence for sequence in sequences])
    meta = (sequences == 0) & paired
    meta[:1] |= special[:1]
    return meta, (sequences == int(paired)) & ~special
