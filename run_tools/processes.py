"""What processes that run PyTorch on many documents have in common: threads, and bounded memory."""

import ctypes
import os
import sys
import time
from contextlib import suppress

PROCESS = os.getpid()  # another one later, in a process that was forked


def prepare_process(num_threads: int | None = None) -> None:
    """Sets the number of torch's threads, by default to the cores that Ray assigned, and bounds a cache of oneDNN.

    In a forked process it is by default 1: with more, torch waits forever for those of the parent, if that has computed anything.
    oneDNN keeps the code of each shape of a batch, by default of 1,024: hundreds of megabytes. It reads its limit on first use.
    """
    import torch

    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
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
    """Returns free memory of glibc's heap to the system, every five seconds; called after each batch. It takes 20 to 90 ms.

    Batches of all lengths leave a fragmented heap, most of which is free: 640 of 850 MB after 1,000 abstracts.
    """

    last = 0.0

    def __call__(self) -> None:
        """Releases memory if it is time."""
        if sys.platform == "linux" and time.monotonic() - self.last >= 5:
            with suppress(AttributeError, OSError):  # another C library
                ctypes.CDLL(None).malloc_trim(0)
            self.last = time.monotonic()
