"""Shared by the benchmarks of speed: timing in turns, peak memory, and the command line of a benchmark of several parts."""

import argparse
import ctypes
import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from common import Record, make_parser

Parts = dict[str, Callable[[argparse.Namespace], Iterable[dict]]]


def interleaved(candidates: dict[str, Callable[[], object]], rounds: int = 7) -> dict[str, dict]:
    """Times candidates in turns (A B A B ...) after one warm-up each.

    Returns:
        For each candidate the median and all rounds, in milliseconds.
    """
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
    """Waits until all work of the accelerator is done, if this process uses one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def compare(candidates: dict[str, Callable[[], object]], rounds: int, **place) -> dict:
    """Times candidates in turns, and prints them beside the first one. Returns a row of the results: the place and the times."""
    times = interleaved(candidates, rounds)
    first = next(iter(times.values()))["median_ms"]
    shown = (f"{name} {one['median_ms']:,.1f} ms ({one['median_ms'] / first:.2f})" for name, one in times.items())
    print(f"{describe(place)}   {'   '.join(shown)}", flush=True)
    return {**place, "times": times}


def describe(values: dict) -> str:
    """Names with their values, to print."""
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()
    )


def both_ways(call: Callable[[], torch.Tensor], leaves: Iterable[torch.Tensor]) -> dict[str, Callable[[], None]]:
    """A call with the backward pass, which starts without gradients of the leaves, and a call without."""
    leaves = list(leaves)

    def train():
        for leaf in leaves:
            leaf.grad = None
        call().square().mean().backward()

    def infer():
        with torch.no_grad():
            call()

    return {"forward and backward": train, "forward": infer}


def peak_of(call: Callable[[], object], cuda: bool = False) -> float:
    """Peak memory of a call in MiB, above what was allocated before."""
    gc.collect()
    if cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: freed tensors are returned to the system instead of being cached
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the peak
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


def resident(field: str) -> float:
    """A field of /proc/self/status in MiB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 2**10


def in_new_process(function: Callable, *args):
    """The result of a function of a module, called in a new process: for peak memory, and times from a process's start."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def speed_parser(doc: str, parts: Iterable[str], devices: tuple[str, ...] = ("cpu",), rounds: int = 5):
    """A parser with `--only`, `--rounds`, `--device` and the arguments of a record."""
    parser = make_parser(doc)
    parser.add_argument("--only", nargs="+", choices=tuple(parts), help="measure these parts (default: all)")
    parser.add_argument("--rounds", type=int, default=rounds, help="rounds, in which candidates take turns")
    if len(devices) > 1:
        parser.add_argument("--device", choices=devices, default="cpu", help="device of the models")
    else:
        parser.set_defaults(device="cpu")
    return parser


def measure_parts(options: argparse.Namespace, name: str, parts: Parts, **settings) -> None:
    """Measures the chosen parts, and replaces their rows in results/NAME.json, or NAME_cuda.json for a GPU.

    Args:
        options: of `speed_parser`.
        parts: each returns rows, to which `what`, the part's name, is added.
        settings: what all rows share, besides the rounds and the device.
    """
    name = options.name or (name if options.device == "cpu" else f"{name}_{options.device}")
    settings = {"rounds": options.rounds, "device": options.device, **settings}
    record = Record(name, overwrite=options.overwrite, **settings)
    for part in options.only or parts:
        rows = list(parts[part](options))
        record.remove(what=part)
        for row in rows:
            record.add({"what": part, **row})
