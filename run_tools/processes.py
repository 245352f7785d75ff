"""What processes that run PyTorch on many documents have in common: threads, and a bounded cache."""

import os
import sys
from contextlib import suppress

PRIMITIVES = "64"
SPINS = "10000"
PROCESS = os.getpid()  # another one later, in a process that was forked


def limit_spinning() -> None:
    """Lets torch's idle threads sleep after ten thousand rounds of waiting; call it before torch is imported.

    GCC's OpenMP has 300,000. Where other work needs the cores too, a batch then waits for threads that cannot run while others spin:
    several times slower than one thread. A policy of the environment stays.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


def prepare_process(num_threads: int | None = None) -> None:
    """Sets the number of torch's threads, by default to the cores that Ray assigned, and bounds a cache of oneDNN.

    In a forked process it is by default 1: with more, torch waits forever for those of the parent, if that has computed anything.

    oneDNN keeps the code that it generates for each shape of a batch, by default for 1,024 of them: hundreds of megabytes for
    documents of all lengths. It reads its limit on first use; one that is set in the environment stays.
    """
    import torch

    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", PRIMITIVES)
    if threads := num_threads or assigned_cores() or (1 if os.getpid() != PROCESS else None):
        torch.set_num_threads(threads)


def assigned_cores() -> int | None:
    """The cores that Ray assigned to this worker process; `None` outside a worker."""
    ray, cores = sys.modules.get("ray"), None
    if ray is not None and ray.is_initialized():
        with suppress(AssertionError):  # in the driver
            cores = ray.get_runtime_context().get_assigned_resources().get("CPU")
    return None if cores is None else max(1, int(cores))
