"""Fingerprints of models, files, folders and Hub repositories, and how settings differ: equal ones mean equal results."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from .errors import short_repr
from .files import sha256_of

# what a training writes beside a model
BESIDE = {"arguments.yml", "results.json", "trainer_state.json", "training_args.bin"}
NOT_READ = (".md", ".pt", ".pth")  # cards, and states of optimisers


def digest(value) -> str:
    """The SHA-256 of a value as JSON."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()


def fingerprint(source: str | Path) -> dict:
    """The `name` of a file, folder or Hub repository, and its content's `sha256`, or the downloaded `commit`."""
    from huggingface_hub import constants

    path = Path(source)
    if path.is_file():
        return {"name": path.name, "sha256": sha256_of(path)}
    if path.is_dir():
        parts = {file: file.relative_to(path).parts for file in sorted(path.rglob("*")) if file.is_file()}
        files = [
            ("/".join(names), sha256_of(file))
            for file, names in parts.items()
            if file.suffix not in NOT_READ and names[-1] not in BESIDE
            if not any(name.startswith((".", "checkpoint-")) for name in names)
        ]
        return {"name": path.resolve().name, "sha256": digest(files)}
    for kind in ("models", "datasets"):
        head = Path(constants.HF_HUB_CACHE) / f"{kind}--{str(source).replace('/', '--')}" / "refs" / "main"
        if head.is_file():
            return {"name": str(source), "commit": head.read_text(encoding="utf-8").strip()}
    return {"name": str(source)}


def is_same(before, now) -> bool:
    """Whether two settings are equal. Fingerprints of contents are whatever their name; before a download, no commit is known."""
    if isinstance(before, dict) and isinstance(now, dict):
        is_known = "commit" in before and "commit" in now
        ignored = "name" if "sha256" in before else None if is_known else "commit"
        return {**before, ignored: None} == {**now, ignored: None}
    return before == now


def differences(before: Mapping, now: Mapping, prefix: str = "") -> str:
    """The settings that differ, such as "top_k=2 before, 3 now"; "" if none does."""

    def show(value) -> str:
        if isinstance(value, dict) and "name" in value:
            return f"{value['name']} ({str(value.get('sha256') or value.get('commit'))[:8]})"
        return short_repr(value)

    found = []
    for name in {**before, **now}:
        old, new = before.get(name), now.get(name)
        if is_same(old, new):
            continue
        if isinstance(old, dict) and isinstance(new, dict) and "name" not in {*old, *new}:
            found.append(differences(old, new, f"{prefix}{name}."))
        else:
            found.append(f"{prefix}{name}={show(old)} before, {show(new)} now")
    return "; ".join(found)


def parse_named_path(argument: str) -> tuple[str, str]:
    """ "FILE" or "NAME=FILE" -> the name, or "", and the file."""
    name, separator, path = argument.partition("=")
    return (name, path) if separator and not Path(argument).exists() else ("", argument)


def hash_weights(model) -> str:
    """Hash of the names, shapes, types and values of all parameters and buffers, adapters included."""
    import torch

    hashed = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        hashed.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        hashed.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return hashed.hexdigest()


def hash_tokenizer(tokenizer) -> str:
    """Hash of the vocabulary, the rules and the special tokens, without the current padding and truncation settings."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = json.loads(backend.to_str()) if backend is not None else {"vocabulary": tokenizer.get_vocab()}
    for name in ("padding", "truncation"):
        content.pop(name, None)
    return digest(content | {"special": tokenizer.special_tokens_map, "max": tokenizer.model_max_length})
