"""The worker's side of a gang: one worker leads a chain, and others train its steps with it.

Only the leader has the chain: it evaluates, saves states and reports. Forks are not verified in a gang, since a
verification repeats steps from a state in memory, which the other workers do not have. Its result does not depend on
the number of workers, so that a chain with one worker finds the same problems.
"""

from __future__ import annotations

from collections.abc import Generator

from hpstage.errors import InternalError
from hpstage.execution.control import Control
from hpstage.execution.flight import Gathering
from hpstage.plan.facts import StateKey
from hpstage.plan.messages import Chain
from hpstage.trainable import Elastic, Trainable

GATHER_SECONDS = 120.0
"""Seconds that the workers of a gang wait for each other, since the others have to load the chain's source first."""


def gather(trainable: Trainable, chain: Chain, host: str, control: Control) -> Generator[Gathering, float | None, None]:
    """Form the gang of a chain, if it has one. The trainable must be at the chain's source.

    Yields a request to the executor to send the other workers.

    Raises:
        GangApart: the other workers did not come, or the chain was stopped before they came.
    """
    if chain.gang:
        elastic = _elastic(trainable, chain)
        yield Gathering(chain.id, elastic.open_gang(host))
        elastic.lead(1 + len(chain.gang), GATHER_SECONDS, lambda: control.stopped is not None)
        elastic.shared_seconds()  # count from here on


def follow(trainable: Trainable, chain: Chain, address: str, rank: int) -> StateKey | None:
    """Train a chain with the worker that leads it. The trainable must be at the chain's source. Return the key of the
    state that was reached, if that state was saved.

    Raises:
        GangApart: the leader cannot be reached.
        GangLost: a worker of the gang is gone.
    """
    word = _elastic(trainable, chain).follow(address, rank, 1 + len(chain.gang), GATHER_SECONDS)
    return StateKey(word) if word else None


def dismiss(trainable: Trainable, chain: Chain, key: StateKey | None) -> None:
    """Dissolve the gang of a chain, if it has one. ``key``: the key of the state that all workers are in, if it is
    saved."""
    if chain.gang:
        _elastic(trainable, chain).dismiss(key or "")


def alone_seconds(trainable: Trainable, chain: Chain) -> float | None:
    """Estimate the seconds that the steps since the last call take on one worker; ``None`` without a gang."""
    return _elastic(trainable, chain).shared_seconds() if chain.gang else None


def _elastic(trainable: Trainable, chain: Chain) -> Elastic:
    if not isinstance(trainable, Elastic):
        raise InternalError(f"{chain.id} needs a gang, but a {type(trainable).__name__} cannot train in one")
    return trainable
