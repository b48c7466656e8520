"""Objectives that hpstage measures itself: the cost of a trial.

They are not metrics of a state and never part of a key. Those in :data:`NOISY` differ between two runs of the same
search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from hpstage.errors import UsageError
from hpstage.plan.nodes import PlannedTrial
from hpstage.plan.plan import SearchPlan


def seconds(plan: SearchPlan, trial: PlannedTrial, step: int) -> float:
    """Return the worker seconds of training a trial to ``step``, as if it shared nothing, without evaluation.

    Each step counts as the average time of a step of its node, so that a trial is not cheaper because another trial
    requested its steps first.
    """
    return float(sum((stop - start) * plan.step_seconds(node) for node, start, stop in trial.path_to(step)))


def peak_bytes(plan: SearchPlan, trial: PlannedTrial, step: int) -> float:
    """Return the peak bytes of device memory that were allocated while a trial was trained to ``step``.

    Raises:
        UsageError: the peak was not measured for some of its steps.
    """
    reached = [state for state in trial.states() if state.step <= step and (state.digest or state.metrics is not None)]
    found = [state.peak_bytes for state in reached if state.peak_bytes is not None]
    if len(found) < len(reached) or not found:
        raise UsageError(
            f"hpstage:peak_bytes of trial {trial.id} is not known: some of its steps were trained by an earlier build "
            f"of hpstage, or on no CUDA device; give the search another store=, or leave this metric out"
        )
    return float(max(found))


def checkpoint_bytes(plan: SearchPlan, trial: PlannedTrial, step: int) -> float:
    """Return the bytes of a trial's checkpoint at ``step``, a function of its state."""
    size = plan.target(trial.id, step).bytes
    assert size is not None, "a requested state is kept"
    return float(size)


COSTS: dict[str, Callable[[SearchPlan, PlannedTrial, int], float]] = {
    "hpstage:seconds": seconds,
    "hpstage:peak_bytes": peak_bytes,
    "hpstage:bytes": checkpoint_bytes,
}
NOISY = frozenset({"hpstage:seconds", "hpstage:peak_bytes"})


def check_costs(metrics: Iterable[str], environment: Mapping[str, str]) -> None:
    """Raise :class:`UsageError` for a cost that cannot be measured in an environment, as described by its workers."""
    if "hpstage:peak_bytes" in metrics and not environment.get("device", "").startswith("cuda"):
        raise UsageError(
            "hpstage:peak_bytes is the peak memory of CUDA devices, and training here uses none. (The peak of main "
            "memory cannot stand in for it: a process has one peak for all trials.) hpstage:bytes, the size of a "
            "checkpoint, is measured on every device"
        )
