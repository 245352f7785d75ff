# SPDX-License-Identifier: Apache-2.0
"""What the pipeline needs to know about a model of PyTorch: the longest input, its hidden states, and what cannot be pickled."""

import copy

import torch

from lexperts_lite.windows import NO_LIMIT

POSITIONS = ("max_position_embeddings", "max_encoder_position_embeddings", "n_positions")  # fields of configurations
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


def known_limit(tokenizer, model) -> int | None:
    """The longest window that both the tokenizer and the model's positions allow; `None` for a model with relative positions, such as
    T5 and XLNet, and a tokenizer without a limit.
    """
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


def last_states(outputs, name: str) -> torch.Tensor:
    """The last hidden states `(n, S, d)` of a model's outputs, in float32.

    Raises:
        ValueError: if the outputs have none for each sub-token; `name` is the model's, for the message.
    """
    states = (getattr(outputs, "hidden_states", None) or [None])[-1]
    if states is None or states.shape[:2] != outputs.logits.shape[:2]:
        found = "no hidden_states" if states is None else f"hidden states of shape {tuple(states.shape)}"
        raise ValueError(
            f"diversity needs the hidden states of each sub-token, but {name} returns {found} with "
            "output_hidden_states=True. Leave diversity out."
        )
    return states.float()
