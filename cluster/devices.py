"""Which CUDA devices there are, and which worker gets which."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from hpstage.errors import ClusterError


def visible_devices() -> list[str]:
    """CUDA devices that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []  # no driver: spare the seconds that importing torch takes
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",")[:count] if named else [str(index) for index in range(count)]


def first_devices(devices: Sequence[str], gpus: int | None) -> list[str]:
    """As many of ``devices`` as were asked for; all for ``None``.

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
    """The variables that show a worker one device, dealt out in turn. Without devices: none, or to ``hide`` what is."""
    if devices:
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": devices[worker % len(devices)]}
    return {"CUDA_VISIBLE_DEVICES": ""} if hide else {}
