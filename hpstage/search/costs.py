"""Objectives that hpstage measures itself: what a trial costs, beside what it is worth.

They are measured, so they are noisy: another run of the same search gives other values. They are no metrics of a state
and never part of a key.
"""

from __future__ import annotations

from collections.abc import Callable

from hpstage.plan.nodes import PlannedTrial
from hpstage.plan.plan import SearchPlan


def seconds(plan: SearchPlan, trial: PlannedTrial, step: int) -> float:
    """Return the worker seconds of training a trial to ``step``, as if it shared nothing, without evaluation.

    Each step counts what the steps of its node took on average, whoever had them trained: a trial is not cheaper for
    being the second to ask.
    """
    return float(sum((stop - start) * plan.step_seconds(node) for node, start, stop in trial.path_to(step)))


COSTS: dict[str, Callable[[SearchPlan, PlannedTrial, int], float]] = {"hpstage:seconds": seconds}
