"""Exceptions and missing values in the user's code: which trials fail, what is logged, and how the others continue."""

from __future__ import annotations

import logging
import math
import pickle
import sqlite3
import traceback
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

import hpstage
from hpstage import schedule as s
from hpstage.algorithm import Algorithm
from hpstage.algos import FullTraining, OptunaPruner, SuccessiveHalving
from hpstage.errors import StoreError, TrainingError, UsageError
from hpstage.optuna.private import id_of, storage_of
from hpstage.plan.facts import TrialId
from hpstage.plan.log import open_existing_plan
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Failing, Tape
from tests.unit.search.test_optimize import Stopper, create, run

pytestmark = pytest.mark.sampled(4)

optuna.logging.set_verbosity(optuna.logging.ERROR)


def test_an_exception_fails_only_the_trials_that_share_its_stage():
    def risky(trial: optuna.Trial) -> dict[str, object]:
        early = trial.suggest_categorical("early", [1, 2])
        late = trial.suggest_categorical("late", [1, 5, 7])
        return {"a": s.piecewise({0: early, 4: late})}

    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.GridSampler({"early": [1, 2], "late": [1, 5, 7]}, seed=0)
    )
    run(study, Failing(), space=risky, n_trials=6)
    for trial in study.trials:
        if trial.params["late"] == 1:
            assert trial.state == TrialState.COMPLETE
        elif trial.params["late"] == 7:
            assert trial.state == TrialState.FAIL
            assert "ZeroDivisionError: the user's own error at step 4" in trial.user_attrs["hpstage:failure"]
            assert "toys.py" in trial.user_attrs["hpstage:traceback"]
        else:
            assert trial.state == TrialState.FAIL
            assert "evaluation fails under a=5" in trial.user_attrs["hpstage:failure"]


def test_an_exception_in_setup_fails_only_trials_with_the_same_initial_values():
    study = create()
    grid = optuna.samplers.GridSampler({"a": [1, 13]}, seed=0)
    study = optuna.create_study(direction="maximize", sampler=grid)
    run(study, Failing(), space=lambda trial: {"a": trial.suggest_categorical("a", [1, 13])}, n_trials=2)
    assert {t.params["a"]: t.state for t in study.trials} == {1: TrialState.COMPLETE, 13: TrialState.FAIL}


def test_an_exception_that_catch_does_not_name_stops_the_study_with_the_users_traceback():
    study = create()
    with pytest.raises(TrainingError, match=r"(?s)the user's own error.*toys\.py"):
        run(study, Failing(), space=lambda trial: {"a": 7}, n_trials=3, catch=(KeyError,))
    assert study.trials[0].state == TrialState.FAIL


class Peculiar(KeyError):
    """An exception of the user's own."""


class Raising(Tape):
    version = "raising"
    stateless = ("error",)
    error: Exception = ValueError("broken")

    def train(self, step, hp):
        raise self.error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("broken"), ValueError),
        (Peculiar("broken"), KeyError),
        (FileNotFoundError(2, "broken"), OSError),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "broken"), ValueError),
        (ExceptionGroup("broken", [ValueError()]), TrainingError),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_training_error_is_an_instance_of_the_builtin_exception_raised_by_user_code(
    error: Exception, kind: type[Exception]
) -> None:
    Raising.error = error
    with pytest.raises(kind) as raised:
        run(create(), Raising(), space=lambda trial: {"a": 7}, n_trials=2, catch=(ZeroDivisionError,))
    assert isinstance(raised.value, TrainingError) and raised.value.__cause__ is error
    assert str(raised.value).startswith("a trial failed: ")
    again = pickle.loads(pickle.dumps(raised.value))  # noqa: S301
    assert isinstance(again, kind) and str(again) == str(raised.value)
    names = [line.name for line in traceback.extract_tb(error.__traceback__)]
    assert names[-1] == "train"


def test_a_nan_objective_fails_its_trial_and_the_study_continues():
    class Nan(Tape):
        def evaluate(self):
            return {"score": math.nan if self.score > 5 else self.score}

    study = create()
    run(study, Nan(), space=lambda trial: {"a": trial.suggest_categorical("a", [1, 100])}, n_trials=8, catch=())
    assert {(t.params["a"], t.state) for t in study.trials} == {(1, TrialState.COMPLETE), (100, TrialState.FAIL)}


class Breaking(Tape):
    version = "breaking at 6"

    def train(self, step, hp):
        if step == 6:
            raise ValueError("broken at 6")
        super().train(step, hp)


