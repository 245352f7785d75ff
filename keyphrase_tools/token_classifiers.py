# SPDX-License-Identifier: Apache-2.0
"""What the pipeline needs to know about a token classifier: its labels, and the longest input."""

import copy

import torch
from transformers.utils import logging

from .decoding import B, I, O
from .windows import NO_LIMIT

POSITIONS = ("max_position_embeddings", "max_encoder_position_embeddings", "n_positions")  # fields of configurations
logger = logging.get_logger(__name__)
ENOUGH_WORDS = 200  # a trained model finds a keyphrase in as many words of nearly all texts
DEFAULT_WINDOW = 512  # sub-tokens, where neither the model nor the tokenizer has a limit

HOOK = "output_capturing_hook"  # in the names of transformers' hooks


def unwrap_model(model):
    """The model inside a peft wrapper, whose forward has no argument names of its own; else the model itself."""
    get_base_model = getattr(model, "get_base_model", None)
    return get_base_model() if callable(get_base_model) else model


def without_hooks(state: dict) -> dict:
    """A copy of a pipeline's attributes that can be pickled, with the same tensors.

    transformers leaves local functions as hooks in a model whose hidden states were asked for, and installs them again when they are
    needed.
    """
    model = state["model"]
    if not any(is_capturing(hook) for module in model.modules() for hook in module._forward_hooks.values()):
        return state
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copied = copy.deepcopy(state, tensors)
    for module in copied["model"].modules():
        hooks = module._forward_hooks
        for key in [key for key, hook in hooks.items() if is_capturing(hook)]:
            del hooks[key]
        module.__dict__.pop("_output_capturing_hooks_installed", None)
    return copied


def is_capturing(hook) -> bool:
    """Whether a hook is one that transformers uses to return hidden states."""
    return HOOK in getattr(hook, "__qualname__", "")


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
    """The longest window that both the tokenizer and the model's positions allow; without a limit `DEFAULT_WINDOW`."""
    return known_limit(tokenizer, model) or DEFAULT_WINDOW


def warn_if_all_outside(words: int) -> bool:
    """For a model that labels so many words, and all as O, as one does that was trained too little: warns unless they are few.
    Returns whether it has warned.
    """
    if words < ENOUGH_WORDS:
        return False
    logger.warning(
        f"The model labels all {words:,} words as O, so there are no keyphrases. If it is newly trained, train it longer or "
        "with a higher learning rate (1e-3 with LoRA, 1e-4 without), or set model.config.keyphrase_threshold, such as 0.1."
    )
    return True


def known_limit(tokenizer, model) -> int | None:
    """As `length_limit`; `None` for a model with relative positions, such as T5 and XLNet, and a tokenizer without a limit."""
    config = model.config.get_text_config()
    values = [getattr(config, name, None) for name in POSITIONS]
    limits = [value for value in values if isinstance(value, int) and value > 0]
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            padding = module.padding_idx  # RoBERTa and similar models start positions at padding_idx + 1
            limits.append(module.num_embeddings - (0 if padding is None else padding + 1))
    if tokenizer.model_max_length < NO_LIMIT:
        limits.append(tokenizer.model_max_length)
    return min(limits, default=None)
