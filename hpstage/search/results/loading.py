"""Loading a kept state into new objects, in this process."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from hpstage.errors import UsageError
from hpstage.plan.facts import TrialId
from hpstage.schedule import Scalar
from hpstage.training.randomness import generators_restored
from hpstage.training.trainables import as_trainable

logger = logging.getLogger("hpstage")


@dataclass(frozen=True, slots=True)
class LoadedState:
    """A state in objects of its own."""

    trial: TrialId
    step: int
    """Number of steps trained."""
    hp: dict[str, Scalar]
    """The values of the hyper-parameters in the last of these steps."""
    metrics: dict[str, float] | None
    """As evaluated in the search; ``None`` if it was not evaluated there."""
    parts: dict[str, Any] = field(repr=False)
    """The objects by name. Of a ``TorchTrainable``: ``"model"``, ``"optimizer"``, and ``"trainable"`` with what it
    holds itself (averaged weights). Of a function: what it attached. Of an object with five methods:
    ``"trainable"``."""

    @property
    def model(self) -> Any:
        """The part ``"model"``, in the mode in which it was trained: call ``model.eval()`` before you use it."""
        return self._part("model")

    @property
    def optimizer(self) -> Any:
        return self._part("optimizer")

    @property
    def trainable(self) -> Any:
        return self._part("trainable")

    def _part(self, name: str) -> Any:
        if name not in self.parts:
            raise UsageError(f"trial {self.trial} has no part {name!r}; it has {', '.join(sorted(self.parts))}")
        return self.parts[name]


def load(
    subject: object,
    state: object | None,
    *,
    start: int,
    stop: int,
    values: Callable[[int], Mapping[str, Scalar]],
    trial: TrialId,
    metrics: dict[str, float] | None,
) -> LoadedState:
    """Load the state after ``start`` steps (``None``: the beginning), and train on to ``stop``.

    Args:
        values: returns the values of the hyper-parameters in a step.
    """
    trainable: Any = as_trainable(subject)
    with generators_restored(), closing(trainable):
        trainable.setup(values(0))
        if state is not None:
            trainable.load_state_dict(state)
        if start < stop:
            logger.info("Training steps %d to %d of trial %s again", start, stop, trial)
        for step in range(start, stop):
            if hasattr(trainable, "announce"):
                trainable.announce(step == stop - 1)
            trainable.train(step, values(step))
        objects, kept = trainable.parts()
        parts = _copied(objects, kept)
    return LoadedState(trial, stop, dict(values(stop - 1)), metrics, parts)


def _copied(objects: Mapping[str, object], kept: Mapping[int, object]) -> dict[str, Any]:
    """Copy objects that may refer to each other; those in ``kept``, by id, are not copied."""
    memo: dict[int, Any] = dict(kept)
    parts: dict[str, Any] = {}
    for name, value in objects.items():
        try:
            parts[name] = copy.deepcopy(value, memo)
        except Exception as error:  # a lock, a file, a generator: whatever the user's objects hold
            if name != "trainable" or len(objects) == 1:
                raise UsageError(f"{name} cannot be copied out of training ({error}); use state() instead") from error
            logger.info("The trainable cannot be copied out of training (%s); its model can", error)
    return parts
