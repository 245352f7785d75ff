"""Hashes of models, tokenizers and configurations, and how they differ: equal hashes mean equal results."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch


def _digest(parts: Iterable[bytes]) -> str:
    hashed = hashlib.blake2b(digest_size=16)
    for part in parts:
        hashed.update(part)
    return hashed.hexdigest()


def hash_weights(model: torch.nn.Module) -> str:
    """Hash of the names, shapes, types and values of all parameters and buffers, adapters included."""

    def parts():
        for name, tensor in sorted(model.state_dict().items()):
            yield from tensor_parts(name, tensor)

    return _digest(parts())


def tensor_parts(name: str, tensor) -> Iterator[Any]:
    """Bytes that identify an entry of a state dict: its name, shape, type and values; of a quantised tensor, those of its parts."""
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
    content |= {"special": tokenizer.special_tokens_map, "max": tokenizer.model_max_length}
    return _digest([json.dumps(content, sort_keys=True, default=str).encode()])


def hash_config(config) -> dict[str, str]:
    """The fields of a configuration as JSON, so that a difference can be named; long values are replaced by their hash."""
    settings = config.to_dict()
    for name in ("_name_or_path", "transformers_version", "dtype", "custom_pipelines", "auto_map"):
        settings.pop(name, None)
    written = {f"config.{name}": json.dumps(value, sort_keys=True, default=str) for name, value in settings.items()}
    return {name: text if len(text) < 100 else _digest([text.encode()]) for name, text in written.items()}


def hash_text(text: str) -> str:
    """Hash of a text."""
    return _digest([text.encode(errors="replace")])


class NotGiven:
    """A setting that has no value."""

    def __repr__(self) -> str:
        return "(not given)"


NOT_GIVEN = NotGiven()
FINGERPRINTS = {
    "weights": "the model's weights (the checkpoint in that folder was replaced)",
    "tokenizer": "the tokenizer",
    "content": "the documents of the source (they have changed)",
}


def different_settings(before: Mapping, about: Mapping) -> list[str]:
    """The settings that differ. If a model or source was renamed, its other fingerprints are left out."""
    names = [name for name in {**before, **about} if before.get(name, NOT_GIVEN) != about.get(name, NOT_GIVEN)]
    if "model" in names and "weights" not in names and before.get("weights"):
        names.remove("model")  # it was only moved
    elif "model" in names:
        names = [name for name in names if name not in ("weights", "tokenizer") and not name.startswith("config.")]
    if "source" in names:
        names = [name for name in names if name != ("content" if "content" in names else "source")]
    return names


def describe_differences(before: Mapping, about: Mapping) -> list[str]:
    """Messages that name the settings that differ between an earlier run and this one."""
    return [
        FINGERPRINTS[name]
        if name in FINGERPRINTS
        else f"{name}={before.get(name, NOT_GIVEN)!r} before, {about.get(name, NOT_GIVEN)!r} now"
        for name in different_settings(before, about)
    ]
