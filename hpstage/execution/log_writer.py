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
        """Save the logged values and printed text of the steps before ``stop``."""
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
        """Save the log and output of an unfinished step, under the key of the state that it would have produced."""
        if flight.step < flight.course.stages[-1].stop:
            self.save(flight, flight.course.own(flight.step + 1).key, flight.step + 1)