def test_a_failure_that_catch_does_not_name_is_raised_even_if_a_callback_stopped_the_study():
    study, journal = create(), MemoryJournal()
    options = {"space": lambda trial: {"a": 1, "steps": [4, 8][trial.number]}, "store": journal, "n_trials": 2}
    with pytest.raises(TrainingError, match="broken at 6"):
        run(study, Breaking(), callbacks=[Stopper(1)], catch=(), **options)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE, TrialState.FAIL]
    assert open_existing_plan(journal).searches[study.study_name].ended


def test_a_search_whose_trials_all_fail_warns_once_at_the_end(caplog):
    def warnings(**options: object) -> list[str]:
        caplog.clear()
        run(create(), Breaking(), **options)
        return [record.getMessage() for record in caplog.records if "No trial" in record.getMessage()]

    assert warnings(n_trials=3) == ["No trial of the search has a value: all 3 failed, with ValueError: broken at 6"]
    assert not warnings(n_trials=3, steps=4)
    mixed = warnings(space=lambda trial: {"a": 1, "steps": [4, 8][trial.number]}, n_trials=2)
    assert not mixed


@pytest.mark.parametrize("where", ["setup", "evaluate"])
def test_raising_trial_pruned_in_setup_or_evaluate_prunes_only_that_trial(where):
    class Pruning(Tape):
        version = f"pruning in {where}"

        def setup(self, hp):
            super().setup(hp)
            if where == "setup" and hp["a"] == 2:
                raise optuna.TrialPruned("not this one")

        def evaluate(self):
            if where == "evaluate" and self.score > 2.5:
                raise optuna.TrialPruned("not this one")
            return super().evaluate()

    study = create()
    result = run(
        study, Pruning(), space=lambda trial: {"a": trial.suggest_categorical("a", [1, 2])}, n_trials=8, catch=()
    )
    assert {(t.params["a"], t.state) for t in study.trials} == {(1, TrialState.COMPLETE), (2, TrialState.PRUNED)}
    assert all(("not this one" in t.user_attrs.get("hpstage:ended", "")) == (t.params["a"] == 2) for t in study.trials)
    assert result.savings.steps_trained == result.savings.steps_unique


def test_a_failure_message_with_a_file_name_that_is_not_utf8_is_recorded():
    class Missing(Tape):
        def train(self, step, hp):
            raise FileNotFoundError("caf\udce9.png")

    journal, study = MemoryJournal(), create()
    run(study, Missing(), store=journal, n_trials=2)
    assert [trial.state for trial in study.trials] == [TrialState.FAIL] * 2
    assert open_existing_plan(journal).failures[0].failure.summary == "FileNotFoundError: caf\\udce9.png"


def test_repeated_failures_are_logged_once_with_the_users_traceback_and_then_suppressed(caplog):
    result = run(create(), Failing(), space=lambda trial: {"a": 7, "b": trial.number}, n_trials=4)
    messages = [text for text in map(logging.LogRecord.getMessage, caplog.records) if text.startswith("Trial")]
    assert len(messages) == 2
    assert "Trial 0 failed: ZeroDivisionError" in messages[0] and "toys.py" in messages[0]
    assert messages[1] == "Trial 1 failed as trial 0 did; no more of these failures are logged"
    assert result.savings.failed == 4


def test_savings_count_no_time_without_sharing_if_all_trials_fail():
    result = run(create(), Failing(), space=lambda trial: {"a": 7}, n_trials=4)
    assert result.savings.worker_seconds_alone == 0.0
    assert result.savings.lower_bound_seconds is None


@pytest.mark.ci
@pytest.mark.parametrize("rejects", [False, True], ids=["trained", "rejected"])
def test_a_trial_that_somebody_else_failed_stays_failed_and_other_trials_continue(
    rejects: bool, tmp_path: Path
) -> None:
    storage = f"sqlite:///{tmp_path / 'studies.db'}"

    def space(trial: optuna.Trial) -> dict[str, float]:
        found = {"a": trial.suggest_float("a", 0, 1)}
        if trial.number == 1:
            optuna.load_study(study_name="study", storage=storage).tell(1, state=TrialState.FAIL)
            if rejects:
                raise optuna.TrialPruned("too late")
        return found

    study = optuna.create_study(study_name="study", storage=storage)
    result = hpstage.optimize(
        *(study, Tape(), space),
        metric="score",
        steps=4,
        n_trials=4,
        store=tmp_path / "store",
        executor=hpstage.InlineExecutor(),
        algorithm=FullTraining(window=1),
    )
    states = [trial.state.name for trial in study.trials]
    assert states == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]
    assert study.trials[1].values is None
    ended = result.plan.ended[TrialId("study/1")]
    assert ended.state == "FAIL" and ended.values is None


