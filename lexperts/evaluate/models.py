"""BERTScore and MAUVE, by a model of the user's choice."""

from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel, GPT2Tokenizer, RobertaTokenizer

from run_tools.loading import open_tokenizer


def refuse_pickles(model: str):
    """Opens a model, without a head. Raises an `OSError` for weights in pickle files, which the packages would read."""
    return AutoModel.from_pretrained(model, use_safetensors=True, trust_remote_code=False)


@cache
def open_bertscore(model: str):
    """The package's scorer, without IDF and rescaling. The layer is the package's choice for the model's name, or the last."""
    from bert_score import BERTScorer
    from bert_score.utils import model2layers

    config = refuse_pickles(model).config
    layer = model2layers.get(model) or model2layers.get(Path(model).name) or config.num_hidden_layers
    scorer = BERTScorer(model_type=model, num_layers=layer)
    # The package puts a space before a RoBERTa text by an argument of `encode`, which transformers 5 ignores. It also uses the
    # tokenizer's maximum length, which may be 10^30.
    if isinstance(scorer._tokenizer, (GPT2Tokenizer, RobertaTokenizer)):
        scorer._tokenizer = open_tokenizer(model, add_prefix_space=True)
    limit = getattr(config, "max_position_embeddings", None) or 512
    scorer._tokenizer.model_max_length = min(scorer._tokenizer.model_max_length, limit)
    return scorer


def bertscore(model: str, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> tuple[np.ndarray, str]:
    """F1 of BERTScore (Zhang et al. 2020) with the best reference, `(n,)` in per cent, 0 for a blank prediction; and its settings."""
    scorer, gold = open_bertscore(model), [[one or "." for one in own] for own in references]
    f1 = scorer.score([text.strip() or "." for text in predictions], gold)[2].double().numpy()
    facts = f"bert-score {version('bert-score')}, F1, {model}, layer {scorer.num_layers}, not rescaled, no IDF"
    return 100 * np.where([bool(text.strip()) for text in predictions], f1, 0.0), facts


def mauve(model: str, predictions: Sequence[str], references: Sequence[str]) -> tuple[np.ndarray, str]:
    """MAUVE (Pillutla et al. 2021), `(1,)` in per cent, and its settings. The model's name must contain gpt2 or bert."""
    from mauve import compute_mauve

    refuse_pickles(model)
    gold, found = ([text or "." for text in texts] for texts in (references, predictions))
    options = {"device_id": 0 if torch.cuda.is_available() else -1, "batch_size": 64, "max_text_length": 512}
    value = compute_mauve(p_text=gold, q_text=found, featurize_model_name=model, **options).mauve
    return np.array([100 * value]), f"mauve-text {version('mauve-text')}, {model}"
