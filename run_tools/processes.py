"""What processes that run PyTorch on many documents have in common: threads, and bounded memory."""

import ctypes
import os
import sys
import time
from contextlib import suppress

PROCESS = os.getpid()  # another one later, in a process that was forked


def prepare_process(num_threads: int | None = None) -> None:
    """Sets the number of torch's threads, by default only in a forked process, where more than one wait forever for those of the
    parent, and bounds a cache of oneDNN, which would keep the code of 1,024 shapes of batches.
    """
    import torch

    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    if threads := num_threads or (os.getpid() != PROCESS):
        torch.set_num_threads(int(threads))


class MemoryRelease:
    """Returns free memory of glibc's heap, which batches of all lengths fragment, to the system every five seconds."""

    last = 0.0

    def __call__(self) -> None:
        """Releases memory if it is time."""
        if sys.platform == "linux" and time.monotonic() - self.last >= 5:
            with suppress(AttributeError, OSError):  # another C library
                ctypes.CDLL(None).malloc_trim(0)
            self.last = time.monotonic()
