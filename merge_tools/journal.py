"""The journal of a staging folder: what an interrupted run has written, and which source pieces it has looked at."""

import hashlib
import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from run_tools.files import sync

from .errors import MergeError
from .plan import OutputTensor
from .tensor_files import TensorEntry, pack_header


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
    groups, filled = [[]], 0
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
                digest.update(repr(part.key(tensor.tensor)).encode())
            if tensor.values is not None:
                digest.update(tensor.values.tobytes())
    return digest.hexdigest()


class Journal:
    """One line per completed step, stored in the staging folder. After a system crash only synced shards count."""

    def __init__(self, path: Path, plan: str, resume: bool, shards: list[Shard]):
        self.written: dict[str, int] = {}  # name of a tensor -> its elements that are written
        self.synced: set[str] = set()
        self.seen: list[list] = []  # file, tensor, number and digests of groups of pieces
        self._lock = threading.Lock()
        boot, names = boot_id(), [shard.name for shard in shards]
        if resume and path.is_file():
            self._read(path, plan, boot)
            for shard in shards:
                file = path.with_name(shard.name)
                if not file.is_file() or file.stat().st_size != shard.nbytes:  # deleted or lost
                    self.synced.discard(shard.name)
                    for tensor in shard.tensors:
                        self.written.pop(tensor.name, None)
        lines = [{"plan": plan, "boot": boot}, {"files": names}]
        lines += [{"written": name, "elements": count} for name, count in sorted(self.written.items())]
        lines += [{"synced": name} for name in sorted(self.synced)] + [{"seen": group} for group in self.seen]
        new = path.with_suffix(".new")
        new.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        sync(new)  # else a crash could leave an empty journal in place of the old one
        os.replace(new, path)  # atomic
        sync(path.parent)
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
            self.written |= {line["written"]: line["elements"] for line in lines if "written" in line}
        self.synced |= {line["synced"] for line in lines if "synced" in line}
        self.seen = [line["seen"] for line in lines if "seen" in line]

    def add(self, **line):
        """Appends a line."""
        with self._lock:
            os.write(self._file, (json.dumps(line) + "\n").encode())

    def close(self):
        """Closes the file."""
        os.close(self._file)


def stat_key(file: Path) -> tuple[int, ...]:
    """Size, times of modification and of change, and inode: a file that was written or replaced has another key."""
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def boot_id() -> str:
    """An id that changes when the system restarts; empty if unknown."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""


class ResumableError(MergeError):
    """An error that leaves the staging folder unchanged."""
