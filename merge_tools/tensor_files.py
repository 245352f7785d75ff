"""safetensors files as byte ranges: headers, blocks, copies inside the kernel, and the search for NaN and infinity.

No function holds a whole tensor in memory: data is read in blocks, or copied without entering the process.
"""

import errno
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path

import numpy as np

from run_tools.errors import format_size, short_reason

from .errors import MergeError

BLOCK, COPIED = 1 << 20, 32 << 20  # bytes that are copied at once in the process, and inside the kernel
NOT_IN_KERNEL = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)
PIECE = 1 << 18  # elements: a piece stays in a core's cache while it is read, hashed, scanned and written
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
LARGEST_HEADER = 100_000_000  # bytes, as in the reference implementation
FLOATS = {name: code for code, name in TORCH_NAMES.items()}
EXPONENTS = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000, "F64": 0x7FF << 52}
RANGES = {"F16": 0, "BF16": 1, "F32": 2, "F64": 3}  # dtypes by their largest values
SAMPLES = 4  # per tensor, of SAMPLE_BYTES each
SAMPLE_BYTES = 1 << 14


@dataclass(frozen=True)
class TensorEntry:
    """One tensor in a safetensors file: its byte range, its dtype (safetensors' name) and its shape."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.stop - self.start

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def read_header(file: Path) -> list[TensorEntry]:
    """All tensors of a safetensors file in the order of their bytes, which must fill the file without gaps.

    Raises a `MergeError` if the file is truncated or its header is invalid. The message names the file.
    """
    again = f"Copy or download {file.name} again."
    try:
        with open(file, "rb") as handle:
            length = os.fstat(handle.fileno()).st_size
            start = handle.read(8)
            if start == b"version ":
                raise MergeError(f"{file} is a Git LFS pointer. Download the file itself with: git lfs pull")
            if len(start) < 8:
                raise MergeError(f"{file} has {length} bytes, fewer than a safetensors header. {again}")
            (header_bytes,) = struct.unpack("<Q", start)
            if header_bytes > min(length - 8, LARGEST_HEADER):
                raise MergeError(
                    f"{file} is truncated or not a safetensors file: it has {format_size(length)}, but should have a "
                    f"header of {format_size(header_bytes)}. {again}"
                )
            header = parse_header(handle.read(header_bytes))
        entries = [parse_entry(file, name, tensor, 8 + header_bytes) for name, tensor in header.items()]
    except OSError as error:
        raise MergeError(f"{file} cannot be read: {error.strerror or error}.") from error
    except MergeError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MergeError(f"{file} has an invalid header ({short_reason(error)}). {again}") from error
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    for entry in entries:
        if entry.dtype not in DTYPE_BYTES:
            raise MergeError(
                f"{file}: tensor {entry.name!r} has dtype {entry.dtype}, which is not supported. Save the model in "
                "bfloat16, float16 or float32."
            )
        if entry.nbytes != DTYPE_BYTES[entry.dtype] * entry.elements:
            raise MergeError(
                f"{file}: tensor {entry.name!r} of shape {list(entry.shape)} and dtype {entry.dtype} has "
                f"{entry.nbytes} bytes, which do not match. {again}"
            )
    position = 8 + header_bytes
    for entry in entries:
        if entry.start != position:
            raise MergeError(f"{file}: tensor {entry.name!r} does not start where the previous one ends. {again}")
        position = entry.stop
    if position > length:
        raise MergeError(
            f"{file} is truncated: it has {format_size(length)} of {format_size(position)}; the end of "
            f"{entries[-1].name!r} is missing. {again}"
        )
    if position < length:
        raise MergeError(f"{file} has {length - position:,} bytes more than its header describes. {again}")
    return entries


def parse_header(text: bytes) -> dict[str, dict]:
    """The tensors of a header, as strictly as the safetensors library reads it; raises a `ValueError` if it would not."""

    def raise_for(constant: str):
        raise ValueError(f"{constant} is not JSON")

    def unique(pairs: list[tuple[str, object]]) -> dict:
        content = dict(pairs)
        if len(content) < len(pairs):
            raise ValueError("a key occurs twice")
        return content

    if not text.startswith(b"{"):
        raise ValueError("it does not start with a brace")
    header = json.loads(text.decode("utf-8"), parse_constant=raise_for, object_pairs_hook=unique)
    json.dumps(header, ensure_ascii=False).encode()  # a lone surrogate is not UTF-8
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ must map strings to strings")
    return header


def parse_entry(file: Path, name: str, tensor: dict, data_start: int) -> TensorEntry:
    """One tensor of a header; raises a `ValueError` if its values are invalid."""
    dtype, shape, (start, stop) = tensor["dtype"], tensor["shape"], tensor["data_offsets"]
    numbers = [*shape, start, stop]
    if (
        not isinstance(shape, list)
        or not isinstance(dtype, str)
        or any(type(n) is not int or n < 0 for n in numbers)
        or stop < start
    ):
        raise ValueError(f"{name!r}: {tensor}")
    if any(size >= 1 << 63 for size in (*numbers, *accumulate(shape, mul))):
        raise ValueError(f"{name!r} has more elements than fit into 63 bits")
    return TensorEntry(name, file, dtype, tuple(shape), data_start + start, data_start + stop)


def pack_header(tensors: list[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, list[int]]:
    """`[(name, dtype, shape)]` -> the bytes of a header, and the offset of each tensor in the file."""
    offset, offsets = 0, []
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    for name, dtype, shape in tensors:
        count = DTYPE_BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + count]}
        offsets.append(offset)
        offset += count
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)  # aligns the data
    prefix = struct.pack("<Q", len(text)) + text
    return prefix, [len(prefix) + start for start in offsets]


Observer = Callable[[TensorEntry, int, np.ndarray], None]
OBSERVER: ContextVar[Observer | None] = ContextVar("observer", default=None)


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Shows every block that `read_blocks` reads in this context to an observer: entry, first element, raw elements."""
    token = OBSERVER.set(observer)
    try:
        yield
    finally:
        OBSERVER.reset(token)


