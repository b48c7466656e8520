"""The trials of a plan as runs: parameters, what was logged and measured by step, how they ended."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import xxhash

from hpstage.checkpoints.store import CheckpointStore
from hpstage.plan.facts import TrialId
from hpstage.plan.nodes import PlannedTrial
from hpstage.plan.plan import SearchPlan
from hpstage.report.trial_log import log_of

Param = bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class TrialRun:
    """A trial.

    Attributes:
        number: in its study.
        state: complete, pruned, fail, or running.
        steps: the number of steps requested.
        params: the study's parameters.
        rows: ascending steps, each with values by name. What was logged has the step in which it was, counted from 0,
            and a metric the number of steps that were trained before. Where a metric has the name of something that is
            logged, that is called ``log/NAME``.
        metrics: the last known values of all metrics.
    """

    plan: str
    id: TrialId
    study: str
    number: str
    state: str
    steps: int
    params: Mapping[str, Param]
    rows: tuple[tuple[int, Mapping[str, float]], ...]
    metrics: Mapping[str, float]


def runs_of(plan: SearchPlan, checkpoints: CheckpointStore) -> Iterator[TrialRun]:
    """Yield the trials of a plan in the order in which they were added."""
    for id, trial in plan.trials.items():
        ended, proposed = plan.ended.get(id), plan.searches.proposed.get(id)
        measured = {
            state.step: state.metrics
            for state in trial.states()
            if state.metrics is not None and state.step <= trial.requested
        }
        yield TrialRun(
            plan=plan.id,
            id=id,
            study=plan.study_of(id),
            number=id.rpartition("/")[2],
            state="running" if ended is None else ended.state.lower(),
            steps=trial.requested,
            params={} if proposed is None else proposed.params,
            rows=tuple(_rows(plan, checkpoints, trial, measured)),
            metrics={name: value for step in sorted(measured) for name, value in measured[step].items()},
        )


def _rows(
    plan: SearchPlan, checkpoints: CheckpointStore, trial: PlannedTrial, measured: Mapping[int, Mapping[str, float]]
) -> Iterator[tuple[int, Mapping[str, float]]]:
    rows: dict[int, dict[str, float]] = {}
    names = {name for metrics in measured.values() for name in metrics}
    for name, values in log_of(plan, checkpoints, trial).values.items():
        for step, value in values.items():
            rows.setdefault(step, {})[f"log/{name}" if name in names else name] = value
    for step, metrics in measured.items():
        rows.setdefault(step, {}).update(metrics)
    yield from sorted(rows.items())


def plain_name(name: str, allowed: str = ".,=+@-", most: int = 100) -> str:
    """Return a name of letters, digits, ``_`` and ``allowed``. If that changes the name, a digest distinguishes it from
    others that become the same."""
    plain = re.sub(rf"[^0-9A-Za-z_{re.escape(allowed)}]", "_", name).strip(".")[:most]
    return plain if plain == name != "" else f"{plain}-{xxhash.xxh3_64_hexdigest(name.encode())[:8]}"
