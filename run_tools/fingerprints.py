"""Fingerprints of models, tokenizers, configurations, files, folders and Hub repositories: equal ones mean equal results."""

import hashlib
import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from .files import hash_file

RECORD = "run_settings.json"
# files in a model's folder that are not part of the model
BESIDE_THE_MODEL = (
    RECORD, "results.json", "scores.json", "log.json", "losses.json", "trainer_state.json", "training_args.bin",
    "optimizer.bin", "scheduler.bin",
)  # fmt: skip
MODEL_SUFFIXES = (".safetensors", ".bin", ".json", ".model", ".txt", ".jinja", ".tiktoken")
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow", ".txt")


def hash_weights(model) -> str:
    """Hash of the names, shapes, types and values of all parameters and buffers, adapters included."""
    hashed = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        for part in tensor_parts(name, tensor):
            hashed.update(part)
    return hashed.hexdigest()


def tensor_parts(name: str, tensor) -> Iterator[Any]:
    """Bytes that identify an entry of a state dict: its name, shape, type and values; of a quantised tensor, those of its parts."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        yield f"{name}{tensor!r}".encode()
        return
    yield f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode()
    if tensor.is_meta:  # its values are offloaded
        return
    if hasattr(tensor, "__tensor_flatten__"):  # a subclass, such as torchao's: its repr leaves values out
        parts, settings = tensor.__tensor_flatten__()
        yield repr(settings).encode()
        for part in parts:
            yield from tensor_parts(f"{name}.{part}", getattr(tensor, part))
        return
    if tensor.is_quantized:
        yield f"{tensor.qscheme()}".encode()
        tensor = tensor.dequantize()
    yield tensor.detach().cpu().to_dense().contiguous().flatten().view(torch.uint8).numpy()


def hash_tokenizer(tokenizer) -> str:
    """Hash of the vocabulary, the rules and the special tokens, without the current padding and truncation settings."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = json.loads(backend.to_str()) if backend is not None else {"vocabulary": tokenizer.get_vocab()}
    for name in ("padding", "truncation"):
        content.pop(name, None)
    return digest(content | {"special": tokenizer.special_tokens_map, "max": tokenizer.model_max_length})


def digest(value) -> str:
    """The SHA-256 of a value as JSON."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()


@lru_cache(maxsize=4096)
def cached_sha256(path: str, size: int, modified: int) -> str:
    """The hash of a file; `size` and `modified` are part of the cache's key."""
    return hash_file(Path(path))


def sha256_of(path: Path) -> str:
    """The hash of a file's content. A file is read again only if its size or modification time changed."""
    status = path.stat()
    return cached_sha256(str(path.resolve()), status.st_size, status.st_mtime_ns)


def content_files(folder: Path) -> list[Path]:
    """The files of a model or dataset folder, without what training and scoring write beside them."""
    is_model = (folder / "config.json").exists() or (folder / "adapter_config.json").exists()
    suffixes = MODEL_SUFFIXES if is_model else DATA_SUFFIXES
    paths = []
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        ignored = path.name.startswith((".", "states")) or (is_model and path.name in BESIDE_THE_MODEL)
        other = any(part.startswith((".", "checkpoint-", "seed-")) or part in ("base", "first") for part in parts[:-1])
        if path.is_file() and path.suffix in suffixes and not ignored and not other:
            paths.append(path)
    return paths


def fingerprint(source: str | Path) -> dict:
    """The `name` of a file, folder or Hub repository, and its content's `sha256`, or the downloaded `commit`."""
    from huggingface_hub import constants

    path = Path(source)
    if path.is_file():
        return {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256_of(path)}
    if path.is_dir():
        files = [(file.relative_to(path).as_posix(), sha256_of(file)) for file in content_files(path)]
        return {"name": path.resolve().name, "sha256": hashlib.sha256(json.dumps(files).encode()).hexdigest()}
    for kind in ("models", "datasets"):
        head = Path(constants.HF_HUB_CACHE) / f"{kind}--{str(source).replace('/', '--')}" / "refs" / "main"
        if head.is_file():
            return {"name": str(source), "commit": head.read_text(encoding="utf-8").strip()}
    return {"name": str(source)}


def parse_named_path(argument: str) -> tuple[str, str]:
    """ "FILE" or "NAME=FILE" -> the name, or "", and the file."""
    name, separator, path = argument.partition("=")
    return (name, path) if separator and not Path(argument).exists() else ("", argument)


def named_fingerprint(argument: str) -> dict:
    """The fingerprint of "FILE" or "NAME=FILE", with the name under `as`."""
    name, path = parse_named_path(argument)
    return ({"as": name} if name else {}) | fingerprint(path)
