"""Which trial is charged for a second of a worker. Pure.

Every second of a worker is charged to one trial: the first trial that requested the last of the trained steps. If none
was trained, or steps that had been trained before were trained again to evaluate them, it is the first trial that waits
for the evaluation: a search that has ended is charged for nothing more. Seconds are rounded (:func:`rounded`), so that
they add up exactly however they are grouped.
"""

from __future__ import annotations

import msgspec

from hpstage.plan.facts import ChainLost, StateReached, TrialId

# 2**-20 s is about a microsecond.
_PARTS = 2.0**20


def rounded(seconds: float) -> float:
    """Round ``seconds`` to the nearest multiple of 2**-20. Sums and differences of such values are exact, in any order,
    as long as they stay below 2**33 s."""
    return round(seconds * _PARTS) / _PARTS


class Charge(msgspec.Struct, frozen=True):
    """A state that a worker reached, the trial charged for it, and the cost in rounded seconds."""

    fact: StateReached
    trial: TrialId
    seconds: float


class Waste(msgspec.Struct, frozen=True):
    """Training that a worker discarded, the trial charged for it, and its rounded seconds."""

    fact: ChainLost
    trial: TrialId
    seconds: float
