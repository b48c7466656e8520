"""Finding the step backend that ``numerics`` names."""

from __future__ import annotations

import torch

from hpstage.errors import UsageError
from hpstage.store import plugins
from hpstage.torch.backends.backend import StepBackend
from hpstage.torch.backends.eager import EagerBackend

AUTO = "auto"
"""The value of :attr:`~hpstage.torch.TorchTrainable.numerics` by which a search chooses a backend by measurement."""

_GROUP: plugins.Group = "hpstage.step_backends"


def names() -> list[str]:
    """Return the names of all backends, sorted; nothing is loaded."""
    return plugins.names(_GROUP)


def backend_named(name: object) -> type[StepBackend]:
    """Return the backend that ``numerics`` names.

    Raises:
        UsageError: there is none of that name, or it cannot be imported.
    """
    if name == "eager":
        return EagerBackend  # the default; looking through all installed distributions takes milliseconds
    if not isinstance(name, str) or name not in names():
        raise UsageError(f"numerics is {name!r}; give one of {', '.join(map(repr, [*names(), AUTO]))}")
    return plugins.subclass(_GROUP, name, StepBackend)  # type: ignore[type-abstract]


def usable_backend(name: object, device: torch.device) -> type[StepBackend]:
    """Return the backend that ``numerics`` names, to train with on ``device``.

    Raises:
        UsageError: there is none of that name, or it cannot run here; the message says why.
    """
    backend = backend_named(name)
    missing = backend.missing(device)
    if missing is not None:
        raise UsageError(f"numerics = {name!r} cannot be used here: {missing}; give numerics = 'eager', or 'auto'")
    return backend
