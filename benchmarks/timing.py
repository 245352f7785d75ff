"""Shared by the benchmarks of speed: timing in turns, and the seconds and peak memory of a command."""

import os
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import psutil
import torch

Calls = dict[str, Callable[[], object]]


def interleaved(calls: Calls, rounds: int = 5) -> dict[str, dict]:
    """Times calls in turns (A B A B ...) after one warm-up each.

    Returns:
        For each call the median and all rounds, in milliseconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
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
    """Waits until all work of the accelerator is done, if this process uses one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def training_step(loss: Callable[[], torch.Tensor], leaves: Iterable[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """A call that computes a loss and its gradients, and starts without gradients of the leaves."""
    leaves = list(leaves)

    def step() -> torch.Tensor:
        for leaf in leaves:
            leaf.grad = None
        value = loss()
        value.backward()
        return value.detach()

    return step


def run_command(command: list[str]) -> dict[str, float]:
    """Runs a command -> seconds to its exit, its processor seconds, and peak anonymous memory of it and its children in MiB, sampled every
    20 ms.

    Raises:
        RuntimeError: if the command fails.
    """
    peak, done = [0.0], threading.Event()

    def watch(pid: int) -> None:
        while not done.is_set():
            total = 0
            with suppress(psutil.Error):
                for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
                    used = process.memory_info()
                    total += used.rss - used.shared
            peak[0] = max(peak[0], total / 2**20)
            done.wait(0.02)

    start, before = time.perf_counter(), os.times()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    watcher = threading.Thread(target=watch, args=(process.pid,))
    watcher.start()
    errors = process.communicate()[1]
    seconds, after = time.perf_counter() - start, os.times()
    done.set()
    watcher.join()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} failed: {errors[-2000:]}")
    processor = sum(getattr(after, name) - getattr(before, name) for name in ("children_user", "children_system"))
    return {"seconds": seconds, "processor_seconds": processor, "memory_mib": peak[0]}
