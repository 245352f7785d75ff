"""Dense Llamas in memory, from sources: whole, or one layer at a time. The only part of merging that needs PyTorch."""

from collections.abc import Iterator

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from .llama import LlamaShape, both_ropes
from .planning import CHUNK
from .sources import Source
from .tensor_files import TORCH_NAMES


def to_torch(raw: np.ndarray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Raw elements -> a tensor of their dtype (by safetensors' name)."""
    signed = raw.view(f"<i{raw.itemsize}")
    return torch.from_numpy(signed).view(getattr(torch, TORCH_NAMES[dtype])).reshape(shape)


def read_tensor(source: Source, name: str) -> torch.Tensor:
    """One tensor of a source, an adapter's part added."""
    entry = source.entry(name)
    raw = np.concatenate(list(source.blocks(name, CHUNK)) or [np.empty(0, "<u2")])
    return to_torch(raw, entry.dtype, entry.shape)


def llama_config(source: Source) -> LlamaConfig:
    config = {key: value for key, value in source.config.items() if key not in ("rope_scaling", "rope_theta")}
    config["rope_parameters"] = both_ropes(source.config)["rope_parameters"]
    return LlamaConfig.from_dict(config)


def load_state(kind: type[PreTrainedModel], config, state: dict[str, torch.Tensor]) -> PreTrainedModel:
    """A model from tensors as they would stand in its files, in their dtype and in eval mode."""
    dtype = state["model.embed_tokens.weight"].dtype
    return kind.from_pretrained(None, config=config, state_dict=state, dtype=dtype).eval()


def load_dense(source: Source) -> LlamaForCausalLM:
    """The whole Llama, in the dtype of its files."""
    names = LlamaShape.of(source.config).tensors()
    return load_state(LlamaForCausalLM, llama_config(source), {name: read_tensor(source, name) for name in names})


def layers_one_by_one(source: Source, batches: list[torch.Tensor]) -> Iterator[LlamaDecoderLayer]:
    """Runs batches of ids through the layers, one layer in memory at a time; yields each before it runs, so that a hook
    can be put on it. The batches' hidden states are kept between layers. Padding stands on the right, where no real
    token sees it, so that attention without a mask, which is causal here, is enough."""
    config = llama_config(source)
    config._attn_implementation = "sdpa"
    embeddings = source.entry("model.embed_tokens.weight")
    dtype = getattr(torch, TORCH_NAMES[embeddings.dtype])
    states = [embed(source, ids) for ids in batches]
    rotary = LlamaRotaryEmbedding(config)
    for number in range(config.num_hidden_layers):
        with torch.device("meta"):
            layer = LlamaDecoderLayer(config, number)
        prefix = f"model.layers.{number}."
        weights = {name: read_tensor(source, prefix + name) for name, _ in layer.named_parameters()}
        layer.load_state_dict(weights, assign=True)
        layer.to(dtype).eval()
        yield layer
        for i, state in enumerate(states):
            places = torch.arange(state.shape[1])[None]
            states[i] = layer(state, position_ids=places, position_embeddings=rotary(state, position_ids=places))


def embed(source: Source, ids: torch.Tensor) -> torch.Tensor:
    """(B, T) ids -> (B, T, d) embeddings, reading the rows that are needed and no more."""
    entry = source.entry("model.embed_tokens.weight")
    rows, columns = entry.shape
    table = np.memmap(entry.file, f"<u{entry.nbytes // (rows * columns)}", "r", entry.start, entry.shape)
    unique, place = np.unique(ids.numpy(), return_inverse=True)
    found = to_torch(np.ascontiguousarray(table[unique]), entry.dtype, (len(unique), columns))
    return found[torch.from_numpy(place.reshape(ids.shape))]
