"""A mixture as one GGUF file for llama.cpp, streamed tensor by tensor and renamed when it is complete."""

import contextlib
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from run_tools.errors import expand_user
from run_tools.files import sync

from .averaging import to_float32
from .checkpoints import Source, open_source
from .config_checks import find_value_errors
from .errors import MergeError
from .families import MIXTURES, MixtureClass
from .findings import Report
from .fused_experts import FUSED
from .gguf_tokenizer import add_tokenizer
from .layout import RoutedPart, Shape, mixture_layout, rope_parameters, routed_parts
from .output_folder import check_disk, existing_parent
from .shard_writer import Progress
from .tensor_files import PIECE, TORCH_NAMES, TensorEntry, read_blocks

CONVERTER = "LLAMA_CPP_CONVERTER"
ALIGNMENT = 32  # bytes, of a tensor's data in a GGUF file
QUANTIZED = "Q8_0"  # 8 bits: 32 weights share a float16 scale
GROUP, GROUP_BYTES = 32, 34
ROPES = {"LLAMA": ("default", "linear", "yarn", "llama3"), "QWEN3MOE": ("default", "linear", "yarn")}
YARN = ("rope_type", "rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file: its name, shape and dtype (safetensors' name), and the stored tensors or values that it consists of."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[TensorEntry, ...] = ()
    heads: int = 0  # in each of which the halves of the rows are interleaved
    values: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes without the padding after it."""
        count = math.prod(self.shape)
        return count // GROUP * GROUP_BYTES if self.dtype == QUANTIZED else count * (4 if self.dtype == "F32" else 2)

    def blocks(self) -> Iterator[np.ndarray]:
        """Yields its elements in blocks."""
        import gguf

        if self.values is not None:
            yield self.values
        for part in self.parts:
            for block in read_blocks(part, part.elements // self.heads if self.heads else PIECE):
                if self.heads:
                    half = part.shape[0] // self.heads // 2
                    block = np.ascontiguousarray(block.reshape(2, half, -1).swapaxes(0, 1)).ravel()
                if self.dtype != part.dtype:
                    block = to_float32(block, part.dtype)
                if self.dtype == QUANTIZED:
                    block = gguf.quantize(block.reshape(-1, GROUP), gguf.GGMLQuantizationType[QUANTIZED])
                yield block


def export_gguf(
    mixture: str | Path,
    out: str | Path,
    *,
    converter: str | Path | None = None,
    quantize: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Writes a mixture as a GGUF file. The weights keep their dtype, or are quantized; norms, biases and gates are float32.

    Args:
        mixture: a folder with a mixture of a stock class, also one of mergekit after `split_fused_experts`.
        out: the file, which must not exist.
        converter: llama.cpp's convert_hf_to_gguf.py, to be run instead. Default: the environment variable
            LLAMA_CPP_CONVERTER; without it the file is written here by the package `gguf`.
        quantize: "q8_0" for weights of 8 bits, rounded as llama.cpp does, without a converter; llama-quantize has more.
        progress: receives the progress.

    Returns:
        What was written, and `warnings`.

    Raises:
        MergeError: if llama.cpp cannot represent the mixture, or `out` is not free.
        ImportError: if `gguf` is not installed.
    """
    source, out = open_source("mixture", str(mixture)), expand_user(out).resolve()
    shape, kind = check_source(source)
    warnings = find_warnings(source, shape)
    rewritten = kind.gguf == "LLAMA" and kind.model_type != "mixtral"
    if rewritten and converter:
        raise MergeError(
            f"llama.cpp's own {kind.model_type} does not normalise the weights of the selected experts, and divides zero by "
            "zero for the shared expert. Leave out --converter: the file is then a llama, which computes the same."
        )
    if quantize not in (None, QUANTIZED.lower()):
        raise MergeError(f"Invalid quantize: {quantize!r:.60}. Use {QUANTIZED.lower()}; llama-quantize has more.")
    if quantize and converter:
        raise MergeError("A converter does not quantize. Leave out --converter, or run llama-quantize on its file.")
    converter = converter or (None if rewritten or quantize else os.environ.get(CONVERTER))
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ImportError("Writing GGUF files needs gguf. Install it with: pip install 'lexperts[gguf]'") from error
    if converter:
        check_output_file(out, source, sum(entry.nbytes for entry in source.checkpoint.entries.values()))
        with staged_file(out) as path:
            run_converter(expand_user(converter), source.folder, path)
            nbytes = path.stat().st_size
        return {"out": str(out), "bytes": nbytes, "written_by": str(converter), "warnings": warnings}
    tensors = plan_tensors(source, shape, kind)
    if quantize:
        tensors = [quantized(tensor) for tensor in tensors]
    check_output_file(out, source, sum(tensor.nbytes + ALIGNMENT for tensor in tensors))
    with staged_file(out) as path:
        write_header(path, source, shape, kind, tensors)
        write_data(path, tensors, progress or Progress())
        nbytes = path.stat().st_size
    return {"out": str(out), "tensors": len(tensors), "bytes": nbytes, "architecture": kind.gguf, "warnings": warnings}


def check_source(source: Source) -> tuple[Shape, MixtureClass]:
    """Checks that llama.cpp can represent a folder; raises a `MergeError` with the reason if not."""
    config, able = source.config, ", ".join(name for name, kind in MIXTURES.items() if kind.gguf)
    model_type = config.get("model_type")
    kind = MIXTURES.get(model_type) if isinstance(model_type, str) else None
    if kind is None or not kind.gguf:
        raise MergeError(
            f"{source.folder} has model_type {model_type!r:.60}, which llama.cpp does not have. It reads mixtures of these "
            f"types: {able}. For a lexicon mixture: export it with --format mixtral first."
        )
    if errors := find_value_errors(config):
        raise MergeError(f"{source.folder}/config.json: {errors[0]}. Copy or compose the mixture again.")
    if any(FUSED.fullmatch(name) for name in source.checkpoint.entries):
        raise MergeError(
            f"{source.folder} has fused experts. Export it with --from-mergekit first, and then the result."
        )
    shape, rope = source.shape, rope_parameters(config)
    problem = None
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        problem = f"hidden_act is {config['hidden_act']!r:.60}; its experts have silu"
    elif rope["rope_type"] not in ROPES[kind.gguf]:
        problem = f"rope_type is {rope['rope_type']!r:.60}; this architecture has {', '.join(ROPES[kind.gguf])}"
    elif rope["rope_type"] == "yarn" and (unknown := [key for key in rope if key not in YARN]):
        problem = f"{unknown[0]} of yarn is set"
    elif kind.gguf != "LLAMA" and shape.attention_bias:
        problem = "attention_bias is true; this architecture has no bias in o_proj"
    elif kind.model_type != "mixtral" and not config.get("norm_topk_prob"):
        problem = "norm_topk_prob is not true; weights of the selected experts are always normalised"
    if problem:
        raise MergeError(f"llama.cpp cannot represent {source.folder}: {problem}.")
    return shape, kind


def find_warnings(source: Source, shape: Shape) -> list[str]:
    """What the file does not hold."""
    window, longest = source.config.get("sliding_window"), source.config.get("max_position_embeddings", 0)
    if shape.family.mixture == "mixtral" and window and window < longest:
        return [f"llama.cpp ignores sliding_window: texts of more than {window} tokens give other results."]
    return []


def check_output_file(out: Path, source: Source, needed: int):
    """Checks that the file does not exist, that its folder is writable and not a source, and the free space."""
    parent = existing_parent(out)
    if os.path.lexists(out):
        raise MergeError(f"{out} exists. Choose another file, or delete it first.")
    if source.folder.resolve() in out.parents:
        raise MergeError(
            f"{out} is inside the source {source.folder}, which must not be modified. Choose another folder."
        )
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise MergeError(f"{out} cannot be created: {parent} is not a writable folder.")
    report = Report()
    check_disk(report, out, needed)
    report.raise_for_errors()


@contextlib.contextmanager
def staged_file(out: Path) -> Iterator[Path]:
    """A new file next to `out`, which gets its name when the block ends without an error."""
    out.parent.mkdir(parents=True, exist_ok=True)
    path = out.with_name(f".{out.name}.{os.getpid()}.partial")
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield path
        sync(path)
        if os.path.lexists(out):
            raise MergeError(f"{out} was created by another program. Choose another file.")
        os.rename(path, out)
        sync(out.parent)
    finally:
        path.unlink(missing_ok=True)


def run_converter(converter: Path, folder: Path, out: Path):
    """Runs llama.cpp's converter in this Python; raises a `MergeError` with the end of its output if it fails."""
    if not converter.is_file():
        raise MergeError(f"The converter {converter} does not exist. Give llama.cpp's convert_hf_to_gguf.py.")
    command = [sys.executable, str(converter), str(folder), "--outfile", str(out), "--outtype", "auto"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise MergeError(f"{converter} failed with status {done.returncode}: {reason:.300}")


def plan_tensors(source: Source, shape: Shape, kind: MixtureClass) -> list[GgufTensor]:
    """The tensors of the file in the order of a forward pass.

    Raises:
        MergeError: if one is missing, has another shape, or has no counterpart in llama.cpp.
    """
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.gguf], shape.num_hidden_layers)
    entries, tensors = dict(source.checkpoint.entries), list[GgufTensor]()
    expected, experts = shape.tensors(), kind.count(source.config)

    def take(name: str, dims: tuple[int, ...]) -> TensorEntry:
        entry = entries.pop(name, None)
        if entry is None or entry.shape != dims or entry.dtype not in TORCH_NAMES or entry.dtype == "F64":
            found = f"has {list(entry.shape)}, {entry.dtype}" if entry else "does not have it"
            raise MergeError(
                f"{name!r} of shape {list(dims)} is needed in float32 or less, but {source.folder} {found}."
            )
        return entry

    def gguf_name(name: str) -> str:
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise MergeError(f"{name!r} has no counterpart in llama.cpp's {kind.gguf}.")
        return found

    for item in mixture_layout(shape, routed_parts(shape.num_hidden_layers, ["mlp"], None, kind)):
        if isinstance(item, str):
            entry = take(item, expected[item])
            dtype = entry.dtype if len(entry.shape) > 1 else "F32"
            tensors.append(GgufTensor(gguf_name(item), entry.shape, dtype, (entry,), heads_of(item, shape, kind)))
            continue
        gate = take(item.gate, (experts, shape.hidden_size))
        tensors.append(GgufTensor(gguf_name(item.gate), gate.shape, "F32", (gate,)))
        for dense, suffix in item.expert_tensors(shape):
            parts = tuple(take(item.expert(index, suffix), expected[dense]) for index in range(experts))
            if len({part.dtype for part in parts}) > 1:
                raise MergeError(
                    f"{parts[0].name!r} and the same tensor of other experts have different dtypes. Set dtype in the recipe."
                )
            name = gguf_name(dense.replace(".mlp.", ".mlp.experts."))
            tensors.append(GgufTensor(name, (experts, *parts[0].shape), parts[0].dtype, parts))
        take_shared_expert(source, item, shape, take)
    if rope_parameters(source.config)["rope_type"] == "llama3":
        factors = llama3_factors(rope_parameters(source.config), shape.head_dim)
        tensors.append(GgufTensor("rope_freqs.weight", factors.shape, "F32", values=factors))
    if entries:
        raise MergeError(
            f"{source.folder} has the tensor {next(iter(entries))!r}, which a {kind.model_type} does not have."
        )
    return tensors


