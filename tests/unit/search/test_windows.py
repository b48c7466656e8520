"""As many trials are open as keep the workers busy, also while these join and leave, and what a search costs then."""

from __future__ import annotations

from typing import Any, ClassVar

import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.accounting.savings import shortest_makespan
from hpstage.algorithm import Algorithm, Setting, Trials
from hpstage.algorithm import Search as AlgorithmSearch
from hpstage.algos import ASHA, FullTraining, Hyperband, MedianStopping, SuccessiveHalving
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.execution.simulated_cluster import Scaling, SimulatedCluster
from hpstage.plan.facts import WorkerId
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Tape

pytestmark = pytest.mark.sampled(10)

optuna.logging.set_verbosity(optuna.logging.ERROR)


def tpe() -> optuna.samplers.BaseSampler:
    return optuna.samplers.TPESampler(seed=0)


def real(trial: optuna.Trial) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 0.0, 1.0)}


def milestones(trial: optuna.Trial) -> dict[str, Any]:
    """Trials that begin equally, with rates that drop twice and batches that grow."""
    drops = [trial.suggest_categorical("first", [40, 60, 80]), trial.suggest_categorical("second", [100, 120, 140])]
    rate, factor = trial.suggest_categorical("lr", [0.1, 0.05, 0.02]), trial.suggest_categorical("gamma", [0.1, 0.2])
    return {
        "lr": s.multistep(rate, milestones=drops, gamma=factor),
        "momentum": trial.suggest_categorical("momentum", [0.9, 0.95]),
        "batch": s.piecewise({0: 64, trial.suggest_categorical("grow_at", [40, 80, 120]): 256}),
        "decay": s.piecewise({0: 1e-4, 100: trial.suggest_categorical("decay", [1e-4, 5e-4])}),
    }


