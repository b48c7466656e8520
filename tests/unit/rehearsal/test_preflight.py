"""``hpstage.preflight``: what it says before a search is what the search then does."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.algos import FullTraining, Hyperband, MedianStopping, OptunaPruner, SuccessiveHalving
from hpstage.cli.naming import named
from hpstage.errors import UsageError
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.plan.step_times import StepTimes
from hpstage.rehearsal.rehearse import most_needed
from hpstage.schedule.space import describe
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Tape
from tests.unit.rehearsal.drops import STEPS, random, search, space, true_seconds, truth
from tests.unit.searches import histories, trial

pytestmark = pytest.mark.sampled(5)

# --- steps ------------------------------------------------------------------------------------------------


def partial_grid():
    grid = {"lr": [0.2, 0.05], "first": [10, 30, 60], "second": [80, 100], "grow": [20, 80]}
    return optuna.samplers.GridSampler(grid, seed=1)


@pytest.mark.ci
@pytest.mark.parametrize("make", [random, lambda: random(7), partial_grid])
def test_preflight_predicts_the_steps_of_full_training_exactly(make):
    said = hpstage.preflight(space, steps=STEPS, n_trials=20, sampler=make(), workers=(1, 3))
    done = search(hpstage.InlineExecutor(), make(), metric="score", n_trials=20).savings
    assert said.exact and said.rehearsals == 1
    for name in ("trials", "steps_asked", "steps_unique", "merge_rate"):
        spread = getattr(said, name)
        assert spread.low == spread.median == spread.high == getattr(done, name), name
    assert "No decision depends on metrics" in str(said)


def test_preflight_of_the_demo_counts_the_unique_prefixes_of_its_trials():
    pytest.importorskip("sklearn")
    demo = Path(__file__).parents[3] / "scripts" / "demo_digits.py"
    its_space = named(f"{demo}:space", "the space")
    steps, n_trials = named(f"{demo}:STEPS", "the steps"), named(f"{demo}:N_TRIALS", "the trials")
    study = optuna.create_study(sampler=random())
    trials = [trial(number, describe(its_space, study.ask(), steps).schedules, steps) for number in range(n_trials)]
    said = hpstage.preflight(its_space, steps=steps, n_trials=n_trials, workers=(2,))
    assert said.steps_asked.median == steps * n_trials
    assert said.steps_unique.median == len(histories(trials, [steps] * n_trials))
    halving = SuccessiveHalving(15, 4, tree_aware=False)
    said = hpstage.preflight(its_space, steps=steps, n_trials=n_trials, workers=(2,), algorithm=halving)
    # How far trials go is a matter of counts; which of them do, and so what they share, is one of values.
    assert said.steps_asked.low == said.steps_asked.high == 48 * 15 + 12 * 45 + 3 * 60
    assert said.steps_unique.low <= 470 <= said.steps_unique.high  # as the README's demo trained
    assert not said.exact and said.steps_unique.low < said.steps_unique.high


def test_preflight_with_the_grid_sampler_counts_all_trials_of_the_grid():
    said = hpstage.preflight(space, steps=STEPS, sampler="grid", workers=(2,))
    assert said.trials.median == 3 * 3 * 2 * 3
    # lr x first drop x second drop x growth, as one counts them by hand: 3 roots, each with 3 x 3 beginnings.
    points = [
        {"lr": lr, "first": first, "second": second, "grow": grow}
        for lr in (0.2, 0.1, 0.05)
        for first in (10, 30, 60)
        for second in (80, 100)
        for grow in (20, 40, 80)
    ]
    trials = [
        trial(i, describe(space, optuna.trial.FixedTrial(point, i), STEPS).schedules, STEPS)
        for i, point in enumerate(points)
    ]
    assert said.steps_unique.median == len(histories(trials, [STEPS] * len(points)))


@pytest.mark.parametrize(
    "algorithm", [SuccessiveHalving(15, 4), SuccessiveHalving(15, 4, tree_aware=False), MedianStopping(30, 30)]
)
@pytest.mark.ci
def test_a_search_lies_within_the_range_of_preflight_if_metrics_decide_its_steps(algorithm):
    said = hpstage.preflight(space, steps=STEPS, n_trials=48, algorithm=algorithm, workers=(2,), rehearsals=15)
    done = search(hpstage.InlineExecutor(), random(), algorithm=algorithm, metric="score").savings
    assert not said.exact
    assert said.steps_unique.low <= done.steps_unique <= said.steps_unique.high
    assert said.merge_rate.low <= done.merge_rate <= said.merge_rate.high
    assert "rehearsals with random metrics" in str(said)


def test_a_preflight_of_a_learning_sampler_is_not_exact():
    said = hpstage.preflight(space, steps=20, n_trials=15, sampler="tpe", workers=(1,), rehearsals=3)
    assert not said.exact and said.sampler == "TPESampler" and said.trials.median == 15


def test_preflight_counts_steps_shared_by_a_stage_tree_sampler():
    def late(trial):
        return {
            "lr": trial.suggest_float("lr", 0.1, 0.2),
            "drop": s.piecewise({0: 1, 50: trial.suggest_float("d", 0, 1)}),
        }

    sampler = hpstage.optuna.StageTreeSampler(random())
    said = hpstage.preflight(late, steps=60, n_trials=30, sampler=sampler, workers=(2,), rehearsals=3)
    assert not said.exact and said.merge_rate.low > 1.0
    assert said.sampler == "StageTreeSampler over RandomSampler"


@pytest.mark.parametrize("algorithm", [Hyperband(5, 3), OptunaPruner(10, 10), FullTraining()])
def test_repeated_preflights_are_equal_and_do_not_change_the_sampler(algorithm):
    def ask(sampler):
        return hpstage.preflight(
            space, steps=60, n_trials=12, sampler=sampler, algorithm=algorithm, workers=(2,), rehearsals=3
        )

    sampler = random()
    assert ask(sampler) == ask(sampler) == ask("random")


# --- seconds ----------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_makespan_of_full_training_is_predicted_within_fifteen_percent(costs):
    said = preflight_with(costs, FullTraining(), workers=(1, 2, 4))
    for fleet in said.fleets:
        executor = truth(fleet.workers)
        done = search(executor, random()).savings
        assert fleet.makespan.median == pytest.approx(executor.clock(), rel=0.15)
        assert fleet.worker_seconds.median == pytest.approx(done.worker_seconds, rel=0.15)
        assert fleet.lower_bound.median <= fleet.makespan.median
        assert fleet.lower_bound.median == pytest.approx(done.lower_bound_seconds, rel=0.15)


@pytest.mark.ci
def test_makespan_of_successive_halving_is_predicted_within_fifteen_percent_of_the_median(costs):
    """The metrics decide, so it is a range, and is compared with searches that differ only in their metrics."""
    halving = SuccessiveHalving(15, 4, tree_aware=False)
    for fleet in preflight_with(costs, halving, workers=(1, 3)).fleets:
        took = []
        for salt in range(9):
            executor = truth(fleet.workers, lambda key, step, salt=salt: {"value": int(key[3 * salt :][:6], 16) - step})
            search(executor, random(), algorithm=halving)
            took.append(executor.clock())
        assert fleet.makespan.median == pytest.approx(statistics.median(took), rel=0.15)
        assert 0.85 * fleet.makespan.low <= min(took) and max(took) <= 1.15 * fleet.makespan.high


def preflight_with(costs, algorithm, workers):
    return hpstage.preflight(
        space,
        steps=STEPS,
        n_trials=48,
        algorithm=algorithm,
        workers=workers,
        step_seconds=costs.step_seconds,
        evaluate_seconds=costs.evaluate_seconds,
        load_seconds=costs.load_seconds,
        save_seconds=costs.save_seconds,
    )


def test_a_search_without_sharing_takes_at_least_the_predicted_lower_bound():
    said = hpstage.preflight(space, steps=STEPS, n_trials=10, workers=(1, 3), step_seconds=true_seconds)
    for fleet in said.fleets:
        executor = SimulatedExecutor(fleet.workers, step_seconds=true_seconds)
        hpstage.optimize(
            optuna.create_study(sampler=random()),
            Tape(),
            space,
            metric="value",
            steps=STEPS,
            n_trials=10,
            executor=executor,
            store=MemoryJournal(),
            sharing=False,
        )
        assert fleet.alone_bound.median <= executor.clock() * (1 + 1e-9)
        assert fleet.alone_bound.median == pytest.approx(executor.clock(), rel=0.25)


# --- checkpoints ------------------------------------------------------------------------------------------


def test_preflight_predicts_the_largest_number_of_checkpoints_needed_at_one_time():
    """Two trials that part halfway, on one worker: the trunk's state and the end of whichever is not reported yet."""

    def fork(trial):
        return {"lr": s.piecewise({0: 1, 50: trial.suggest_categorical("late", [2, 3, 4])})}

    def run(space):
        return hpstage.optimize(
            optuna.create_study(sampler=optuna.samplers.GridSampler({"late": [2, 3, 4]}, seed=0)),
            Tape(),
            space,
            metric="value",
            steps=100,
            executor=SimulatedExecutor(1),
            store=MemoryJournal(),
            checkpoint_every=100,
        )

    result = run(fork)
    assert result.savings.kept == 4
    assert most_needed(result) == 3  # the trunk, the best, and the one being written
    said = hpstage.preflight(fork, steps=100, sampler="grid", workers=(1,), checkpoint_bytes=1000)
    assert said.checkpoints.median == 4 and said.checkpoints_needed.median == 3
    assert "4, 4.0 kB" in str(said) and "3, 3.0 kB" in str(said)


