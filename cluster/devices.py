"""The CUDA devices of this host, and their assignment to workers."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence

from dask.system import CPU_COUNT

from hpstage.checkpoints import host_memory
from hpstage.errors import ClusterError, UsageError
from hpstage.errors.arguments import WORKERS, optional
from hpstage.execution.shared_device import SHARERS
from hpstage.training.identity import accelerators
from hpstage.training.identity.accelerators import HIDDEN

_MIG = "MIG-"
"""Prefix of the names of MIG instances. A MIG instance is a part of a GPU that is used like a GPU."""


def visible_devices() -> list[str]:
    """Return the CUDA devices that this process may use, as named in ``CUDA_VISIBLE_DEVICES``: by number, UUID, or MIG
    instance. A process sees only the first of several MIG instances. All of them are returned, since each can be given
    to a worker."""
    if not _loads("libcuda.so.1"):
        return []  # there is no driver; importing torch would take seconds
    import torch

    count = torch.cuda.device_count()
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if names == [""]:
        return [str(index) for index in range(count)]
    return names if count and names[0].startswith(_MIG) else names[:count]


def has_other_accelerator() -> bool:
    """Return whether training on this host uses an accelerator other than CUDA, such as Apple's or Intel's."""
    if sys.platform != "darwin" and not _loads("libze_loader.so.1"):
        return False  # without importing torch
    import torch  # noqa: F401  # for accelerators.other()

    return accelerators.other() is not None


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def identities(count: int) -> tuple[str, ...]:
    """Return the UUIDs of the first ``count`` CUDA devices, which do not depend on how devices were selected. If torch
    does not know a UUID, the name from :func:`visible_devices` is returned instead."""
    import torch

    found = []
    for index, name in enumerate(visible_devices()[:count]):
        # The name of a MIG instance is its UUID. Torch may return the UUID of the GPU, which several instances share.
        uuid = "" if name.startswith(_MIG) else getattr(torch.cuda.get_device_properties(index), "uuid", "")
        found.append(str(uuid) or name.removeprefix(_MIG))
    return tuple(found)


def first_devices(devices: Sequence[str], gpus: int | None) -> list[str]:
    """Return the first ``gpus`` of ``devices``, or all of them if ``gpus`` is ``None``.

    Raises:
        ClusterError: there are fewer.
    """
    if gpus is None:
        return list(devices)
    if len(devices) < gpus:
        raise ClusterError(
            f"{gpus} GPUs were requested, but torch finds {len(devices)} here (CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}); request {len(devices)}, or install a torch that "
            f"was built for CUDA"
        )
    return list(devices[:gpus])


def grouped(devices: Sequence[str], size: int) -> list[str]:
    """Return the devices in groups of ``size``, each as a value of ``CUDA_VISIBLE_DEVICES``. Drop devices left over.

    Raises:
        ClusterError: there are devices, but fewer than ``size``.
    """
    if devices and len(devices) < size:
        raise ClusterError(
            f"{size} GPUs per worker were requested, but torch finds {len(devices)} here; request at most that many"
        )
    return [",".join(devices[first : first + size]) for first in range(0, len(devices) - size + 1, size)]


def how_many(
    n_workers: int | None, workers_per_gpu: int | None, devices: Sequence[str], *, accelerator: bool = False
) -> int:
    """Return how many workers to start: by default one per device, one for another ``accelerator``, else one per core.

    Raises:
        UsageError: both numbers are given, or ``workers_per_gpu`` is given, but there is no GPU.
    """
    optional(WORKERS).of("n_workers", n_workers)
    if workers_per_gpu is None:
        return n_workers or len(devices) or (1 if accelerator else CPU_COUNT)
    WORKERS.of("workers_per_gpu", workers_per_gpu)
    if n_workers is not None:
        raise UsageError(
            f"{n_workers} workers and {workers_per_gpu} workers per GPU were requested; give only one of the two"
        )
    if not devices:
        raise UsageError(
            f"{workers_per_gpu} workers per GPU were requested, but there is no usable GPU; give the number of workers "
            f"instead, or install a torch that was built for CUDA"
        )
    return workers_per_gpu * len(devices)


def assigned(
    n_workers: int | None, gpus: int | None, workers_per_gpu: int | None, gpus_per_worker: int
) -> tuple[list[str], int]:
    """Return the devices, one or one group per worker, and the number of workers to start."""
    devices = [] if gpus == 0 else grouped(first_devices(visible_devices(), gpus), gpus_per_worker)
    elsewhere = not devices and gpus != 0 and has_other_accelerator()
    return devices, how_many(n_workers, workers_per_gpu, devices, accelerator=elsewhere)


def environment_of(worker: int, devices: Sequence[str], *, hide: bool, workers: int = 1) -> dict[str, str]:
    """Return variables that give a worker one device, or one group, round-robin. Without devices, return none, or if
    ``hide`` is set, a variable that hides them.

    Args:
        workers: the number of all workers; each worker is passed how many share its device.
    """
    if devices:
        # PCI_BUS_ID: numbers as in nvidia-smi. If the user has set CUDA_VISIBLE_DEVICES, its numbering is kept.
        numbered = {} if "CUDA_VISIBLE_DEVICES" in os.environ else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        return {
            **numbered,
            "CUDA_VISIBLE_DEVICES": devices[worker % len(devices)],
            SHARERS: str(-(-workers // len(devices))),
            host_memory.SHARERS: str(workers),
        }
    return {host_memory.SHARERS: str(workers), **({"CUDA_VISIBLE_DEVICES": "", HIDDEN: "1"} if hide else {})}
