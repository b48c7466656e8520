"""A snapshot: short strings by path, by which two runs are compared after a step."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

from hpstage.checkpoints.state_tree import digest
from hpstage.errors.text import writable
from hpstage.trainable import Trainable
from hpstage.training.capture.portrait import state_texts
from hpstage.training.function import FunctionTrainable
from hpstage.training.identity import accelerators

Snapshot = dict[str, str]
"""Paths of all that training can reach, each with a short string that is equal for equal content in every process."""

STATE = "state_dict()"
GENERATOR = "the global generator of "
SETTING = "the process's "
THREADS = f"{SETTING}torch.get_num_threads()"


def snapshot(trainable: Trainable, *, trained: bool = True) -> tuple[Snapshot, object]:
    """Return a snapshot of the present, and the state.

    Args:
        trained: whether a step was just trained. If not, there may be no state, and no generator was keyed for a step.

    Raises:
        StateError: a state cannot be captured.
    """
    found: Snapshot = dict(_generators()) if trained else {}  # first: taking a state might draw from them
    portrait: Callable[[], Snapshot] | None = getattr(trainable, "portrait", None)
    if portrait is not None:
        found |= portrait()
    found |= _settings()
    state = trainable.state_dict() if trained else None
    if isinstance(trainable, FunctionTrainable) and isinstance(state, dict):
        found |= state_texts(STATE, {**state, "metrics": None})  # whether it has metrics depends on the reports wanted
    elif trained:
        found |= state_texts(STATE, state)
    return {writable(path): writable(text) for path, text in found.items()}, state


def _generators() -> Iterator[tuple[str, str]]:
    yield f"{GENERATOR}Python", digest(random.getstate())
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        yield f"{GENERATOR}NumPy", digest(numpy.random.get_state(legacy=False))
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        yield f"{GENERATOR}torch", digest(torch.default_generator.get_state())
        if torch.cuda.is_initialized():
            for number, generator in enumerate(torch.cuda.default_generators):
                yield f"{GENERATOR}torch on cuda:{number}", digest(generator.get_state())
        for number, state in enumerate(accelerators.states()):
            yield f"{GENERATOR}torch on {accelerators.other()}:{number}", digest(state)


def _settings() -> Iterator[tuple[str, str]]:
    """Yield process-wide settings that decide bits."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return
    yield THREADS, str(torch.get_num_threads())
    for name in (
        "get_default_dtype",
        "get_default_device",
        "is_grad_enabled",
        "get_float32_matmul_precision",
        "are_deterministic_algorithms_enabled",
    ):
        yield f"{SETTING}torch.{name}()", str(getattr(torch, name)())
    yield f"{SETTING}torch.backends.mkldnn.enabled", str(torch.backends.mkldnn.enabled)
    yield f"{SETTING}torch.backends.cudnn.benchmark", str(torch.backends.cudnn.benchmark)
