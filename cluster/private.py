"""Names of Dask's that are private: no other file of ours uses any.

They were looked at, and tested, in distributed 2025.1.0 and 2026.8.0. Nothing public does the same: a client cannot be
told to stay lost, nor a cluster to start workers in the foreground, where what goes wrong is raised.
"""

from __future__ import annotations

from distributed import Client, LocalCluster


class ClientOnce(Client):  # type: ignore[misc]
    """Connected once. Dask's would try again when it has lost its scheduler, and hear nothing from the next one:
    topics, plugins and futures belong to the one that is gone."""

    async def _reconnect(self) -> None:
        pass


def start_workers(cluster: LocalCluster) -> None:
    """Bring a cluster to its ``worker_spec``; ``scale()`` would do it later, and swallow what goes wrong."""
    cluster.sync(cluster._correct_state)
