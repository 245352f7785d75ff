# SPDX-License-Identifier: Apache-2.0
"""Titles as meta-text, the first sequence of the tokenizer's pair: truncation and masks."""

import logging
from collections.abc import Sequence

import numpy as np

MASKS = ("meta_mask", "main_mask")
MAX_TITLE_LENGTH = 64

logger = logging.getLogger(__name__)


def truncate_titles(titles: Sequence[str], tokenizer, max_title_length: int = MAX_TITLE_LENGTH) -> list[str]:
    """Strips titles and truncates them to `max_title_length` sub-tokens; a warning gives the number of truncated titles."""
    if max_title_length < 1:
        raise ValueError(f"max_title_length={max_title_length} must be at least 1. To ignore titles, do not pass them.")
    titles, too_long = [title.strip() for title in titles], 0
    options = {"add_special_tokens": False, "truncation": False, "verbose": False}
    read = tokenizer(titles, return_offsets_mapping=True, **options) if any(titles) else {"offset_mapping": ()}
    for number, offsets in enumerate(read["offset_mapping"]):
        title, kept = titles[number] if offsets else "", max_title_length
        too_long += len(offsets) > kept
        # a beginning may have more sub-tokens than it has within the whole title
        while len(offsets) > kept and len(tokenizer([title], **options)["input_ids"][0]) > max_title_length:
            title, kept = title[: offsets[kept][0]].rstrip(), kept - 1
        titles[number] = title
    if too_long:
        logger.warning(
            f"{too_long} of {sum(map(bool, titles))} titles are longer than {max_title_length} sub-tokens and were truncated."
        )
    return titles


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
