"""What the pipeline needs to know about a token classifier: its labels, and the longest input."""

import torch

from .decoding import B, I, O
from .windows import NO_LIMIT


def unwrap_model(model):
    """The model inside a peft wrapper, whose forward has no argument names of its own; else the model itself."""
    get_base_model = getattr(model, "get_base_model", None)
    return get_base_model() if callable(get_base_model) else model


def read_labels(id2label: dict[int, str]) -> list[int]:
    """The tag of each label id, 0 (O), 1 (B) or 2 (I), from the labels' names; types such as -KEY are ignored."""
    tags = {"O": O, "OUTSIDE": O, "B": B, "I": I}
    names = [id2label[i] for i in sorted(id2label)]
    try:
        tag_of_label = [tags[name.upper().replace("_", "-").split("-")[0]] for name in names]
    except KeyError:
        tag_of_label = []
    if set(tag_of_label) != {O, B, I}:
        raise ValueError(
            f"The model's labels are {', '.join(map(repr, names))}: keyphrase-extraction needs labels that begin a phrase (B "
            "or B-...), continue it (I or I-...), and O. If the model was trained with such labels, set their names: "
            "model.config.id2label = {0: 'O', 1: 'B-KEY', 2: 'I-KEY'}."
        )
    return tag_of_label


def length_limit(tokenizer, model) -> int:
    """The longest window that both the tokenizer and the model's position embeddings allow."""
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    limits = [limit] if isinstance(limit, int) and limit > 0 else []
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            padding = module.padding_idx  # RoBERTa and similar models start positions at padding_idx + 1
            limits.append(module.num_embeddings - (0 if padding is None else padding + 1))
    if tokenizer.model_max_length < NO_LIMIT:
        limits.append(tokenizer.model_max_length)
    return min(limits, default=NO_LIMIT)
