"""What Dask must be told to train for hours: as variables of the environment, for processes still to be started.

A variable that is set already is left as it is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

_BOTH = {
    # Silence shorter than this is a busy process, not a dead one: code that holds Python's lock looks dead to Dask.
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": "30s",
}
_SCHEDULER = {
    **_BOTH,
    # How long a frozen worker keeps its chain. Less would kill workers in the midst of a long call into C.
    "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "60s",
    # The driver takes the chain of a lost worker back. With 0 Dask would fail its task first, as if the code were bad.
    "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "3",
}
_WORKER = {
    **_BOTH,
    # With steps of 1 ms it takes 2 to 3 % of a core.
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
}


def scheduler_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """``environment`` for a scheduler."""
    return {**_SCHEDULER, **environment}


def worker_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """``environment`` for a worker. Processes that it starts to train have variables of their own."""
    return {**_WORKER, **environment}
