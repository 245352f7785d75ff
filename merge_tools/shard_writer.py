"""Writes a checkpoint atomically: the output is complete or does not exist, and an interrupted run can be resumed.

Shards are written to a staging folder next to the output. A journal records which tensors are written and which shards
are synced to disk. At the end everything is synced and the folder is renamed, which makes the output visible in one step.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .errors import MergeError, expand_user, format_size
from .plan import OutputTensor
from .staging import find_staging_problem, partial_folder
from .tensor_files import (
    ScanResult,
    TensorEntry,
    copy_range,
    has_nonfinite,
    hash_and_scan,
    pack_header,
    pwrite_all,
    read_blocks,
    read_header,
)

try:
    import fcntl
except ImportError:  # no file locks on this system; two runs into one folder are not detected
    fcntl = None  # type: ignore[assignment]

SHARD_BYTES = 5_000_000_000
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)


class Progress:
    """Receives the progress of a run; this base class ignores it. Phases: read, write, sync, rename; unit: bytes."""

    def start(self, phase: str, total: int):
        """A phase that will process `total` bytes starts."""

    def advance(self, phase: str, count: int):
        """`count` more bytes were processed. Called from several threads."""


def write_checkpoint(out: Path, tensors, sources, make_files, progress=None, resume=False, shard_bytes=SHARD_BYTES):
    """Writes tensors, and the files that `make_files` builds from the scans of the sources' files."""
    progress, shards = progress or Progress(), assign_shards(tensors, shard_bytes)
    files = {file: read_header(file) for source in sources for file in source.files}
    with staging_folder(out, resume) as folder:
        scans = Writer(folder, shards, files, resume, progress).run()
        metadata = make_files(scans)
        with opened(folder / "journal.jsonl", os.O_WRONLY | os.O_APPEND | NOFOLLOW) as journal:
            entry = {"files": [*metadata, "model.safetensors.index.json"]}
            pwrite_all(journal, (json.dumps(entry) + "\n").encode(), os.fstat(journal).st_size)
        commit_output(folder, out, shards, metadata, progress)


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
    shards = []
    for index, group in enumerate(groups, 1):
        name = "model.safetensors" if len(groups) == 1 else f"model-{index:05d}-of-{len(groups):05d}.safetensors"
        header, starts = pack_header([(t.name, t.dtype, t.shape) for t in group])
        shards.append(Shard(name, tuple(group), header, tuple(starts)))
    return shards


def fingerprint(shards: list[Shard], files: dict[Path, list[TensorEntry]]) -> str:
    """A hash of everything that determines the output. A run with the same fingerprint can be resumed."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(repr((str(file.resolve()), stat_key(file))).encode())
    for shard in shards:
        digest.update(shard.header)
        for tensor in shard.tensors:
            for part in tensor.slices:
                locations = [(s.origin, tensor.tensor, str(s.entry(tensor.tensor).file)) for s in part.sources]
                digest.update(repr((locations, part.weights, part.start, part.stop)).encode())
            if tensor.values is not None:
                digest.update(tensor.values.tobytes())
    return digest.hexdigest()


class Journal:
    """One line per completed step, stored in the staging folder. After a system crash only synced shards count."""

    def __init__(self, path: Path, plan: str, resume: bool, shards: list[Shard]):
        self.written: set[str] = set()
        self.synced: set[str] = set()
        self.audits: dict[str, dict] = {}
        self._lock = threading.Lock()
        boot, names = boot_id(), [shard.name for shard in shards]
        if resume and path.is_file():
            self._read(path, plan, boot)
            for shard in shards:
                file = path.with_name(shard.name)
                if not file.is_file() or file.stat().st_size != shard.nbytes:  # deleted or lost
                    self.synced.discard(shard.name)
                    self.written.difference_update(tensor.name for tensor in shard.tensors)
        lines = [{"plan": plan, "boot": boot}, {"files": names}]
        lines += [{"written": n} for n in sorted(self.written)] + [{"synced": n} for n in sorted(self.synced)]
        lines += [{"audit": record} for record in self.audits.values()]
        new = path.with_suffix(".new")
        new.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        os.replace(new, path)  # atomic
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def _read(self, path: Path, plan: str, boot: str):
        lines = []
        for line in path.read_text(errors="replace", encoding="utf-8").splitlines():
            try:
                lines.append(dict(json.loads(line)))
            except (ValueError, TypeError):  # truncated by the interruption
                break
        if lines[0]["plan"] != plan:
            raise ResumableError(
                f"Cannot resume the run in {path.parent}: it has another recipe or other sources. Start again without "
                "--resume."
            )
        if lines[0].get("boot") == boot:  # after a reboot, pages that were not synced are lost
            self.written |= {line["written"] for line in lines if "written" in line}
        self.synced |= {line["synced"] for line in lines if "synced" in line}
        self.audits = {line["audit"]["file"]: line["audit"] for line in lines if "audit" in line}

    def add(self, **line):
        """Appends a line."""
        with self._lock:
            os.write(self._file, (json.dumps(line) + "\n").encode())

    def close(self):
        """Closes the file."""
        os.close(self._file)


def boot_id() -> str:
    """An id that changes when the system restarts; empty if unknown."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""


