"""Place: the cluster on which an executor trains, given by the user or started by the executor."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from distributed import Client, LocalCluster
from distributed.security import Security

from hpstage.cluster.fork_server import ForkServer
from hpstage.cluster.local import local_cluster
from hpstage.errors import UsageError


@runtime_checkable
class Cluster(Protocol):
    """The interface of Dask's clusters. The cluster of dask-gateway has it without being a subclass. Some clusters also
    have the attribute ``security``."""

    scheduler_address: str | None
    status: object
    """Dask's ``Status``, or its name."""


class Place:
    """A given cluster, or a local cluster that :meth:`open` starts.

    Args:
        given: a cluster, or a client of it; neither is modified or closed.
        n_workers, gpus, workers_per_gpu: sizes of the local cluster, as for :func:`local_cluster`.

    Raises:
        UsageError: a size was given with a cluster.
    """

    def __init__(
        self, given: Client | Cluster | None, n_workers: int | None, gpus: int | None, workers_per_gpu: int | None
    ) -> None:
        if given is not None and n_workers is not None:
            raise UsageError(
                "n_workers is the size of a local cluster that hpstage starts, but a cluster or client is given; leave "
                "n_workers out"
            )
        if given is not None and workers_per_gpu is not None:
            raise UsageError(
                "workers_per_gpu is only for a local cluster; for other clusters, start workers by `hpstage worker "
                "--workers-per-gpu N`"
            )
        self._given = given
        self._sizes = n_workers, gpus, workers_per_gpu
        self.fork_server: ForkServer | None = None
        """The fork server for the local cluster, which closes it."""
        self.cluster: LocalCluster | None = None
        """The local cluster, after it is started."""

    @property
    def is_given(self) -> bool:
        return self._given is not None

    def open(self, gpus_per_worker: int) -> tuple[str | LocalCluster, Security | None]:
        """Return the address or cluster to connect to, and its security. Raises :class:`UsageError` if the given client
        or cluster is closed, and the errors of :func:`local_cluster`."""
        if self._given is None:
            n_workers, gpus, workers_per_gpu = self._sizes
            server, self.fork_server = self.fork_server, None  # the cluster closes it
            self.cluster = local_cluster(
                n_workers,
                gpus=gpus,
                workers_per_gpu=workers_per_gpu,
                gpus_per_worker=gpus_per_worker,
                fork_server=server,
            )
            return self.cluster, None
        if isinstance(self._given, Cluster):
            address, status = self._given.scheduler_address or "", self._given.status
            if "://" not in address:
                raise UsageError(f"the given cluster, {self._given!r}, has no scheduler yet; start or await it first")
            if getattr(status, "name", status) in ("closing", "closed"):
                raise UsageError(f"the given cluster, {self._given!r}, is closed; start another one")
            if isinstance(self._given, LocalCluster) and not self._given.asynchronous:
                return self._given, None  # the client then uses its event loop, which avoids waking up another thread
            return address, getattr(self._given, "security", None)
        # A client that has just lost its scheduler has status "connecting", and still knows the address.
        if self._given.status not in ("running", "connecting") or self._given.scheduler is None:
            raise UsageError(f"the given client is {self._given.status}; connect it first")
        return self._given.scheduler.address, self._given.security

    def close(self) -> None:
        """Close the cluster and the fork server that this object has started."""
        for ours in (self.cluster, self.fork_server):
            if ours is not None:
                ours.close()
        self.cluster = self.fork_server = None
