# SPDX-License-Identifier: Apache-2.0
"""The probabilities with which a decoder writes given phrases: all phrases of a document in one pass.

The phrases follow the prompt side by side. A token reads the prompt and its own phrase only, at the positions that it would have alone, so
that each phrase has the probability that it has alone.

Letters: P tokens of the prompt, K of the phrases, V vocabulary.
"""

from collections.abc import Iterator, Sequence

import torch

MAX_TOKENS = 512  # of the phrases that are read in one pass
MASKED = ("eager", "sdpa")  # attention that takes any mask


@torch.no_grad()
def score_phrases(model, prompt: list[int], phrases: Sequence[list[int]], absent: Sequence[bool]) -> list[float]:
    """log P(phrase | prompt) of each phrase as the answer's first one; of one that does not occur in the document as the first after
    the mark of these, which is what a decoder writes of a document without present keyphrases.

    A phrase ends with any token that may end one, as in `CausalPhraseSearch`.

    Args:
        model: an `ExhirdForCausalLM`.
        prompt: token ids.
        phrases: token ids of each, at least one.
        absent: whether each phrase does not occur in the document.

    Raises:
        ValueError: for an attention that takes no mask of its own, and if the configuration does not name the tokens between phrases.
    """
    kind = model.config.text_config._attn_implementation
    if kind not in MASKED:
        raise ValueError(
            f"attn_implementation={kind!r} cannot score candidates. Open the model with 'sdpa' or 'eager'."
        )
    scores: list[float] = []
    for start, end in passes([len(ids) for ids in phrases]):
        scores += read_side_by_side(model, prompt, phrases[start:end], absent[start:end])
    return scores


def passes(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The first and last of the phrases that are read together."""
    start = 0
    for end in range(1, len(lengths) + 1):
        if end == len(lengths) or sum(lengths[start : end + 1]) > MAX_TOKENS:
            yield start, end
            start = end


def read_side_by_side(model, prompt: list[int], phrases: Sequence[list[int]], absent: Sequence[bool]) -> list[float]:
    """`score_phrases` in one pass over the prompt, the mark, and all phrases."""
    P, mark = len(prompt), model.config.marks[1]
    lengths = torch.tensor([len(ids) for ids in phrases])
    ids = torch.tensor([*prompt, mark, *(token for phrase in phrases for token in phrase)])
    phrase = torch.arange(len(phrases)).repeat_interleave(lengths)  # (K,)
    after_mark = torch.tensor(absent)[phrase].long()  # (K,)
    place = torch.arange(len(phrase)) - (lengths.cumsum(0) - lengths)[phrase]  # in its phrase
    positions = torch.cat([torch.arange(P + 1), P + after_mark + place])
    of_phrase = torch.cat([torch.full((P,), -1), torch.tensor([-2]), phrase])
    of_absent = torch.cat([torch.zeros(P, dtype=torch.bool), torch.tensor([True]), after_mark.bool()])
    reads = (of_phrase[:, None] == of_phrase) | (of_phrase == -1) | (of_absent[:, None] & (of_phrase == -2))
    mask = torch.zeros(reads.shape, dtype=model.dtype).masked_fill(~reads.tril(), torch.finfo(model.dtype).min)
    given = {"input_ids": ids, "position_ids": positions, "attention_mask": mask[None]}
    given = {name: value[None].to(model.device) for name, value in given.items()}
    logits = model(**given, use_cache=False, logits_to_keep=len(phrase) + 2).logits[0].float().cpu()  # (K + 2, V)
    total = logits.logsumexp(1)
    # row 0 is the prompt's last token, 1 the mark; these predict the first token of a phrase, then each the next one
    rows = torch.where(place == 0, after_mark, torch.arange(len(phrase)) + 1)
    log_p = logits[rows, ids[P + 1 :]] - total[rows]
    last, ends = lengths.cumsum(0) + 1, torch.tensor([*model.config.marks, *model.config.ends])
    at_ends = logits[last[:, None], ends].logsumexp(1) - total[last]
    return at_ends.index_add(0, phrase, log_p).tolist()
