"""Writing a checkpoint so that it is there whole or not at all, and can be taken up again where it stopped.

Shards grow in a folder beside the output under a name of their own; a journal says which tensors are written and which
shards are on the disk. At the end everything is synced and the folder renamed: that one step makes the output.
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

from .errors import MergeError, size
from .planning import OutputTensor
from .tensor_files import Audit, TensorEntry, audit, copy_range, nonfinite, pack_header, read_blocks, write_all

try:
    import fcntl
except ImportError:  # no locks on this system; two runs into one folder are then the user's to avoid
    fcntl = None

SHARD_BYTES = 5_000_000_000
PHASES = ("read", "write", "sync", "rename")


class Progress:
    """What a run tells while it works; this one tells nobody. Phases: read, write, sync, rename; units: bytes."""

    def start(self, phase: str, total: int):
        """A phase begins that will handle `total` bytes."""

    def advance(self, phase: str, count: int):
        """`count` more bytes of the phase are done. Called from several threads."""


@dataclass(frozen=True)
class Shard:
    """A file to be written: its tensors in order, its header, where each tensor starts."""

    name: str
    tensors: tuple[OutputTensor, ...]
    header: bytes
    starts: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


def lay_out(tensors: list[OutputTensor], limit: int = SHARD_BYTES) -> list[Shard]:
    """Tensors in their order, in files of at most `limit` bytes (a tensor that is larger has its own)."""
    groups: list[list[OutputTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if groups[-1] and filled + tensor.nbytes > limit:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.nbytes
    shards = []
    for number, group in enumerate(groups, 1):
        name = "model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        header, starts = pack_header([(t.name, t.dtype, t.shape) for t in group])
        shards.append(Shard(name, tuple(group), header, tuple(starts)))
    return shards


def fingerprint(shards: list[Shard], files: dict[Path, list[TensorEntry]]) -> str:
    """Of everything that decides the bytes: what has this in its journal may be continued."""
    digest = hashlib.sha256()
    for file in files:
        status = file.stat()
        digest.update(f"{file.resolve()} {status.st_size} {status.st_mtime_ns}\n".encode())
    for shard in shards:
        digest.update(shard.header)
        for tensor in shard.tensors:
            for part in tensor.parts:
                places = [(s.given, tensor.tensor, str(s.entry(tensor.tensor).file)) for s in part.sources]
                digest.update(repr((places, part.weights, part.start, part.stop)).encode())
            if tensor.given is not None:
                digest.update(tensor.given.tobytes())
    return digest.hexdigest()


class Journal:
    """One line a step, in the folder that grows. After a crash of the machine only what was synced counts."""

    def __init__(self, path: Path, plan: str, resume: bool, shards: list[Shard]):
        self.written: set[str] = set()
        self.synced: set[str] = set()
        self.audits: dict[str, dict] = {}
        self._lock = threading.Lock()
        boot = boot_id()
        if resume and path.is_file():
            self._read(path, plan, boot)
            for shard in shards:
                file = path.with_name(shard.name)
                if not file.is_file() or file.stat().st_size != shard.nbytes:  # somebody made room, or the disk lost it
                    self.synced.discard(shard.name)
                    self.written.difference_update(tensor.name for tensor in shard.tensors)
        kept = [{"written": n} for n in sorted(self.written)] + [{"synced": n} for n in sorted(self.synced)]
        kept += [{"audit": record} for record in self.audits.values()]
        fresh = path.with_suffix(".new")
        fresh.write_text(
            "".join(json.dumps(line) + "\n" for line in [{"plan": plan, "boot": boot}, *kept]), encoding="utf-8"
        )
        os.replace(fresh, path)  # at no moment is there half a journal
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def _read(self, path: Path, plan: str, boot: str):
        lines = []
        for line in path.read_text(errors="replace", encoding="utf-8").splitlines():
            try:
                lines.append(dict(json.loads(line)))
            except (ValueError, TypeError):  # cut short by the interruption
                break
        if not lines or lines[0].get("plan") != plan:
            what = "was another merge: its recipe or its sources differ" if lines else "has lost its journal"
            raise KeepError(f"What was begun in {path.parent} {what}. Start over without --resume.")
        for line in lines[1:]:
            if "written" in line:
                self.written.add(line["written"])
            if "synced" in line:
                self.synced.add(line["synced"])
            if "audit" in line:
                self.audits[line["audit"]["file"]] = line["audit"]
        if lines[0].get("boot") != boot:  # the machine was restarted: pages not yet on the disk are lost
            self.written.clear()

    def add(self, **line):
        with self._lock:
            os.write(self._file, (json.dumps(line) + "\n").encode())

    def close(self):
        os.close(self._file)


def boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""


class KeepError(MergeError):
    """A refusal that leaves what was begun as it lies."""


@contextlib.contextmanager
def growing_folder(out: Path, resume: bool) -> Iterator[Path]:
    """The folder beside `out` in which it grows, locked against a second run.

    It is kept when interrupted, for `--resume`, and removed when the merge itself is refused.
    """
    out = out.expanduser().resolve()
    made = [parent for parent in out.parents if not parent.exists()]
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = out.parent / f".{out.name}.partial"
    folder.mkdir(exist_ok=True)
    with locked(folder):
        if not resume:
            for left in folder.iterdir():
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        try:
            yield folder
        except KeepError:
            raise
        except MergeError:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # somebody else's file is in it by now
                for parent in made:
                    parent.rmdir()
            raise


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    busy = KeepError(f"Another run is writing in {folder}. Wait for it, or choose another output.")
    handle = os.open(folder, os.O_RDONLY)
    try:
        if fcntl is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise busy from None
            except OSError:  # a file system without locks
                pass
        if not folder.is_dir() or not os.path.samestat(os.fstat(handle), folder.stat()):
            raise busy  # it has ended in this very moment, and what was opened is its output now
        yield
    finally:
        os.close(handle)


class Writer:
    """Writes the shards of one plan while its sources are read through for hashes and values that are not finite."""

    def __init__(self, folder: Path, shards: list[Shard], files: dict[Path, list[TensorEntry]], resume: bool, progress):
        self.folder, self.shards, self.files, self.progress = folder, shards, files, progress
        self.states = {file: state(file) for file in files}
        self.journal = Journal(folder / "journal.jsonl", fingerprint(shards, files), resume, shards)
        self.stop = threading.Event()
        names = {shard.name for shard in shards} | {"journal.jsonl"}
        for stray in folder.iterdir():
            if stray.name not in names:
                stray.unlink()

    def run(self) -> dict[Path, Audit]:
        """Writes everything -> what the reading of each source file showed.

        Raises:
            MergeError: for values that are not finite, or a source that changes meanwhile.
            OSError: of the disk.
        """
        try:
            self.progress.start("read", sum(file.stat().st_size for file in self.files))
            self.progress.start("write", sum(shard.nbytes for shard in self.shards))
            with ThreadPoolExecutor(2) as readers, ThreadPoolExecutor(1) as syncer:
                return self._run(readers, syncer)
        finally:
            self.journal.close()  # after the threads, which write into it

    def _run(self, readers: ThreadPoolExecutor, syncer: ThreadPoolExecutor) -> dict[Path, Audit]:
        audits = {}
        try:
            # largest first, so that the two readers end together
            order = sorted(self.files, key=lambda file: -file.stat().st_size)
            audits = {file: readers.submit(self._audit, file) for file in order}
            syncs = []
            for shard in self.shards:
                if shard.name not in self.journal.synced:
                    self._write(shard)
                    syncs.append(syncer.submit(self._sync, shard))
                else:
                    self.progress.advance("write", shard.nbytes)
            for sync in syncs:
                sync.result()
            found = {file: audits[file].result() for file in self.files}
            for file, before in self.states.items():
                if state(file) != before:
                    raise MergeError(f"{file} was changed while it was merged. Start over when nothing writes there.")
            return found
        except BaseException as error:
            self.stop.set()
            syncer.shutdown(wait=False, cancel_futures=True)
            readers.shutdown(wait=True, cancel_futures=True)
            if isinstance(error, Stopped):
                for future in audits.values():
                    fault = None if future.cancelled() else future.exception()
                    if fault and not isinstance(fault, Stopped):
                        raise fault from None
            raise

    def _tick(self, phase: str):
        def advance(count: int):
            if self.stop.is_set():
                raise Stopped
            self.progress.advance(phase, count)

        return advance

    def _audit(self, file: Path) -> Audit:
        status = file.stat()
        known = self.journal.audits.get(str(file))
        if known and (known["nbytes"], known["mtime_ns"]) == (status.st_size, status.st_mtime_ns):
            self.progress.advance("read", status.st_size)
            return Audit(file, known["sha256"], status.st_size, ())
        try:
            found = audit(file, self.files[file], self._tick("read"))
            if found.nonfinite:
                raise NotFinite(file, found.nonfinite)
        except BaseException:
            self.stop.set()
            raise
        record = {"file": str(file), "sha256": found.sha256, "nbytes": found.nbytes, "mtime_ns": status.st_mtime_ns}
        self.journal.add(audit=record)
        return found

    def _write(self, shard: Shard):
        tick = self._tick("write")
        target = os.open(self.folder / shard.name, os.O_RDWR | os.O_CREAT, 0o644)
        sources: dict[Path, int] = {}
        try:
            if os.fstat(target).st_size != shard.nbytes:
                os.truncate(target, 0)
                reserve(target, shard.nbytes)
            write_all(target, shard.header, 0)
            tick(len(shard.header))
            for tensor, start in zip(shard.tensors, shard.starts, strict=True):
                if tensor.name in self.journal.written:
                    tick(tensor.nbytes)
                    continue
                entry = tensor.verbatim
                if entry is not None:
                    if entry.file not in sources:
                        sources[entry.file] = os.open(entry.file, os.O_RDONLY)
                    try:
                        copy_range(sources[entry.file], entry.start, entry.nbytes, target, start, tick)
                    except EOFError:
                        raise MergeError(f"{entry.file} became shorter while it was copied.") from None
                else:
                    at = start
                    for block in tensor.blocks():
                        if tensor.dtype == "F16" and nonfinite(block, "F16"):
                            raise too_large(tensor)
                        at += write_all(target, block, at)
                        tick(block.nbytes)
                self.journal.add(written=tensor.name)
        finally:
            os.close(target)
            for handle in sources.values():
                os.close(handle)

    def _sync(self, shard: Shard):
        self.progress.start("sync", shard.nbytes)
        handle = os.open(self.folder / shard.name, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        self.journal.add(synced=shard.name)
        self.progress.advance("sync", shard.nbytes)


class Stopped(Exception):
    """The other side of the run has failed."""


class NotFinite(MergeError):
    """A source file with NaN or infinite values."""

    def __init__(self, file: Path, names: tuple[str, ...]):
        self.file, self.names = file, names
        super().__init__(f"{file}: {names[0]!r} holds NaN or infinite values. Take an earlier checkpoint.")


def too_large(tensor: OutputTensor) -> MergeError:
    """Why a tensor of float16 is not finite: it was not before, or its values are beyond what float16 holds."""
    for part in tensor.parts:
        for source in part.sources:
            entry = source.entry(tensor.tensor)
            if any(nonfinite(raw, entry.dtype) for raw in read_blocks(entry, 1 << 18)):
                return NotFinite(entry.file, (entry.name,))
    return MergeError(
        f"{tensor.name!r} would hold values beyond 65,504, where float16 ends. Use dtype: bfloat16 or float32."
    )


def state(file: Path) -> tuple[int, int]:
    """What a file that is written to does not keep."""
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def reserve(handle: int, count: int):
    """Takes the room on the disk at once: a full disk is noticed here and not hours later."""
    try:
        os.posix_fallocate(handle, 0, count)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise MergeError(f"The disk is full: {size(count)} are needed for the next file. Make room.") from error
        os.truncate(handle, count)


def finish(folder: Path, out: Path, shards: list[Shard], small_files: dict[str, bytes], progress: Progress):
    """Verifies the lengths, writes the small files, configuration and index last, syncs, and renames to `out`."""
    for shard in shards:
        found = (folder / shard.name).stat().st_size
        if found != shard.nbytes:
            raise MergeError(
                f"{shard.name} holds {found} bytes instead of {shard.nbytes}: the disk lost some. Start over."
            )
    last = ("config.json", "model.safetensors.index.json")
    files = dict(small_files)
    if len(shards) > 1:
        places = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
        total = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        files["model.safetensors.index.json"] = (json.dumps(index, indent=2) + "\n").encode()
    progress.start("rename", len(files))
    for name in sorted(files, key=lambda name: (name in last, last.index(name) if name in last else 0, name)):
        with open(folder / name, "wb") as handle:
            handle.write(files[name])
            handle.flush()
            os.fsync(handle.fileno())
        progress.advance("rename", 1)
    (folder / "journal.jsonl").unlink(missing_ok=True)
    sync_folder(folder)
    out = out.expanduser().resolve()
    try:
        os.rename(folder, out)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise KeepError(f"{out} has been occupied meanwhile. The mixture lies whole in {folder}: move it.") from error
    sync_folder(out.parent)
    progress.advance("rename", 0)


def sync_folder(folder: Path):
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
