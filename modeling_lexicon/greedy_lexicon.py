# SPDX-License-Identifier: Apache-2.0
"""Greedy decoding of a batch that rows leave when they have ended: `generate` reads them to the end of the longest.

Letters: B rows, T tokens of the prompts, t generated tokens, V vocabulary.
"""

from collections.abc import Sequence

import torch
from transformers import DynamicCache
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from .cache_lexicon import CACHE

SHARE = 8  # one row in so many must have ended before the others are copied to a smaller batch
INPUTS = {
    "attention_mask",
    "position_ids",
    "use_cache",
    "logits_to_keep",
    CACHE,
}  # that `generate` may pass to its loop


def can_shrink(model, logits_processor: Sequence, stopping_criteria: Sequence, generation_config, inputs: dict) -> bool:
    """Whether `decode_greedily` gives what the loop of `generate` would, given the arguments of that loop."""
    plain = not (generation_config.do_sample or (generation_config.num_beams or 1) > 1 or len(logits_processor))
    usual = all(isinstance(one, EosTokenCriteria | MaxLengthCriteria) for one in stopping_criteria)
    given = {name for name, value in inputs.items() if value is not None}
    by_token = (
        getattr(model.config, "routing_policy", "token") == "token"
    )  # decisions for whole rows are in the cache, too
    return plain and usual and by_token and given <= INPUTS and type(inputs.get(CACHE)) is DynamicCache


def decode_greedily(
    model,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    cache: DynamicCache,
    length: int,
    ends: Sequence[int],
    pad: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts (B, T), padded on the left -> the most likely tokens (B, t), with `pad` after one of `ends`, and their
    log-probabilities (B, t), float32. At most `length` tokens are generated.
    """
    B, device = len(input_ids), input_ids.device
    tokens = input_ids.new_full((B, length), pad)
    log_p = torch.zeros(B, length, device=device)
    rows = torch.arange(B, device=device)  # of the batch that is left
    alive = torch.ones(B, dtype=torch.bool, device=device)
    stops = torch.tensor(ends, device=device)
    mask, ids = attention_mask, input_ids
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for t in range(length):
        outputs = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{CACHE: cache},
        )
        scores = outputs.logits[:, -1].float()  # (rows, V)
        best, chosen = scores.max(1)
        tokens[rows[alive], t] = chosen[alive]
        log_p[rows[alive], t] = (best - scores.logsumexp(1))[alive]
        alive &= ~torch.isin(chosen, stops)
        left = int(alive.sum())
        if not left or t + 1 == length:
            return tokens[:, : t + 1], log_p[:, : t + 1]
        if left <= len(rows) - max(1, len(rows) // SHARE):
            kept = alive.nonzero()[:, 0]
            cache.batch_select_indices(kept)
            mask, rows, chosen, positions, alive = mask[kept], rows[kept], chosen[kept], positions[kept], alive[kept]
        ids, positions = chosen[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
    return tokens, log_p
