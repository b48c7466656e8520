"""Prefetching: loads the states from which the next chains are expected to start, while a chain trains."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from hpstage.checkpoints.live import LiveCache
from hpstage.checkpoints.store import CheckpointStore
from hpstage.plan.facts import StateKey

logger = logging.getLogger("hpstage")


class Fetcher:
    """Loads expected states into a cache, in a thread that runs while any of them is missing. Thread-safe.

    Failures are ignored: the chain that needs the state loads it itself, and reports the failure.
    """

    def __init__(self, checkpoints: CheckpointStore, live: LiveCache) -> None:
        self._checkpoints = checkpoints
        self._live = live
        self._changed = threading.Condition()
        self._missing: list[StateKey] = []
        self._loading: StateKey | None = None

    def expect(self, keys: Sequence[StateKey]) -> None:
        """Load these states, those needed soonest first. They replace the states of the last call."""
        self._live.expect(keys)
        if not self._checkpoints.beside_training or not (self._live.has_room() and self._live.holds_two()):
            return
        with self._changed:
            self._missing = [key for key in keys if key != self._loading and key not in self._live]
            if self._missing and self._loading is None:
                self._loading = self._missing.pop(0)
                threading.Thread(target=self._run, args=(self._loading,), name="hpstage-fetch", daemon=True).start()

    def get(self, key: StateKey) -> object | None:
        """Return a cached state; if it is being loaded, wait for it."""
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
