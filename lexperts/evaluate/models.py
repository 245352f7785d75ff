"""BERTScore and MAUVE, by a model of the user's choice."""

from collections.abc import Callable, Sequence
from functools import cache, partial

import numpy as np
import torch
from tqdm import tqdm
from transformers import GPT2Tokenizer, RobertaTokenizer

from run_tools.loading import open_config, open_tokenizer

CHUNK = 2048  # pairs whose vectors are in memory together


@cache
def open_bertscore(model: str, layer: int | None = None) -> tuple[Callable, str]:
    """F1 of BERTScore (Zhang et al. 2020), not rescaled, without IDF: n predictions with references -> (n,) in per cent, 0 for a
    blank text; and the layer: by default the package's choice, or the last.
    """
    from bert_score import BERTScorer
    from bert_score.utils import model2layers

    config = open_config(model)
    if layer is not None and layer > config.num_hidden_layers:
        raise ValueError(f"--bertscore-layer {layer}: {model} has {config.num_hidden_layers} layers.")
    layer = model2layers.get(model, config.num_hidden_layers) if layer is None else layer
    scorer = BERTScorer(model_type=model, num_layers=layer)
    # The package puts a space before a RoBERTa text by an argument of `encode`, which transformers 5 ignores. It also uses the
    # tokenizer's maximum length, which may be 10^30.
    if isinstance(scorer._tokenizer, (GPT2Tokenizer, RobertaTokenizer)):
        scorer._tokenizer = open_tokenizer(model, add_prefix_space=True)
    limit = getattr(config, "max_position_embeddings", None) or 512
    scorer._tokenizer.model_max_length = min(scorer._tokenizer.model_max_length, limit)
    return partial(bertscore, scorer), f"F1, {model}, layer {layer}, not rescaled, no IDF"


def bertscore(scorer, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
    """See `open_bertscore`."""
    scores = []
    for start in tqdm(range(0, len(pairs), CHUNK), desc="BERTScore", unit="chunk", leave=False):
        chunk = pairs[start : start + CHUNK]
        ours, theirs = ([text if text.strip() else "." for text in side] for side in zip(*chunk, strict=True))
        f1 = scorer.score(ours, theirs)[2].numpy()
        scores.append(100 * np.where([bool(one.strip() and other.strip()) for one, other in chunk], f1, 0.0))
    return np.concatenate(scores)


def mauve(model: str, predictions: Sequence[str], references: Sequence[str]) -> float:
    """MAUVE (Pillutla et al. 2021) in per cent by its authors' package, whose models have gpt2 or bert in their names. An empty
    text is read as a full stop.
    """
    from mauve import compute_mauve

    open_config(model)  # refuses weights that are not safetensors
    gold, found = ([text or "." for text in texts] for texts in (references, predictions))
    options = {"device_id": 0 if torch.cuda.is_available() else -1, "batch_size": 64, "max_text_length": 512}
    return 100 * float(compute_mauve(p_text=gold, q_text=found, featurize_model_name=model, **options).mauve)