class ResumableError(MergeError):
    """An error that leaves the staging folder unchanged."""


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
        for path in folder.iterdir():
            if not resume or (path.name != "journal.jsonl" and path.suffix != ".safetensors"):
                path.unlink()
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


class Writer:
    """Writes the shards of a plan, while two threads hash the sources and scan them for NaN and infinity."""

    def __init__(self, folder: Path, shards: list[Shard], files: dict[Path, list[TensorEntry]], resume: bool, progress):
        self.folder, self.shards, self.files, self.progress = folder, shards, files, progress
        self.stat_keys = {file: stat_key(file) for file in files}
        self.journal = Journal(folder / "journal.jsonl", fingerprint(shards, files), resume, shards)
        self.stop = threading.Event()

    def run(self) -> dict[Path, ScanResult]:
        """Writes all shards. Returns the scan result of each source file.

        Raises:
            MergeError: if a source holds NaN or infinity, or changes while it is read.
            OSError: if reading or writing fails.
        """
        try:
            self.progress.start("read", sum(file.stat().st_size for file in self.files))
            self.progress.start("write", sum(shard.nbytes for shard in self.shards))
            with ThreadPoolExecutor(2) as readers, ThreadPoolExecutor(1) as syncer:
                return self._run(readers, syncer)
        finally:
            self.journal.close()  # after the threads, which write to it

    def _run(self, readers: ThreadPoolExecutor, syncer: ThreadPoolExecutor) -> dict[Path, ScanResult]:
        scans = {}
        try:
            # largest first, so both readers end at about the same time
            order = sorted(self.files, key=lambda file: -file.stat().st_size)
            scans = {file: readers.submit(self._scan, file) for file in order}
            syncs = []
            for shard in self.shards:
                if shard.name in self.journal.synced:
                    self.progress.advance("write", shard.nbytes)
                    continue
                self._write(shard)
                syncs.append(syncer.submit(self._sync, shard))
            for sync in syncs:
                sync.result()
            results = {file: scans[file].result() for file in self.files}
            if changed := [file for file, before in self.stat_keys.items() if stat_key(file) != before]:
                raise MergeError(f"{changed[0]} was modified during the merge. Start again when nothing writes to it.")
            return results
        except BaseException as error:
            self.stop.set()
            syncer.shutdown(wait=False, cancel_futures=True)
            readers.shutdown(wait=True, cancel_futures=True)
            if isinstance(error, WorkerStoppedError):
                for future in scans.values():
                    fault = None if future.cancelled() else future.exception()
                    if fault and not isinstance(fault, WorkerStoppedError):
                        raise fault from None
            raise

    def _tick(self, phase: str):
        def advance(count: int):
            if self.stop.is_set():
                raise WorkerStoppedError
            self.progress.advance(phase, count)

        return advance

    def _scan(self, file: Path) -> ScanResult:
        size, modified = stat_key(file)
        recorded = self.journal.audits.get(str(file))
        if recorded and (recorded["nbytes"], recorded["mtime_ns"]) == (size, modified):
            self.progress.advance("read", size)
            return ScanResult(file, recorded["sha256"], size, ())
        try:
            scan = hash_and_scan(file, self.files[file], self._tick("read"))
            if scan.nonfinite:
                raise NotFiniteError(file, scan.nonfinite)
        except BaseException:
            self.stop.set()
            raise
        self.journal.add(audit={"file": str(file), "sha256": scan.sha256, "nbytes": scan.nbytes, "mtime_ns": modified})
        return scan

    def _write(self, shard: Shard):
        tick = self._tick("write")
        with opened(self.folder / shard.name, os.O_RDWR | os.O_CREAT | NOFOLLOW) as target:
            if os.fstat(target).st_size != shard.nbytes:
                os.truncate(target, 0)
                preallocate(target, shard.nbytes)
            pwrite_all(target, shard.header, 0)
            tick(len(shard.header))
            for tensor, start in zip(shard.tensors, shard.starts, strict=True):
                if tensor.name in self.journal.written:
                    tick(tensor.nbytes)
                    continue
                self._write_tensor(tensor, target, start, tick)
                self.journal.add(written=tensor.name)

    def _write_tensor(self, tensor: OutputTensor, target: int, start: int, tick):
        entry = tensor.copy_source
        if entry is not None:
            with opened(entry.file) as source:
                try:
                    copy_range(source, entry.start, entry.nbytes, target, start, tick)
                except EOFError:
                    message = f"{entry.file} was truncated while it was copied. Restore it and start again."
                    raise MergeError(message) from None
            return
        for block in tensor.blocks():
            if tensor.dtype == "F16" and has_nonfinite(block, "F16"):
                raise overflow_error(tensor)
            start += pwrite_all(target, block, start)
            tick(block.nbytes)

    def _sync(self, shard: Shard):
        self.progress.start("sync", shard.nbytes)
        sync_to_disk(self.folder / shard.name)
        self.journal.add(synced=shard.name)
        self.progress.advance("sync", shard.nbytes)


