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
    """A client that never reconnects. Dask's would reconnect after losing its scheduler, but receive nothing from the
    next one: topics, plugins and futures belong to the lost one."""

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
    """Start the workers in a cluster's ``worker_spec``; ``scale()`` would do so later, and suppress errors."""
    cluster.sync(cluster._correct_state)


def is_fixed(cluster: object) -> bool:
    """Return whether nobody has called ``adapt()`` of a cluster, who would ask how many workers to have."""
    return isinstance(cluster, LocalCluster) and cluster._adaptive is None


def draw_apart() -> None:
    """Let Dask draw from a generator of its own, where it estimates the sizes of messages: its event loop runs next to
    the user's code, and next to training by ``InlineExecutor``, whose numbers it would draw from ``random``."""
    module: Any = dask.sizeof
    module.random = random.Random()
