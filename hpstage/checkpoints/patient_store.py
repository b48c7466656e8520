"""A worker's access to its checkpoints, which retries temporary errors and proves the place before use."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TypeVar

from hpstage.checkpoints.store import CheckpointStore
from hpstage.errors import CheckpointUnreachable
from hpstage.plan.facts import Kept, StateKey

T = TypeVar("T")

logger = logging.getLogger("hpstage")

# Seconds for which an unreachable place is retried: longer than a server restart, shorter than others will wait for
# this worker's chain. The environment variable is for tests of this.
PATIENCE = float(os.environ.get("HPSTAGE_CHECKPOINT_PATIENCE", "30"))
# Initial and maximum seconds between attempts.
_PAUSES = (0.1, 3.0)
# Seconds between checks whether the chain is to end.
_LOOK = 0.1


class PatientStore:
    """The checkpoint store as used by a worker's consecutive chains. It loads and saves one state at a time.

    Raises :class:`CheckpointUnreachable` when its patience is over. From then on every chain is refused at its start,
    until the place can be read and written again, since its training would be lost.
    """

    def __init__(self, checkpoints: CheckpointStore, *, patience: float = PATIENCE) -> None:
        self._checkpoints = checkpoints
        self._patience = patience
        self._proven = False
        self._failed = False
        self._giving_up: Callable[[], bool] = lambda: False

    def enter(self, giving_up: Callable[[], bool]) -> None:
        """Start a chain: check once that the place is the driver's. ``giving_up``: whether the chain is to stop
        waiting."""
        self._giving_up = giving_up
        if self._proven:
            return
        self._checkpoints.prove()
        if self._failed:
            self._checkpoints.check()
        self._proven, self._failed = True, False

    def load(self, key: StateKey) -> object:
        return self._persist(lambda: self._checkpoints.load(key), self._giving_up)

    def save(
        self,
        key: StateKey,
        state: object,
        *,
        step: int,
        parent: StateKey | None,
        giving_up: Callable[[], bool] | None = None,
    ) -> Kept:
        """Save a state; ``giving_up``: as in :meth:`enter`, for a save while training continues."""
        return self._persist(
            lambda: self._checkpoints.save(key, state, step=step, parent=parent), giving_up or self._giving_up
        )

    def meet(self, state: object) -> None:
        self._checkpoints.meet(state)

    def _persist(self, action: Callable[[], T], giving_up: Callable[[], bool]) -> T:
        pause, longest = _PAUSES
        deadline: float | None = None
        while True:
            try:
                return action()
            except CheckpointUnreachable as error:
                if deadline is None:
                    deadline = time.monotonic() + self._patience
                    logger.warning("%s. Trying again for %.0f s.", error, self._patience)
                again = time.monotonic() + pause
                if again > deadline or _waits_in_vain(again, giving_up):
                    self._proven, self._failed = False, True
                    raise
                pause = min(2 * pause, longest)


def _waits_in_vain(until: float, giving_up: Callable[[], bool]) -> bool:
    """Wait; return whether the chain is to end."""
    while (left := until - time.monotonic()) > 0:
        if giving_up():
            return True
        time.sleep(min(_LOOK, left))
    return giving_up()
