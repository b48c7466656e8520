"""Keeping what training logs and prints."""

from __future__ import annotations

import logging

from hpstage.checkpoints import CheckpointStore
from hpstage.errors import CheckpointError
from hpstage.execution.flight import Flight
from hpstage.plan.facts import StateKey

logger = logging.getLogger("hpstage")


class Logs:
    """Saves the logs of chains. Where that is not possible, nothing else is lost."""

    def __init__(self, checkpoints: CheckpointStore) -> None:
        self._checkpoints = checkpoints
        self._lost_one = False

    def save(self, flight: Flight, key: StateKey, stop: int) -> None:
        """Save what steps before ``stop`` have logged and printed."""
        log = flight.recorder.take(stop)
        if log is None:
            return
        try:
            self._checkpoints.save_log(key, log)
        except CheckpointError as error:
            if not self._lost_one:
                self._lost_one = True
                logger.warning(
                    "A training log is lost: %s. Training continues; further losses are not reported.", error
                )

    def save_last(self, flight: Flight) -> None:
        """Save what a step that has not come to its end has logged and printed, under the state it would have made."""
        if flight.step < flight.course.stages[-1].stop:
            self.save(flight, flight.course.own(flight.step + 1).key, flight.step + 1)
