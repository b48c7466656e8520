"""Names of the last release that have changed. For one version, they work with a ``DeprecationWarning``."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any


def deprecated(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Warn the caller of the function that calls this one."""
    warnings.warn(f"{old} is deprecated; use {new}", DeprecationWarning, stacklevel=stacklevel)


def moved(old: str, new: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of the module ``old``, all of which is in the module ``new`` now."""

    def getattr_(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(new), name)
        deprecated(f"{old}.{name}", f"{new}.{name}")
        return found

    return getattr_
