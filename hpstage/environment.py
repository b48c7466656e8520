"""What of this process decides bits, and what it would train, in short texts; part of the workload's key."""

from __future__ import annotations

import importlib.metadata
import platform
import sys

from hpstage.executor import Environment
from hpstage.identity import identify
from hpstage.trainable import Trainable


def describe(trainable: Trainable) -> Environment:
    """The environment of the process that will train, with torch pinned to one thread.

    A trainable adds what it knows by ``describe_environment()`` (a dict of short texts) and ``describe_data()``.
    """
    identity = identify(trainable)
    described = {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "machine": platform.machine(),
    }
    # Whether it is imported here already or not: workers with different pasts must agree.
    described["numpy"] = importlib.metadata.version("numpy")
    if "torch" in sys.modules:
        from hpstage.torch.environment import pin

        pin()
    if hasattr(trainable, "describe_environment"):
        described |= trainable.describe_environment()
    if hasattr(trainable, "describe_data"):
        described["data"] = trainable.describe_data()
    return Environment(
        {name: str(text) for name, text in described.items()}, identity=identity.described, loaded=identity.loaded
    )