def quantized(tensor: GgufTensor) -> GgufTensor:
    """A matrix in 8 bits; vectors, and the gates' float32, stay.

    Raises:
        MergeError: if the length of its rows is not a multiple of the weights that share a scale.
    """
    if len(tensor.shape) < 2 or ".ffn_gate_inp." in tensor.name:
        return tensor
    if tensor.shape[-1] % GROUP:
        raise MergeError(
            f"{tensor.name!r} has rows of {tensor.shape[-1]}, and {QUANTIZED} needs a multiple of {GROUP}."
        )
    return replace(tensor, dtype=QUANTIZED)


def take_shared_expert(source: Source, part: RoutedPart, shape: Shape, take: Callable):
    """Checks that a shared expert adds nothing: the file has none."""
    for name, dims in part.zero_tensors(shape).items():
        entry = take(name, dims)
        if name.endswith("down_proj.weight") and any(block.any() for block in read_blocks(entry, PIECE)):
            raise MergeError(
                f"{source.folder} has a shared expert that is not zero ({name!r}), and the file would lose it."
            )


def heads_of(name: str, shape: Shape, kind: MixtureClass) -> int:
    """The heads of a tensor whose rows llama.cpp has in another order; 0 for all others.

    Its `llama` rotates neighbouring pairs of a head's values, transformers its first and second half.
    """
    match = re.search(r"self_attn\.([qk])_proj\.(weight|bias)$", name)
    if kind.gguf != "LLAMA" or not match:
        return 0
    return shape.num_attention_heads if match[1] == "q" else shape.num_key_value_heads


