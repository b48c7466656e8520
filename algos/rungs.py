"""Helpers shared by several algorithms: rungs (steps at which trials are compared), tree-awareness, and checks."""

from __future__ import annotations

from hpstage.algorithm import Trials
from hpstage.errors import UsageError
from hpstage.errors.arguments import whole


def rung_steps(min_steps: int, reduction_factor: int, steps: int) -> list[int]:
    """Return all ``min_steps * reduction_factor**k`` below the last step, and the last step."""
    rungs = []
    step = min_steps
    while step < steps:
        rungs.append(step)
        step *= reduction_factor
    return [*rungs, steps]


RUNGS = {"reduction_factor": whole(2), "min_steps": whole()}
"""What the parameters of such algorithms may be."""


def check_rungs(min_steps: int, steps: int) -> None:
    """Raise :class:`UsageError` if there are no such rungs."""
    if min_steps > steps:
        raise UsageError(f"min_steps is {min_steps}, but a trial has {steps} steps; lower min_steps or raise steps")


def known(trials: Trials, *, tree_aware: bool) -> Trials:
    """Return the look-ups for an algorithm: if it is not tree-aware, all trials appear different."""
    return trials if tree_aware else Trials()
