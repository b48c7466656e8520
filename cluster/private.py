"""Uses of Dask's private names; no other module of this project uses any.

Reviewed and tested with distributed 2025.1.0 and 2026.8.0. There is no public equivalent: a client cannot be configured
not to reconnect, nor a cluster to start workers in the foreground, where errors are raised.
"""

from __future__ import annotations

from distributed import Client, LocalCluster


class ClientOnce(Client):  # type: ignore[misc]
    """A client that never reconnects. Dask's would reconnect after losing its scheduler, but receive nothing from the
    next one: topics, plugins and futures belong to the lost one."""

    async def _reconnect(self) -> None:
        pass


def start_workers(cluster: LocalCluster) -> None:
    """Start the workers in a cluster's ``worker_spec``; ``scale()`` would do so later, and suppress errors."""
    cluster.sync(cluster._correct_state)
