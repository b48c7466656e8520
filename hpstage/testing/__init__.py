"""Contract suites of the ports. To test an implementation of a port, subclass its suite in your tests and run pytest.

The trainables of the suites are in :mod:`hpstage.testing.toys`, which does not need pytest, since workers load it, too.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from hpstage.errors.deprecation import deprecated

if TYPE_CHECKING:
    from hpstage.testing.algorithm import AlgorithmContract
    from hpstage.testing.checkpoints import CheckpointContract
    from hpstage.testing.executor import ExecutorContract
    from hpstage.testing.journal import JournalContract
    from hpstage.testing.step_backend import StepBackendContract
    from hpstage.testing.trainable import TrainableContract

__all__ = [
    "AlgorithmContract",
    "CheckpointContract",
    "ExecutorContract",
    "JournalContract",
    "StepBackendContract",
    "TrainableContract",
]


_HOMES = {
    "AlgorithmContract": "hpstage.testing.algorithm",
    "CheckpointContract": "hpstage.testing.checkpoints",
    "ExecutorContract": "hpstage.testing.executor",
    "JournalContract": "hpstage.testing.journal",
    "StepBackendContract": "hpstage.testing.step_backend",
    "TrainableContract": "hpstage.testing.trainable",
}

if "pytest" in sys.modules:
    # Register the suites before they are imported, so that failed assertions show the values compared.
    more = ("chains", "executor_case", "leases", "play")
    sys.modules["pytest"].register_assert_rewrite(*_HOMES.values(), *(f"hpstage.testing.{name}" for name in more))


def __getattr__(name: str) -> Any:
    if name in ("StoreContract", "LeasesContract", "SnapshotsContract"):  # until 0.3
        deprecated(f"hpstage.testing.{name}", "hpstage.testing.JournalContract")
        name = "JournalContract"
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'hpstage.testing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
