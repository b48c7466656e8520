"""The accelerator that torch has here, if it is another one than CUDA: Apple's (mps), Intel's (xpu), or a plugin's.

All that is needed of it is in the module that torch has for its type: random generators, and when it has finished.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

HIDDEN = "HPSTAGE_NO_ACCELERATOR"
"""Variable of processes that are to use none, as an empty ``CUDA_VISIBLE_DEVICES`` says of CUDA."""


def other() -> str | None:
    """Return the type of its devices, or ``None`` if there is none, or torch is not imported.

    torch 2.5 has no word for it, and so none is used.
    """
    torch: Any = sys.modules.get("torch")
    return _found(torch.accelerator) if hasattr(torch, "accelerator") else None


@functools.cache
def _found(accelerator: Any) -> str | None:
    hidden = HIDDEN in os.environ or not accelerator.is_available()
    device = None if hidden else accelerator.current_accelerator()
    return None if device is None or device.type == "cuda" else str(device.type)


def _module() -> Any:
    name = other()
    return None if name is None else sys.modules["torch"].get_device_module(name)


def _has_begun(module: Any) -> bool:
    """Whether its generators are there; where this cannot be known, they are from the start."""
    return bool(getattr(module, "is_initialized", lambda: True)())


def seed(key: int, *, early: bool) -> None:
    """Key its generators. ``early``: also before it is used, for which the key is queued."""
    module = _module()
    if module is not None and (early or _has_begun(module)):
        getattr(module, "manual_seed_all", module.manual_seed)(key)


def states() -> list[Any]:
    """Return the states of its generators, a tensor for each device that it has begun to use."""
    module = _module()
    if module is None or not _has_begun(module):
        return []
    return list(module.get_rng_state_all()) if hasattr(module, "get_rng_state_all") else [module.get_rng_state()]


def restore(found: list[Any]) -> None:
    """Give its generators states that :func:`states` has returned."""
    module = _module()
    if hasattr(module, "set_rng_state_all"):
        module.set_rng_state_all(found)
    elif found:
        module.set_rng_state(found[0])


def synchronize(device: Any) -> None:
    """Wait until a ``torch.device`` of any type has finished, before time is measured."""
    if device.type == "cuda":
        sys.modules["torch"].cuda.synchronize(device)
    elif device.type == other():
        _module().synchronize()
