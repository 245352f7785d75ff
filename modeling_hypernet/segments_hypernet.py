# SPDX-License-Identifier: Apache-2.0
"""Splits a tokenised pair into meta-text and main text (Duan et al. 2021, Sect. 2.1).

Letters: B pairs, S tokens of a padded pair, W tokens of the longest segment.

The meta-text H^u consists of the first token, a special one, and the tokens of the first segment; the main text H^v of the
tokens of the second segment. Separators belong to neither. A single segment is the main text; the first token is then the
whole meta-text.
"""

import torch
import torch.nn.functional as F


class LeftAlignedTokens:
    """The tokens of a mask, left-aligned, and the way back to their positions.

    Args:
        mask (`(B, S)`, bool): the tokens, with holes and padding anywhere.
        width: at least W.

    Attributes:
        index (`(B, W)`): the position of each token in its row; arbitrary beyond a row's tokens.
        lengths (`(B,)`): number of tokens of each row.
        valid (`(B, W)`): false beyond a row's tokens.
    """

    def __init__(self, mask: torch.Tensor, width: int):
        self.mask, self.lengths = mask, mask.sum(1)
        index = (~mask).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
        self.index = F.pad(index, (0, width - index.shape[1]))
        self.valid = torch.arange(width, device=mask.device) < self.lengths[:, None]

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, d) -> (B, W, d), 0 beyond a row's tokens."""
        tokens = x.gather(1, self.index[..., None].expand(-1, -1, x.shape[-1]))
        return tokens.masked_fill(~self.valid[..., None], 0)

    def scatter(self, y: torch.Tensor, fill: float = 0) -> torch.Tensor:
        """(B, W, d) -> (B, S, d), `fill` outside the mask."""
        rank = (self.mask.cumsum(1) - 1).clamp(min=0)  # (B, S)
        return y.gather(1, rank[..., None].expand(-1, -1, y.shape[-1])).masked_fill(~self.mask[..., None], fill)


def find_segments(
    config,
    input_ids: torch.Tensor | None,
    attention_mask: torch.Tensor,
    token_type_ids: torch.Tensor | None = None,
    meta_mask: torch.Tensor | None = None,
    main_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks of meta-text and main text: those of the collator, or else from `token_type_ids`, or else from the separators.

    All arguments and results are `(B, S)`; the results are booleans.

    Raises:
        ValueError: for masks of another shape, and if the inputs do not determine the segments.
    """
    real = attention_mask != 0
    for name, mask in (("meta_mask", meta_mask), ("main_mask", main_mask), ("token_type_ids", token_type_ids)):
        if mask is not None and mask.shape != real.shape:
            raise ValueError(
                f"{name} has the shape {tuple(mask.shape)}, but attention_mask {tuple(real.shape)}: it needs one value per "
                "token. Pad it with DataCollatorForTextPairs."
            )
    first = real & (real.cumsum(1) == 1)
    if main_mask is not None:
        return (first if meta_mask is None else meta_mask.bool() & real), main_mask.bool() & real
    special = special_tokens(config, input_ids)
    words = real & ~special
    if meta_mask is not None:
        meta = meta_mask.bool() & real
        return meta, words & ~meta
    separators = ((input_ids == config.sep_token_id) & real).int().cumsum(1)
    second, is_pair = separators > 0, separators[:, -1:] > 1  # a single segment has one separator, at its end
    if token_type_ids is not None:
        typed = (token_type_ids == 1) & real
        has_types = typed.any(1, keepdim=True)
        second, is_pair = torch.where(has_types, typed, second), is_pair | has_types
    return first | (words & ~second & is_pair), words & (second | ~is_pair)


def special_tokens(config, input_ids: torch.Tensor | None) -> torch.Tensor:
    """(B, S): true at separators and at the token for the whole text ([CLS])."""
    if input_ids is None:
        raise ValueError(
            "inputs_embeds do not show where the main text begins. Pass meta_mask and main_mask with them, as made by "
            "DataCollatorForTextPairs."
        )
    if config.sep_token_id is None:
        raise ValueError(
            "config.sep_token_id is None, so the two segments cannot be located. Set it to tokenizer.sep_token_id, or pass "
            "meta_mask and main_mask, as made by DataCollatorForTextPairs."
        )
    special = input_ids == config.sep_token_id
    return special if config.cls_token_id is None else special | (input_ids == config.cls_token_id)


def split_segments(meta: torch.Tensor, main: torch.Tensor) -> tuple[LeftAlignedTokens, LeftAlignedTokens]:
    """Masks (B, S) of meta-text and main text -> both texts, left-aligned. Raises a `ValueError` for a main text that
    follows its meta-text without a separator.
    """
    if torch.compiler.is_compiling():
        return LeftAlignedTokens(meta, meta.shape[1]), LeftAlignedTokens(main, main.shape[1])
    titles = meta & (meta.cumsum(1) > 1)  # without a title, the first token may be next to the main text
    touching = (titles[:, :-1] & main[:, 1:]).any(1)
    counts = torch.stack([meta.sum(1).max(), main.sum(1).max(), touching.int().argmax(), touching.sum()])
    U, L, row, count = counts.tolist()  # one transfer from the device
    if count:
        raise ValueError(
            f"The main text of row {row} follows its meta-text without a separator. Make pairs with "
            "tokenizer(titles, texts); for texts without titles, use tokenizer(texts)."
        )
    return LeftAlignedTokens(meta, max(U, 1)), LeftAlignedTokens(main, max(L, 1))


def pool(states: torch.Tensor, mask: torch.Tensor, pooling: str) -> torch.Tensor:
    """H^S (B, S, D), mask of the main text (B, S) -> (B, D): its last state, or the mean; 0 for an empty text.

    The states must be 0 outside the mask.
    """
    if pooling == "mean":
        return states.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
    position = torch.arange(mask.shape[1], device=mask.device)
    last = (position * mask).argmax(1)
    return states.gather(1, last[:, None, None].expand(-1, 1, states.shape[-1])).squeeze(1)
