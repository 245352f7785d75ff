"""Writes a checkpoint atomically: the output is complete or does not exist, and an interrupted run can be resumed.

Shards are written to a staging folder next to the output. A journal records which tensors are written and which shards
are synced to disk. At the end everything is synced and the folder is renamed, which makes the output visible in one step.
"""

import contextlib
import errno
import json
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from run_tools.errors import expand_user, format_size
from run_tools.files import sync

from .errors import MergeError
from .journal import Journal, ResumableError, Shard, assign_shards, fingerprint, stat_key
from .plan import OutputTensor, overflow_message
from .source_scan import ScanResult, SourceScan, sha256_of
from .staging import empty_staging, find_staging_problem, partial_folder
from .tensor_files import (
    DTYPE_BYTES,
    PIECE,
    TensorEntry,
    copy_range,
    has_nonfinite,
    observed,
    pwrite_all,
    read_blocks,
    read_header,
)

try:
    import fcntl
except ImportError:  # no file locks on this system; two runs into one folder are not detected
    fcntl = None  # type: ignore[assignment]

SHARD_BYTES = 5_000_000_000
PART_BYTES = 32 << 20  # after which the journal notes the progress within a tensor
WORKERS = 2
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)


class Progress:
    """Receives the progress of a run; this base class ignores it. Phases: read, write, sync, rename; unit: bytes."""

    def start(self, phase: str, total: int):
        """A phase that will process `total` bytes starts."""

    def advance(self, phase: str, count: int):
        """`count` more bytes were processed. Called from several threads."""


@dataclass(frozen=True)
class Look:
    """How a merge looks at its sources: whether it hashes them and scans them for NaN, and computes their SHA-256 too."""

    scan: bool = True
    sha256: bool = False


def write_checkpoint(
    out: Path,
    tensors,
    sources,
    make_files,
    progress=None,
    resume=False,
    shard_bytes=SHARD_BYTES,
    look: Look | None = None,
):
    """Writes tensors, and the files that `make_files` builds from the scans of the sources' files."""
    progress, shards = progress or Progress(), assign_shards(tensors, shard_bytes)
    files = {file: read_header(file) for source in sources for file in source.files}
    with staging_folder(out, resume) as folder:
        scans = Writer(folder, shards, files, resume, progress, look or Look()).run()
        metadata = make_files(scans)
        with opened(folder / "journal.jsonl", os.O_WRONLY | os.O_APPEND | NOFOLLOW) as journal:
            entry = {"files": [*metadata, "model.safetensors.index.json"]}
            pwrite_all(journal, (json.dumps(entry) + "\n").encode(), os.fstat(journal).st_size)
            os.fsync(journal)  # later runs remove only files that the journal lists
        commit_output(folder, out, shards, metadata, progress)


