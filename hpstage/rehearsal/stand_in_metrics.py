"""Metrics for rehearsals, where nothing is trained: metrics that an earlier plan has measured, or random ones."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

from hpstage.errors import UsageError
from hpstage.plan.facts import StateKey, TrialAdded
from hpstage.plan.log import read_header
from hpstage.plan.plan import SearchPlan
from hpstage.store import Journal


@dataclass(frozen=True, slots=True)
class Precedent:
    """A plan that was trained before, and its metric on which a rehearsed search bases its decisions.

    Raises:
        UsageError: the plan has not measured the metric.
    """

    plan: SearchPlan
    metric: str
    maximize: bool

    def __post_init__(self) -> None:
        measured = measured_on(self.plan)
        if self.metric not in measured:
            there = ", ".join(map(repr, sorted(measured))) or "none"
            raise UsageError(f"metric is {self.metric!r}, which was not measured on this plan; give one of: {there}")

    def values(self, workload: StateKey) -> dict[StateKey, float]:
        """Return the measured values, by the keys that the states have in a plan of ``workload``."""
        other = SearchPlan(workload)
        found: dict[StateKey, float] = {}
        for trial in self.plan.trials.values():
            other.apply(TrialAdded(trial.id, dict(trial.schedules), trial.steps))
            for node, start, stop in trial.path_to(trial.requested):
                for step, state in node.states.items():
                    value = math.nan if state.metrics is None else state.metrics.get(self.metric, math.nan)
                    if start < step <= stop and not math.isnan(value):
                        found[other.key(other.trials[trial.id].node_at(step), step)] = value
        return found


def measured_on(plan: SearchPlan) -> set[str]:
    """Return the names of all metrics measured on the plan."""
    return {name for node in plan.nodes for state in node.states.values() for name in state.metrics or ()}


class StandIn:
    """Provides the metric ``value`` of states that are not trained.

    The value of a state is always the same. A state that the precedent has measured has the measured value. Any other
    value is drawn from the values measured after the same number of steps, or from all measured values if there are
    none. Without a precedent, values are uniform in [0, 1).

    Args:
        seed: seed of the drawn values.
        journal: journal of the rehearsal.
    """

    def __init__(self, seed: int, journal: Journal, precedent: Precedent | None = None) -> None:
        self.measured = 0
        """Number of evaluations that the precedent had measured."""
        self.drawn = 0
        """Number of evaluations whose value was drawn."""
        self._seed = seed
        self._journal = journal
        self._precedent = precedent
        self._known: Mapping[StateKey, float] | None = {} if precedent is None else None
        self._pools: Mapping[int, list[float]] = {} if precedent is None else _pools(precedent)

    def __call__(self, key: StateKey, step: int) -> dict[str, float]:
        if self._known is None:
            assert self._precedent is not None
            self._known = self._precedent.values(read_header(self._journal).workload)
        if key in self._known:
            self.measured += 1
            return {"value": self._known[key]}
        self.drawn += 1
        digest = hashlib.blake2b(f"{self._seed} {key}".encode(), digest_size=7).digest()
        share = int.from_bytes(digest) / 256**7
        pool = self._pools.get(step) or self._pools.get(0)
        return {"value": pool[int(share * len(pool))] if pool else share}


def _pools(precedent: Precedent) -> dict[int, list[float]]:
    """Return the measured values by step; the key 0 has the values of all steps."""
    pools: dict[int, list[float]] = {0: []}
    for node in precedent.plan.nodes:
        for step, state in sorted(node.states.items()):
            value = math.nan if state.metrics is None else state.metrics.get(precedent.metric, math.nan)
            if not math.isnan(value):
                pools.setdefault(step, []).append(value)
                pools[0].append(value)
    return pools
