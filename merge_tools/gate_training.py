"""Trains the gates of a mixture on texts, with everything else frozen, and measures perplexity. Imports PyTorch."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from .errors import MergeError

GATE = ".gate.weight"
IGNORED = -100  # label of a token without a loss
EVAL_TOKENS = 4096  # of a forward pass, with padding
Windows = list[list[int]]  # token ids of pieces of text


def freeze_all_but_gates(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Freezes everything except the gates of a mixture of merge-experts or transformers.

    Returns:
        The gates, by the names of their parameters.

    Raises:
        MergeError: if the model has no gates that can learn from texts alone.
    """
    config = model.config
    policy = getattr(config, "routing_policy", "token")
    if policy != "token":
        raise MergeError(
            f"routing_policy is {policy}: its router reads a prompt, and is not trained on plain texts. Use `lexperts train "
            "lexicon-router`, which trains on prompts with answers."
        )
    gates = {name: parameter for name, parameter in model.named_parameters() if name.endswith(GATE)}
    if not gates:
        raise MergeError(f"model_type {config.model_type!r:.60} has no gates. Give a mixture of experts.")
    normalised = config.model_type == "mixtral" or getattr(config, "norm_topk_prob", False)
    if config.num_experts_per_tok == 1 and normalised:
        raise MergeError(
            "num_experts_per_tok is 1: the weight of the only selected expert is always 1, so gates get no gradient. "
            "Compose with experts_per_token: 2, or with format: lexicon, whose top-1 gates get one."
        )
    model.requires_grad_(False)
    for gate in gates.values():
        gate.requires_grad_(True)
    return gates


def cut_windows(tokenizer, texts: list[str], max_length: int) -> Windows:
    """Tokenizes texts with special tokens and cuts them into windows of at most `max_length` tokens; single tokens are
    dropped, because nothing is predicted from them.
    """
    windows = []
    for text in texts:
        ids = tokenizer(text, verbose=False)["input_ids"]
        windows += [ids[start : start + max_length] for start in range(0, len(ids), max_length)]
    return [window for window in windows if len(window) > 1]


def pad(windows: Windows, device) -> dict[str, torch.Tensor]:
    """Pads on the right; labels are the ids, without a loss on padding."""
    width = max(map(len, windows))
    mask = torch.tensor([[1] * len(window) + [0] * (width - len(window)) for window in windows])
    ids = torch.tensor([window + [0] * (width - len(window)) for window in windows])
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}
    return {name: tensor.to(device) for name, tensor in batch.items()}


@torch.no_grad()
def nats_of_windows(model: PreTrainedModel, windows: Windows) -> np.ndarray:
    """(N,): the summed negative log-likelihood of all tokens of each window but the first."""
    model.eval()
    nats = np.zeros(len(windows))
    order = sorted(range(len(windows)), key=lambda i: -len(windows[i]))
    while order:
        count = max(EVAL_TOKENS // len(windows[order[0]]), 1)
        chosen, order = order[:count], order[count:]
        batch = pad([windows[i] for i in chosen], model.device)
        labels = batch.pop("labels")[:, 1:]
        for i, logits, row in zip(chosen, model(**batch, use_cache=False).logits[:, :-1], labels, strict=True):
            nats[i] = nn.functional.cross_entropy(logits.float(), row, reduction="sum", ignore_index=IGNORED).item()
    return nats


def nats_and_tokens(model: PreTrainedModel, windows: Windows) -> tuple[float, int]:
    """The summed negative log-likelihood of all tokens but the first of each window, and their number."""
    return float(nats_of_windows(model, windows).sum()), sum(len(window) - 1 for window in windows)


def endless(windows: Windows, generator: torch.Generator) -> Iterator[list[int]]:
    """The windows in a random order, again and again."""
    while True:
        for i in torch.randperm(len(windows), generator=generator).tolist():
            yield windows[i]


def train_gates(
    model: PreTrainedModel,
    gates: dict[str, nn.Parameter],
    domains: list[Windows],
    *,
    steps: int,
    learning_rate: float,
    batch_size: int,
    seed: int,
    on_step: Callable[[int, float], None],
) -> None:
    """Trains the gates with AdamW on batches in which all domains are equally frequent.

    The learning rate rises over 5% of the steps and falls as a cosine. Gates of 16 bits are trained on copies in float32.

    Raises:
        MergeError: if the loss is not finite.
    """
    copies = {name: gate.detach().float().clone() for name, gate in gates.items()}
    optimizer = torch.optim.AdamW(copies.values(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    warmup = max(1, steps // 20)
    generator = torch.Generator().manual_seed(seed)
    streams = [endless(windows, generator) for windows in domains]
    turn = 0
    model.eval()  # no dropout: what is trained is what is measured
    for step in range(steps):
        scale = min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = learning_rate * scale
        windows = []
        for _ in range(batch_size):
            windows.append(next(streams[turn % len(streams)]))
            turn += 1
        loss = model(**pad(windows, model.device), use_cache=False).loss
        if not torch.isfinite(loss):
            raise MergeError(f"The loss is {loss.item()} at step {step + 1}. Use a smaller learning rate.")
        loss.backward()
        for name, gate in gates.items():
            copies[name].grad, gate.grad = gate.grad.float(), None
        nn.utils.clip_grad_norm_(copies.values(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for name, gate in gates.items():
                gate.copy_(copies[name])
        on_step(step + 1, loss.item())
