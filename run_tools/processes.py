"""What processes that run PyTorch on many documents have in common: threads, and bounded memory."""

import ctypes
import os
import time
from contextlib import suppress

PROCESS = os.getpid()  # another one later, in a process that was forked


def prepare_process(num_threads: int | None = None) -> None:
    """Sets torch's threads, to 1 in a forked process, where more wait for the parent's; bounds oneDNN's cache."""
    import torch

    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")  # shapes of batches; it keeps code for each
    if num_threads or os.getpid() != PROCESS:
        torch.set_num_threads(num_threads if num_threads and os.getpid() == PROCESS else 1)


class MemoryRelease:
    """Returns free memory of glibc's heap, which batches of all lengths fragment, to the system every five seconds."""

    last = 0.0

    def __call__(self) -> None:
        """Releases memory if it is time."""
        if time.monotonic() - self.last >= 5:
            with suppress(AttributeError, OSError, TypeError):  # another C library
                ctypes.CDLL(None).malloc_trim(0)
            self.last = time.monotonic()
