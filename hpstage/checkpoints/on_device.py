"""Copies states from CUDA devices to pinned host memory, on a separate stream, while training continues."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from hpstage.checkpoints.state_tree import FlatState, unflatten
from hpstage.errors import DeviceFull


class CudaMover:
    """Copies states from CUDA devices to the host: tensors on one stream per device; other leaves are shared with the
    state. In tests the CPU may stand in for the device."""

    def __init__(self) -> None:
        self._streams: dict[Any, Any] = {}
        self._returned: Counter[Any] = Counter()  # maximum bytes that steps have used and freed, by device

    def is_on_device(self, flat: FlatState) -> bool:
        """Whether any part of a state is on the device."""
        return any(_is_on_device(value) for value in flat.values)

    def room(self, flat: FlatState) -> int:
        """Return the bytes of such states that fit on the devices, apart from the memory that steps need."""
        import torch

        sizes: Counter[Any] = Counter()
        for leaf, value in zip(flat.leaves, flat.values, strict=True):
            if _is_on_device(value):
                sizes[value.device] += leaf.nbytes
        rooms = []
        for device, size in sizes.items():
            unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            now = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
            # The maximum so far: each state kept after a step brings the allocated memory closer to the peak.
            returned = self._returned[device] = max(now, self._returned[device])
            left = torch.cuda.mem_get_info(device)[0] + unused - returned
            rooms.append(left / max(1, size))
        return int(min(rooms, default=0.0) * flat.nbytes)

    def to_host(self, flat: FlatState) -> tuple[object, Callable[[], object]]:
        """Begin to copy a state to the host. Return the copy, and a function that waits until it is complete.

        The state may be freed before that: the copy is queued after all work that is already queued on the device.
        """
        streams: dict[Any, Any] = {}
        values = [self._copied(value, streams) if _is_on_device(value) else value for value in flat.values]
        events = [stream.record_event() for stream in streams.values()]
        return unflatten(flat.tree, values), lambda: [event.synchronize() for event in events]

    def _copied(self, tensor: Any, streams: dict[Any, Any]) -> Any:
        import torch

        stream = streams.get(tensor.device)
        if stream is None:
            if tensor.device not in self._streams:
                self._streams[tensor.device] = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
            stream = self._streams[tensor.device]
            stream.wait_stream(torch.cuda.current_stream(tensor.device))
            streams[tensor.device] = stream
        host = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu", pin_memory=True)
        with torch.cuda.stream(stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # its memory is not reused before it is copied
        return host


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, is that a device has run out of memory."""
    while error is not None:
        known = isinstance(error, DeviceFull) or type(error).__name__ == "OutOfMemoryError"
        if known or "CUBLAS_STATUS_ALLOC_FAILED" in str(error):
            return True
        error = error.__cause__
    return False


def _is_on_device(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor) and value.device.type == "cuda"
