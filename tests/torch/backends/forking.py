"""Training straight through and from forks, by a step backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hpstage.checkpoints.state_tree import reread
from hpstage.torch import TorchTrainable
from hpstage.torch.backends.compiled import CompiledBackend
from hpstage.torch.loop import TorchLoop
from tests.torch.trainables import FORK, STEPS, advance, fresh, hp_at, outcome


def by(numerics: str, make: Callable[[], TorchTrainable]) -> Callable[[], TorchTrainable]:
    """Like ``make``, with another step backend."""

    def made() -> TorchTrainable:
        trainable = make()
        trainable.numerics = numerics
        return trainable

    return made


def compiled_of(trainable: Any) -> CompiledBackend:
    assert isinstance(trainable, TorchLoop)
    backend = trainable._steps_by()
    assert isinstance(backend, CompiledBackend)
    return backend


def forks_exactly(make: Callable[[], TorchTrainable]) -> list[object]:
    """Check that forks give the bits of training straight through; return what that gives.

    In a process that has trained before, in one that has compiled another step first, and in one that has done nothing.
    """
    torch._dynamo.reset()
    first: Any = advance(fresh(make()), 0, FORK)
    state = reread(first.state_dict())
    expected = outcome(advance(first, FORK, STEPS))

    first.setup(hp_at(0))
    first.load_state_dict(state)
    assert outcome(advance(first, FORK, STEPS)) == expected

    torch._dynamo.reset()  # as in another process
    other: Any = fresh(make())
    other.load_state_dict(state)
    assert outcome(advance(other, FORK, STEPS)) == expected
    other.setup(hp_at(0))
    assert outcome(advance(other, 0, STEPS)) == expected
    return expected
