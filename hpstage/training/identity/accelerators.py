"""The accelerators that torch can use in this process: CUDA, and at most one other: Apple's (mps), Intel's (xpu) or a
plugin's.

For each type of accelerator, torch has a module, such as ``torch.mps``, with its random generators and ``synchronize``.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

HIDDEN = "HPSTAGE_NO_ACCELERATOR"
"""Environment variable that hides the other accelerator from a process, as an empty ``CUDA_VISIBLE_DEVICES`` hides
CUDA."""


def other() -> str | None:
    """Return the type of the accelerator other than CUDA; ``None`` if there is none, or if torch is not imported.

    torch 2.5 lacks ``torch.accelerator``. With this version, only CUDA is used.
    """
    torch: Any = sys.modules.get("torch")
    return _found(torch.accelerator) if hasattr(torch, "accelerator") else None


@functools.cache
def _found(accelerator: Any) -> str | None:
    hidden = HIDDEN in os.environ or not accelerator.is_available()
    device = None if hidden else accelerator.current_accelerator()
    return None if device is None or device.type == "cuda" else str(device.type)


def _modules() -> dict[str, Any]:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return {}
    name = other()
    return {"cuda": torch.cuda} | ({} if name is None else {name: torch.get_device_module(name)})


def _has_begun(module: Any) -> bool:
    """Return whether the accelerator's generators exist. If this is unknown, they are assumed to exist."""
    return bool(getattr(module, "is_initialized", lambda: True)())


def seed(key: int, *, early: bool) -> None:
    """Seed the accelerators' generators with ``key``. If ``early`` is set, also seed accelerators that are not used
    yet: torch queues the seed. This must not be done at each step, since the queue would grow."""
    for module in _modules().values():
        if _has_begun(module) or (early and getattr(module, "is_available", lambda: True)()):
            getattr(module, "manual_seed_all", module.manual_seed)(key)


def states() -> dict[str, list[Any]]:
    """Return the states of the generators by type of accelerator, for the types in use: one tensor per device."""
    begun = {name: module for name, module in _modules().items() if _has_begun(module)}
    return {
        name: list(module.get_rng_state_all()) if hasattr(module, "get_rng_state_all") else [module.get_rng_state()]
        for name, module in begun.items()
    }


def restore(found: dict[str, list[Any]]) -> None:
    """Restore the generators' states that :func:`states` has returned."""
    for name, present in found.items():
        module = _modules()[name]
        if hasattr(module, "set_rng_state_all"):
            module.set_rng_state_all(present)
        else:
            module.set_rng_state(present[0])


def synchronize(device: Any) -> None:
    """Wait until a ``torch.device`` of any type has finished its work, before time is measured."""
    if device.type == "cuda":
        sys.modules["torch"].cuda.synchronize(device)
    elif device.type == other():
        _modules()[device.type].synchronize()
