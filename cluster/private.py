"""Uses of Dask's private names; no other module of this project uses any.

Reviewed and tested with distributed 2025.1.0 and 2026.8.0. There are no public equivalents for: a client that never
reconnects and always ends its event loop; a cluster that starts workers in the foreground, where errors are raised;
estimates of sizes that draw from a separate random generator.
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
        # Dask also leaves the event loop if the scheduler has closed the connection. It is stopped here, and not when
        # the client is deleted: that may happen while this thread starts another loop, and would wait for its lock.
        if self._loop_runner.is_started():
            self._loop_runner.stop()


def start_workers(cluster: LocalCluster) -> None:
    """Start the workers in a cluster's ``worker_spec``. ``scale()`` would start them later, and suppress errors."""
    cluster.sync(cluster._correct_state)


def is_fixed(cluster: object) -> bool:
    """Return whether this is a local cluster of fixed size: ``adapt()`` was not called."""
    return isinstance(cluster, LocalCluster) and cluster._adaptive is None


def draw_apart() -> None:
    """Make Dask use a separate random generator when it estimates the sizes of messages. Otherwise, its event loop
    would draw numbers from ``random``, which the user's code and training by ``InlineExecutor`` draw from as well."""
    module: Any = dask.sizeof
    module.random = random.Random()
