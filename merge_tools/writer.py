"""Writes a checkpoint one tensor at a time, in a folder beside the output that is renamed when it is complete."""

import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from run_tools.errors import UserError
from run_tools.files import locked

from .sources import DTYPES, INDEX

SHARD_BYTES = 5_000_000_000
BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
# whose bits are all 1 in NaN and infinity
EXPONENTS = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000, "F64": 0x7FF << 52}


class Item(NamedTuple):
    """A tensor of an output: name, dtype (safetensors' name) and shape, the model that it comes from, and what loads it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: str
    load: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * BYTES[self.dtype]

    def value(self) -> torch.Tensor:
        """The tensor in its dtype. Raises a `UserError` if it holds NaN or infinity, also because it exceeds the dtype's range."""
        loaded = self.load()
        value = loaded.to(DTYPES[self.dtype]).contiguous()
        if has_nonfinite(value):
            if has_nonfinite(loaded.contiguous()):
                raise UserError(f"{self.source}: {self.name} holds NaN or infinity. Use an earlier checkpoint.")
            raise UserError(f"{self.source}: {self.name} exceeds the range of {self.dtype}. Use dtype: bfloat16.")
        return value


def has_nonfinite(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds NaN or infinity. As integers these are the largest numbers, without a sign and with it."""
    raw = raw_bits(tensor)
    if not raw.size:
        return False
    mask, sign = EXPONENTS[next(n for n, d in DTYPES.items() if d == tensor.dtype)], 1 << (8 * raw.itemsize - 1)
    return bool(raw.view(f"i{raw.itemsize}").max() >= mask or raw.max() >= sign | mask)


def raw_bits(tensor: torch.Tensor) -> np.ndarray:
    """The elements of a tensor as unsigned integers of their width, without a copy."""
    flat = tensor.reshape(-1).contiguous().view(torch.uint8)
    return flat.numpy().view(f"<u{tensor.dtype.itemsize}")


@contextmanager
def new_folder(out: str | Path, keep: bool = True) -> Iterator[Path]:
    """A folder `OUT.partial`, which becomes `out` when the block ends without an error, and is removed after one, or without `keep`.

    Raises a `UserError` if `out` is not free, or a run that was killed, or still runs, has left such a folder.
    """
    out = Path(out).expanduser().resolve()
    if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not empty. Choose another folder, or delete it first.")
    partial = out.with_name(f"{out.name}.partial")
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        partial.mkdir()
    except FileExistsError:
        raise UserError(f"{partial} exists: another run writes there, or was killed. Delete it, or wait.") from None
    try:
        yield partial
        if keep:
            os.rename(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_tensors(folder: Path, items: list[Item], shard_bytes: int = SHARD_BYTES) -> None:
    """Writes tensors into safetensors files of at most `shard_bytes`, and their index. A larger tensor gets a file of its own."""
    shards: list[list[Item]] = [[]]
    filled = 0
    for item in items:
        filled += item.nbytes
        if shards[-1] and filled > shard_bytes:
            shards.append([])
            filled = item.nbytes
        shards[-1].append(item)
    total, placed = sum(item.nbytes for item in items), dict[str, str]()
    if (free := shutil.disk_usage(folder).free) < total:
        raise UserError(f"{folder.parent}: {total / 1e9:.1f} GB are needed, but {free / 1e9:.1f} GB are free.")
    with tqdm(total=total, unit="B", unit_scale=True, desc="writing", disable=None) as bar:
        for number, shard in enumerate(shards, 1):
            one = len(shards) == 1
            name = "model.safetensors" if one else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            placed |= {item.name: name for item in shard}
            with locked(folder / name) as file:  # names a file that the disk has no room for
                write_shard(file, shard, bar)
    if len(shards) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": placed})


def write_shard(file: IO[bytes], items: list[Item], bar: tqdm) -> None:
    """Writes one safetensors file, and waits until it is on the disk."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    start = 0
    for item in items:
        header[item.name] = {"dtype": item.dtype, "shape": item.shape, "data_offsets": [start, start + item.nbytes]}
        start += item.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)  # aligns the data
    file.write(struct.pack("<Q", len(text)) + text)
    for item in items:
        value = item.value()
        if tuple(value.shape) != item.shape:
            raise UserError(f"{item.source}: {item.name} has shape {tuple(value.shape)} instead of {item.shape}.")
        file.write(raw_bits(value).data)
        bar.update(item.nbytes)
    file.flush()
    os.fsync(file.fileno())


def write_json(path: Path, content: dict) -> None:
    """Writes an indented JSON file."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
