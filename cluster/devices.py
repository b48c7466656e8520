"""The CUDA devices of this host, and their assignment to workers."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from hpstage.errors import ClusterError


def visible_devices() -> list[str]:
    """Return the CUDA devices that this process may use, as named in ``CUDA_VISIBLE_DEVICES``."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []  # no driver: save the seconds that importing torch takes
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",")[:count] if named else [str(index) for index in range(count)]


def first_devices(devices: Sequence[str], gpus: int | None) -> list[str]:
    """Return the first ``gpus`` of ``devices``; all of them for ``None``.

    Raises:
        ClusterError: there are fewer.
    """
    if gpus is None:
        return list(devices)
    if len(devices) < gpus:
        raise ClusterError(
            f"{gpus} GPUs were asked for, but torch finds {len(devices)} here (CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}); ask for {len(devices)}, or install a torch that "
            f"was built for CUDA"
        )
    return list(devices[:gpus])


def environment_of(worker: int, devices: Sequence[str], *, hide: bool) -> dict[str, str]:
    """Return variables that give a worker one device, round-robin. Without devices: none, or one to ``hide`` them."""
    if devices:
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": devices[worker % len(devices)]}
    return {"CUDA_VISIBLE_DEVICES": ""} if hide else {}
