"""A mixture as one GGUF file for llama.cpp, written one tensor at a time, and renamed when it is complete."""

import math
import os
import re
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

try:
    import gguf
except ImportError as error:
    raise ImportError("Writing GGUF files needs gguf. Install the extra lexperts[gguf].") from error

from run_tools.errors import UserError

from .check import check_complete
from .families import MIXTURES, MixtureClass
from .gguf_tokenizer import add_tokenizer
from .sources import Source, read_json
from .writer import Item, new_folder, raw_bits

ROPES = {"LLAMA": ("default", "linear", "yarn", "llama3"), "QWEN3MOE": ("default", "linear", "yarn")}
YARN = {"rope_type", "rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow"}
EXPERT = re.compile(r"experts\.\d+\.")
FILE_TYPES = {"BF16": "MOSTLY_BF16", "F16": "MOSTLY_F16", "F32": "ALL_F32"}


def export_gguf(mixture: str | Path, out: str | Path) -> dict[str, Any]:
    """Writes a folder with a mixture of a stock class as a GGUF file. Weights keep their dtype; norms, biases and gates are float32.

    Returns `out`, `tensors`, `bytes`, `architecture` (of llama.cpp) and `warnings`. Raises a `UserError` if llama.cpp cannot represent
    the mixture, or `out` exists.
    """
    folder, out = Path(mixture).expanduser(), Path(out).expanduser().resolve()
    config, kinds = read_json(folder / "config.json"), {name: kind for name, kind in MIXTURES.items() if kind.gguf}
    if (model_type := str(config.get("model_type"))) not in kinds:
        way = " Export it as one of them first." * (model_type == "lexicon" and not config.get("attention_bias"))
        raise UserError(f"{folder}: model_type is {model_type!r:.60}, but llama.cpp has {', '.join(kinds)}.{way}")
    kind = kinds[model_type]
    source = Source("mixture", str(mixture), folder)
    check_config(source, kind)
    size = getattr(source.config, "head_dim", None) or source.config.hidden_size // source.config.num_attention_heads
    items, types = gguf_items(source, kind, size), gguf.GGMLQuantizationType
    with new_folder(out, keep=False) as scratch:
        path = scratch / out.name
        with closing(gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[kind.gguf]])) as writer:
            add_metadata(writer, source, kind, size, gguf.LlamaFileType[FILE_TYPES[items[0].dtype]])
            add_tokenizer(writer, source.folder, source.config.vocab_size)
            for item in items:  # numpy has no bfloat16: the last argument sets the type
                writer.add_tensor_info(item.name, item.shape, np.dtype("f4"), item.nbytes, types[item.dtype])
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            total = sum(item.nbytes for item in items)
            with tqdm(total=total, unit="B", unit_scale=True, desc="writing", disable=None) as bar:
                for item in items:
                    writer.write_tensor_data(raw_bits(item.value()))
                    bar.update(item.nbytes)
        if os.path.lexists(out):
            raise UserError(f"{out} was created by another program. Choose another file.")
        os.rename(path, out)
    window, warnings = getattr(source.config, "sliding_window", None), []
    if window and window < source.config.max_position_embeddings:
        warnings = [f"llama.cpp ignores sliding_window: texts of more than {window} tokens give other results."]
    summary = {"out": str(out), "tensors": len(items), "bytes": out.stat().st_size, "architecture": kind.gguf}
    return summary | {"warnings": warnings}


