"""What every benchmark shares: interleaved timing, and results that say where they come from."""

import ctypes
import gc
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from threading import Lock

import torch

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("torch", "transformers", "peft", "accelerate", "datasets")


def machine() -> dict:
    """Processor, cores and accelerator, without names that belong to one place."""
    names = [line for line in read("/proc/cpuinfo").splitlines() if line.startswith("model name")]
    return {
        "processor": names[0].split(":")[1].strip() if names else platform.processor(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
    }


def read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8") if Path(path).exists() else ""


def commit() -> str:
    """The commit measured, marked where the working tree differs from it; LEXPERTS_COMMIT names that of a copy without history."""
    if "LEXPERTS_COMMIT" in os.environ:
        return os.environ["LEXPERTS_COMMIT"]
    here = Path(__file__).resolve().parent
    run = lambda *args: subprocess.run(["git", *args], cwd=here, capture_output=True, text=True).stdout.strip()  # noqa: E731
    changed = run("status", "--porcelain", "--", "..", ":!results")
    return run("rev-parse", "--short", "HEAD") + (" with changes" if changed else "")


def write(name: str, results, **settings) -> Path:
    """Writes results/NAME.json with date, commit, versions and machine."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    versions = {package: version(package) for package in PACKAGES}
    record = {"date": date.today().isoformat(), "commit": commit(), "versions": versions, "machine": machine()}
    path.write_text(json.dumps({**record, "settings": settings, "results": results}, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path.relative_to(RESULTS.parent.parent)}")
    return path


class Record:
    """results/NAME.json as rows that are added one by one, so that nothing is lost on interruption, nor made again."""

    def __init__(self, name: str, **settings):
        self.name, self.settings, self.lock = name, settings, Lock()

    def rows(self) -> list[dict]:
        path = RESULTS / f"{self.name}.json"
        return json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else []

    def find(self, **place) -> dict | None:
        """The row of a place, such as `system="a", seed=0`."""
        found = (row for row in self.rows() if all(row.get(name) == value for name, value in place.items()))
        return next(found, None)

    def add(self, row: dict) -> dict:
        """A row, with the commit and the processor that it was measured at."""
        row = row | {"commit": commit(), "processor": machine()["processor"]}
        with self.lock:  # read again: the same script may run for other places
            write(self.name, [*self.rows(), row], **self.settings)
        return row


def interleaved(candidates: dict[str, Callable[[], object]], rounds: int = 7) -> dict[str, dict]:
    """Times candidates in turn, A B A B ..., after one warm-up each -> median and all rounds, in milliseconds."""
    seconds = {name: [] for name in candidates}
    for call in candidates.values():
        call()
    for _ in range(rounds):
        for name, call in candidates.items():
            wait_for_device()
            start = time.perf_counter()
            call()
            wait_for_device()
            seconds[name].append(time.perf_counter() - start)
    return {
        name: {"median_ms": 1e3 * statistics.median(times), "rounds_ms": [round(1e3 * t, 3) for t in times]}
        for name, times in seconds.items()
    }


def wait_for_device() -> None:
    """Until the accelerator has done what it was given, if this process uses one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def peak_of(call: Callable[[], object], cuda: bool = False) -> float:
    """MiB that a call needs at its peak beyond what lay there before."""
    gc.collect()
    if cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: tensors go back when they are freed, instead of being kept for later
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak counts from now
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


def resident(field: str) -> float:
    line = next(
        line for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines() if line.startswith(field)
    )
    return int(line.split()[1]) / 2**10
