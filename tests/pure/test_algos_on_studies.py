"""Algorithms through the front door: exact values, the same study on any workers, failures, interruptions."""

from __future__ import annotations

import random
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

import hpstage
from hpstage import schedule as s
from hpstage.algorithm import Algorithm
from hpstage.algos import ASHA, Hyperband, MedianStopping
from hpstage.simulate import SimulatedExecutor
from hpstage.store import MemoryJournal
from tests.pure.test_resume import SEARCHES, Fuse, call, outcome
from tests.toys import Failing, Tape, alone

optuna.logging.set_verbosity(optuna.logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore:.*is experimental:optuna.exceptions.ExperimentalWarning")

STEPS, TRIALS = 8, 24
SYNCHRONOUS: list[Algorithm] = [
    Hyperband(1, 2),
    MedianStopping(interval=2, grace=2, min_trials=3, window=5),
]
ASYNCHRONOUS: list[Algorithm] = [
    ASHA(1, 2, window=5),
    ASHA(1, 2, "stopping", window=5),
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
    """Every value that the study was told is that of its trial trained alone."""
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
def test_every_trial_ends_with_the_values_that_it_has_alone_and_no_step_is_trained_twice(algorithm):
    # Every state is kept: where only some are, a trial that goes on later may fork where none is.
    result = run(algorithm, checkpoint_every=1)
    states = [trial.state for trial in result.study.trials]
    assert len(states) == TRIALS
    assert states.count(TrialState.COMPLETE) > 0 and states.count(TrialState.PRUNED) > 0
    assert states.count(TrialState.COMPLETE) + states.count(TrialState.PRUNED) == TRIALS
    assert_values_are_exact(result)
    assert result.plan.totals.steps_trained == result.plan.steps_unique


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
def test_a_synchronous_algorithm_gives_one_study_on_any_number_of_workers(algorithm):
    studies = [outcome(run(algorithm, sampler=learning(), executor=uneven(n)).study) for n in (1, 2, 4)]
    assert studies[0] == studies[1] == studies[2]


@pytest.mark.parametrize("algorithm", SYNCHRONOUS, ids=repr)
def test_a_synchronous_algorithm_gives_one_study_with_and_without_sharing(algorithm):
    shared, alone_ = (run(algorithm, sampler=learning(), sharing=sharing) for sharing in (True, False))
    assert outcome(shared.study) == outcome(alone_.study)
    assert shared.savings.steps_trained < alone_.savings.steps_trained


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("algorithm", ASYNCHRONOUS, ids=repr)
def test_an_asynchronous_algorithm_ends_every_trial_on_any_workers(algorithm, workers):
    result = run(algorithm, executor=uneven(workers), checkpoint_every=1)
    states = {trial.state for trial in result.study.trials}
    assert states == {TrialState.COMPLETE, TrialState.PRUNED} and len(result.study.trials) == TRIALS
    assert result.plan.totals.steps_trained == result.plan.steps_unique


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_trials_that_fail_leave_the_others_as_they_are(algorithm):
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


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_without_n_trials_a_study_goes_on_until_a_callback_stops_it(algorithm):
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
    "asha-stopping": (lambda: optuna.samplers.RandomSampler(seed=1), ASHA(2, 2, "stopping", window=3)),
}


@pytest.fixture(autouse=True)
def _interrupted_searches(monkeypatch):
    for kind, search in INTERRUPTED.items():
        monkeypatch.setitem(SEARCHES, kind, search)


def interruptions(kind: str, tmp_path, stride: int):
    """Results of calls that were interrupted once, somewhere, and made again."""
    for place in ("train", "space after", "callback", "tell", "told"):
        for at in range(1, 200, stride):
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


@pytest.mark.parametrize("kind", ["hyperband", "bohb", "median"])
def test_a_synchronous_search_that_was_interrupted_anywhere_ends_as_if_it_had_not_been(kind, tmp_path):
    expected = outcome(call(tmp_path / "undisturbed", kind, n_trials=14).study)
    assert len(expected) == 14
    for again in interruptions(kind, tmp_path, stride=4):
        assert outcome(again.study) == expected
        again.plan.validate()


@pytest.mark.parametrize("kind", ["asha", "asha-stopping"])
def test_an_asynchronous_search_that_was_interrupted_anywhere_ends_every_trial_with_exact_values(kind, tmp_path):
    for again in interruptions(kind, tmp_path, stride=9):
        assert len(outcome(again.study)) == 14
        assert all(trial.state.is_finished() for trial in again.study.trials)
        assert_values_are_exact(again, steps=6)
        again.plan.validate()
