"""safetensors files as byte ranges: headers, copies by the kernel, and the look for values that are not numbers.

Nothing here holds a tensor whole: what is read is read in blocks, and what can be copied never enters the process.
"""

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

from .errors import MergeError, reason, size

BLOCK = 1 << 20  # bytes: a core's cache holds a block from its reading through its hashing to the look at its values
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
LARGEST_HEADER = 100_000_000  # bytes, as the reference implementation has it
LFS_START = b"version "
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
    """All tensors of a safetensors file, in the order of their bytes, which fill the file without a gap.

    Raises:
        MergeError: naming the file, when it is cut short, or its header is not one.
    """
    again = f"Copy or download {file.name} again."
    try:
        with open(file, "rb") as handle:
            length = os.fstat(handle.fileno()).st_size
            start = handle.read(8)
            if start == LFS_START:
                raise MergeError(f"{file} is a pointer to a file that Git LFS has not fetched. Run: git lfs pull")
            if len(start) < 8:
                raise MergeError(f"{file} holds {length} bytes, fewer than a safetensors header. {again}")
            (header_bytes,) = struct.unpack("<Q", start)
            if header_bytes > min(length - 8, LARGEST_HEADER):
                raise MergeError(
                    f"{file} is no safetensors file, or is cut short: its header should take {size(header_bytes)}, and "
                    f"the whole file holds {size(length)}. {again}"
                )
            header = json.loads(handle.read(header_bytes))
        header.pop("__metadata__", None)
        entries = [entry_of(file, name, tensor, 8 + header_bytes) for name, tensor in header.items()]
    except OSError as error:
        raise MergeError(f"{file} cannot be read: {error.strerror or error}.") from error
    except MergeError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MergeError(f"{file} has a header that cannot be read ({reason(error)}). {again}") from error
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    for entry in entries:
        if entry.dtype not in DTYPE_BYTES:
            raise MergeError(
                f"{file}: tensor {entry.name!r} has the dtype {entry.dtype}, which cannot be merged. Save the model in "
                "bfloat16, float16 or float32 first."
            )
        if entry.nbytes != DTYPE_BYTES[entry.dtype] * math.prod(entry.shape):
            raise MergeError(
                f"{file}: tensor {entry.name!r} of shape {list(entry.shape)} and dtype {entry.dtype} takes "
                f"{entry.nbytes} bytes, which do not fit. {again}"
            )
    at = 8 + header_bytes
    for entry in entries:
        if entry.start != at:
            raise MergeError(f"{file}: tensor {entry.name!r} does not begin where the one before it ends. {again}")
        at = entry.stop
    if at > length:
        raise MergeError(
            f"{file} is cut short: it holds {size(length)} of {size(at)}, and {entries[-1].name!r} is missing bytes. "
            f"{again}"
        )
    if at < length:
        raise MergeError(f"{file} holds {length - at:,} bytes more than its header speaks of. {again}")
    return entries


def entry_of(file: Path, name: str, tensor: dict, begin: int) -> TensorEntry:
    """A tensor as the header describes it; ValueError for what no writer would say."""
    dtype, shape, (start, stop) = tensor["dtype"], tensor["shape"], tensor["data_offsets"]
    numbers = [*shape, start, stop]
    if not isinstance(dtype, str) or any(type(n) is not int or n < 0 for n in numbers) or stop < start:
        raise ValueError(f"{name!r}: {tensor}")
    return TensorEntry(name, file, dtype, tuple(shape), begin + start, begin + stop)


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
    """Whether a block of raw elements holds NaN or an infinity, whose exponents are ones only.

    Read as integers with a sign, these are the largest positive numbers; without one, the largest of all.
    """
    if not len(raw):
        return False
    _, mask = EXPONENTS[dtype]
    sign = 1 << (8 * raw.itemsize - 1)
    return bool(raw.view(f"i{raw.itemsize}").max() >= mask or raw.max() >= sign | mask)


def copy_range(source: int, start: int, count: int, target: int, offset: int, tick: Callable[[int], None]) -> None:
    """Copies bytes between open files without bringing them into the process, where the system can.

    Raises:
        EOFError: when the source ends too early.
    """
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
            raise EOFError
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
    """Hashes a file and looks at every floating-point element, in one pass: each block is read once.

    Read and not mapped, though that costs a copy: a mapped file that somebody cuts short kills the process.
    """
    digest, found, at = hashlib.sha256(), [], 0
    buffer = memoryview(bytearray(BLOCK))
    with open(file, "rb", buffering=0) as handle:
        length = os.fstat(handle.fileno()).st_size

        def through(stop: int) -> Iterator[memoryview]:
            nonlocal at
            while at < stop:
                block = buffer[: min(BLOCK, stop - at)]
                filled = 0
                while filled < len(block):  # one call may read less than it was asked for
                    got = os.preadv(handle.fileno(), [block[filled:]], at + filled)
                    if got == 0:
                        raise MergeError(f"{file} became shorter while it was read.")
                    filled += got
                digest.update(block)
                at += len(block)
                tick(len(block))
                yield block

        for entry in entries:
            for _ in through(entry.start):
                pass
            for block in through(entry.stop):
                if entry.dtype not in EXPONENTS or (found and found[-1] == entry.name):
                    continue
                if nonfinite(np.frombuffer(block, dtype=EXPONENTS[entry.dtype][0]), entry.dtype):
                    found.append(entry.name)
        for _ in through(length):
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
