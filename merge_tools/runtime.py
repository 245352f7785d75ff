"""Runs dense models, whole or one layer at a time. The only module of this package that imports PyTorch."""

from collections.abc import Iterator

import numpy as np
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .checkpoints import Source
from .errors import MergeError
from .layout import Shape, rope_config_v4_and_v5
from .plan import CHUNK
from .tensor_files import TORCH_NAMES


def to_torch(raw: np.ndarray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Converts raw elements to a tensor of `dtype` (safetensors' name)."""
    signed = raw.view(f"<i{raw.itemsize}")
    return torch.from_numpy(signed).view(getattr(torch, TORCH_NAMES[dtype])).reshape(shape)


def read_tensor(source: Source, name: str) -> torch.Tensor:
    """One tensor of a source, with its adapter applied."""
    entry = source.entry(name)
    raw = np.concatenate(list(source.blocks(name, CHUNK)) or [np.empty(0, "<u2")])
    return to_torch(raw, entry.dtype, entry.shape)


def dense_class(source: Source) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """The class of a source, and its configuration with RoPE settings as transformers 5 reads them."""
    config = {key: value for key, value in source.config.items() if key not in ("rope_scaling", "rope_theta")}
    config["rope_parameters"] = rope_config_v4_and_v5(source.config)["rope_parameters"]
    made = CONFIG_MAPPING[source.config["model_type"]].from_dict(config)
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(made)], made


def load_state(cls: type[PreTrainedModel], config, state: dict[str, torch.Tensor]) -> PreTrainedModel:
    """A model from the tensors of its checkpoint, in their dtype and in eval mode."""
    dtype = state["model.embed_tokens.weight"].dtype
    return cls.from_pretrained(None, config=config, state_dict=state, dtype=dtype).eval()


def load_dense(source: Source) -> PreTrainedModel:
    """The whole model, in the dtype of its files."""
    names = Shape.from_config(source.config).tensors()
    return load_state(*dense_class(source), {name: read_tensor(source, name) for name in names})


def layers_one_by_one(source: Source, batches: list[torch.Tensor]) -> Iterator[torch.nn.Module]:
    """Runs batches of ids with one layer in memory at a time; yields each layer before it runs, to add hooks.

    The hidden states of all batches are kept between layers. Batches must be padded on the right: no real token attends
    to later positions, and so causal attention needs no mask.

    Raises:
        MergeError: for a text that is longer than a sliding window, which needs a mask.
    """
    model_class, config = dense_class(source)
    window, longest = getattr(config, "sliding_window", None), max(ids.shape[1] for ids in batches)
    if window and longest > window:
        raise MergeError(
            f"A text has {longest} tokens, more than sliding_window={window}. Leave out --low-memory, or shorten it."
        )
    config._attn_implementation = "sdpa"
    embeddings = source.entry("model.embed_tokens.weight")
    dtype = getattr(torch, TORCH_NAMES[embeddings.dtype])
    states = [embed(source, ids) for ids in batches]
    with torch.device("meta"):
        model = model_class(config).model
    layer_class, rotary = type(model.layers[0]), type(model.rotary_emb)(config)
    for index in range(config.num_hidden_layers):
        with torch.device("meta"):
            layer = layer_class(config, index)
        prefix = f"model.layers.{index}."
        weights = {name: read_tensor(source, prefix + name) for name, _ in layer.named_parameters()}
        layer.load_state_dict(weights, assign=True)
        layer.to(dtype).eval()
        yield layer
        for i, state in enumerate(states):
            positions = torch.arange(state.shape[1])[None]
            states[i] = layer(state, position_ids=positions, position_embeddings=rotary(state, position_ids=positions))


def embed(source: Source, ids: torch.Tensor) -> torch.Tensor:
    """Embeds ids `(B, T)` as `(B, T, d)`, reading only the rows that are needed."""
    entry = source.entry("model.embed_tokens.weight")
    rows, columns = entry.shape
    table = np.memmap(entry.file, f"<u{entry.nbytes // (rows * columns)}", "r", entry.start, entry.shape)
    unique, inverse = np.unique(ids.numpy(), return_inverse=True)
    embeddings = to_torch(np.ascontiguousarray(table[unique]), entry.dtype, (len(unique), columns))
    return embeddings[torch.from_numpy(inverse.reshape(ids.shape))]
