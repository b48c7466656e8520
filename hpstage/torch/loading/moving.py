"""Moving a batch to a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def moved(batch: Any, device: torch.device | None) -> Any:
    """Return ``batch`` with its tensors on ``device``, including those in dicts, lists and (named) tuples.

    From pinned memory they are copied while training continues. ``None`` and the CPU leave the batch as it is.
    """
    return batch if device is None or device.type == "cpu" else _moved(batch, device)


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: _moved(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_moved(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_moved(value, device) for value in batch)
    return batch