# --- workers --------------------------------------------------------------------------------------------


def test_simulated_time_passes_only_while_an_executor_waits():
    executor = SimulatedExecutor(1)
    late = executor.cluster.join(5.0)
    assert len(executor.wait(0.0)) == 1  # the worker that is there
    assert executor.wait(0.0) == [] and executor.clock() == 0.0
    [joined] = executor.wait(0.1)
    assert joined.worker == late and executor.clock() == 5.0


def test_preflight_counts_stacked_training_of_siblings_with_its_step_times() -> None:
    def space(trial: optuna.Trial) -> dict[str, object]:
        return {"a": s.constant(trial.suggest_categorical("a", [0, 1, 2, 3]))}

    grid = optuna.samplers.GridSampler({"a": [0, 1, 2, 3]}, seed=0)
    options: dict[str, Any] = {"steps": 100, "sampler": grid, "workers": (1,), "step_seconds": 2.0}
    alone = hpstage.preflight(space, **options)
    fused = hpstage.preflight(space, **options, step_times=StepTimes(((1, 1.0), (4, 2.0))))
    assert (alone.worker_seconds.median, alone.fused_seconds.median) == (800.0, 0.0)
    assert (fused.worker_seconds.median, fused.fused_seconds.median) == (400.0, 400.0)
    assert fused.fleets[0].makespan.median == pytest.approx(400.0)
    assert fused.fleets[0].lower_bound.median == pytest.approx(400.0)
    assert "saved by fusing siblings" in str(fused) and "saved by fusing siblings" not in str(alone)


def test_preflight_lets_idle_workers_train_one_trial_together():
    lone = [
        hpstage.preflight(
            lambda trial: {"lr": 0.1}, steps=100, n_trials=1, workers=(4,), step_seconds=10.0, virtual_nodes=n
        )
        for n in (1, 4)
    ]
    alone, together = (said.fleets[0].makespan.median for said in lone)
    assert alone == 1000.0
    assert together < 1000.0 / 3
    assert [said.fleets[0].lower_bound.median for said in lone] == pytest.approx([1000.0, 1000.0 / 1.8**2])


# --- what cannot be -------------------------------------------------------------------------------------


def test_preflight_without_n_trials_is_refused_if_the_sampler_has_no_end():
    with pytest.raises(UsageError, match="n_trials"):
        hpstage.preflight(space, steps=STEPS)


def test_a_continuous_space_is_refused_with_the_grid_sampler():
    with pytest.raises(UsageError, match="'lr' has no grid"):
        hpstage.preflight(lambda trial: {"lr": trial.suggest_float("lr", 0, 1)}, steps=2, sampler="grid")
