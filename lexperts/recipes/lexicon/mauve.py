"""MAUVE of definitions, by a model of the user's choice."""

from collections.abc import Sequence

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoModel

from run_tools.loading import open_model, open_tokenizer, parse_device

from .scores import facts_of

MAX_TOKENS = 1024  # of a text; longer ones are truncated


class Mauve:
    """MAUVE (Pillutla et al. 2021) of all predictions and all gold definitions, by its authors' package with its settings.

    A text's features are the last layer's hidden state at its last token, as in the package, which only loads models with gpt2
    or bert in their names.
    """

    def __init__(self, model: str, batch_size: int = 64):
        from mauve import compute_mauve

        self.compute, self.batch_size, self.tokenizer = compute_mauve, batch_size, open_tokenizer(model)
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.tokenizer.padding_side = "right"
        self.model = open_model(AutoModel, model, new=("pooler.",)).to(parse_device(None)).eval()
        positions = getattr(self.model.config, "max_position_embeddings", None) or MAX_TOKENS
        self.limit = min(positions, self.tokenizer.model_max_length, MAX_TOKENS)
        settings = f"{model}, last layer at the last token, buckets n / 10, scaling factor 5, seed 25"
        self.facts = facts_of("mauve-text", settings)

    @torch.no_grad()
    def features(self, texts: Sequence[str]) -> np.ndarray:
        """n texts -> (n, d); an empty text is replaced by the end-of-text token."""
        filler, features = self.tokenizer.eos_token or self.tokenizer.sep_token, {}
        unique = sorted({text or filler for text in texts}, key=len)
        for start in tqdm(range(0, len(unique), self.batch_size), desc="MAUVE", unit="batch", leave=False):
            own = unique[start : start + self.batch_size]
            batch = self.tokenizer(own, truncation=True, max_length=self.limit, padding=True, return_tensors="pt")
            states = self.model(**batch.to(self.model.device)).last_hidden_state  # (B, T, d)
            rows = states[torch.arange(len(own)), batch["attention_mask"].sum(1) - 1]
            features |= dict(zip(own, rows.float().cpu().numpy(), strict=True))
        return np.stack([features[text or filler] for text in texts])

    def __call__(self, predictions: Sequence[str], references: Sequence[str]) -> float:
        """MAUVE in per cent, near 100 for texts with the same distribution."""
        return 100 * float(
            self.compute(p_features=self.features(references), q_features=self.features(predictions)).mauve
        )
