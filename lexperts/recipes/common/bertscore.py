"""BERTScore by the package bert-score, of summaries and of definitions."""

from collections.abc import Iterator, Sequence

import numpy as np
from tqdm import tqdm
from transformers import GPT2Tokenizer, RobertaTokenizer

from run_tools.loading import open_config, open_tokenizer
from run_tools.versions import package_version

CHUNK = 2048  # pairs whose vectors are in memory together


def in_chunks(pairs: Sequence[tuple[str, str]], name: str) -> Iterator[Sequence[tuple[str, str]]]:
    """The pairs in chunks, with a progress bar."""
    for start in tqdm(range(0, len(pairs), CHUNK), desc=name, unit="chunk", leave=False):
        yield pairs[start : start + CHUNK]


class BertScore:
    """F1 of BERTScore (Zhang et al. 2020), not rescaled, without IDF; by default of the layer that the package
    recommends.
    """

    def __init__(self, model: str, layer: int | None = None, batch_size: int = 64):
        from bert_score import BERTScorer
        from bert_score.utils import model2layers

        config = open_config(model)
        layers = config.num_hidden_layers
        if layer is not None and not 0 <= layer <= layers:
            raise ValueError(f"--bertscore-layer {layer} must be between 0 and {layers} for {model}.")
        layer = model2layers.get(model, layers) if layer is None else layer
        self.scorer = BERTScorer(model_type=model, num_layers=layer, batch_size=batch_size)
        # The package puts a space before a RoBERTa text by an argument of `encode`, which transformers 5 ignores. It also uses
        # the tokenizer's maximum length, which may be 10^30.
        tokenizer = self.scorer._tokenizer
        if isinstance(tokenizer, (GPT2Tokenizer, RobertaTokenizer)):
            tokenizer = open_tokenizer(model, add_prefix_space=True)
        limit = getattr(config, "max_position_embeddings", None) or 512
        tokenizer.model_max_length = min(tokenizer.model_max_length, limit)
        self.scorer._tokenizer = tokenizer
        settings = f"F1, {model}, layer {layer}, not rescaled, no IDF"
        self.facts = {"package": "bert-score", "version": package_version("bert-score"), "settings": settings}

    def __call__(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        """n pairs -> scores (n,) in per cent; 0 for a blank prediction or reference."""
        scores = []
        for chunk in in_chunks(pairs, "BERTScore"):
            ours, theirs = ([text if text.strip() else "." for text in side] for side in zip(*chunk, strict=True))
            f1 = self.scorer.score(ours, theirs)[2].numpy()
            scores.append(100 * np.where([bool(one.strip() and other.strip()) for one, other in chunk], f1, 0.0))
        return np.concatenate(scores)
