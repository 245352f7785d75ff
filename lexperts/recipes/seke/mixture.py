"""Training on several data sets at once: how often each is sampled, and when the model is told the style of a row."""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch.utils.data import Sampler

SORTED_BATCHES = 32  # rows of as many batches are sorted by length together


class MixtureSampler(Sampler[int]):
    """Draws rows with replacement so that data set f has the share n_f^(1/T) / sum n^(1/T)   (Arivazhagan et al. 2019).

    `files` has the data set of each row, `documents` the n_f, `lengths` the sub-tokens of each row. Rows of similar
    length come together, in batches of random order. The draws of an epoch depend only on its number and the seed.
    """

    def __init__(self, files, documents, lengths, *, temperature: float, num_rows: int, batch_size: int, seed: int):
        self.lengths, self.num_rows, self.batch_size, self.seed, self.epoch = lengths, num_rows, batch_size, seed, 0
        shares = np.array(documents, dtype=float) ** (1 / temperature)
        files = np.asarray(files)
        rows_of_file = np.bincount(files, minlength=len(shares))
        self.probabilities = (shares / shares.sum() / rows_of_file)[files]

    def set_epoch(self, epoch: int) -> None:
        """Called before each epoch by the Trainer's data loader."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_rows

    def __iter__(self) -> Iterator[int]:
        random = np.random.default_rng((self.seed, self.epoch))
        sampled = random.choice(len(self.probabilities), self.num_rows, p=self.probabilities / self.probabilities.sum())
        size = self.batch_size * SORTED_BATCHES
        for start in range(0, self.num_rows, size):
            part = sorted(sampled[start : start + size].tolist(), key=self.lengths.__getitem__)
            batches = [part[i : i + self.batch_size] for i in range(0, len(part), self.batch_size)]
            short = [batches.pop()] if len(batches[-1]) < self.batch_size else []
            for batch in [*(batches[i] for i in random.permutation(len(batches))), *short]:
                yield from batch


class HideStyles:
    """A collator that sets the style of a share of the rows to 0, none, but for the styles that are `kept`."""

    def __init__(self, collator, share: float, kept: Iterable[int] = ()):
        self.collator, self.share, self.kept = collator, share, torch.tensor(list(kept), dtype=torch.long)

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        """The batch of the rows."""
        batch = self.collator(rows)
        if "style_ids" in batch and self.share:
            hidden = (torch.rand(len(batch["style_ids"])) < self.share) & ~torch.isin(batch["style_ids"], self.kept)
            batch["style_ids"] = batch["style_ids"].masked_fill(hidden, 0)
        return batch


def freeze_layers(model, number: int | None) -> None:
    """Freezes the embeddings and the first layers of the backbone. Raises a `ValueError` if it has fewer."""
    if number is None:
        return
    lists = ((name, m) for name, m in model.backbone.named_modules() if isinstance(m, torch.nn.ModuleList))
    layers = next((m for name, m in lists if "." not in name.removeprefix("encoder.")), [])
    if number > len(layers):
        raise ValueError(f"--frozen-layers {number} exceeds the {len(layers)} layers of the backbone.")
    model.backbone.get_input_embeddings().requires_grad_(False)
    if (embeddings := getattr(model.backbone, "embeddings", None)) is not None:
        embeddings.requires_grad_(False)
    for layer in layers[:number]:
        layer.requires_grad_(False)