@pytest.mark.ci
@pytest.mark.parametrize("algorithm", [FullTraining(window=2), OptunaPruner(window=2), SuccessiveHalving(2)], ids=repr)
def test_a_trial_that_somebody_sets_to_waiting_stays_queued_for_the_next_call(
    algorithm: Algorithm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = f"sqlite:///{tmp_path / 'studies.db'}"
    study = optuna.create_study(study_name="study", storage=storage, sampler=optuna.samplers.RandomSampler(seed=1))
    queued: list[int] = []

    def queue(study: optuna.Study, trial: FrozenTrial) -> None:
        running = [one for one in study.get_trials(deepcopy=False) if one.state == TrialState.RUNNING]
        if running and not queued:
            queued.append(running[-1].number)
            storage_of(study).set_trial_state_values(id_of(running[-1]), TrialState.WAITING)

    def search(n_trials: int) -> None:
        options = {"metric": "score", "steps": 4, "executor": hpstage.InlineExecutor(), "algorithm": algorithm}
        options |= {"n_trials": n_trials, "store": tmp_path / "store", "callbacks": [queue]}
        hpstage.optimize(study, Tape(), lambda trial: {"a": trial.suggest_float("a", 0, 1)}, **options)

    search(4)
    left = study.trials[queued[0]]
    assert left.state == TrialState.WAITING and len(study.trials) == 4
    assert not [name for name in left.user_attrs if name not in ("hpstage:search", "hpstage:plan")]
    assert caplog.text.count(f"Trial {left.number} was set to WAITING while it was trained") == 1
    search(1)
    assert all(trial.state.is_finished() for trial in study.trials) and len(study.trials) == 4
    assert study.trials[left.number].params == left.params


def test_a_queued_trial_that_somebody_else_failed_stays_failed_after_a_stop(tmp_path: Path) -> None:
    study = optuna.create_study(storage=f"sqlite:///{tmp_path / 'studies.db'}")
    for value in (0.1, 0.2, 0.3):
        study.enqueue_trial({"a": value})

    def stop(study: optuna.Study, trial: FrozenTrial) -> None:
        if trial.number == 0:
            study.tell(2, state=TrialState.FAIL)
            study.stop()

    options: dict[str, Any] = {"metric": "score", "steps": 4, "n_trials": 3, "executor": hpstage.InlineExecutor()}
    options |= {"algorithm": FullTraining(window=3), "callbacks": [stop], "store": tmp_path / "store"}
    hpstage.optimize(study, Tape(), lambda trial: {"a": trial.suggest_float("a", 0, 1)}, **options)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "WAITING", "FAIL"]


@pytest.mark.parametrize("which", [0, -1], ids=["first", "last"])
def test_deleting_a_running_trial_raises_a_store_error_and_its_steps_are_not_trained_again(
    which: int, tmp_path: Path
) -> None:
    storage = f"sqlite:///{tmp_path / 'studies.db'}"
    study = optuna.create_study(study_name="study", storage=storage)

    def delete(study: optuna.Study, trial: FrozenTrial) -> None:
        running = [one for one in study.get_trials(deepcopy=False) if one.state == TrialState.RUNNING]
        with sqlite3.connect(tmp_path / "studies.db") as database:
            for table in ("trial_user_attributes", "trial_params", "trials"):
                database.execute(f"DELETE FROM {table} WHERE trial_id = ?", [id_of(running[which])])

    def search(study: optuna.Study, **options: Any) -> hpstage.Result:
        options |= {"metric": "score", "steps": 4, "store": tmp_path / "store", "n_trials": 4}
        options |= {"executor": hpstage.InlineExecutor()}
        return hpstage.optimize(study, Tape(), lambda trial: {"a": trial.suggest_int("a", 0, 1)}, **options)

    options = {"algorithm": FullTraining(window=3)}
    with pytest.raises(StoreError, match="a trial of study 'study' was deleted from its storage while"):
        search(study, callbacks=[delete], **options)
    if which == 0:
        with pytest.raises(UsageError, match="this store has trial 1 of study 'study', the study's storage"):
            search(optuna.load_study(study_name="study", storage=storage), **options)
    assert search(optuna.create_study()).savings.steps_trained <= 4