def check_config(source: Source, kind: MixtureClass) -> None:
    """Raises a `UserError` for the first setting that llama.cpp's architecture does not have."""
    config, rope, is_qwen = source.config, source.config.rope_parameters, kind.model_type != "mixtral"
    extra = [k for k, v in rope.items() if k not in YARN and v is not None and (k, v) != ("truncate", True)]
    problems = {
        f"hidden_act={config.hidden_act!r:.60}": config.hidden_act not in ("silu", "swish"),
        f"rope_type={rope['rope_type']!r:.60}": rope["rope_type"] not in ROPES[kind.gguf],
        f"{', '.join(extra)} of yarn": rope["rope_type"] == "yarn" and extra,
        "attention_bias=True": kind.gguf != "LLAMA" and config.attention_bias,
        "norm_topk_prob=False": is_qwen and not config.norm_topk_prob,
        "layers without experts": is_qwen and (config.mlp_only_layers or config.decoder_sparse_step > 1),
        "fused experts, as mergekit writes (compose it again)": any(".gate_up_proj" in n for n in source.specs),
    }
    if problem := next((text for text, found in problems.items() if found), None):
        raise UserError(f"{source.folder}: llama.cpp cannot represent a {kind.model_type} with {problem}.")


def gguf_items(source: Source, kind: MixtureClass, size: int) -> list[Item]:
    """The tensors of the file: one of all experts for each linear layer, and no shared expert, which must be zero.

    Raises a `UserError` if one is missing, has another shape or dtype, or has no counterpart in llama.cpp.
    """
    from transformers.core_model_loading import dot_natural_key

    names, items = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.gguf], source.config.num_hidden_layers), list[Item]()
    shapes, parts = check_complete(source), dict[str, list[str]]()  # name in the file -> the stored tensors in it
    for name in sorted(shapes, key=dot_natural_key):
        if ".shared_expert" not in name:
            parts.setdefault(names.get_name(EXPERT.sub("experts.", name), (".weight", ".bias")), []).append(name)
        elif name.endswith("down_proj.weight") and source[name].any():
            raise UserError(f"{source.folder}: {name} is not zero, but llama.cpp's llama has no shared expert.")
    for name, stored in parts.items():
        shape, dtypes = shapes[stored[0]], {source.specs[part][0] for part in stored}
        if len(dtypes) > 1 or dtypes - FILE_TYPES.keys():
            raise UserError(f"{source.folder}: {stored[0]} has not one of {', '.join(FILE_TYPES)} in all experts.")
        dtype = "F32" if len(shape) == 1 or ".ffn_gate_inp." in name else dtypes.pop()
        shape = (len(stored), *shape) if EXPERT.search(stored[0]) else shape
        items.append(Item(name, dtype, shape, source.name, partial(load, source, kind, stored)))
    if source.config.rope_parameters["rope_type"] == "llama3":
        factors = partial(llama3_factors, source.config.rope_parameters, size)
        items.append(Item("rope_freqs.weight", "F32", (size // 2,), source.name, factors))
    return items


def load(source: Source, kind: MixtureClass, stored: list[str]) -> torch.Tensor:
    """A tensor, or those of all experts (E, out, in), of which only one is in memory besides the result.

    llama.cpp's llama rotates neighbouring pairs of a head's values, transformers its first and second half: rows of q and k move.
    """
    tensor = source[stored[0]]
    if len(stored) > 1:
        stack = tensor.new_empty((len(stored), *tensor.shape))
        for index, name in enumerate(stored):
            stack[index] = source[name]
        return stack
    heads = {"q_proj": source.config.num_attention_heads, "k_proj": source.config.num_key_value_heads}
    if kind.gguf != "LLAMA" or (module := stored[0].split(".")[-2]) not in heads:
        return tensor
    return tensor.reshape(heads[module], 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def llama3_factors(rope: dict[str, Any], size: int) -> torch.Tensor:
    """The factors that divide the RoPE frequencies, (size / 2,), as `llama3` settings define them (Llama 3.1)."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    frequencies = rope["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / rope["factor"] + smooth)


def add_metadata(writer: Any, source: Source, kind: MixtureClass, size: int, file_type: int) -> None:
    """Adds all fields but those of the tokenizer to a `gguf.GGUFWriter`."""
    config, rope = source.config, source.config.rope_parameters
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(source.folder.resolve().name)
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(width)
    if kind.gguf != "LLAMA":
        writer.add_expert_feed_forward_length(width)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(float(rope["factor"]))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(float(rope.get("beta_fast") or 32))
        writer.add_rope_scaling_yarn_beta_slow(float(rope.get("beta_slow") or 1))
