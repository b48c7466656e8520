"""Rehearse a search on simulated workers, and find the smallest fleet that meets a deadline."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import optuna

from hpstage.accounting.bound import speeds
from hpstage.accounting.savings import Savings, shortest_makespan
from hpstage.algorithm import Algorithm
from hpstage.checkpoints.evictable import needed_states
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.execution.simulated_cluster import Disruptions, Scaling, SimulatedCluster
from hpstage.plan.facts import StateReached
from hpstage.plan.plan import SearchPlan
from hpstage.plan.step_times import ALONE
from hpstage.rehearsal.costs import Costs
from hpstage.rehearsal.stand_in_metrics import Precedent, StandIn
from hpstage.schedule import Plateau
from hpstage.schedule.space import Space, points_of
from hpstage.scheduler.widths import Widths
from hpstage.search.optimize import optimize
from hpstage.search.results.result import Result
from hpstage.store import MemoryJournal

# Maximum number of checkpoints inspected to find how many were needed at the same time.
_LOOKS = 200_000
# The largest fleet tried, and the relative gain that twice as many workers must have for a larger one to be tried.
_LARGEST, _FASTER = 4096, 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The figures of a rehearsed search. They do not hold its plan in memory, so that there can be many of them."""

    workers: int
    savings: Savings
    makespan: float
    paid_seconds: float
    """Worker seconds from the request for each worker until it leaves, or the search ends."""
    lower_bound: float
    alone_bound: float
    needed: int
    """Maximum number of checkpoints that were needed or being written at the same time."""
    measured: int
    drawn: int
    """Numbers of evaluations whose metrics were measured on an earlier plan, and were drawn at random."""
    observes: bool
    """Whether a schedule depends on metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """A search that can be rehearsed on any number of workers."""

    space: Space
    steps: int
    n_trials: int | None
    sampler: optuna.samplers.BaseSampler
    algorithm: Algorithm
    catch: tuple[type[Exception], ...]
    costs: Costs
    checkpoint_every: int | None
    precedent: Precedent | None
    disruptions: Disruptions | None = None

    def on(self, workers: int, values: int, *, start_seconds: float | None = None) -> Rehearsal:
        """Rehearse the search.

        Args:
            workers: number of workers.
            values: seed of the metrics that no precedent has measured, and of the disruptions of workers.
            start_seconds: if given, the number of workers follows the demand, up to ``workers``, and starting a worker
                takes this long.
        """
        costs, times = self.costs, self.costs.step_times or ALONE
        direction: Literal["maximize", "minimize"] = (
            "maximize" if self.precedent is not None and self.precedent.maximize else "minimize"
        )
        journal = MemoryJournal()
        stand_in = StandIn(values, journal, self.precedent)
        speedup = Widths().speedup
        scaling = None if start_seconds is None else Scaling(1, workers, start_seconds)
        disruptions = self.disruptions and dataclasses.replace(self.disruptions, seed=values)
        first = workers if scaling is None else 1
        executor = SimulatedExecutor(
            SimulatedCluster(first, slots=times.best, scaling=scaling, disruptions=disruptions),
            step_seconds=costs.step_seconds,
            evaluate_seconds=costs.evaluate_seconds,
            load_seconds=costs.load_seconds,
            save_seconds=costs.save_seconds,
            state_bytes=costs.checkpoint_bytes,
            measure=stand_in,
            virtual_nodes=costs.virtual_nodes,
            speedup=speedup,
            step_times=times,
        )
        result = optimize(
            optuna.create_study(study_name="preflight", sampler=copy.deepcopy(self.sampler), direction=direction),
            _Untrained(),
            _on_stand_in(self.space),
            metric="value",
            steps=self.steps,
            n_trials=self.n_trials,
            algorithm=self.algorithm,
            catch=self.catch,
            executor=executor,
            store=journal,
            checkpoint_every=self.checkpoint_every,
            audit="off",  # audits delay no chain, and can be left out
        )
        trials = result.plan.trials.values()
        fleet = speeds(workers, slots=times.best, step_times=times, widest=costs.virtual_nodes, speedup=speedup)
        return Rehearsal(
            workers=workers,
            savings=result.savings,
            makespan=executor.clock(),
            paid_seconds=executor.cluster.paid_seconds,
            lower_bound=shortest_makespan(result.plan, trials, workers, fleet),
            alone_bound=shortest_makespan(result.plan, trials, workers, fleet, sharing=False),
            needed=most_needed(result),
            measured=stand_in.measured,
            drawn=stand_in.drawn,
            observes=any(trial.plateaus for trial in trials),
        )


def _on_stand_in(space: Space) -> Space:
    """Return the space with schedules that observe the only metric of a rehearsal, instead of the metrics they name."""

    def rehearsed(trial: optuna.Trial) -> Mapping[str, Any]:
        described = space(trial)
        if not isinstance(described, Mapping):
            return described
        return {name: _observing_value(value) for name, value in described.items()}

    return space if points_of(space) else rehearsed


def _observing_value(value: object) -> object:
    if not isinstance(value, Plateau):
        return value
    mode = value.mode if value.metric is None else value.mode or "min"
    return msgspec.structs.replace(value, metric=None, mode=mode)


class _Untrained:
    """A placeholder for the trainable, which simulated workers do not use."""

    version = "1"


def most_needed(result: Result) -> int:
    """Return the maximum number of checkpoints of a search that were needed at the same time
    (:mod:`hpstage.checkpoints.evictable`), including those that running chains were writing.

    They are counted before each checkpoint; in a large plan only before some checkpoints, to bound the work.
    """
    kept = [place for place, fact in enumerate(result.journal) if isinstance(fact, StateReached) and fact.kept]
    spacing = max(1, len(kept) * len(result.plan.kept) // _LOOKS)
    looks = set(kept[::spacing])
    plan = SearchPlan(result.plan.workload)
    most = 0
    for place, fact in enumerate(result.journal):
        if place in looks:
            most = max(most, len(needed_states(plan)) + sum(chain.continues for chain in plan.chains.values()))
        plan.apply(fact)
    return most


@dataclass(frozen=True, slots=True)
class FleetCost:
    """A fleet of at most ``workers`` workers, with the worst figures of all rehearsals.

    The smallest fleet that meets a deadline is also the cheapest, up to a few seconds: twice as many workers never need
    less than half the time.
    """

    workers: int
    makespan: float
    paid_seconds: float
    """Seconds of all workers, each from its request until it leaves or the search ends."""


def cheapest(rehearse: Callable[[int], Sequence[Rehearsal]], deadline: float, workers: int) -> FleetCost | None:
    """Return the smallest fleet whose makespan is at most ``deadline`` seconds in every rehearsal, found by bisection.

    Return ``None`` if more workers are not faster and still miss the deadline.

    Args:
        rehearse: rehearses the search on at most the given number of workers.
        workers: number of workers to try first.
    """
    found: dict[int, FleetCost] = {}

    def on(workers: int) -> FleetCost:
        if workers not in found:
            runs = rehearse(workers)
            found[workers] = FleetCost(
                workers, max(run.makespan for run in runs), max(run.paid_seconds for run in runs)
            )
        return found[workers]

    enough, before = workers, math.inf
    while on(enough).makespan > deadline:
        if enough >= _LARGEST or on(enough).makespan > (1 - _FASTER) * before:
            return None
        before = on(enough).makespan
        enough *= 2
    too_few = max((count for count, cost in found.items() if cost.makespan > deadline), default=0)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if on(middle).makespan <= deadline:
            enough = middle
        else:
            too_few = middle
    return on(enough)
