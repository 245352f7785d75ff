"""Hashes and scans the source files of a merge, each byte once, in whatever order and thread the merge reads them.

The content hash of a file can be computed in any order: XXH3-128 over the header and, in the order of the file, over the
XXH3-128 digests of the pieces of each tensor (`PIECE` elements each). It finds accidental changes, at the speed of the
memory; SHA-256, which also finds deliberate ones, is computed on request.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .errors import MergeError
from .tensor_files import EXPONENTS, PIECE, TensorEntry, has_nonfinite, observed, read_blocks

DIGEST = 16  # bytes
READ = 1 << 20  # bytes


@dataclass(frozen=True)
class ScanResult:
    """Hashes of a file (None if they were not computed), its size, and the names of tensors with NaN or infinity."""

    file: Path
    nbytes: int
    xxh3: str | None = None
    sha256: str | None = None
    nonfinite: tuple[str, ...] = ()

    @property
    def record(self) -> dict[str, str | int]:
        """The file in a merge record."""
        hashes = {"xxh3": self.xxh3, "sha256": self.sha256}
        return {"name": self.file.name, "bytes": self.nbytes, **{key: h for key, h in hashes.items() if h}}


def new_hash():
    """An XXH3-128; raises an `ImportError` that names the package if it is missing."""
    try:
        import xxhash
    except ImportError as error:
        raise ImportError("Merging needs xxhash. Install it with: pip install 'lexperts[merge]'") from error
    return xxhash.xxh3_128()


class TensorScan:
    """What is known of one tensor: the digests of its pieces, and whether one holds NaN or infinity."""

    def __init__(self, entry: TensorEntry):
        self.entry = entry
        self.pieces = -(-entry.elements // PIECE)
        self.digests, self.seen = bytearray(DIGEST * self.pieces), bytearray(self.pieces)
        self.nonfinite = False

    @property
    def complete(self) -> bool:
        """Whether every piece was looked at."""
        return 0 not in self.seen


class SourceScan:
    """Collects the pieces of all source files as they are read, and reads those that nothing else has read.

    Args:
        files: the tensors of each file.
        advance: is called with the number of bytes that were looked at for the first time.
    """

    def __init__(self, files: Mapping[Path, list[TensorEntry]], advance: Callable[[int], None] = lambda count: None):
        self.files, self.advance = files, advance
        self.tensors = {(e.file, e.name): TensorScan(e) for entries in files.values() for e in entries}
        self._lock = threading.Lock()

    def observe(self, entry: TensorEntry, first: int, raw: np.ndarray) -> None:
        """Looks at the raw elements of a tensor from `first` on, if they are whole pieces that are not known."""
        scan = self.tensors.get((entry.file, entry.name))
        if scan is None or first % PIECE or (len(raw) % PIECE and first + len(raw) != entry.elements):
            return
        for start in range(0, len(raw), PIECE):
            number, piece = (first + start) // PIECE, raw[start : start + PIECE]
            if scan.seen[number]:
                continue
            digest = new_hash()
            digest.update(piece)
            bad = entry.dtype in EXPONENTS and not scan.nonfinite and has_nonfinite(piece, entry.dtype)
            with self._lock:
                if scan.seen[number]:  # by another thread
                    continue
                scan.seen[number] = 1
                scan.digests[number * DIGEST : (number + 1) * DIGEST] = digest.digest()
                scan.nonfinite |= bad
            self.advance(piece.nbytes)

    def read_unseen(self, entry: TensorEntry) -> None:
        """Reads the pieces of a tensor that nothing else has read."""
        scan = self.tensors[entry.file, entry.name]
        with observed(self.observe):
            for number in range(scan.pieces):
                if not scan.seen[number]:
                    for _ in read_blocks(entry, PIECE, number * PIECE, min((number + 1) * PIECE, entry.elements)):
                        pass

    def find_nonfinite(self, entries: Iterable[TensorEntry]) -> TensorEntry | None:
        """The first of some tensors in which NaN or infinity was found."""
        scans = (self.tensors.get((entry.file, entry.name)) for entry in entries)
        return next((scan.entry for scan in scans if scan is not None and scan.nonfinite), None)

    def result(self, file: Path, sha256: str | None = None) -> ScanResult:
        """The result for a file of which every tensor was read."""
        digest, entries = new_hash(), self.files[file]
        with open(file, "rb") as handle:
            digest.update(handle.read(entries[0].start if entries else -1))
        scans = [self.tensors[file, entry.name] for entry in entries]
        for scan in scans:
            digest.update(scan.digests)
        bad = tuple(scan.entry.name for scan in scans if scan.nonfinite)
        return ScanResult(file, file.stat().st_size, digest.hexdigest(), sha256, bad)


def scan_file(
    file: Path, entries: list[TensorEntry], advance: Callable[[int], None] = lambda count: None
) -> ScanResult:
    """Hashes a file and scans every floating-point element for NaN and infinity, in one pass.

    The file is read and not memory-mapped: truncating a mapped file kills the process.
    """
    scan = SourceScan({file: entries}, advance)
    for entry in entries:
        scan.read_unseen(entry)
    return scan.result(file)


def sha256_of(file: Path, advance: Callable[[int], None] = lambda count: None) -> str:
    """The SHA-256 of a file, read in blocks."""
    digest, buffer, position = hashlib.sha256(), memoryview(bytearray(READ)), 0
    with open(file, "rb", buffering=0) as handle:
        length = os.fstat(handle.fileno()).st_size
        while position < length:
            got = os.preadv(handle.fileno(), [buffer], position)
            if got == 0:
                raise MergeError(f"{file} was truncated while it was read. Restore it and start again.")
            digest.update(buffer[:got])
            position += got
            advance(got)
    return digest.hexdigest()


def compare_hashes(file: Path, entries: list[TensorEntry], recorded: dict, advance) -> bool | None:
    """Whether a file has the recorded hash: XXH3 if there is one, else SHA-256; None if neither was recorded."""
    if "xxh3" in recorded:
        return scan_file(file, entries, advance).xxh3 == recorded["xxh3"]
    if "sha256" in recorded:
        return sha256_of(file, advance) == recorded["sha256"]
    return None
