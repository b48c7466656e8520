"""Algorithms through the front door: exact values, the same study on any workers, failures, interruptions."""

from __future__ import annotations

import random
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

import hpstage
from hpstage import schedule as s
from hpstage.accounting.savings import merged
from hpstage.algorithm import Algorithm
from hpstage.algos import (
    ASHA,
    FullTraining,
    Hyperband,
    MedianStopping,
    OptunaPruner,
    PopulationBasedTraining,
    SuccessiveHalving,
)
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.optuna import StageTreeSampler
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Failing, Tape, alone
from tests.invariants import validate
from tests.unit.search.test_resume import SEARCHES, Fuse, call, outcome

optuna.logging.set_verbosity(optuna.logging.ERROR)
pytestmark = [
    pytest.mark.sampled(10),
    pytest.mark.filterwarnings("ignore:.*is experimental:optuna.exceptions.ExperimentalWarning"),
]

STEPS, TRIALS = 8, 16
SYNCHRONOUS: list[Algorithm] = [
    SuccessiveHalving(1, 2),
    Hyperband(1, 2),
    MedianStopping(interval=2, grace=2, min_trials=3, window=5),
    OptunaPruner(interval=2, grace=2, window=5),
    PopulationBasedTraining(2),
]
ASYNCHRONOUS: list[Algorithm] = [
    ASHA(1, 2, window=5),
    ASHA(1, 2, "stopping", window=5),
    Hyperband(1, 2, variant="asynchronous", window=5),
]
ALGORITHMS = [*SYNCHRONOUS, *ASYNCHRONOUS]


def space(trial: optuna.Trial) -> dict[str, object]:
    return {
        "a": s.piecewise({0: trial.suggest_int("a", 1, 3), 4: trial.suggest_int("late", 1, 3)}),
        "b": s.linear(trial.suggest_categorical("b", [1.0, 2.0]), total_iters=trial.suggest_int("iters", 2, 6)),
    }


def run(algorithm: Algorithm, trainable: object = None, sampler: Any = None, **options: Any) -> hpstage.Result:
    study = optuna.create_study(direction="maximize", sampler=sampler or optuna.samplers.RandomSampler(seed=5))
    settings: dict[str, Any] = {"metric": "score", "steps": STEPS, "n_trials": TRIALS, "store": MemoryJournal()}
    settings |= {"executor": hpstage.InlineExecutor(), "algorithm": algorithm, "space": space} | options
    return hpstage.optimize(study, trainable or Tape(), settings.pop("space"), **settings)


def assert_values_are_exact(result: hpstage.Result, steps: int = STEPS) -> None:
    """Every value of the study is that of its trial trained without sharing."""
    for trial in result.study.trials:
        if trial.state == TrialState.FAIL:
            continue
        line = dict(result.plan.trials[f"{result.study.study_name}/{trial.number}"].schedules)
        for step, value in trial.intermediate_values.items():
            assert value == alone(line, step).score
        reached = max(trial.intermediate_values)
        assert (trial.state == TrialState.COMPLETE) == (reached == steps)
        assert trial.value == trial.intermediate_values[reached]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_every_algorithm_gives_the_values_of_training_without_sharing_and_trains_no_step_twice(algorithm):
    # Every state is kept: otherwise a trial that continues later may fork from a step without a checkpoint.
    result = run(algorithm, checkpoint_every=1)
    states = [trial.state for trial in result.study.trials]
    forks = sum("hpstage:donor" in trial.user_attrs for trial in result.study.trials)
    assert len(states) == TRIALS + forks
    assert states.count(TrialState.COMPLETE) > 0 and states.count(TrialState.PRUNED) > 0
    assert states.count(TrialState.COMPLETE) + states.count(TrialState.PRUNED) == TRIALS + forks
    assert_values_are_exact(result)
    assert result.plan.totals.steps_trained == merged(result.plan).steps_unique


