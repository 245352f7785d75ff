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
    scores, mark = [0.0] * len(phrases), model.config.marks[1]
    for is_absent, context in ((False, prompt), (True, [*prompt, mark])):
        chosen = [i for i, value in enumerate(absent) if value == is_absent]
        for part in passes(chosen, [len(ids) for ids in phrases]):
            found = read_side_by_side(model, context, [phrases[i] for i in part])
            for i, score in zip(part, found, strict=True):
                scores[i] = score
    return scores


def passes(numbers: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """The phrases of these numbers that are read together."""
    part: list[int] = []
    for i in numbers:
        if part and sum(lengths[j] for j in part) + lengths[i] > MAX_TOKENS:
            yield part
            part = []
        part.append(i)
    if part:
        yield part


def read_side_by_side(model, prompt: list[int], phrases: Sequence[list[int]]) -> list[float]:
    """log P of each phrase after a prompt."""
    device, P = model.device, len(prompt)
    lengths = torch.tensor([len(ids) for ids in phrases])
    ids = torch.tensor([*prompt, *(token for phrase in phrases for token in phrase)])
    phrase = torch.arange(len(phrases)).repeat_interleave(lengths)  # (K,)
    place = torch.arange(len(phrase)) - (lengths.cumsum(0) - lengths)[phrase]  # in its phrase
    positions = torch.cat([torch.arange(P), P + place])
    own = torch.cat([torch.full((P,), -1), phrase])
    reads = ((own[:, None] == own) | (own == -1)).tril()  # (P + K, P + K)
    mask = torch.zeros(reads.shape, dtype=model.dtype).masked_fill(~reads, torch.finfo(model.dtype).min)
    given = {"input_ids": ids, "position_ids": positions, "attention_mask": mask[None]}
    given = {name: value[None].to(device) for name, value in given.items()}
    logits = model(**given, use_cache=False, logits_to_keep=len(phrase) + 1).logits[0].float()  # (K + 1, V)
    total = logits.logsumexp(1)
    # row 0 is the prompt's last token, which predicts the first one of every phrase
    rows = torch.where(place == 0, 0, torch.arange(len(phrase))).to(device)
    log_p = logits[rows, ids[P:].to(device)] - total[rows]
    last, ends = lengths.cumsum(0).to(device), torch.tensor([*model.config.marks, *model.config.ends], device=device)
    found = logits[last[:, None], ends].logsumexp(1) - total[last]
    return found.index_add(0, phrase.to(device), log_p).tolist()
