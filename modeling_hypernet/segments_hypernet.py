"""Which tokens are meta-text and which are main text, and both cut out of the pair (Duan et al. 2021, Sect. 2.1).

Letters: B pairs, S tokens of a padded pair, W tokens of the longest part that is cut out.

The meta-text H^u is the first token, a special one, and the tokens of the first segment; the main text H^v the tokens of
the second. Separators belong to neither. Where there is one segment, it is the main text, and the first token stands
for the title.
"""

import torch


class LeftAligned:
    """The tokens of a mask side by side from the left, and back to their places.

    Args:
        mask (`(B, S)`, bool): the tokens, with holes and padding anywhere.
        width: W, or more.

    Attributes:
        index (`(B, W)`): the place of each token in its row; beyond a row's tokens, that of some other one.
        lengths (`(B,)`): tokens of each row.
        there (`(B, W)`): whether there is a token.
    """

    def __init__(self, mask: torch.Tensor, width: int):
        self.size = mask.shape[1]
        self.lengths, width = mask.sum(1), min(width, mask.shape[1])
        self.index = (~mask).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
        self.there = torch.arange(width, device=mask.device) < self.lengths[:, None]

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, d) -> (B, W, d), 0 beyond a row's tokens."""
        found = x.gather(1, self.index[..., None].expand(-1, -1, x.shape[-1]))
        return found.masked_fill(~self.there[..., None], 0)

    def scatter(self, y: torch.Tensor) -> torch.Tensor:
        """(B, W, d) -> (B, S, d), 0 where there is no token."""
        y = y.masked_fill(~self.there[..., None], 0)
        full = y.new_zeros(len(y), self.size, y.shape[-1])
        return full.scatter(1, self.index[..., None].expand_as(y), y)


def find_segments(
    config,
    input_ids: torch.Tensor | None,
    attention_mask: torch.Tensor,
    token_type_ids: torch.Tensor | None = None,
    meta_mask: torch.Tensor | None = None,
    main_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Told by the masks of the collator, or else by `token_type_ids`, or else found by the separators.

    All (B, S) -> meta (B, S), main (B, S), both bool.

    Raises:
        ValueError: for masks of another shape, and where nothing tells the two apart.
    """
    real = attention_mask != 0
    for name, mask in (("meta_mask", meta_mask), ("main_mask", main_mask), ("token_type_ids", token_type_ids)):
        if mask is not None and mask.shape != real.shape:
            raise ValueError(
                f"{name} has the shape {tuple(mask.shape)}, and the tokens are {tuple(real.shape)}: it needs one value a "
                "token. HypernetCollator pads it."
            )
    first = real & (real.cumsum(1) == 1)
    if main_mask is not None:
        return (first if meta_mask is None else meta_mask.bool() & real), main_mask.bool() & real
    special = special_tokens(config, input_ids)
    words = real & ~special
    if meta_mask is not None:
        meta = meta_mask.bool() & real
        return meta, words & ~meta
    before = ((input_ids == config.sep_token_id) & real).int().cumsum(1)
    second, is_pair = before > 0, before[:, -1:] > 1  # one segment has one separator, behind it
    if token_type_ids is not None:
        typed = (token_type_ids == 1) & real
        tells = typed.any(1, keepdim=True)
        second, is_pair = torch.where(tells, typed, second), is_pair | tells
    return first | (words & ~second & is_pair), words & (second | ~is_pair)


def special_tokens(config, input_ids: torch.Tensor | None) -> torch.Tensor:
    """(B, S): where a separator or the token of the whole text stands."""
    if input_ids is None:
        raise ValueError(
            "inputs_embeds do not say where the main text begins. Pass meta_mask and main_mask with them, as "
            "HypernetCollator makes them."
        )
    if config.sep_token_id is None:
        raise ValueError(
            "config.sep_token_id is not known, so that meta-text and main text cannot be told apart by separators. Set it "
            "to tokenizer.sep_token_id, or pass meta_mask and main_mask, as HypernetCollator makes them."
        )
    special = input_ids == config.sep_token_id
    return special if config.cls_token_id is None else special | (input_ids == config.cls_token_id)


def cut(meta: torch.Tensor, main: torch.Tensor) -> tuple[LeftAligned, LeftAligned]:
    """(B, S) each -> both texts, left-aligned.

    Raises:
        ValueError: where the main text follows the meta-text without a separator, or a row has no tokens at all.
    """
    if torch.compiler.is_compiling():
        return LeftAligned(meta, meta.shape[1]), LeftAligned(main, main.shape[1])
    titles = meta & (meta.cumsum(1) > 1)  # the first token touches the main text where there is no title
    touching = (titles[:, :-1] & main[:, 1:]).any(1)
    numbers = torch.stack([meta.sum(1).max(), main.sum(1).max(), touching.int().argmax(), touching.sum()])
    U, L, row, count = numbers.tolist()  # one transfer
    if count:
        raise ValueError(
            f"The main text of row {row} follows its meta-text without a separator. Make pairs by "
            "tokenizer(titles, texts), or leave titles out where there are none."
        )
    return LeftAligned(meta, max(U, 1)), LeftAligned(main, max(L, 1))


def read_out(states: torch.Tensor, mask: torch.Tensor, readout: str) -> torch.Tensor:
    """H^S (B, S, D) -> (B, D): the state after the last token of the main text, or the mean; 0 for an empty text.

    mask (B, S): the main text's tokens, outside which the states are 0.
    """
    if readout == "mean":
        return states.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
    place = torch.arange(mask.shape[1], device=mask.device)
    last = (place * mask).argmax(1)
    return states.gather(1, last[:, None, None].expand(-1, 1, states.shape[-1])).squeeze(1)
