"""Prefetching: while a chain trains, the states from which the next ones are expected to start are loaded."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from hpstage.checkpoints.live import LiveCache
from hpstage.checkpoints.store import CheckpointStore
from hpstage.plan.facts import StateKey

logger = logging.getLogger("hpstage")


class Fetcher:
    """Loads expected states into a cache, in a thread that lives while any is missing there. Thread-safe.

    A failure says nothing: the chain that needs the state loads it itself, and finds out.
    """

    def __init__(self, checkpoints: CheckpointStore, live: LiveCache) -> None:
        self._checkpoints = checkpoints
        self._live = live
        self._changed = threading.Condition()
        self._missing: list[StateKey] = []
        self._loading: StateKey | None = None

    def expect(self, keys: Sequence[StateKey]) -> None:
        """Load these states, soonest first, instead of those expected before."""
        self._live.expect(keys)
        if not self._checkpoints.beside_training or not (self._live.has_room() and self._live.holds_two()):
            return
        with self._changed:
            self._missing = [key for key in keys if key != self._loading and key not in self._live]
            if self._missing and self._loading is None:
                self._loading = self._missing.pop(0)
                threading.Thread(target=self._run, args=(self._loading,), name="hpstage-fetch", daemon=True).start()

    def get(self, key: StateKey) -> object | None:
        """Return a state of the cache, after the wait for it if it is being loaded."""
        with self._changed:
            if key in self._missing:
                self._missing.remove(key)  # the caller loads it at once
            self._changed.wait_for(lambda: self._loading != key)
        return self._live.get(key)

    def _run(self, key: StateKey) -> None:
        while True:
            try:
                self._live.adopt(key, self._checkpoints.load(key))
            except Exception:
                logger.debug("state %s could not be fetched", key, exc_info=True)
            with self._changed:
                self._loading = self._missing.pop(0) if self._missing else None
                self._changed.notify_all()
                if self._loading is None:
                    return
                key = self._loading
