"""safetensors files as byte ranges: headers, copies by the kernel, and the look for values that are not numbers.

Nothing here holds a tensor whole: what is read is read in blocks, and what can be copied never enters the process.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .errors import MergeError, size

BLOCK = 1 << 21  # bytes: what the processor's cache holds between hashing a block and looking through it
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
FLOATS = {name: code for code, name in TORCH_NAMES.items()}
EXPONENTS = {"BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), "F32": ("<u4", 0x7F800000), "F64": ("<u8", 0x7FF << 52)}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor in a safetensors file: its place there in bytes, its dtype by safetensors' name, its shape."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def read_header(file: Path) -> list[TensorEntry]:
    """All tensors of a safetensors file, in the order of their bytes.

    Raises:
        MergeError: naming the file, when it is cut short, or its header is not one.
    """
    length = file.stat().st_size
    again = f"Copy or download {file.name} again."
    if length < 8:
        raise MergeError(f"{file} holds {length} bytes, fewer than a safetensors header. {again}")
    with open(file, "rb") as handle:
        (header_bytes,) = struct.unpack("<Q", handle.read(8))
        if header_bytes > length - 8:
            raise MergeError(
                f"{file} is no safetensors file, or is cut short: its header should take {size(header_bytes)}, and the "
                f"whole file holds {size(length)}. {again}"
            )
        try:
            header = json.loads(handle.read(header_bytes))
            header.pop("__metadata__", None)
            entries = [
                TensorEntry(
                    name,
                    file,
                    tensor["dtype"],
                    tuple(tensor["shape"]),
                    *(8 + header_bytes + offset for offset in tensor["data_offsets"]),
                )
                for name, tensor in header.items()
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise MergeError(f"{file} has a header that cannot be read ({error!r:.80}). {again}") from error
    entries.sort(key=lambda entry: entry.start)
    for entry in entries:
        width = DTYPE_BYTES.get(entry.dtype)
        if width is None:
            raise MergeError(f"{file}: tensor {entry.name!r} has the dtype {entry.dtype}, which cannot be merged.")
        if entry.nbytes != width * math.prod(entry.shape):
            raise MergeError(
                f"{file}: tensor {entry.name!r} of shape {list(entry.shape)} and dtype {entry.dtype} takes "
                f"{entry.nbytes} bytes, which do not fit. {again}"
            )
    if entries and entries[-1].stop > length:
        raise MergeError(
            f"{file} is cut short: it holds {size(length)} of {size(entries[-1].stop)}, and {entries[-1].name!r} is "
            f"missing bytes. {again}"
        )
    return entries


def pack_header(tensors: list[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, list[int]]:
    """[(name, dtype, shape)] -> the header's bytes, and where each tensor starts in the file."""
    offset, offsets, header = 0, [], {"__metadata__": {"format": "pt"}}
    for name, dtype, shape in tensors:
        count = DTYPE_BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + count]}
        offsets.append(offset)
        offset += count
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)  # data starts at a multiple of 8, as readers expect
    prefix = struct.pack("<Q", len(text)) + text
    return prefix, [len(prefix) + start for start in offsets]