class Open:
    """A callback that notes how many trials are open when one ends, those that end with it included."""

    def __init__(self, executor: SimulatedExecutor) -> None:
        self.seen: list[tuple[float, int]] = []
        self._executor = executor

    def __call__(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        running = sum(not one.state.is_finished() for one in study.get_trials(deepcopy=False))
        self.seen.append((self._executor.clock(), 1 + running))

    def between(self, start: float, stop: float) -> int:
        """Return the most at a time."""
        return max(count for at, count in self.seen if start < at <= stop)


def searched(executor: SimulatedExecutor, space: Any = real, **options: Any) -> hpstage.Result:
    given = {
        "study": optuna.create_study(study_name="x", sampler=tpe()),
        "metric": "value",
        "steps": 10,
        "n_trials": 300,
        "executor": executor,
        "store": MemoryJournal(),
        "audit": "off",
        **options,
    }
    return hpstage.optimize(given.pop("study"), Tape(), space, **given)


def outcome(study: optuna.Study) -> list[tuple[object, ...]]:
    return [(t.number, t.params, t.state, t.value, t.intermediate_values) for t in study.trials]


@pytest.mark.ci
def test_the_number_of_unfinished_trials_follows_workers_that_join_and_leave() -> None:
    executor = SimulatedExecutor(8)
    for _ in range(12):
        executor.cluster.join(55.0)  # after five trials of each
    for number in range(8):
        executor.cluster.kill(WorkerId(f"sim-{number}"), 95.0)
    seen = Open(executor)
    searched(executor, callbacks=[seen])
    assert seen.between(0, 50) == 16
    assert seen.between(70, 90) == 16 + 4 * 12
    assert seen.between(125, 135) == 16 + 4 * 4
    assert len(seen.seen) == 300


@pytest.mark.ci
def test_a_worker_that_dies_and_is_replaced_does_not_change_the_trials_of_the_study() -> None:
    calm, troubled = SimulatedExecutor(16), SimulatedExecutor(16)
    for number, after in enumerate((33.0, 41.0, 77.0)):
        troubled.cluster.kill(WorkerId(f"sim-{number}"), after)
        troubled.cluster.join(after + 4.0)
    studies = [searched(executor, n_trials=150).study for executor in (calm, troubled)]
    assert troubled.clock() > calm.clock()
    assert outcome(studies[0]) == outcome(studies[1])


class Noting(MedianStopping):
    """Notes with how many workers it was started."""

    seen: ClassVar[list[int]] = []

    def start(self, setting: Setting, trials: Trials) -> AlgorithmSearch:
        self.seen.append(setting.workers)
        return super().start(setting, trials)


@pytest.mark.parametrize("more", [{}, {"n_trials": 120}, {"extend": True, "steps": 12}], ids=str)
def test_a_resumed_search_keeps_the_number_of_workers_that_its_algorithm_started_with(more: dict[str, Any]) -> None:
    def interrupt(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if trial.number == 20:
            raise KeyboardInterrupt

    Noting.seen.clear()
    study, kept = optuna.create_study(study_name="x", sampler=tpe()), set[Any]()
    options: dict[str, Any] = {"algorithm": Noting(2, 2), "n_trials": 112, "study": study, "store": MemoryJournal()}
    with pytest.raises(KeyboardInterrupt):
        searched(SimulatedExecutor(32, kept=kept), callbacks=[interrupt], **options)
    searched(SimulatedExecutor(4, kept=kept), **options | more)
    assert Noting.seen[0] == Noting.seen[-1] == 32


def test_a_new_search_starts_its_algorithm_with_the_current_number_of_workers() -> None:
    Noting.seen.clear()
    options: dict[str, Any] = {"algorithm": Noting(2, 2), "n_trials": 20, "store": MemoryJournal()}
    study = optuna.create_study(study_name="x", sampler=tpe())
    for workers in (32, 4):
        searched(SimulatedExecutor(workers), study=study, **options)
    assert Noting.seen[-1] == 4


@pytest.mark.ci
@pytest.mark.parametrize(
    ("algorithm", "sampler", "most"),
    [
        (FullTraining(), tpe, 1.10),  # with 16 open, 3.7
        (SuccessiveHalving(6, 3), tpe, 1.10),
        (ASHA(6, 3), tpe, 1.10),
        (ASHA(6, 3, "stopping"), tpe, 1.10),
        (Hyperband(6, 3), lambda: optuna.samplers.RandomSampler(seed=0), 1.10),
        (Hyperband(6, 3, "asynchronous"), tpe, 1.10),
        (Hyperband(6, 3), tpe, 1.50),  # BOHB: a cycle knows the results of earlier ones
        (MedianStopping(18, 18), tpe, 1.35),
    ],
    ids=["full", "halving", "ASHA", "ASHA stopping", "Hyperband", "Hyperband async", "BOHB", "median"],
)
@pytest.mark.ci_one_in(2)
def test_32_workers_are_kept_busy_by_default(algorithm: Algorithm, sampler: Any, most: float) -> None:
    executor = SimulatedExecutor(32, step_seconds=0.2, evaluate_seconds=0.02, save_seconds=0.02, load_seconds=0.02)
    study = optuna.create_study(sampler=sampler())
    plan = searched(executor, milestones, algorithm=algorithm, steps=160, study=study).plan
    assert executor.clock() <= most * shortest_makespan(plan, plan.trials.values(), 32)


def test_preflight_expects_32_workers_to_be_kept_busy_by_default() -> None:
    said = hpstage.preflight(milestones, steps=160, n_trials=300, sampler="tpe", workers=(32,), step_seconds=0.2)
    (fleet,) = said.fleets
    assert fleet.makespan.median <= 1.10 * fleet.lower_bound.median


def test_an_elastic_fleet_grows_to_its_maximum_with_the_number_of_unfinished_trials() -> None:
    executor = SimulatedExecutor(SimulatedCluster(1, scaling=Scaling(1, 32, 5.0)), step_seconds=10.0)
    seen = Open(executor)
    result = searched(executor, callbacks=[seen])
    assert result.savings.workers == 32
    assert max(count for _, count in seen.seen) == 112
