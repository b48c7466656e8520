"""Finding the step backend that ``numerics`` names."""

from __future__ import annotations

import functools

import torch

from hpstage.errors import UsageError
from hpstage.store import plugins
from hpstage.torch.backends.backend import StepBackend
from hpstage.torch.backends.eager import EagerBackend

AUTO = "auto"
"""The value of :attr:`~hpstage.torch.TorchTrainable.numerics` that makes a search choose a backend by measurement."""

_GROUP: plugins.Group = "hpstage.step_backends"


def names() -> list[str]:
    """Return the names of all backends, sorted; nothing is loaded."""
    return plugins.names(_GROUP)


def backend_named(name: object) -> type[StepBackend]:
    """Return the backend that ``numerics`` names.

    Raises:
        UsageError: there is no backend of that name, or it cannot be imported.
    """
    if name == "eager":
        return EagerBackend  # the default; looking through all installed distributions takes a while
    if not isinstance(name, str):
        raise _no_backend(name)
    return _loaded(name)


@functools.cache  # every slot of a worker calls it whenever it changes its backend
def _loaded(name: str) -> type[StepBackend]:
    if name not in names():
        raise _no_backend(name)
    found: type[StepBackend] = plugins.subclass(_GROUP, name, StepBackend)  # type: ignore[type-abstract]
    if found.several:
        from hpstage.torch.backends.stacked_backend import StackedBackend

        plugins.subclass(_GROUP, name, StackedBackend)  # as StackedLoop requires
    return found


def _no_backend(name: object) -> UsageError:
    return UsageError(f"numerics is {name!r}; give one of {', '.join(map(repr, [*names(), AUTO]))}")


def usable(device: torch.device) -> list[str]:
    """Return the names of the backends that can run here, for a search to choose from."""
    return [name for name in names() if backend_named(name).missing(device) is None]


def choices(device: torch.device) -> dict[str, str]:
    """Describe the backends that can run here, one entry for each setting that decides bits, such as ``{"auto compiled
    numerics": "compiled-v2", ...}``. A search keeps the entries of the backend that it chooses."""
    described = {}
    for name in usable(device):
        backend = backend_named(name)
        for key, text in {"numerics": backend.numerics, **backend.describe()}.items():
            described[f"{AUTO} {name} {key}"] = text
    return described


def usable_backend(name: object, device: torch.device) -> type[StepBackend]:
    """Return the backend that ``numerics`` names, to train with on ``device``.

    Raises:
        UsageError: there is no backend of that name, or it cannot run here; the message gives the reason.
    """
    backend = backend_named(name)
    missing = backend.missing(device)
    if missing is not None:
        raise UsageError(f"numerics = {name!r} cannot be used here: {missing}; give numerics = 'eager', or 'auto'")
    return backend