def read_blocks(
    entry: TensorEntry, elements: int, start: int = 0, stop: int | None = None, buffer: np.ndarray | None = None
) -> Iterator[np.ndarray]:
    """Yields the raw elements `start` to `stop` of a tensor as unsigned integers of its width, `elements` at a time.

    With a `buffer` of that many elements, each block is valid until the next one is read.
    """
    width, observer = DTYPE_BYTES[entry.dtype], OBSERVER.get()
    stop = entry.elements if stop is None else stop
    with open(entry.file, "rb", buffering=0) as handle:
        for first in range(start, stop, elements or 1):
            count = min(elements, stop - first)
            raw = np.empty(count, f"<u{width}") if buffer is None else buffer[:count]
            read_into(handle.fileno(), memoryview(raw).cast("B"), entry, entry.start + first * width)
            if observer is not None:
                observer(entry, first, raw)
            yield raw


def read_all(entry: TensorEntry) -> np.ndarray:
    """All raw elements of a small tensor."""
    return next(read_blocks(entry, entry.elements), np.empty(0, f"<u{DTYPE_BYTES[entry.dtype]}"))


def read_into(handle: int, buffer: memoryview, entry: TensorEntry, position: int):
    """Fills a buffer from a file; raises a `MergeError` if the file ends before that."""
    filled = 0
    while filled < len(buffer):  # a single call may read less
        got = os.preadv(handle, [buffer[filled:]], position + filled)
        if got == 0:
            raise MergeError(f"{entry.file} was truncated while {entry.name!r} was read. Restore it and start again.")
        filled += got


def has_nonfinite(raw: np.ndarray, dtype: str) -> bool:
    """Whether a block of raw elements holds NaN or infinity, i.e. an exponent whose bits are all 1.

    As signed integers these are the largest positive numbers; as unsigned integers the largest numbers.
    """
    if not len(raw):
        return False
    mask, sign = EXPONENTS[dtype], 1 << (8 * raw.itemsize - 1)
    return bool(raw.view(f"i{raw.itemsize}").max() >= mask or raw.max() >= sign | mask)


def copy_bytes(entry: TensorEntry, target: int, offset: int) -> Iterator[int]:
    """Copies a tensor to an open file, inside the kernel if possible; yields the number of bytes of each part.

    Raises a `MergeError` if its file ends before it.
    """
    done, in_kernel = 0, hasattr(os, "copy_file_range")
    with open(entry.file, "rb", buffering=0) as source:
        while done < entry.nbytes:
            want, start = min(entry.nbytes - done, COPIED), entry.start + done
            try:
                if in_kernel:
                    moved = os.copy_file_range(source.fileno(), target, want, start, offset + done)
                else:
                    moved = pwrite_all(target, os.pread(source.fileno(), min(want, BLOCK), start), offset + done)
            except OSError as error:
                if not in_kernel or error.errno not in NOT_IN_KERNEL:
                    raise
                in_kernel = False
                continue
            if moved == 0:
                raise MergeError(f"{entry.file} was truncated while it was copied. Restore it and start again.")
            done += moved
            yield moved


def pwrite_all(target: int, data, offset: int) -> int:
    """Writes all of `data` at `offset`; a single `os.pwrite` may write less."""
    view, done = memoryview(data).cast("B"), 0
    while done < len(view):
        done += os.pwrite(target, view[done:], offset + done)
    return done


def sample_blocks(entry: TensorEntry) -> Iterator[np.ndarray]:
    """A few blocks of a tensor, spread evenly from the first to the last element."""
    size = min(SAMPLE_BYTES // DTYPE_BYTES[entry.dtype], entry.elements)
    for start in sorted({(entry.elements - size) * i // (SAMPLES - 1) for i in range(SAMPLES)}):
        yield from read_blocks(entry, size, start, start + size)


def sample_nonfinite(entries: list[TensorEntry]) -> list[str]:
    """Names of tensors with NaN or infinity in a few blocks, spread evenly from the first to the last element."""
    floats = (entry for entry in entries if entry.dtype in EXPONENTS)
    return [entry.name for entry in floats if any(has_nonfinite(raw, entry.dtype) for raw in sample_blocks(entry))]


def equal_blocks(blocks: Iterable[np.ndarray], elements: int) -> Iterator[np.ndarray]:
    """Blocks of any size as blocks of `elements`, and a smaller last one: several tensors can then be read in parallel."""
    rest = None
    for block in blocks:
        rest = block if rest is None or not len(rest) else np.concatenate([rest, block])
        while len(rest) >= elements:
            yield rest[:elements]
            rest = rest[elements:]
    if rest is not None and len(rest):
        yield rest


def equal_tensors(first: TensorEntry, other: TensorEntry | None) -> bool:
    """Whether two stored tensors have the same dtype, shape and bytes."""
    if other is None or (first.dtype, first.shape) != (other.dtype, other.shape):
        return False
    return all(map(np.array_equal, read_blocks(first, PIECE), read_blocks(other, PIECE)))