class WorkerStoppedError(Exception):
    """Stops a thread after another one has failed."""


class NotFiniteError(MergeError):
    """A source file holds NaN or infinity."""

    def __init__(self, file: Path, names: tuple[str, ...]):
        self.file, self.names = file, names
        super().__init__(f"{file}: {names[0]!r} holds NaN or infinity. Use an earlier checkpoint.")


def overflow_error(tensor: OutputTensor) -> MergeError:
    """The error for a float16 tensor that is not finite: a source is not, or values exceed the range of float16."""
    for part in tensor.slices:
        for source in part.sources:
            entry = source.entry(tensor.tensor)
            if any(has_nonfinite(raw, entry.dtype) for raw in read_blocks(entry, 1 << 18)):
                return NotFiniteError(entry.file, (entry.name,))
    return MergeError(f"{tensor.name!r} has values above 65,504, float16's maximum. Use dtype: bfloat16 or float32.")


def stat_key(file: Path) -> tuple[int, int]:
    """Size and modification time, which change when a file is written."""
    status = file.stat()
    return status.st_size, status.st_mtime_ns


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
        (folder / name).write_bytes(files[name])
        sync_to_disk(folder / name)
        progress.advance("rename", 1)
    sync_to_disk(folder)
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
    sync_to_disk(out)
    sync_to_disk(out.parent)
    progress.advance("rename", 0)


@contextlib.contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Opens a file or a folder as a file descriptor."""
    handle = os.open(path, flags, 0o644)
    try:
        yield handle
    finally:
        os.close(handle)


def sync_to_disk(path: Path):
    """Syncs a file, or the entries of a folder, to disk."""
    with opened(path) as handle:
        os.fsync(handle)
