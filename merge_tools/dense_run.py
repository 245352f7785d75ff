"""Runs a dense model on a few texts, one weight in memory at a time, for the inputs of its modules. Imports PyTorch.

Starting transformers and building a model cost more than the sums. Values are rounded where transformers rounds them.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from run_tools.model_options import gpu_or_cpu

from .checkpoints import Source
from .layout import BLOCK_OF, Shape, rope_config_v4_and_v5, rope_parameters
from .tensor_files import DTYPE_BYTES, TORCH_NAMES, read_blocks

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu, "swish": F.silu, "gelu": F.gelu, "relu": F.relu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}  # fmt: skip
Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, each (T, head_dim)


def to_torch(raw: np.ndarray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Converts raw elements to a tensor of `dtype` (safetensors' name)."""
    signed = raw.view(f"<i{raw.itemsize}")
    return torch.from_numpy(signed).view(getattr(torch, TORCH_NAMES[dtype])).reshape(shape)


def embed(source: Source, ids: torch.Tensor) -> torch.Tensor:
    """Embeds ids `(...)` as `(..., d)`, reading only the rows that are needed."""
    entry = source.entry("model.embed_tokens.weight")
    rows, columns = entry.shape
    table = np.memmap(entry.file, f"<u{entry.nbytes // (rows * columns)}", "r", entry.start, entry.shape)
    unique, inverse = np.unique(ids.numpy(), return_inverse=True)
    embeddings = to_torch(np.ascontiguousarray(table[unique]), entry.dtype, (len(unique), columns))
    return embeddings[torch.from_numpy(inverse.reshape(ids.shape))]


