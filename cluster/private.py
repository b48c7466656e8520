"""Uses of Dask's private names; no other module of this project uses any.

Reviewed and tested with distributed 2025.1.0 and 2026.8.0. There is no public equivalent: a client cannot be configured
not to reconnect or to end its event loop in any case, nor a cluster to start workers in the foreground, where errors
are raised, nor estimates of sizes to draw from a generator of their own.
"""

from __future__ import annotations

import random
from typing import Any

import dask.sizeof
from distributed import Client, LocalCluster


class ClientOnce(Client):  # type: ignore[misc]
    """A client that never reconnects. Dask's client would reconnect after losing its scheduler, but would receive
    nothing from the next one, since its topics, plugins and futures belong to the lost scheduler."""

    async def _reconnect(self) -> None:
        pass

    def start(self, **kwargs: Any) -> None:
        try:
            super().start(**kwargs)
        except BaseException:
            self._loop_runner.stop()  # Dask leaves the thread of its event loop if there is no scheduler
            raise

    def close(self, *arguments: Any, **kwargs: Any) -> None:
        super().close(*arguments, **kwargs)
        # Dask leaves it, too, after the scheduler has closed the connection. Not again when it is deleted: that may be
        # while this thread starts another loop, whose lock it would wait for.
        if self._loop_runner.is_started():
            self._loop_runner.stop()


def start_workers(cluster: LocalCluster) -> None:
    """Start the workers in a cluster's ``worker_spec``. ``scale()`` would start them later, and suppress errors."""
    cluster.sync(cluster._correct_state)


def is_fixed(cluster: object) -> bool:
    """Return whether a cluster's size is fixed: nobody has called its ``adapt()``."""
    return isinstance(cluster, LocalCluster) and cluster._adaptive is None


def draw_apart() -> None:
    """Make Dask use a separate random generator when it estimates the sizes of messages. Otherwise, its event loop
    would draw numbers from ``random``, which the user's code and training by ``InlineExecutor`` draw from as well."""
    module: Any = dask.sizeof
    module.random = random.Random()
