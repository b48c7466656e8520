"""The settings of the torch environment that decide bits: they are described for keys, and pinned."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from hpstage.errors import UsageError
from hpstage.training.identity import accelerators, settings

# Names how a step is computed. Other methods (compiled, fused siblings) give other bits and need other names.
NUMERICS = "eager-v1"


_SHORT = 0.125
"""A GPU is short of memory if less than this share of it is free."""


def default_device() -> torch.device:
    """Return the accelerator that torch has here (cuda, mps, xpu, or a plugin's), else cpu."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device(accelerators.other() or "cpu")


def see_devices(who: str, count: object) -> None:
    """Check that this process sees as many GPUs as a trainable uses.

    Raises:
        UsageError: it sees fewer.
    """
    if type(count) is not int or count < 1:
        raise UsageError(f"{who}: devices_per_stage is {count!r}; it must be a whole number of at least 1")
    if count > 1 and torch.cuda.device_count() < count:
        raise UsageError(
            f"{who} states devices_per_stage = {count}, and this process sees {torch.cuda.device_count()} CUDA "
            f"devices; start workers that see {count} each: hpstage worker --gpus-per-worker {count}, or "
            f"CUDA_VISIBLE_DEVICES with as many"
        )


def pin() -> None:
    """Use one intra-op thread, since their number changes bits, and do not select kernels by timing them."""
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = False


def warm_up() -> None:
    """Import what torch would import when the first optimizer is created (its compiler: most of a second).

    Call it when a worker is opened, since workers are opened concurrently. During the first stage, the import would
    delay all other stages, and count as training time.
    """
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


def give_memory_back(device: torch.device) -> None:
    """Release the memory that torch's allocator caches, if a GPU is short of memory: other processes cannot use it, and
    models of other shapes do not fit into its blocks. Otherwise the cache stays, since allocating memory again takes
    time."""
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if free < _SHORT * total and unused > free:
        torch.cuda.empty_cache()


def use_deterministic_algorithms() -> None:
    """Select deterministic GPU kernels, since others add in arbitrary order. torch raises if it has none."""
    # cuBLAS reads it at the first product of matrices. Training processes are started with it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Reading uninitialized memory would be the user's bug; filling all of it would slow down every step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


def describe(device: torch.device | str | None = None) -> dict[str, str]:
    """Describe what decides the bits of training on ``device`` (default: the default device), by short names."""
    device = default_device() if device is None else torch.device(device)
    backends: Any = torch.backends  # its types lag behind
    described = {
        "torch": torch.__version__,
        "device": device.type,
        "isa": backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "mkldnn": "available" if backends.mkldnn.is_available() else "absent",
        "numerics": NUMERICS,
        **settings.described(("torch",)),
    }
    if device.type == "cuda":
        described["device"] = f"cuda ({torch.cuda.get_device_name(device)})"
        described["cuda"] = f"{torch.version.cuda}, cudnn {backends.cudnn.version()}"
        described["cublas workspace"] = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "default")
    elif device.type != "cpu":
        named = getattr(torch.get_device_module(device.type), "get_device_name", None)
        described["device"] = f"{device.type} ({named() if named is not None else platform.machine()})"
        described["system"] = f"{platform.system()} {platform.mac_ver()[0] or platform.release()}"
    return described
