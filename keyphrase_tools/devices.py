# SPDX-License-Identifier: Apache-2.0
"""Copies between the CPU and an accelerator that do not wait for each other."""

from collections.abc import Callable

import torch


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
