"""Models whose package holds only what training has added to a packaged model: opened with it, and with one copy of it on disk.

A package has `trained.safetensors` and config.json, and what differs of the tokenizer. On first use a folder in the cache gets these, the
backbone's tokenizer, a hard link to its weights, and the index of a checkpoint in two files, which `from_pretrained` opens.

In `trained.safetensors` a thin matrix of 8 bits, or a stack of them, is one of int8 and, as NAME.scale, the scales of the rank's dimensions. A name with `.*.` is the
part that all experts share: it stands before each expert's own, along the rank, which is the shorter side.
"""

import json
import os
import re
import shutil
from functools import partial
from hashlib import blake2b
from pathlib import Path

from .errors import UserError
from .fingerprints import digest, sha256_of
from .model_files import CONFIG, KEY_MAPPING
from .pretrained import cache_folder, unpacked, unpacked_folder, write_once

WEIGHTS, TRAINED, BACKBONE = "model.safetensors", "trained.safetensors", "backbone.safetensors"
INDEX = "model.safetensors.index.json"
SCALE, ANY_EXPERT = ".scale", ".*."
COPIED = (".json", ".txt", ".jinja", ".md")
TOKENIZER = ("tokenizer", "chat_template", "special_tokens")  # how the names of a tokenizer's files begin


def is_partial(package: Path) -> bool:
    """Whether the folder of a package lacks the model that its weights were added to."""
    return (package / TRAINED).is_file() and not (package / WEIGHTS).exists()


def backbone_of(package: Path) -> str:
    """The name of the packaged model that the weights of a package were added to."""
    from safetensors import safe_open

    with safe_open(package / TRAINED, "np") as file:
        return file.metadata()["backbone"]


def joined(package: Path) -> Path:
    """The folder in the cache with the complete model of a package; written on first use.

    Raises:
        UserError: if the packaged model that it was trained on is not installed, or was changed.
    """
    content = [
        (path.name, sha256_of(path)) for path in sorted(package.iterdir()) if path.suffix in (*COPIED, ".safetensors")
    ]
    folder = cache_folder() / f"{package.name}-{digest(content)[:12]}"
    write_once(folder, partial(join, package))
    for name in (INDEX, BACKBONE, TRAINED, CONFIG):
        check_present(folder / name)
    about = json.loads((folder / INDEX).read_text(encoding="utf-8"))["metadata"]
    if state_of(folder / BACKBONE) != about["backbone_state"]:
        source = unpacked_folder(backbone_of(package)) / WEIGHTS
        linked = source.is_file() and source.samefile(folder / BACKBONE)
        check_backbone(folder / BACKBONE, about["backbone_digest"], folder, *([source.parent] if linked else []))
    return folder


def join(package: Path, folder: Path) -> None:
    """Writes the complete model of a package into an empty folder."""
    from safetensors import safe_open
    from safetensors.numpy import save_file

    with safe_open(package / TRAINED, "np") as file:
        about, stored = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    original = unpacked(about["backbone"])
    weights = original / WEIGHTS
    check_backbone(weights, about["backbone_digest"], original)
    tokenizer = [path for path in original.iterdir() if path.name.startswith(TOKENIZER)]
    for path in (*tokenizer, *package.iterdir()):  # the package's own come last
        if path.suffix in COPIED:
            shutil.copyfile(path, folder / path.name)
    tensors = expand(stored)
    save_file(tensors, folder / TRAINED, {"format": "pt"})
    try:
        os.link(weights, folder / BACKBONE)
    except OSError:  # a file system without hard links
        shutil.copy2(weights, folder / BACKBONE)
    with safe_open(weights, "np") as file:
        places = dict.fromkeys(file.keys(), BACKBONE) | dict.fromkeys(tensors, TRAINED)
    total = sum((folder / name).stat().st_size for name in (BACKBONE, TRAINED))
    metadata = {"total_size": total, KEY_MAPPING: json.loads(about[KEY_MAPPING])}
    metadata |= {"backbone_digest": about["backbone_digest"], "backbone_state": state_of(folder / BACKBONE)}
    (folder / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": places}, indent=1), encoding="utf-8")


def expand(stored: dict) -> dict:
    """The tensors of a `trained.safetensors` as arrays -> as they are in a checkpoint, in float16."""
    import numpy as np

    tensors = {name: array for name, array in stored.items() if not name.endswith(SCALE)}
    for name, array in tensors.items():
        if array.dtype == np.int8:
            tensors[name] = (array * stored[name + SCALE].astype(np.float32)).astype(np.float16)
    for name in [name for name in tensors if ANY_EXPERT in name]:
        common, pattern = tensors.pop(name), re.compile(re.escape(name).replace(r"\*", r"\d+"))
        for own in filter(pattern.fullmatch, tensors):
            axis = int(tensors[own].shape[0] > tensors[own].shape[1])
            tensors[own] = np.ascontiguousarray(np.concatenate([common, tensors[own]], axis))
    return tensors


def quantize(factor):
    """Thin matrices of floats (..., m, n) -> int8 (..., m, n), and one scale for each of the rank's dimensions, (..., m, 1) or
    (..., 1, n), float16.
    """
    import numpy as np

    longer = -1 if factor.shape[-2] < factor.shape[-1] else -2
    scale = (np.abs(factor).max(longer, keepdims=True) / 127).astype(np.float16)
    steps = np.divide(factor, scale, out=np.zeros(factor.shape, np.float32), where=scale > 0, dtype=np.float32)
    return np.clip(np.rint(steps), -127, 127).astype(np.int8), scale


def digest_of(weights: Path) -> str:
    """A hash of the names, types, shapes and values of the tensors in a file, which another version of safetensors writes otherwise."""
    hashed = blake2b(digest_size=16)
    with open(weights, "rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items()):
            start, end = entry["data_offsets"]
            stream.seek(8 + size + start)
            hashed.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
            hashed.update(stream.read(end - start))
    return hashed.hexdigest()


def state_of(path: Path) -> list[int]:
    """Size and time of the last change of a file: while they are the same, it is not read again."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def check_present(path: Path) -> None:
    """Raises a `UserError` for a file that is missing in a folder of the cache."""
    if not path.is_file():
        raise UserError(f"{path} is missing. Delete the folder {path.parent}, which is written again.")


def check_backbone(weights: Path, expected: str, *folders: Path) -> None:
    """Raises a `UserError` if the weights, which these folders hold, are missing, or not those that a model was trained on."""
    check_present(weights)
    if digest_of(weights) != expected:
        several = len(folders) > 1
        raise UserError(
            f"{weights} is damaged, or not the model that the weights of the package were added to: its tensors have another hash. Delete "
            f"the {'folders' if several else 'folder'} {' and '.join(map(str, folders))}, which {'are' if several else 'is'} written again."
        )
