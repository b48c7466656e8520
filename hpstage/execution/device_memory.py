"""Peak memory of CUDA devices, as their caching allocator counts it.

All allocations of this process count: the model, the memory that a step needs, and any other data or models on the
device. On a CPU there is no such figure: the peak of a process's resident memory cannot be reset, so it would include
everything that the process trained before.
"""

from __future__ import annotations

import sys


def reset_peak() -> None:
    """Reset the peak to the bytes allocated now."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(device)


def peak_bytes() -> int | None:
    """Return the peak of allocated bytes since :func:`reset_peak`, over all devices; ``None`` without a device."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return sum(int(torch.cuda.max_memory_allocated(device)) for device in range(torch.cuda.device_count()))


class DeviceMemory:
    """The memory of the CUDA device that this process trains on."""

    def reset_peak(self) -> None:
        import torch

        torch.cuda.empty_cache()
        reset_peak()

    def free_bytes(self) -> int:
        """Return the bytes that this process can use: the free ones of the device, and those that it has reserved."""
        import torch

        return int(torch.cuda.mem_get_info()[0]) + int(torch.cuda.memory_reserved())

    def taken_bytes(self) -> int:
        """Return the peak of bytes that this process has reserved since :meth:`reset_peak`, whether used or not."""
        import torch

        return int(torch.cuda.max_memory_reserved())
