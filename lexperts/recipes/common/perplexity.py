"""Perplexity of definitions, in the Trainer and for finished models.

Letters: B rows, T tokens, V vocabulary.
"""

import math

import torch
import torch.nn.functional as F

from modeling_lexicon.data_lexicon import IGNORED, DataCollatorForDefinitions


def token_nll(logits, labels: torch.Tensor) -> torch.Tensor:
    """logits (B, T, V), labels (B, T) -> (B, 2): a row's negative log-likelihood in nats, and its number of labels.

    The Trainer passes a tuple of outputs if a model returns more; the logits are then its tensor of three dimensions.
    """
    if isinstance(logits, (tuple, list)):
        logits = next(output for output in logits if isinstance(output, torch.Tensor) and output.dim() == 3)
    logits, labels = logits[:, :-1], labels[:, 1:]  # the logits at t are for token t + 1
    row, position = (labels != IGNORED).nonzero(as_tuple=True)
    nll = F.cross_entropy(logits[row, position].float(), labels[row, position], reduction="none")
    sums = torch.zeros(labels.shape[0], 2, device=nll.device)
    return sums.index_add_(0, row, torch.stack([nll, torch.ones_like(nll)], dim=-1))


def perplexity(sums) -> float:
    """(N, 2) nats and tokens of rows -> exp of the mean nats per token, over all tokens together. Raises a `ValueError` if
    there are no tokens, or their nats are not finite.
    """
    nats, tokens = torch.as_tensor(sums, dtype=torch.float64).reshape(-1, 2).sum(0).tolist()
    if not tokens or not math.isfinite(nats):
        raise ValueError(
            f"The {len(sums):,} rows have {tokens:.0f} tokens of definitions with {nats} nats: no perplexity can be computed. "
            + ("Train again with a lower learning rate." if tokens else "Use rows with definitions.")
        )
    return float(torch.tensor(nats / tokens, dtype=torch.float64).exp())


def perplexity_metric(prediction) -> dict[str, float]:
    """`compute_metrics` for a Trainer whose `preprocess_logits_for_metrics` is `token_nll`."""
    return {"perplexity": perplexity(prediction.predictions)}


@torch.no_grad()
def definition_losses(model, columns: dict[str, list], collator: DataCollatorForDefinitions, batch_size=64, **inputs):
    """Columns of `tokenize_definitions` -> (N, 2): nats and tokens of each row's definition, in the order of the columns.

    Args:
        columns: `input_ids`, `labels` and optionally `domain_ids`. Rows are read in the order of their length.
        inputs: further arguments of each forward pass.
    """
    names = [name for name in ("input_ids", "labels", "domain_ids") if name in columns]
    order = sorted(range(len(columns["input_ids"])), key=lambda i: len(columns["input_ids"][i]))
    training, sums = model.training, torch.zeros(len(order), 2)
    model.eval()
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        batch = collator([{name: columns[name][i] for name in names} for i in indices])
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
        labels = batch["labels"]  # passed to the model too: sequence routing finds the prompt by them
        sums[indices] = token_nll(model(**batch, **inputs).logits, labels).cpu()
    model.train(training)
    return sums