def llama3_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """The factors that divide the RoPE frequencies, `(head_dim / 2,)`, as `llama3` settings define them (Llama 3.1)."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    turns = rope["original_max_position_embeddings"] * rope["rope_theta"] ** -exponents / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype("<f4")


def write_header(path: Path, source: Source, shape: Shape, kind: MixtureClass, tensors: list[GgufTensor]):
    """Writes metadata, tokenizer and the list of tensors."""
    import gguf

    config, rope = source.config, rope_parameters(source.config)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[kind.gguf]])
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(source.folder.resolve().name)
    types = {
        "BF16": gguf.LlamaFileType.MOSTLY_BF16,
        "F16": gguf.LlamaFileType.MOSTLY_F16,
        "F32": gguf.LlamaFileType.ALL_F32,
        QUANTIZED: gguf.LlamaFileType.MOSTLY_Q8_0,
    }
    writer.add_file_type(types[tensors[0].dtype])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_context_length(config.get("max_position_embeddings", shape.family.defaults["max_position_embeddings"]))
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_hidden_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    if kind.gguf != "LLAMA":
        writer.add_expert_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_attention_heads)
    writer.add_head_count_kv(shape.num_key_value_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", shape.family.defaults["rms_norm_eps"]))
    writer.add_expert_count(kind.count(config))
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(float(rope["factor"]))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(float(rope.get("beta_fast", 32)))
        writer.add_rope_scaling_yarn_beta_slow(float(rope.get("beta_slow", 1)))
    add_tokenizer(writer, source.folder, shape.vocab_size)
    for tensor in tensors:
        # the type of an element is set by raw_dtype; numpy has no bfloat16
        options = {"raw_dtype": gguf.GGMLQuantizationType[tensor.dtype]}
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype("f4"), tensor.nbytes, **options)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def write_data(path: Path, tensors: list[GgufTensor], progress: Progress):
    """Appends the tensors, each aligned, in blocks."""
    progress.start("write", sum(tensor.nbytes for tensor in tensors))
    with open(path, "r+b") as handle:
        handle.seek(0, os.SEEK_END)
        for tensor in tensors:
            handle.write(bytes(-handle.tell() % ALIGNMENT))
            for block in tensor.blocks():
                handle.write(block.data)
                progress.advance("write", block.nbytes)
        handle.write(bytes(-handle.tell() % ALIGNMENT))