class DenseRun:
    """A dense model whose weights are read when they are needed, each into the buffer of the last one of its size. It runs on a GPU if
    there is one, in its own dtype or another (safetensors' name).
    """

    def __init__(self, source: Source, dtype: str | None = None):
        self.device = gpu_or_cpu()
        self.source, self.shape = source, source.shape
        self.family = self.shape.family
        config = {**self.family.defaults, **{k: v for k, v in source.config.items() if v is not None}}
        self.norms_before = "input_layernorm" in self.family.layer  # otherwise after the blocks
        self.eps, self.activation = config["rms_norm_eps"], activation(config.get("hidden_act", "silu"))
        self.window = source.config.get("sliding_window", self.family.defaults.get("sliding_window"))
        if "sliding_window" not in self.family.carried:
            self.window = None
        self.dtype = getattr(torch, TORCH_NAMES[dtype or source.entry("model.embed_tokens.weight").dtype])
        self.rotate = rotation(source.config, self.shape)
        self._buffers: dict[tuple[int, int], np.ndarray] = {}

    def module_inputs(self, texts: list[list[int]]) -> Iterator[tuple[int, str, torch.Tensor]]:
        """Yields layer, module and its input `(T, d)` for the tokens of all texts, in the order of a forward pass.

        The module is its name within the layer, such as "mlp" or "self_attn.q_proj"; empty for the layer itself.
        """
        lengths = [len(ids) for ids in texts]
        x = embed(self.source, torch.tensor([i for ids in texts for i in ids])).to(self.device, self.dtype)  # (T, d)
        exact = self.dtype if self.norms_before else torch.float32  # OLMo 2 rounds after the rotation
        rotations = {n: tuple(values.to(self.device) for values in self.rotate(n, exact)) for n in set(lengths)}
        before = self.norms_before
        for layer in range(self.shape.num_hidden_layers):
            yield layer, "", x
            inner = self._norm(x, layer, "input_layernorm") if before else x
            yield from ((layer, f"self_attn.{name}", inner) for name in ("q_proj", "k_proj", "v_proj"))
            mixed = self._attention(inner, layer, lengths, rotations)
            yield layer, "self_attn.o_proj", mixed
            mixed = self._linear(mixed, layer, "o_proj")
            x = x + (mixed if before else self._norm(mixed, layer, "post_attention_layernorm"))
            inner = self._norm(x, layer, "post_attention_layernorm") if before else x
            yield from ((layer, name, inner) for name in ("mlp", "mlp.gate_proj", "mlp.up_proj"))
            inner = self.activation(self._linear(inner, layer, "gate_proj")) * self._linear(inner, layer, "up_proj")
            yield layer, "mlp.down_proj", inner
            inner = self._linear(inner, layer, "down_proj")
            x = x + (inner if before else self._norm(inner, layer, "post_feedforward_layernorm"))

    def _weight(self, name: str) -> torch.Tensor:
        """A tensor in the dtype of the model; valid until another one of its size is read."""
        entry = self.source.entry(name)
        if self.source.is_verbatim(name):
            key = (entry.elements, DTYPE_BYTES[entry.dtype])
            if key not in self._buffers:
                self._buffers[key] = np.empty(entry.elements, f"<u{key[1]}")
            raw = next(read_blocks(entry, entry.elements, buffer=self._buffers[key]))
        else:
            raw = np.concatenate(list(self.source.blocks(name)))
        return to_torch(raw, entry.dtype, entry.shape).to(self.device, self.dtype)

    def _linear(self, x: torch.Tensor, layer: int, name: str) -> torch.Tensor:
        module = f"model.layers.{layer}.{BLOCK_OF[name]}.{name}"
        bias = self._weight(f"{module}.bias").clone() if self.shape.has_bias(name) else None
        return F.linear(x, self._weight(f"{module}.weight"), bias)

    def _norm(self, x: torch.Tensor, layer: int, name: str) -> torch.Tensor:
        """RMSNorm over the last dimension, in float32."""
        exact = x.float()
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.eps)
        weight = self._weight(f"model.layers.{layer}.{name}.weight")
        return weight * exact.to(x.dtype) if self.norms_before else (weight * exact).to(x.dtype)

    def _attention(
        self, x: torch.Tensor, layer: int, lengths: list[int], rotations: dict[int, Rotation]
    ) -> torch.Tensor:
        """Causal attention `(T, d)` -> `(T, heads * head_dim)`, within each text."""
        q, k, v = (self._linear(x, layer, name) for name in ("q_proj", "k_proj", "v_proj"))
        if self.family.head_norms == "all":
            q, k = self._norm(q, layer, "self_attn.q_norm"), self._norm(k, layer, "self_attn.k_norm")
        q, k, v = (states.unflatten(-1, (-1, self.shape.head_dim)) for states in (q, k, v))  # (T, heads, head_dim)
        if self.family.head_norms == "head":
            q, k = self._norm(q, layer, "self_attn.q_norm"), self._norm(k, layer, "self_attn.k_norm")
        mixed = []
        for q1, k1, v1 in zip(*(states.split(lengths) for states in (q, k, v)), strict=True):
            rotate = rotations[len(q1)]
            states = (s.transpose(0, 1)[None] for s in (apply(q1, rotate), apply(k1, rotate), v1))
            mask = None
            if self.window and len(q1) > self.window:
                mask = torch.ones(len(q1), len(q1), dtype=torch.bool).tril().triu(1 - self.window)
            result = F.scaled_dot_product_attention(*states, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
            mixed.append(result[0].transpose(0, 1).flatten(1))
        return torch.cat(mixed)


def apply(x: torch.Tensor, rotate: Rotation) -> torch.Tensor:
    """Rotates the halves of each head of `(T, heads, head_dim)`."""
    cosines, sines = (values[:, None] for values in rotate)
    first, second = x.chunk(2, -1)
    return (x * cosines + torch.cat([-second, first], -1) * sines).to(x.dtype)


def rotation(config: dict[str, Any], shape: Shape) -> Callable[[int, torch.dtype], Rotation]:
    """A function of the number of tokens and a dtype that gives RoPE's cosines and sines. Rare types are those of transformers."""
    settings = rope_parameters(config)
    if settings["rope_type"] not in ("default", "linear", "llama3"):
        return rotation_of_transformers(config)
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim
    frequencies = 1.0 / (settings["rope_theta"] ** exponents)
    if settings["rope_type"] == "linear":
        frequencies = frequencies / settings["factor"]
    if settings["rope_type"] == "llama3":
        low, high = settings["low_freq_factor"], settings["high_freq_factor"]
        length, wavelengths = settings["original_max_position_embeddings"], 2 * math.pi / frequencies
        scaled = torch.where(wavelengths > length / low, frequencies / settings["factor"], frequencies)
        share = (length / wavelengths - low) / (high - low)
        smooth = (1 - share) * scaled / settings["factor"] + share * scaled
        medium = ~(wavelengths < length / high) * ~(wavelengths > length / low)
        frequencies = torch.where(medium, smooth, scaled)

    def rotate(tokens: int, dtype: torch.dtype) -> Rotation:
        angles = torch.arange(tokens)[:, None].float() * frequencies
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    return rotate


def rotation_of_transformers(config: dict[str, Any]) -> Callable[[int, torch.dtype], Rotation]:
    """RoPE as the class of transformers computes it."""
    from transformers import AutoModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    content = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_theta", "layer_types")}
    content |= {"rope_parameters": rope_config_v4_and_v5(config)["rope_parameters"], "num_hidden_layers": 1}
    made = CONFIG_MAPPING[config["model_type"]].from_dict(content)
    with torch.device("meta"):
        model = AutoModel.from_config(made)
    rotary = type(model.rotary_emb)(made)

    def rotate(tokens: int, dtype: torch.dtype) -> Rotation:
        cosines, sines = rotary(torch.zeros(1, dtype=dtype), position_ids=torch.arange(tokens)[None])
        return cosines[0], sines[0]

    return rotate


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """An activation function by its name in config.json."""
    if name in ACTIVATIONS:
        return ACTIVATIONS[name]
    from transformers.activations import ACT2FN

    return ACT2FN[name]
