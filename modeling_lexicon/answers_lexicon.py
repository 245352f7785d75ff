# SPDX-License-Identifier: Apache-2.0
"""Training batches whose prompts are not scored: a vocabulary's logits are a fifth of the work of a small Llama. Copied by `make fix-copies`."""

import torch

IGNORED = -100


def score_answers_only(batch: dict) -> dict:
    """A batch with labels (B, T) -> the same with labels (B, K) and `logits_to_keep` K, the last positions that have all labels of the
    batch or predict them: those at t predict the label of t + 1. A model gives the same loss.
    """
    labels: torch.Tensor = batch["labels"]
    first = (labels != IGNORED).any(0).int().argmax().item()  # of the positions with a label
    kept = labels[:, max(int(first) - 1, 0) :]
    return batch | {"labels": kept, "logits_to_keep": kept.shape[1]}
