"""Writes a checkpoint atomically: the output is complete or does not exist, and an interrupted run can be resumed.

Shards are written to a staging folder next to the output, whose record names each before it is written, and again with its size when
it is synced to disk. A resumed run keeps those shards.
"""

import errno
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from run_tools.claims import Claim, FileEntry
from run_tools.files import describe_space

from .checkpoints import Source
from .errors import MergeError
from .output_tensors import OutputTensor
from .source_scan import ScanResult, SourceScan, sha256_of
from .staging import staging_folder
from .tensor_files import (
    DTYPE_BYTES,
    PIECE,
    TensorEntry,
    copy_bytes,
    has_nonfinite,
    observed,
    pack_header,
    pwrite_all,
    read_blocks,
)  # fmt: skip

COMMAND = "merge"  # in the record of the staging folder
SHARD_BYTES = 5_000_000_000
WORKERS = 2
INDEX = "model.safetensors.index.json"
LAST = ("config.json", INDEX)  # written after all other files


class Progress:
    """Receives the progress of a run; this base class ignores it. Phases: gates, whose unit are tokens at a router; and read, write,
    sync, rename, whose unit are bytes.
    """

    def start(self, phase: str, total: int):
        """A phase that will process `total` of its units starts."""

    def advance(self, phase: str, count: int):
        """`count` more units were processed. Called from several threads."""


@dataclass(frozen=True)
class SourceChecks:
    """How a merge looks at its sources: whether it hashes them and scans them for NaN, and computes their SHA-256 too."""

    scan: bool = True
    sha256: bool = False


@dataclass(frozen=True)
class Shard:
    """A file to write: its tensors in order, its header, and the offset of each tensor."""

    name: str
    tensors: tuple[OutputTensor, ...]
    header: bytes
    starts: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


def write_checkpoint(
    out: Path,
    tensors: list[OutputTensor],
    sources: Iterable[Source],
    make_files: Callable[[dict[Path, ScanResult]], dict[str, bytes]],
    progress: Progress | None = None,
    *,
    settings: dict[str, Any] | None = None,
    resume: bool = False,
    shard_bytes: int = SHARD_BYTES,
    checks: SourceChecks | None = None,
    beside: Mapping[str, list[OutputTensor]] | None = None,
) -> None:
    """Writes tensors, and the files that `make_files` builds from the scans of the sources' files.

    `beside`: name of a file -> its tensors, which are not the checkpoint's. With `resume`, a run with the same settings, sources and tensors is continued.
    """
    progress, shards = progress or Progress(), assign_shards(tensors, shard_bytes)
    files = {file: source.tensors_of(file) for source in sources for file in source.files}
    others = [make_shard(name, group) for name, group in (beside or {}).items()]
    plan = {"plan": fingerprint(settings or {}, [*shards, *others], files)}
    with staging_folder(out, COMMAND, plan, resume) as claim:
        scans = Writer(claim, [*shards, *others], files, progress, checks or SourceChecks()).run()
        metadata = make_files(scans)
        if len(shards) > 1:
            weight_map = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
            index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)}, "weight_map": weight_map}
            metadata[INDEX] = (json.dumps(index, indent=2) + "\n").encode()
        progress.start("rename", len(metadata))
        for name in [*sorted(metadata.keys() - set(LAST)), *(name for name in LAST if name in metadata)]:
            claim.write(name, metadata[name])
            progress.advance("rename", 1)
    progress.advance("rename", 0)


