"""What of this process decides bits, in short texts; part of the workload's key."""

from __future__ import annotations

import platform
import sys

from hpstage.executor import Environment
from hpstage.trainable import Trainable


def describe(trainable: Trainable) -> Environment:
    """The environment of the process that would train; a trainable adds what it knows by ``describe()``."""
    described = {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "machine": platform.machine(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        described["numpy"] = str(numpy.__version__)
    own = getattr(trainable, "describe", None)
    if own is not None:
        described |= own()
    return Environment(described)