def read_blocks(entry: TensorEntry, elements: int, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
    """The raw elements from `start` to `stop` of a tensor, as unsigned integers of its width, `elements` at a time."""
    width = DTYPE_BYTES[entry.dtype]
    kind = np.dtype(f"<u{width}")
    stop = entry.nbytes // width if stop is None else stop
    with open(entry.file, "rb", buffering=0) as handle:
        for at in range(start, stop, elements):
            count = min(elements, stop - at)
            raw = os.pread(handle.fileno(), count * width, entry.start + at * width)
            if len(raw) < count * width:
                raise MergeError(f"{entry.file} became shorter while {entry.name!r} was read.")
            yield np.frombuffer(raw, dtype=kind)


def nonfinite(raw: np.ndarray, dtype: str) -> bool:
    """Whether a block of raw elements holds NaN or an infinity: an exponent of ones only."""
    _, mask = EXPONENTS[dtype]
    return bool((raw & raw.dtype.type(mask)).max(initial=0) == mask)


def copy_range(source: int, start: int, count: int, target: int, offset: int, tick: Callable[[int], None]) -> None:
    """Copies bytes between open files without bringing them into the process, where the system can."""
    done, in_kernel = 0, hasattr(os, "copy_file_range")
    while done < count:
        want = min(count - done, 64 << 20)
        if in_kernel:
            try:
                moved = os.copy_file_range(source, target, want, start + done, offset + done)
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
                    raise
                in_kernel = False
                continue
        else:
            moved = write_all(target, os.pread(source, min(want, BLOCK), start + done), offset + done)
        if moved == 0:
            raise MergeError("A source file became shorter while it was copied.")
        done += moved
        tick(moved)


def write_all(target: int, data, offset: int) -> int:
    """Writes all of `data` at `offset`: one call may write less than it was given."""
    view, done = memoryview(data).cast("B"), 0
    while done < len(view):
        done += os.pwrite(target, view[done:], offset + done)
    return done


@dataclass(frozen=True)
class Audit:
    """What reading every byte of a source file showed."""

    file: Path
    sha256: str
    nbytes: int
    nonfinite: tuple[str, ...]


def audit(file: Path, entries: list[TensorEntry], tick: Callable[[int], None] = lambda count: None) -> Audit:
    """Hashes a file and looks at every floating-point element, in one pass: each block is read once."""
    digest, found, at = hashlib.sha256(), [], 0
    buffer = bytearray(BLOCK)
    view = memoryview(buffer)
    with open(file, "rb", buffering=0) as handle:
        with contextlib.suppress(AttributeError, OSError):
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)

        def through(stop: int) -> Iterator[memoryview]:
            nonlocal at
            while at < stop:
                got = os.preadv(handle.fileno(), [view[: min(BLOCK, stop - at)]], at)
                if got == 0:
                    raise MergeError(f"{file} became shorter while it was read.")
                digest.update(view[:got])
                at += got
                tick(got)
                yield view[:got]

        for entry in entries:
            for _ in through(entry.start):
                pass
            rest = b""  # bytes of an element that a short read has parted
            for block in through(entry.stop):
                if entry.dtype not in EXPONENTS or (found and found[-1] == entry.name):
                    continue
                data = rest + bytes(block) if rest else block
                kind = np.dtype(EXPONENTS[entry.dtype][0])
                whole = len(data) // kind.itemsize * kind.itemsize
                rest = bytes(data[whole:])
                if nonfinite(np.frombuffer(data[:whole], dtype=kind), entry.dtype):
                    found.append(entry.name)
        for _ in through(os.fstat(handle.fileno()).st_size):
            pass
    return Audit(file, digest.hexdigest(), at, tuple(found))


def sampled_nonfinite(entries: list[TensorEntry], blocks: int = 4, block_bytes: int = 1 << 14) -> list[str]:
    """Names of tensors where a few blocks, spread evenly from the first byte to the last, hold NaN or an infinity."""
    found = []
    handles: dict[Path, int] = {}
    try:
        for entry in entries:
            if entry.dtype not in EXPONENTS:
                continue
            if entry.file not in handles:
                handles[entry.file] = os.open(entry.file, os.O_RDONLY)
            kind = np.dtype(EXPONENTS[entry.dtype][0])
            span = max(entry.nbytes - block_bytes, 0)
            for place in sorted(
                {span * i // max(blocks - 1, 1) // kind.itemsize * kind.itemsize for i in range(blocks)}
            ):
                count = min(block_bytes, entry.nbytes - place)
                raw = os.pread(handles[entry.file], count, entry.start + place)
                if nonfinite(np.frombuffer(raw[: len(raw) // kind.itemsize * kind.itemsize], dtype=kind), entry.dtype):
                    found.append(entry.name)
                    break
    finally:
        for handle in handles.values():
            os.close(handle)
    return found