def assign_shards(tensors: list[OutputTensor], limit: int) -> list[Shard]:
    """Assigns tensors in order to files of at most `limit` bytes; a larger tensor gets a file of its own."""
    groups: list[list[OutputTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        filled += tensor.nbytes
        if groups[-1] and filled > limit:
            groups.append([])
            filled = tensor.nbytes
        groups[-1].append(tensor)
    if len(groups) == 1:
        return [make_shard("model.safetensors", tensors)]
    return [make_shard(f"model-{i:05d}-of-{len(groups):05d}.safetensors", group) for i, group in enumerate(groups, 1)]


def make_shard(name: str, tensors: list[OutputTensor]) -> Shard:
    """A file of tensors."""
    header, starts = pack_header([(t.name, t.dtype, t.shape) for t in tensors])
    return Shard(name, tuple(tensors), header, tuple(starts))


def fingerprint(settings: dict[str, Any], shards: list[Shard], files: Iterable[Path]) -> str:
    """A hash of everything that determines the output. A run with the same fingerprint can be resumed."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for file in files:
        digest.update(repr((str(file.resolve()), stat_key(file))).encode())
    for shard in shards:
        digest.update(shard.header)
        for tensor in shard.tensors:
            digest.update(repr([part.key for part in tensor.slices]).encode())
            digest.update(b"" if tensor.values is None else np.ascontiguousarray(tensor.values).view(np.uint8))
    return digest.hexdigest()


def stat_key(file: Path) -> tuple[int, ...]:
    """Size, times of modification and of change, and inode: a file that was written or replaced has another key."""
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


class Writer:
    """Writes the shards of a plan with two threads, which hash and scan the sources as they read them."""

    def __init__(
        self,
        claim: Claim,
        shards: list[Shard],
        files: dict[Path, list[TensorEntry]],
        progress: Progress,
        checks: SourceChecks,
    ):
        self.claim, self.shards, self.files, self.progress, self.checks = claim, shards, files, progress, checks
        self.stop, self._lock = threading.Event(), threading.RLock()
        self.scan = SourceScan(files if checks.scan else {}, self._tick("read"))

    def run(self) -> dict[Path, ScanResult]:
        """Writes all shards. Returns the scan result of each source file.

        Raises:
            MergeError: if a source holds NaN or infinity, or changes while it is read.
            OSError: if reading or writing fails.
        """
        before, sizes = {file: stat_key(file) for file in self.files}, sum(file.stat().st_size for file in self.files)
        self.progress.start("read", sizes * (self.checks.scan + self.checks.sha256))
        self.progress.start("write", sum(shard.nbytes for shard in self.shards))
        with ThreadPoolExecutor(WORKERS) as workers, ThreadPoolExecutor(1) as syncer:
            try:
                syncs = self._write_shards(workers, syncer)
                jobs = [
                    workers.submit(self._read_unseen, s.entry) for s in self.scan.tensors.values() if not s.complete
                ]
                hashes = {f: workers.submit(sha256_of, f, self._tick("read")) for f in self.files if self.checks.sha256}
                raise_first_error([*jobs, *hashes.values(), *syncs])
            except BaseException:
                self.stop.set()
                for pool in (syncer, workers):
                    pool.shutdown(cancel_futures=True)
                raise
        if changed := [file for file, key in before.items() if stat_key(file) != key]:
            raise MergeError(f"{changed[0]} was modified during the merge. Start again when nothing writes to it.")
        sha256 = {file: hash.result() for file, hash in hashes.items()}
        if not self.checks.scan:
            return {file: ScanResult(file, file.stat().st_size, sha256=sha256.get(file)) for file in self.files}
        return {file: self.scan.result(file, sha256.get(file)) for file in self.files}

    def _write_shards(self, workers: ThreadPoolExecutor, syncer: ThreadPoolExecutor) -> list[Future]:
        complete, syncs = self.claim.complete(), list[Future]()
        missing = [shard for shard in self.shards if shard.name not in complete]
        self._tick("write")(sum(shard.nbytes for shard in self.shards if shard.name in complete))
        paths = [self.claim.name_file(shard.name) for shard in missing]  # before another thread writes to the record
        for path, shard in zip(paths, missing, strict=True):
            file = open(path, "w+b", buffering=0)  # noqa: SIM115  (closed when it is synced)
            allocate(file.fileno(), shard.nbytes)
            pwrite_all(file.fileno(), shard.header, 0)
            jobs = [
                workers.submit(self._write, file, tensor, start, syncer)
                for tensor, start in zip(shard.tensors, shard.starts, strict=True)
            ]
            raise_first_error([*jobs, *(sync for sync in syncs if sync.done())])
            self._tick("write")(len(shard.header))
            syncs.append(syncer.submit(self._sync, file, shard))
        return syncs

    def _write(self, file: BinaryIO, tensor: OutputTensor, start: int, syncer: ThreadPoolExecutor) -> None:
        tick, target, position = self._tick("write"), file.fileno(), start
        with observed(self.scan.observe):
            for count in self._write_blocks(tensor, target, start):
                tick(count)
                position += count
        self._check_finite(tensor.entries())
        if hasattr(os, "posix_fadvise"):  # starts to write to disk, so that little is left for the final sync
            syncer.submit(os.posix_fadvise, target, start, position - start, os.POSIX_FADV_DONTNEED)

    def _write_blocks(self, tensor: OutputTensor, target: int, position: int) -> Iterator[int]:
        """Writes a tensor; yields the number of bytes of each block."""
        entry, width = tensor.copy_source, DTYPE_BYTES[tensor.dtype]
        if entry is not None and not self.checks.scan:
            yield from copy_bytes(entry, target, position)
            return
        buffer = np.empty(PIECE, f"<u{width}") if entry is not None else None
        for block in tensor.blocks() if entry is None else read_blocks(entry, PIECE, buffer=buffer):
            if entry is None and has_nonfinite(block, tensor.dtype):
                raise overflow_error(tensor)
            pwrite_all(target, block, position)
            position += block.nbytes
            yield block.nbytes

    def _sync(self, file: BinaryIO, shard: Shard) -> None:
        with file:
            with self._lock:
                self.progress.start("sync", shard.nbytes)
            try:
                os.fsync(file.fileno())
            except OSError as error:
                raise describe_space(error, self.claim.folder / shard.name) from error
        self.claim.name_file(shard.name, FileEntry(shard.nbytes))
        self._tick("sync")(shard.nbytes)

    def _read_unseen(self, entry: TensorEntry) -> None:
        self.scan.read_unseen(entry)
        self._check_finite([entry])

    def _check_finite(self, entries: list[TensorEntry]) -> None:
        if (entry := self.scan.find_nonfinite(entries)) is not None:
            raise NotFiniteError(entry.file, (entry.name,))

    def _tick(self, phase: str) -> Callable[[int], None]:
        def advance(count: int) -> None:
            if self.stop.is_set():
                raise WorkerStoppedError
            with self._lock:
                self.progress.advance(phase, count)

        return advance


def raise_first_error(jobs: list[Future]) -> None:
    """Waits for jobs; raises the error of the first that fails."""
    for job in wait(jobs, return_when=FIRST_EXCEPTION).done:
        job.result()


class WorkerStoppedError(Exception):
    """Stops a thread after another one has failed."""


class NotFiniteError(MergeError):
    """A source file holds NaN or infinity."""

    def __init__(self, file: Path, names: tuple[str, ...]):
        self.file, self.names = file, names
        super().__init__(f"{file}: {names[0]!r} holds NaN or infinity. Use an earlier checkpoint.")


def overflow_error(tensor: OutputTensor) -> MergeError:
    """The error for an output that is not finite: a source is not, or values exceed the range of the dtype."""
    for entry in tensor.entries():
        if any(has_nonfinite(raw, entry.dtype) for raw in read_blocks(entry, PIECE)):
            return NotFiniteError(entry.file, (entry.name,))
    return MergeError(tensor.overflow)


def allocate(handle: int, count: int) -> None:
    """Allocates disk space before writing, so a full disk is noticed immediately."""
    try:
        os.posix_fallocate(handle, 0, count)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        os.truncate(handle, count)
