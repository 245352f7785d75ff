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
    meta_mask: torch.Tensor | None = None,
    main_mask: torch.Tensor | None = None,
) -> tuple[LeftAlignedTokens, LeftAlignedTokens]:
    """The tokens of meta-text and main text: those of the collator's masks, or else what the separators divide.

    All arguments are `(B, S)`. A row with one separator is a main text alone.

    Raises:
        ValueError: without masks, if the ids or the separator's id are unknown.
    """
    real = attention_mask != 0
    first = real & (real.cumsum(1) == 1)
    if main_mask is not None:
        meta, main = (first if meta_mask is None else meta_mask.bool() & real), main_mask.bool() & real
    elif input_ids is None or config.sep_token_id is None:
        raise ValueError(
            "main_mask=None needs input_ids and config.sep_token_id. Pass the masks of DataCollatorForTextPairs."
        )
    else:
        separator = (input_ids == config.sep_token_id) & real
        second, is_pair = separator.cumsum(1) > 0, separator.sum(1, keepdim=True) > 1
        cls_id = -1 if config.cls_token_id is None else config.cls_token_id
        words = real & ~separator & (input_ids != cls_id)
        meta, main = first | (words & ~second & is_pair), words & (second | ~is_pair)
    if torch.compiler.is_compiling():
        widths = [meta.shape[1]] * 2
    else:
        widths = torch.stack([meta.sum(1).max(), main.sum(1).max()]).tolist()  # one transfer from the device
    return LeftAlignedTokens(meta, max(widths[0], 1)), LeftAlignedTokens(main, max(widths[1], 1))


def pool(states: torch.Tensor, mask: torch.Tensor, pooling: str) -> torch.Tensor:
    """H^S (B, S, D), mask of the main text (B, S) -> (B, D): its last state, or the mean; 0 for an empty text.

    The states must be 0 outside the mask.
    """
    if pooling == "mean":
        return states.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
    position = torch.arange(mask.shape[1], device=mask.device)
    last = (position * mask).argmax(1)
    return states.gather(1, last[:, None, None].expand(-1, 1, states.shape[-1])).squeeze(1)
