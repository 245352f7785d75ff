"""Work ahead of an accelerator, so that it need not wait: the next block is tokenised, and the next batch launched, meanwhile."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def prepare_ahead(items: Iterable[Item], prepare: Callable[[Item], Result], ahead: int) -> Iterator[Result]:
    """Yields `prepare(item)` for each item, in order. A thread prepares `ahead` items while the caller works on the one before.

    Items are read by the caller's thread. An error of the items or of `prepare` is raised where its item is due.
    """
    if not ahead:
        yield from map(prepare, items)
        return
    items, due, failure = iter(items), deque(), None
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="prepare") as thread:
        while True:
            while len(due) <= ahead and items is not None:
                try:
                    due.append(thread.submit(prepare, next(items)))
                except StopIteration:
                    items = None
                except Exception as error:  # the items before it come first
                    items, failure = None, error
            if not due:
                break
            yield due.popleft().result()
    if failure is not None:
        raise failure


def launch_ahead(items: Iterable[Item], launch: Callable[[Item], Result], ahead: int) -> Iterator[tuple[Item, Result]]:
    """Yields `(item, launch(item))` for each item, in order, once `ahead` later items have been launched."""
    due: deque[tuple[Item, Result]] = deque()
    for item in items:
        due.append((item, launch(item)))
        if len(due) > ahead:
            yield due.popleft()
    yield from due


def to_device(batch: dict, device: torch.device) -> dict:
    """Copies a batch to a device; to a GPU from pinned memory, without waiting."""
    if device.type != "cuda":
        return {name: value.to(device) for name, value in batch.items()}
    pinned = {name: v.pin_memory() if isinstance(v, torch.Tensor) else v for name, v in batch.items()}
    return {name: value.to(device, non_blocking=True) for name, value in pinned.items()}


def to_host(outputs: dict[str, torch.Tensor]) -> Callable[[], dict]:
    """Starts copying outputs to the CPU, and returns a function that waits for them and gives numpy arrays."""
    device = next(iter(outputs.values())).device
    if device.type != "cuda":
        arrays = {name: value.cpu().numpy() for name, value in outputs.items()}
        return lambda: arrays
    host = {name: torch.empty(v.shape, dtype=v.dtype, pin_memory=True) for name, v in outputs.items()}
    for name, value in outputs.items():
        host[name].copy_(value, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(device))

    def wait() -> dict:
        copied.synchronize()
        return {name: value.numpy() for name, value in host.items()}

    return wait