def learning() -> optuna.samplers.BaseSampler:
    return optuna.samplers.TPESampler(seed=2, n_startup_trials=4)


def uneven(workers: int) -> SimulatedExecutor:
    """Workers whose steps take any time; a state's value is its key's."""
    duration = random.Random(workers)
    return SimulatedExecutor(
        workers,
        step_seconds=lambda values: duration.uniform(0.1, 3.0),
        measure=lambda key, step: {"score": int(key[:6], 16) / step},
    )


@pytest.mark.parametrize("algorithm", SYNCHRONOUS, ids=repr)
def test_a_synchronous_algorithm_gives_the_same_trials_on_one_and_four_workers(algorithm):
    studies = [outcome(run(algorithm, sampler=learning(), executor=uneven(n)).study) for n in (1, 4)]
    assert studies[0] == studies[1]


@pytest.mark.parametrize("algorithm", SYNCHRONOUS, ids=repr)
@pytest.mark.one_in(2)
def test_a_synchronous_algorithm_gives_the_same_trials_with_and_without_sharing(algorithm):
    shared, alone_ = (run(algorithm, sampler=learning(), sharing=sharing) for sharing in (True, False))
    assert outcome(shared.study) == outcome(alone_.study)
    assert shared.savings.steps_trained < alone_.savings.steps_trained


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("algorithm", ASYNCHRONOUS, ids=repr)
def test_an_asynchronous_algorithm_finishes_every_trial_on_workers_of_uneven_speed(algorithm, workers):
    result = run(algorithm, executor=uneven(workers), checkpoint_every=1)
    states = {trial.state for trial in result.study.trials}
    assert states == {TrialState.COMPLETE, TrialState.PRUNED} and len(result.study.trials) == TRIALS
    assert result.plan.totals.steps_trained == merged(result.plan).steps_unique


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
@pytest.mark.one_in(2)
def test_failed_trials_do_not_change_the_values_of_other_trials(algorithm):
    def risky(trial: optuna.Trial) -> dict[str, object]:
        early = trial.suggest_float("early", 0.0, 1.0)
        late = trial.suggest_categorical("late", [1, 2, 5, 7])
        return {"a": s.piecewise({0: early, 3: late})}

    result = run(algorithm, Failing(), space=risky)
    for trial in result.study.trials:
        assert trial.state.is_finished()
        if trial.state == TrialState.FAIL:
            assert trial.params["late"] in (5, 7)
    assert {trial.state for trial in result.study.trials} == {TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL}
    assert_values_are_exact(result)


BOUNDED = SuccessiveHalving | PopulationBasedTraining


@pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if not isinstance(a, BOUNDED)], ids=repr)
@pytest.mark.one_in(2)
def test_a_study_without_n_trials_runs_until_a_callback_stops_it(algorithm):
    def stop_at_twenty(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if sum(t.state.is_finished() for t in study.get_trials(deepcopy=False)) == 20:
            study.stop()

    # In ASHA's promotion variant trials end when they are complete, or with the search.
    result = run(algorithm, n_trials=None, callbacks=[stop_at_twenty])
    assert len(result.study.trials) >= 20
    assert all(trial.state.is_finished() for trial in result.study.trials)
    assert_values_are_exact(result)


# --- interruptions ----------------------------------------------------------------------------------------

INTERRUPTED = {
    "hyperband": (lambda: optuna.samplers.RandomSampler(seed=1), Hyperband(2, 2)),
    "bohb": (lambda: optuna.samplers.TPESampler(seed=1, n_startup_trials=3), Hyperband(2, 2)),
    "median": (lambda: optuna.samplers.TPESampler(seed=1, n_startup_trials=3), MedianStopping(2, 2, 2, window=3)),
    "asha": (lambda: optuna.samplers.RandomSampler(seed=1), ASHA(2, 2, window=3)),
    "pbt": (lambda: optuna.samplers.RandomSampler(seed=1), PopulationBasedTraining(2)),
    "pruner": (lambda: optuna.samplers.TPESampler(seed=1, n_startup_trials=3), OptunaPruner(2, 2, window=3)),
    "stage-tree": (
        lambda: StageTreeSampler(optuna.samplers.TPESampler(seed=1, n_startup_trials=3)),
        FullTraining(window=2),
    ),
    "asha-stopping": (lambda: optuna.samplers.RandomSampler(seed=1), ASHA(2, 2, "stopping", window=3)),
}


@pytest.fixture(autouse=True)
def _interrupted_searches(monkeypatch):
    for kind, search in INTERRUPTED.items():
        monkeypatch.setitem(SEARCHES, kind, search)


def interruptions(kind: str, tmp_path, stride: int):
    """Results of calls that were interrupted once, somewhere, and made again."""
    for place in ("train", "space after", "callback", "end before", "end after"):
        for at in range(3, 200, stride):
            folder = tmp_path / f"{place} {at}"
            fuse = Fuse(at)
            try:
                call(folder, kind, place, fuse, n_trials=14)
            except KeyboardInterrupt:
                pass
            else:
                assert at > fuse.touched > 0
                break
            yield call(folder, kind, place="train", n_trials=14)


@pytest.mark.parametrize("stride", [47, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["hyperband", "bohb", "median", "pbt", "pruner", "stage-tree"])
@pytest.mark.one_in(3)
@pytest.mark.ci
def test_a_resumed_synchronous_search_ends_with_the_trials_of_an_uninterrupted_search(kind, stride, tmp_path):
    expected = outcome(call(tmp_path / "undisturbed", kind, n_trials=14).study)
    assert len(expected) >= 14
    for again in interruptions(kind, tmp_path, stride):
        assert outcome(again.study) == expected
        validate(again.plan)


@pytest.mark.ci
@pytest.mark.parametrize("stride", [47, pytest.param(19, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["asha", "asha-stopping"])
@pytest.mark.one_in(2)
def test_a_resumed_asynchronous_search_finishes_every_trial_with_exact_values(kind, stride, tmp_path):
    for again in interruptions(kind, tmp_path, stride):
        assert len(outcome(again.study)) == 14
        assert all(trial.state.is_finished() for trial in again.study.trials)
        assert_values_are_exact(again, steps=6)
        validate(again.plan)


# --- forks ------------------------------------------------------------------------------------------------


def test_a_forked_trial_has_the_schedules_of_its_donor_before_the_fork_and_its_own_after_it():
    result = run(PopulationBasedTraining(2, resample_probability=0.9), n_trials=8, checkpoint_every=1)
    forks = [trial for trial in result.study.trials if "hpstage:donor" in trial.user_attrs]
    assert len(forks) >= 6
    for fork in forks:
        at = fork.user_attrs["hpstage:forked_at"]
        mine, donor = result.schedules(fork), result.schedules(fork.user_attrs["hpstage:donor"])
        own = space(optuna.trial.FixedTrial(fork.params))
        for name, schedule in mine.items():
            for step in range(STEPS):
                source = donor[name] if step < at else own[name]
                assert schedule.value(step) == source.value(step)


def test_the_winner_of_population_based_training_retrained_as_one_trial_has_the_same_value():
    result = run(PopulationBasedTraining(2, resample_probability=0.9), n_trials=8)
    winner = max(
        (t for t in result.study.trials if "hpstage:donor" in t.user_attrs and t.state == TrialState.COMPLETE),
        key=lambda trial: trial.value,
    )
    replayed = run(FullTraining(), n_trials=1, space=lambda trial: result.schedules(winner))
    assert replayed.best_value == winner.value == alone(result.schedules(winner), STEPS).score
    assert replayed.savings.steps_trained == STEPS


def test_a_fork_with_other_hyperparameters_than_its_donor_fails_and_the_population_continues():
    def conditional(trial: optuna.Trial) -> dict[str, object]:
        kind = trial.suggest_categorical("kind", ["plain", "momentum"])
        rate = {"a": trial.suggest_float("a", 0.1, 1.0), "kind": kind}
        return rate | ({"m": trial.suggest_float("m", 0.1, 0.9)} if kind == "momentum" else {})

    result = run(PopulationBasedTraining(2, resample_probability=1.0), n_trials=8, space=conditional)
    failed = [trial for trial in result.study.trials if trial.state == TrialState.FAIL]
    assert failed and all("same names for all trials" in t.user_attrs["hpstage:failure"] for t in failed)
    assert sum(trial.state == TrialState.COMPLETE for trial in result.study.trials) >= 4
    assert_values_are_exact(result)


# --- spaces and objectives --------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if not isinstance(a, PopulationBasedTraining)], ids=repr)
@pytest.mark.one_in(2)
def test_trials_of_a_conditional_space_have_different_hyperparameters_and_exact_values(algorithm):
    def conditional(trial: optuna.Trial) -> dict[str, object]:
        if trial.suggest_categorical("kind", ["plain", "momentum"]) == "plain":
            return {"a": trial.suggest_int("a", 1, 3)}
        return {"a": trial.suggest_int("a", 1, 3), "m": s.linear(trial.suggest_float("m", 0.1, 0.9), total_iters=4)}

    result = run(algorithm, space=conditional)
    assert {frozenset(line.schedules) for line in result.plan.trials.values()} == {frozenset("a"), frozenset("am")}
    assert_values_are_exact(result)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
@pytest.mark.one_in(2)
def test_all_trials_of_a_space_with_one_point_train_its_steps_once(algorithm):
    result = run(algorithm, space=lambda trial: {"a": 1.0, "b": trial.suggest_categorical("b", [2.0])})
    assert result.best_trial.last_step == STEPS
    assert result.savings.steps_trained == STEPS
    assert_values_are_exact(result)


def test_a_study_with_two_objectives_has_both_values_of_every_trial_and_the_pareto_front():
    study = optuna.create_study(directions=["maximize", "minimize"], sampler=optuna.samplers.NSGAIISampler(seed=1))
    result = hpstage.optimize(
        study,
        Tape(),
        space,
        metric=["score", "hash"],
        steps=STEPS,
        n_trials=20,
        executor=hpstage.InlineExecutor(),
        store=MemoryJournal(),
    )
    for trial in study.trials:
        tape = alone(result.schedules(trial), STEPS)
        assert trial.values == [tape.score, tape.evaluate()["hash"]]
        assert trial.user_attrs["hpstage:steps"] == STEPS
    front = {trial.number for trial in result.best_trials}
    better = [(-trial.values[0], trial.values[1]) for trial in study.trials]
    for trial in study.trials:
        mine = better[trial.number]
        beaten = any(a <= mine[0] and b <= mine[1] and (a, b) != mine for a, b in better)
        assert (trial.number in front) != beaten


def test_the_stage_tree_sampler_shares_first_steps_of_trials_in_a_continuous_space():
    def continuous(trial: optuna.Trial) -> dict[str, object]:
        late = trial.suggest_float("late", 0.1, 10.0, log=True)  # suggested first, matters last
        return {"a": s.piecewise({0: trial.suggest_float("early", 0.1, 10.0, log=True), 6: late})}

    plain, shared = (
        run(FullTraining(window=2), sampler=sampler, space=continuous)
        for sampler in (
            optuna.samplers.TPESampler(seed=1),
            StageTreeSampler(optuna.samplers.TPESampler(seed=1)),
        )
    )
    assert plain.savings.merge_rate == 1.0 and shared.savings.merge_rate > 1.2
    assert len({trial.params["late"] for trial in shared.study.trials}) == TRIALS
    assert_values_are_exact(shared)
