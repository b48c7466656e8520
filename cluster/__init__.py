"""Execution on a Dask cluster, whose workers train chains.

Importing this package is cheap, for commands that only start other processes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpstage.cluster.executor import DaskExecutor
    from hpstage.cluster.local import local_cluster

__all__ = ["DaskExecutor", "local_cluster"]

_HOMES = {"DaskExecutor": "hpstage.cluster.executor", "local_cluster": "hpstage.cluster.local"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'hpstage.cluster' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
