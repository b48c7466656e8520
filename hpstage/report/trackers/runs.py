"""The trials of a plan as runs of a tracker: parameters, logged values and metrics by step, and final states."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import xxhash

from hpstage.checkpoints.store import CheckpointStore
from hpstage.plan.facts import TrialId
from hpstage.plan.nodes import PlannedTrial
from hpstage.plan.plan import SearchPlan
from hpstage.report.trial_log import log_of

Param = bool | int | float | str | None

Row = tuple[int, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class TrialRun:
    """A trial as a run.

    Attributes:
        number: the trial's number in its study.
        state: complete, pruned, fail, or running.
        steps: the number of steps requested.
        params: the trial's values of the study's parameters.
        rows: ascending steps, each with values by name. The step of a logged value is the one in which it was logged,
            counted from 0; the step of a metric is the number of steps trained before. A logged value with the name of
            a metric is called ``log/NAME``.
        metrics: the last known values of all metrics.
    """

    plan: str
    id: TrialId
    study: str
    number: str
    state: str
    steps: int
    params: Mapping[str, Param]
    rows: tuple[Row, ...]
    metrics: Mapping[str, float]


class RunWriter(Protocol):
    """A run of a tracker that is being written."""

    def log(self, rows: Iterable[Row]) -> None:
        """Add rows."""

    def end(self, run: TrialRun) -> None:
        """Write the run's state, final or running, and close the run."""


class Tracker(Protocol):
    """Writes runs of one of the trackers."""

    def start(self, run: TrialRun) -> RunWriter:
        """Begin the run of a trial, and replace an earlier run of the same trial. Rows of ``run`` are not written."""


def exported(runs: Iterable[TrialRun], tracker: Tracker) -> Iterator[TrialRun]:
    """Write complete runs, and yield each run when it is written."""
    for run in runs:
        writer = tracker.start(run)
        try:
            writer.log(run.rows)
        finally:
            writer.end(run)
        yield run


def runs_of(plan: SearchPlan, checkpoints: CheckpointStore) -> Iterator[TrialRun]:
    """Yield the trials of a plan in the order in which they were added."""
    for id, trial in plan.trials.items():
        measured = measured_in(trial)
        logged = log_of(plan, checkpoints, trial).values
        metrics = {name for values in measured.values() for name in values}
        yield replace(run_of(plan, id, measured), rows=tuple(rows_of(logged, measured, metrics)))


def run_of(plan: SearchPlan, id: TrialId, measured: Mapping[int, Mapping[str, float]]) -> TrialRun:
    """Return a trial as a run, without rows."""
    ended, proposed = plan.ended.get(id), plan.searches.proposed.get(id)
    return TrialRun(
        plan=plan.id,
        id=id,
        study=plan.study_of(id),
        number=id.rpartition("/")[2],
        state="running" if ended is None else ended.state.lower(),
        steps=plan.trials[id].requested,
        params={} if proposed is None else proposed.params,
        rows=(),
        metrics={name: value for step in sorted(measured) for name, value in measured[step].items()},
    )


def measured_in(trial: PlannedTrial) -> dict[int, Mapping[str, float]]:
    return {
        state.step: state.metrics
        for state in trial.states()
        if state.metrics is not None and state.step <= trial.requested
    }


def rows_of(
    logged: Mapping[str, Mapping[int, float]], measured: Mapping[int, Mapping[str, float]], metrics: Iterable[str]
) -> list[Row]:
    """Return logged values and metrics as rows.

    Args:
        metrics: the names of all metrics; a logged value with the name of a metric is called ``log/NAME``.
    """
    rows: dict[int, dict[str, float]] = {}
    names = {*metrics}
    for name, values in logged.items():
        for step, value in values.items():
            rows.setdefault(step, {})[f"log/{name}" if name in names else name] = value
    for step, found in measured.items():
        rows.setdefault(step, {}).update(found)
    return sorted(rows.items())


def plain_name(name: str, allowed: str = ".,=+@-", most: int = 100) -> str:
    """Return a name of letters, digits, ``_`` and ``allowed``. If the name changes, a digest is appended, so that
    different names stay different."""
    plain = re.sub(rf"[^0-9A-Za-z_{re.escape(allowed)}]", "_", name).strip(".")[:most]
    return plain if plain == name != "" else f"{plain}-{xxhash.xxh3_64_hexdigest(name.encode())[:8]}"
