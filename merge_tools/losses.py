"""Texts as windows of token ids, and their negative log-likelihoods under a causal model."""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from .errors import MergeError

BATCH_TOKENS = 4096  # of a forward pass, with padding
Windows = list[list[int]]  # token ids of pieces of a text


def cut_domains(tokenizer, texts: Mapping[str, list[str]], max_length: int) -> dict[str, list[Windows]]:
    """Name of a domain -> its texts, each as windows of at most `max_length` tokens.

    Windows of one token are left out, because nothing is predicted from them, and so are texts without longer ones. Raises a
    `MergeError` for a domain without texts that are left.
    """
    found = {}
    for name, own in texts.items():
        ids = [tokenizer(text.strip(), verbose=False)["input_ids"] for text in own]
        windows = [[text[i : i + max_length] for i in range(0, len(text), max_length)] for text in ids]
        found[name] = [kept for text in windows if (kept := [window for window in text if len(window) > 1])]
        if not found[name]:
            raise MergeError(f"The texts of the domain {name!r} are too short to predict anything. Give longer ones.")
    return found


def pad(windows: Windows) -> dict[str, torch.Tensor]:
    """A batch of windows, padded on the right; labels are the ids, without a loss on padding."""
    width = max(map(len, windows))
    mask = torch.tensor([[1] * len(window) + [0] * (width - len(window)) for window in windows])
    ids = torch.tensor([window + [0] * (width - len(window)) for window in windows])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@torch.no_grad()
def nats_of_texts(model, texts: list[Windows]) -> np.ndarray:
    """(N,): the negative log-likelihood of each text, summed over all tokens of its windows but the first of each."""
    model.eval()
    nats = np.zeros(len(texts))
    left = sorted(((window, i) for i, text in enumerate(texts) for window in text), key=lambda pair: -len(pair[0]))
    while left:
        count = max(BATCH_TOKENS // len(left[0][0]), 1)
        chosen, left = left[:count], left[count:]
        batch = {name: tensor.to(model.device) for name, tensor in pad([window for window, _ in chosen]).items()}
        labels = batch.pop("labels")[:, 1:]
        logits = model(**batch, use_cache=False).logits[:, :-1]
        for (_, i), row, own in zip(chosen, logits, labels, strict=True):
            nats[i] += cross_entropy(row.float(), own, reduction="sum").item()
    if not np.isfinite(nats).all():
        raise MergeError(f"A loss of {model.name_or_path} is not finite. Use an earlier checkpoint.")
    return nats


def tokens_of_texts(texts: list[Windows]) -> np.ndarray:
    """(N,): the number of predicted tokens of each text."""
    return np.array([sum(len(window) - 1 for window in text) for text in texts])


def perplexities(model, domains: Mapping[str, list[Windows]]) -> dict[str, float]:
    """Perplexity of the texts of each domain, and of all of them together."""
    sums = {name: (nats_of_texts(model, own).sum(), tokens_of_texts(own).sum()) for name, own in domains.items()}
    sums["all"] = np.sum(list(sums.values()), axis=0)
    return {name: math.exp(min(nats / tokens, 700)) for name, (nats, tokens) in sums.items()}