@contextlib.contextmanager
def staging_folder(out: Path, resume: bool) -> Iterator[Path]:
    """Creates and locks the staging folder of `out`.

    The folder is kept after an interruption, for `--resume`, and removed after a MergeError.
    """
    out = expand_user(out).resolve()
    created = [parent for parent in out.parents if not parent.exists()]
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = partial_folder(out)
    if problem := find_staging_problem(folder):
        raise ResumableError(problem)
    folder.mkdir(exist_ok=True)
    with locked(folder):
        if problem := find_staging_problem(folder):  # written since
            raise ResumableError(problem)
        empty_staging(folder, lambda name: resume and (name == "journal.jsonl" or name.endswith(".safetensors")))
        try:
            yield folder
        except ResumableError:
            raise
        except MergeError:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # not empty
                for parent in created:
                    parent.rmdir()
            raise


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds an exclusive lock on a folder; raises a `ResumableError` if another run holds it."""
    busy = ResumableError(f"Another run is writing to {folder}. Wait for it, or choose another output folder.")
    with opened(folder) as handle:
        try:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise busy from None
        except OSError:  # a file system without locks
            pass
        if not folder.is_dir() or not os.path.samestat(os.fstat(handle), folder.stat()):
            raise busy  # the other run has just finished and renamed its folder
        yield


class ShardFile:
    """A shard that is being written by several threads: opened by the first, closed and synced after the last tensor."""

    def __init__(self, folder: Path, shard: Shard, left: int):
        self.path, self.shard, self.left = folder / shard.name, shard, left
        self.handle: int | None = None
        self._lock = threading.Lock()

    def open_handle(self) -> int:
        """The file descriptor; the header is written and the disk space allocated when it is opened."""
        with self._lock:
            if self.handle is None:
                self.handle = os.open(self.path, os.O_RDWR | os.O_CREAT | NOFOLLOW, 0o644)
                if os.fstat(self.handle).st_size != self.shard.nbytes:
                    os.truncate(self.handle, 0)
                    preallocate(self.handle, self.shard.nbytes)
                pwrite_all(self.handle, self.shard.header, 0)
            return self.handle

    def tensor_done(self) -> bool:
        """Counts a tensor; whether it was the last one."""
        with self._lock:
            self.left -= 1
            return self.left == 0

    def start_writeback(self, offset: int, count: int):
        """Lets the kernel start to write a range to disk, so that little is left for the final sync."""
        if hasattr(os, "posix_fadvise") and self.handle is not None:
            os.posix_fadvise(self.handle, offset, count, os.POSIX_FADV_DONTNEED)

    def close(self):
        """Closes the file if it is open."""
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None


class Writer:
    """Writes the shards of a plan with two threads, which hash and scan the sources as they read them."""

    def __init__(
        self,
        folder: Path,
        shards: list[Shard],
        files: dict[Path, list[TensorEntry]],
        resume: bool,
        progress,
        look: Look,
    ):
        self.folder, self.shards, self.files, self.progress, self.look = folder, shards, files, progress, look
        self.stat_keys = {file: stat_key(file) for file in files}
        self.journal = Journal(folder / "journal.jsonl", fingerprint(shards, files), resume, shards)
        self.stop, self._lock = threading.Event(), threading.RLock()
        self.shard_files: list[ShardFile] = []
        self.scan = SourceScan(files if look.scan else {}, self._tick("read"), self._note_group)

    def run(self) -> dict[Path, ScanResult]:
        """Writes all shards. Returns the scan result of each source file.

        Raises:
            MergeError: if a source holds NaN or infinity, or changes while it is read.
            OSError: if reading or writing fails.
        """
        try:
            sizes = sum(file.stat().st_size for file in self.files)
            self.progress.start("read", sizes * (self.look.scan + self.look.sha256))
            self.progress.start("write", sum(shard.nbytes for shard in self.shards))
            with ThreadPoolExecutor(WORKERS) as workers, ThreadPoolExecutor(1) as syncer:
                return self._run(workers, syncer)
        finally:
            for file in self.shard_files:
                file.close()
            self.journal.close()  # after the threads, which write to it

    def _run(self, workers: ThreadPoolExecutor, syncer: ThreadPoolExecutor) -> dict[Path, ScanResult]:
        syncs: list[Future] = []
        try:
            for file, name, group, digests in self.journal.seen:
                self.scan.recall(Path(file), name, group, bytes.fromhex(digests))
            jobs = self._start_writing(workers, syncer, syncs)
            hashes = {file: workers.submit(self._sha256, file) for file in self.files if self.look.sha256}
            used = {(e.file, e.name) for shard in self.shards for tensor in shard.tensors for e in tensor.entries()}
            unused = [scan.entry for key, scan in self.scan.tensors.items() if key not in used]
            raise_first_error([*jobs, *(workers.submit(self._read_rest, entry) for entry in unused)])
            rest = [scan.entry for scan in self.scan.tensors.values() if not scan.complete]
            raise_first_error([*(workers.submit(self._read_rest, entry) for entry in rest), *hashes.values()])
            raise_first_error(syncs)
            results = {file: self._result(file, hashes) for file in self.files}
            if changed := [file for file, before in self.stat_keys.items() if stat_key(file) != before]:
                raise MergeError(f"{changed[0]} was modified during the merge. Start again when nothing writes to it.")
            return results
        except BaseException:
            self.stop.set()
            syncer.shutdown(wait=False, cancel_futures=True)
            workers.shutdown(wait=True, cancel_futures=True)
            raise

    def _start_writing(
        self, workers: ThreadPoolExecutor, syncer: ThreadPoolExecutor, syncs: list[Future]
    ) -> list[Future]:
        jobs = []
        for shard in self.shards:
            if shard.name in self.journal.synced:
                self.progress.advance("write", shard.nbytes)
                continue
            file = ShardFile(self.folder, shard, len(shard.tensors))
            self.shard_files.append(file)
            for tensor, start in zip(shard.tensors, shard.starts, strict=True):
                jobs.append(workers.submit(self._write, file, tensor, start, syncer, syncs))
        return jobs

    def _result(self, file: Path, hashes: dict[Path, Future]) -> ScanResult:
        sha256 = hashes[file].result() if file in hashes else None
        if not self.look.scan:
            return ScanResult(file, file.stat().st_size, sha256=sha256)
        return self.scan.result(file, sha256)

    def _tick(self, phase: str):
        def advance(count: int):
            if self.stop.is_set():
                raise WorkerStoppedError
            with self._lock:
                self.progress.advance(phase, count)

        return advance

    def _note_group(self, entry: TensorEntry, number: int, digests: bytes):
        self.journal.add(seen=[str(entry.file), entry.name, number, digests.hex()])

    def _check_finite(self, entries):
        for entry in entries:
            scan = self.scan.tensors.get((entry.file, entry.name))
            if scan is not None and scan.nonfinite:
                raise NotFiniteError(entry.file, (entry.name,))

    def _read_rest(self, entry: TensorEntry):
        self.scan.read_rest(entry)
        self._check_finite([entry])

    def _sha256(self, file: Path) -> str:
        return sha256_of(file, self._tick("read"))

    def _write(
        self, file: ShardFile, tensor: OutputTensor, start: int, syncer: ThreadPoolExecutor, syncs: list[Future]
    ):
        tick, width, done = self._tick("write"), DTYPE_BYTES[tensor.dtype], self.journal.written.get(tensor.name, 0)
        target, saved = file.open_handle(), done
        if done:
            tick(done * width)
        with observed(self.scan.see):
            for count in self._write_blocks(tensor, target, start, done) if done < tensor.elements else ():
                done += count
                tick(count * width)
                if (done - saved) * width >= PART_BYTES or done == tensor.elements:
                    self._check_finite(tensor.entries())
                    self.journal.add(written=tensor.name, elements=done)
                    syncer.submit(file.start_writeback, start + saved * width, (done - saved) * width)
                    saved = done
        if file.tensor_done():
            tick(len(file.shard.header))
            syncs.append(syncer.submit(self._sync, file))

    def _write_blocks(self, tensor: OutputTensor, target: int, start: int, done: int) -> Iterator[int]:
        """Writes the elements of a tensor from `done` on; yields the number of elements of each block."""
        entry, width = tensor.copy_source, DTYPE_BYTES[tensor.dtype]
        if entry is not None and not self.look.scan:
            yield from copy_elements(entry, target, start, done)
            return
        buffer = np.empty(PIECE, f"<u{width}") if entry is not None else None
        blocks = read_blocks(entry, PIECE, done, buffer=buffer) if entry is not None else tensor.blocks(done)
        for block in blocks:
            if entry is None and has_nonfinite(block, tensor.dtype):
                raise overflow_error(tensor)
            pwrite_all(target, block, start + done * width)
            done += len(block)
            yield len(block)

    def _sync(self, file: ShardFile):
        with self._lock:
            self.progress.start("sync", file.shard.nbytes)
        assert file.handle is not None  # until `close`
        os.fsync(file.handle)
        file.close()
        self.journal.add(synced=file.shard.name)
        self._tick("sync")(file.shard.nbytes)


def raise_first_error(jobs: list[Future]):
    """Waits for jobs; raises the first error that is not a consequence of another."""
    wait(jobs, return_when=FIRST_EXCEPTION)
    ended = [job.exception() for job in jobs if job.done() and not job.cancelled()]
    errors = [error for error in ended if error is not None]
    errors.sort(key=lambda error: isinstance(error, WorkerStoppedError))
    if errors:
        raise errors[0]


def copy_elements(entry: TensorEntry, target: int, start: int, done: int) -> Iterator[int]:
    """Copies the elements of a tensor from `done` on inside the kernel; yields the number of elements of each part."""
    width = DTYPE_BYTES[entry.dtype]
    step = PART_BYTES // width
    with opened(entry.file) as source:
        for first in range(done, entry.elements, step):
            count = min(step, entry.elements - first)
            try:
                copy_range(source, entry.start + first * width, count * width, target, start + first * width)
            except EOFError:
                message = f"{entry.file} was truncated while it was copied. Restore it and start again."
                raise MergeError(message) from None
            yield count


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
    return MergeError(overflow_message(tensor.name, tensor.dtype, any(part.merge for part in tensor.slices)))


def preallocate(handle: int, count: int):
    """Allocates disk space before writing, so a full disk is noticed immediately."""
    try:
        os.posix_fallocate(handle, 0, count)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise MergeError(f"The disk is full: the next file needs {format_size(count)}. Free some space.") from error
        os.truncate(handle, count)


def commit_output(folder: Path, out: Path, shards: list[Shard], metadata: dict[str, bytes], progress: Progress):
    """Checks the sizes of the shards, writes the metadata files (configuration and index last), syncs, and renames."""
    for shard in shards:
        size = (folder / shard.name).stat().st_size
        if size != shard.nbytes:
            raise MergeError(f"{shard.name} has {size} bytes instead of {shard.nbytes}. Start again.")
    last = ("config.json", "model.safetensors.index.json")
    files = dict(metadata)
    if len(shards) > 1:
        weight_map = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
        total = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        files["model.safetensors.index.json"] = (json.dumps(index, indent=2) + "\n").encode()
    progress.start("rename", len(files))
    for name in [*sorted(files.keys() - set(last)), *(name for name in last if name in files)]:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(files[name])
        sync(path)
        if path.parent != folder:
            sync(path.parent)
        progress.advance("rename", 1)
    sync(folder)
    out = expand_user(out).resolve()
    try:
        os.rename(folder, out)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        (folder / "journal.jsonl").unlink()  # without it no later run empties the folder
        raise ResumableError(
            f"{out} was created by another program during the merge. The complete mixture is in {folder}: move it."
        ) from error
    (out / "journal.jsonl").unlink()
    sync(out)
    sync(out.parent)
    progress.advance("rename", 0)


@contextlib.contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Opens a file or a folder as a file descriptor."""
    handle = os.open(path, flags, 0o644)
    try:
        yield handle
    finally:
        os.close(handle)
