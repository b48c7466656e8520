"""Tracks the saved state that a worker's trainable is in, and brings the trainable to other states."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from hpstage.checkpoints.live import LiveCache
from hpstage.checkpoints.patient_store import PatientStore
from hpstage.errors import StateError
from hpstage.plan.facts import StateKey
from hpstage.schedule import Scalar
from hpstage.trainable import Trainable

logger = logging.getLogger("hpstage")


@dataclass(eq=False, repr=False)
class Position:
    """The saved state that a trainable is in."""

    trainable: Trainable
    checkpoints: PatientStore
    live: LiveCache  # states kept in memory
    find_live: Callable[[StateKey], object | None]  # returns a live state; waits if it is still being fetched
    key: StateKey | None = None  # of that state; None after more training or another setup
    _met: bool = False  # whether a first state was passed to the store

    def go_to(
        self, source: StateKey | None, initial: Mapping[str, Scalar]
    ) -> Literal["fresh", "continued", "live", "disk"]:
        """Bring the trainable to a saved state or to the start of training; return how.

        Raises:
            CheckpointError: the state cannot be loaded.
            StateError: the state does not fit this trainable. The message names the state.
        """
        if source is not None and self.key == source:
            return "continued"
        self.key = None
        if source is None:
            self.trainable.setup(initial)
            self._meet()
            return "fresh"
        state = self.find_live(source)
        found = state is not None
        if state is None:
            self.live.relieve()
            self.live.make_way()
            state = self.checkpoints.load(source)
        self.trainable.setup(initial)
        try:
            self.trainable.load_state_dict(state)
        except StateError as error:
            raise StateError(f"state {source} of the store cannot be loaded: {error}") from error
        self.key = source
        return "live" if found else "disk"

    def _meet(self) -> None:
        """Pass the first state of this process to the store before its first step, so that tensors that training does
        not change are stored once."""
        if self._met:
            return
        self._met = True
        try:
            self.checkpoints.meet(self.trainable.state_dict())
        except Exception:  # a lasting error is raised again when a state is saved
            logger.debug("the state before the first step could not be passed to the store", exc_info=True)

    def load(self, key: StateKey) -> object:
        """Return a saved state, from memory if it is there. Raises :class:`CheckpointError` if it cannot be loaded."""
        state = self.find_live(key)
        return self.checkpoints.load(key) if state is None else state
