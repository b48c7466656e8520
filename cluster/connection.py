"""A connection to a Dask scheduler that receives events about workers and chains."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from distributed import LocalCluster, Scheduler
from distributed.security import Security

from hpstage.cluster.private import ClientOnce
from hpstage.errors import ClusterError
from hpstage.plan.facts import Departure, WorkerId

_ECHO = 60.0
"""Maximum seconds for a scheduler to deliver a test event."""


class Connection:
    """A Dask client that receives events about workers and about a run's chains. It never reconnects.

    Args:
        where: the scheduler's address, or the cluster.
        security: as for the cluster's other clients.
        topic: topic of the run's feed.
        on_feed: called on Dask's loop with each message of the feed.
        present: returns the current incarnation of a worker; ``""`` if the worker is unknown.
        on_left: called on Dask's loop when a worker has left, with the reason and the worker's incarnation.
        timeout: seconds to wait for the scheduler; by default Dask's timeout.

    Raises:
        OSError: no scheduler answers.
    """

    def __init__(
        self,
        where: str | LocalCluster,
        security: Security | None,
        topic: str,
        *,
        on_feed: Callable[[dict[str, Any]], None],
        present: Callable[[WorkerId], str],
        on_left: Callable[[WorkerId, Departure, str], None],
        timeout: float | None = None,
    ) -> None:
        self._topic = topic
        self._on_feed = on_feed
        self._present = present
        self._on_left = on_left
        self._received = threading.Event()
        self._all = False
        self._gone: set[str] = set()  # workers that the scheduler has removed
        limit = {} if timeout is None else {"timeout": timeout}
        self.client = ClientOnce(where, name=topic, security=security, set_as_default=False, **limit)
        # Dask's client batches messages for 10 ms; a worker would be idle for that time.
        self.client.scheduler_comm.interval = 0.001
        self.pool = str(self.client.scheduler_info(n_workers=0)["id"])

    @property
    def alive(self) -> bool:
        return self.client.status == "running" and not self.client.scheduler_comm.closed()

    def listen(self) -> None:
        """Subscribe to events about workers and chains; return once a test event has arrived.

        Raises:
            OSError: the connection to the scheduler is lost.
            ClusterError: the scheduler delivers no events.
        """
        self.client.subscribe_topic("all", self._on_cluster)
        self._all = True
        self.client.subscribe_topic(self._topic, self._on_topic)
        echo = f"{self._topic}-echo"  # when its events arrive, so do those of topics subscribed to before
        self.client.subscribe_topic(echo, lambda _: self._received.set())
        deadline = time.monotonic() + _ECHO
        while not self._received.is_set():
            if not self.alive:
                raise OSError(f"the connection to the scheduler at {self.client.scheduler.address} was lost again")
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"the scheduler at {self.client.scheduler.address} delivers no events; check whether it is "
                    f"overloaded, and run the same command again"
                )
            self.client.log_event(echo, {})
            self._received.wait(0.01)

    def forget_the_dead(self, prefix: str) -> None:
        """Remove plugins with this prefix whose drivers were killed.

        Otherwise each of them would be set up, with its trainable, on every new worker.
        """
        try:
            stale = self.client.run_on_scheduler(_ownerless, prefix)
        except ImportError:
            return  # hpstage is not installed at the scheduler
        for name in stale:
            with suppress(ValueError, KeyError):  # another driver has removed it, at the scheduler or at a worker
                self.client.unregister_worker_plugin(name)

    def close(self) -> None:
        """Close the connection; return when no more events are delivered."""
        if self._all and self.alive:
            # Otherwise the scheduler would try to send this client the event of its own end, and log that it cannot.
            self.client.unsubscribe_topic("all")
        self.client.close()

    # --- on Dask's loop -----------------------------------------------------------------------------------

    def _on_topic(self, event: tuple[float, dict[str, Any]]) -> None:
        _, message = event
        # A worker's message may arrive after its removal. A chain started on that worker would then wait forever.
        if message.get("worker") not in self._gone:
            self._on_feed(message)

    async def _on_cluster(self, event: tuple[float, dict[str, Any]]) -> None:
        _, message = event
        if message.get("action") == "add-worker":
            self._gone.discard(message["worker"])
        if message.get("action") != "remove-worker":
            return
        worker = WorkerId(message["worker"])
        self._gone.add(worker)
        incarnation = self._present(worker)  # read now: another worker may join at this address during the next call
        # Retired and scaled-down workers are expected to leave.
        orderly = message.get("expected", False) or await self._said_goodbye(worker)
        self._on_left(worker, "closed" if orderly else "died", incarnation)

    async def _said_goodbye(self, worker: WorkerId) -> bool:
        """Return whether a removed worker had closed itself, as it does when it is restarted or receives a signal."""
        try:
            events = await self.client.scheduler.events(topic=worker)
        except OSError:
            return False  # the scheduler is lost, and the connection with it
        for message in (message for _, message in reversed(events) if isinstance(message, dict)):
            if message.get("action") == "closing-worker":
                # The scheduler may have closed a worker that was silent for too long.
                return not message.get("reason", "").startswith("check-worker-ttl")
            if message.get("action") == "add-worker":
                break  # older events belong to another worker at this address
        return False


def _ownerless(prefix: str, dask_scheduler: Scheduler) -> list[str]:
    """Return the plugins whose run has no client any more. Runs on the scheduler. A client's name contains its run."""
    names = [name for name in dask_scheduler.worker_plugins if name.startswith(prefix)]
    return [name for name in names if not any(name in client for client in dask_scheduler.clients)]
