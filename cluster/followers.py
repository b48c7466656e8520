"""The tasks of workers that train in the gangs of other workers' chains."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container
from functools import partial

from distributed import Future

from hpstage.plan.facts import ChainId, WorkerId


class Followers:
    """Keeps the Dask future of each worker that follows a leader. Releases it when the chain ends or the worker leaves.

    Thread-safe.

    Args:
        refused: called with a chain, a worker of its gang, and the reason why that worker could not join the gang.
    """

    def __init__(self, refused: Callable[[ChainId, WorkerId, str], None]) -> None:
        self._refused = refused
        self._lock = threading.Lock()
        self._futures: dict[ChainId, dict[WorkerId, Future]] = {}

    def add(self, chain: ChainId, futures: dict[WorkerId, Future]) -> None:
        """Add the tasks of a chain's gang. A task returns the reason why its worker could not join, or ``""``."""
        if not futures:
            return
        with self._lock:
            self._futures[chain] = dict(futures)
        for worker, future in futures.items():
            future.add_done_callback(partial(self._on_done, chain, worker))

    def keep(self, chain: ChainId, present: Container[WorkerId]) -> None:
        """Release the tasks of workers that have left. Each would otherwise wait for another worker at its address."""
        with self._lock:
            futures = self._futures.get(chain, {})
            gone = [futures.pop(worker) for worker in list(futures) if worker not in present]
        for future in gone:
            future.release()

    def release(self, chain: ChainId) -> None:
        """Release the tasks of a chain; workers that still follow it stop."""
        with self._lock:
            futures = self._futures.pop(chain, {})
        for future in futures.values():
            future.release()

    def _on_done(self, chain: ChainId, worker: WorkerId, future: Future) -> None:
        with self._lock:
            if worker not in self._futures.get(chain, {}):
                return  # released
        if future.status == "finished" and (why := future.result()):
            self._refused(chain, worker, why)
        elif future.status == "error":
            self._refused(chain, worker, repr(future.exception()))
