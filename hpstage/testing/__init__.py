"""Contract suites of the ports: whoever writes an implementation subclasses one in the tests and runs pytest.

What the suites train stands in :mod:`hpstage.testing.toys`, which needs no pytest: workers load it, too.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpstage.testing.algorithm import AlgorithmContract
    from hpstage.testing.checkpoints import CheckpointContract
    from hpstage.testing.executor import ExecutorContract
    from hpstage.testing.journal import JournalContract
    from hpstage.testing.leases import LeasesContract
    from hpstage.testing.store import StoreContract
    from hpstage.testing.trainable import TrainableContract

__all__ = [
    "AlgorithmContract",
    "CheckpointContract",
    "ExecutorContract",
    "JournalContract",
    "LeasesContract",
    "StoreContract",
    "TrainableContract",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hpstage.testing' has no attribute {name!r}")
    import pytest

    # Before they are imported, so that their failed assertions tell what was compared.
    homes = {contract: f"hpstage.testing.{contract.removesuffix('Contract').lower()}" for contract in __all__}
    homes["CheckpointContract"] += "s"
    suites = (*homes.values(), "hpstage.testing.chains", "hpstage.testing.play")
    pytest.register_assert_rewrite(*(suite for suite in suites if suite not in sys.modules))
    return getattr(importlib.import_module(homes[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
