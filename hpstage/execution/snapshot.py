"""A snapshot of training: short strings by path, used to compare two runs after the same step."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

from hpstage.checkpoints.state_tree import digest
from hpstage.errors.text import writable
from hpstage.trainable import Trainable
from hpstage.training.capture.portrait import state_texts
from hpstage.training.capture.settings import PATH
from hpstage.training.function import FunctionTrainable
from hpstage.training.identity import accelerators

Snapshot = dict[str, str]
"""Paths of all that training can reach, each with a short string that is equal for equal content in every process."""

STATE = "state_dict()"
GENERATOR = "the global generator of "
SETTING = f"{PATH}."
"""Prefix of the paths of process settings on which the bits of results depend."""
THREADS = f"{SETTING}threads"


def snapshot(trainable: Trainable, *, trained: bool = True) -> tuple[Snapshot, object]:
    """Return a snapshot of training as it is now, and the state.

    Args:
        trained: whether a step was just trained. If not, there may be no state, and no generator was keyed for a step.

    Raises:
        StateError: a state cannot be captured.
    """
    found: Snapshot = dict(_generators()) if trained else {}  # first: taking a state might draw from them
    portrait: Callable[[], Snapshot] | None = getattr(trainable, "portrait", None)
    if portrait is not None:
        found |= portrait()
    state = trainable.state_dict() if trained else None
    if isinstance(trainable, FunctionTrainable) and isinstance(state, dict):
        found |= state_texts(STATE, {**state, "metrics": None})  # its metrics depend on which reports were wanted
    elif trained:
        found |= state_texts(STATE, state)
    return {writable(path): writable(text) for path, text in found.items()}, state


def _generators() -> Iterator[tuple[str, str]]:
    import numpy

    yield f"{GENERATOR}Python", digest(random.getstate())
    yield f"{GENERATOR}NumPy", digest(numpy.random.get_state(legacy=False))
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        yield f"{GENERATOR}torch", digest(torch.default_generator.get_state())
        for kind, states in accelerators.states().items():
            for number, state in enumerate(states):
                yield f"{GENERATOR}torch on {kind}:{number}", digest(state)
