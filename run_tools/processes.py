"""What processes that run PyTorch on many documents have in common: threads, and a bounded cache."""

import ctypes
import os
import sys
import time
from contextlib import suppress

PRIMITIVES = "64"
SPINS = "10000"
RELEASE = 5.0  # seconds
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


class MemoryRelease:
    """Returns the free memory of glibc's heap to the system if five seconds have passed since the last time; called after each batch.

    Batches of all lengths leave a fragmented heap, most of which is free: 640 of 850 MB after 1,000 abstracts.
    """

    def __init__(self):
        self.last = time.monotonic()

    def __call__(self) -> None:
        """Takes 20 to 90 ms."""
        if sys.platform == "linux" and time.monotonic() - self.last >= RELEASE:
            with suppress(AttributeError, OSError):  # another C library
                ctypes.CDLL(None).malloc_trim(0)
            self.last = time.monotonic()
