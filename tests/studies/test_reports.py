"""What users of Optuna, Ray Tune, Keras Tuner and others have reported, tried on a study of ours.

The book's page "Differences from Optuna" lists the reports, with these tests and those of other files."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna import storages
from optuna.samplers import GridSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

import hpstage
from hpstage import schedule as s
from hpstage.algos import FullTraining
from hpstage.errors import StateError, UsageError
from hpstage.schedule import Scalar
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Tape

optuna.logging.set_verbosity(optuna.logging.ERROR)
pytestmark = [
    pytest.mark.sampled(5),
    pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning"),
    pytest.mark.filterwarnings("ignore:.*constraints_func:FutureWarning"),
]

STEPS = 6


def space(trial: optuna.trial.BaseTrial) -> dict[str, Any]:
    return {"a": s.piecewise({0: trial.suggest_int("a", 1, 3), 3: trial.suggest_categorical("late", [1, 2])})}


def search(study: optuna.Study, space: Any = space, trainable: Any = None, **options: Any) -> hpstage.Result:
    settings: dict[str, Any] = {"metric": "score", "steps": STEPS, "n_trials": 6, "store": MemoryJournal()}
    settings |= {"executor": hpstage.InlineExecutor()} | options
    return hpstage.optimize(study, trainable or Tape(), space, **settings)


def create(seed: int = 0, **options: Any) -> optuna.Study:
    return optuna.create_study(**{"direction": "maximize", "sampler": RandomSampler(seed=seed)} | options)


def states(study: optuna.Study) -> list[TrialState]:
    return [trial.state for trial in study.trials]


def interrupt_after(number: int) -> Any:
    def stop(study: optuna.Study, trial: FrozenTrial) -> None:
        if sum(state.is_finished() for state in states(study)) >= number:
            raise KeyboardInterrupt

    return stop


# --- resuming -------------------------------------------------------------------------------------------------


def test_a_study_stopped_by_ctrl_c_can_be_inspected_and_resumed() -> None:
    study, journal = create(), MemoryJournal()
    with pytest.raises(KeyboardInterrupt):
        search(study, store=journal, callbacks=[interrupt_after(3)], algorithm=FullTraining(window=1))
    assert study.best_trial.state == TrialState.COMPLETE and study.best_params.keys() == {"a", "late"}
    assert len(study.trials_dataframe()) == len(study.trials)
    assert len(optuna.visualization.plot_optimization_history(study).data[0].x) >= 3
    search(study, store=journal, algorithm=FullTraining(window=1))
    assert states(study) == [TrialState.COMPLETE] * 6


@pytest.mark.parametrize(("seed", "repeats"), [(1, True), (2, False)])
def test_a_second_call_warns_if_a_sampler_of_the_same_seed_repeats_trials(
    seed: int, repeats: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A script that was run to its end and is run again makes a new sampler."""

    def wide(trial: optuna.Trial) -> dict[str, Any]:
        return {"a": trial.suggest_float("a", 0, 1)}

    study, journal = create(sampler=TPESampler(seed=1)), MemoryJournal()
    search(study, wide, store=journal)
    assert not caplog.messages
    study.sampler = TPESampler(seed=seed)
    result = search(study, wide, store=journal)
    first, second = ([trial.params for trial in study.trials[at : at + 6]] for at in (0, 6))
    assert (first == second) == repeats == (result.savings.steps_trained == 0)
    said = "results of 6 trials up to step 6, since the sampler proposed the parameters of earlier trials of study"
    assert (said in caplog.text) == repeats


# --- proposals ------------------------------------------------------------------------------------------------


def test_trials_with_equal_parameters_are_trained_once_and_have_one_value() -> None:
    study = create()
    result = search(study, n_trials=30)
    by_params: dict[str, set[float]] = {}
    for trial in study.trials:
        by_params.setdefault(str(sorted(trial.params.items())), set()).add(trial.values[0])
    assert len(by_params) == 6 and all(len(values) == 1 for values in by_params.values())
    assert len(study.trials) == 30
    assert result.savings.steps_unique == 3 * 3 + 6 * 3  # what differs from step 3 on has its first three in common


def test_a_grid_point_that_is_also_queued_is_trained_once() -> None:
    grid = {"a": [1, 2, 3], "late": [1, 2]}
    study = create(sampler=GridSampler(grid, seed=0))
    study.enqueue_trial({"a": 1, "late": 1})
    result = search(study, n_trials=None)
    assert states(study) == [TrialState.COMPLETE] * 7
    assert result.savings.steps_unique == 3 * 3 + 6 * 3


def test_a_retried_trial_uses_up_no_point_of_a_grid() -> None:
    retry: Any = getattr(storages, "RetryHeartbeatStaleTrialCallback", None) or storages.RetryFailedTrialCallback
    study = create(sampler=GridSampler({"a": [1, 2, 3], "late": [1, 2]}, seed=0))
    trial = study.ask()
    space(trial)
    study.tell(trial, state=TrialState.FAIL)
    retry()(study, study.trials[0])
    search(study, n_trials=None)
    found = [tuple(sorted(trial.params.items())) for trial in study.trials if trial.state == TrialState.COMPLETE]
    assert len(set(found)) == 6


def test_a_queued_value_out_of_its_range_is_used_as_in_optuna() -> None:
    study = create()
    study.enqueue_trial({"a": 9, "late": 2})
    with pytest.warns(UserWarning, match="out of range"):
        search(study, n_trials=2)
    assert study.trials[0].params == {"a": 9, "late": 2} and states(study) == [TrialState.COMPLETE] * 2


@pytest.mark.parametrize("value", ["text", None])
def test_a_queued_value_of_an_invalid_type_fails_only_its_trial_with_the_reason(value: Any) -> None:
    study = create()
    study.enqueue_trial({"a": value, "late": 2})
    search(study, n_trials=3)
    assert states(study) == [TrialState.FAIL] + [TrialState.COMPLETE] * 2
    assert "is not a valid type. float-castable value is expected" in study.trials[0].user_attrs["hpstage:failure"]


# --- values ---------------------------------------------------------------------------------------------------


class Infinite(Tape):
    """Its score is infinite under 1, none under 2, and a number under 3."""

    version = "infinite"

    def setup(self, hp: Mapping[str, Scalar]) -> None:
        super().setup(hp)
        self.a = hp["a"]

    def evaluate(self) -> dict[str, float]:
        return {"score": {1: -math.inf, 2: math.nan, 3: 1.0}[int(self.a)], "loss": 1.0}  # type: ignore[arg-type]


def test_a_database_stores_infinite_values_and_a_nan_value_fails_its_trial(tmp_path: Path) -> None:
    study = create(storage=f"sqlite:///{tmp_path / 'study.db'}", sampler=GridSampler({"a": [1, 2, 3], "late": [1]}))
    search(study, trainable=Infinite(), n_trials=None, evaluate_every=2)
    found = {trial.params["a"]: (trial.state, trial.values) for trial in study.trials}
    assert found == {
        1: (TrialState.COMPLETE, [-math.inf]),
        2: (TrialState.FAIL, None),
        3: (TrialState.COMPLETE, [1.0]),
    }
    assert study.best_value == 1.0


def test_a_constraints_func_that_reads_metrics_works_in_a_study_with_failed_trials() -> None:
    """A trial that failed has none to compute them from."""

    def too_large(trial: FrozenTrial) -> tuple[float]:
        return (trial.user_attrs["score"] - 5,)

    def failing(trial: optuna.Trial) -> dict[str, Any]:
        return space(trial) | {"b": trial.suggest_categorical("b", [1, 2])}

    class Picky(Tape):
        version = "picky"

        def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
            if hp["b"] == 2 and step == 4:
                raise ArithmeticError
            super().train(step, hp)

    for sampler in (TPESampler(seed=0, constraints_func=too_large), NSGAIISampler(seed=0, constraints_func=too_large)):
        study = create(sampler=sampler)
        search(study, failing, Picky(), n_trials=24, algorithm=FullTraining(window=2))
        assert {*states(study)} == {TrialState.FAIL, TrialState.COMPLETE}
        assert study.best_value <= 5 < max(trial.value or 0 for trial in study.trials)


def test_constraints_are_computed_from_metrics() -> None:
    study = create()
    search(study, space, Tape(), n_trials=12, constraints=lambda metrics: {"score": metrics["score"] - 4})
    assert study.best_value <= 4 < max(trial.value or 0 for trial in study.trials)


@pytest.mark.parametrize("wrong", [lambda metrics: {"score": metrics["scor"]}, lambda metrics: 3])
def test_constraints_that_cannot_be_computed_are_named(wrong: Any) -> None:
    with pytest.raises(
        UsageError, match=r"constraints\({'score': .*}\) raises .*; return a dict with one number for each"
    ):
        search(create(), space, Tape(), n_trials=3, constraints=wrong)


def test_a_space_may_prune_trials_of_a_study_with_several_objectives() -> None:
    def picky(trial: optuna.Trial) -> dict[str, Any]:
        found = space(trial)
        if trial.params["a"] == 2:
            raise optuna.TrialPruned
        return found

    study = optuna.create_study(directions=["maximize", "minimize"], sampler=TPESampler(seed=0, n_startup_trials=5))
    search(study, picky, metric=["score", "hash"], n_trials=20, algorithm=FullTraining(window=1))
    assert set(states(study)) == {TrialState.COMPLETE, TrialState.PRUNED} and len(states(study)) == 20
    assert study.best_trials


def test_a_study_with_only_pruned_trials_has_no_best_trial_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def picky(trial: optuna.Trial) -> dict[str, Any]:
        space(trial)
        raise optuna.TrialPruned

    study = create()
    result = search(study, picky)
    assert states(study) == [TrialState.PRUNED] * 6
    assert "No trial of the search has a value: the space rejected all 6" in caplog.text
    with pytest.raises(ValueError, match="No trials are completed yet"):
        _ = result.best_trial


# --- names and places -----------------------------------------------------------------------------------------


def test_names_of_studies_stores_and_parameters_may_have_spaces_and_any_letters(tmp_path: Path) -> None:
    folder = tmp_path / "my results (final) ü 日本"
    folder.mkdir()
    study = create(study_name="a/b: c* ö 日本", storage=f"sqlite:///{folder / 'study.db'}")

    def named(trial: optuna.Trial) -> dict[str, Any]:
        return {"learning rate (η)": trial.suggest_categorical("learning rate (η)", ["a b", "(1, 2)", "ü/日本"])}

    result = search(study, named, store=folder / "a store", n_trials=4)
    assert states(study) == [TrialState.COMPLETE] * 4
    assert result.load(0).metrics["score"] == study.trials[0].value


def test_a_trial_may_have_a_hundred_parameters_with_long_names_and_values(tmp_path: Path) -> None:
    names = [f"{'parameter' * 20}_{n}" for n in range(100)]

    def long(trial: optuna.Trial) -> dict[str, Any]:
        return {name: trial.suggest_categorical(name, ["x" * 200, "y" * 200]) for name in names}

    study = create(storage=f"sqlite:///{tmp_path / 'study.db'}")
    result = search(study, long, store=tmp_path / "store", n_trials=2)
    assert states(study) == [TrialState.COMPLETE] * 2 and result.load(1).metrics["score"] == study.trials[1].value


def test_a_moved_store_keeps_its_results_and_models(tmp_path: Path) -> None:
    study = create()
    search(study, store=tmp_path / "here", n_trials=3)
    shutil.move(tmp_path / "here", tmp_path / "there")
    study.sampler = RandomSampler(seed=0)
    result = search(study, store=tmp_path / "there", n_trials=3)
    assert result.savings.steps_trained == 0
    assert result.load(0).metrics["score"] == study.trials[0].value


def test_a_relative_store_path_refers_to_the_folder_in_which_the_search_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    study = create()
    result = search(study, store="store")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert result.load(5).metrics["score"] == study.trials[5].value
    assert not list(Path().iterdir()) and (tmp_path / "store").is_dir()


class Moving(Tape):
    version = "moving"

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        if step == 3:
            os.chdir("data")
        super().train(step, hp)


def test_training_that_changes_the_working_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was trained before in the process would decide which folder a relative path means."""
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        StateError, match=r"process\.working directory is .* Something that training changes is in no state"
    ):
        search(create(), trainable=Moving(), n_trials=3)


# --- trainables -----------------------------------------------------------------------------------------------


class Experiment:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def train(self, run: Any) -> None:
        tape = Tape()
        run.attach(tape=tape)
        for _ in run.steps():
            tape.score += self.scale * run.hp["a"]
            run.report(score=tape.score)


def test_a_bound_method_can_be_a_training_function() -> None:
    study = create()
    search(study, trainable=Experiment(2.0).train)
    for trial in study.trials:
        assert trial.value == 2 * 3 * (trial.params["a"] + trial.params["late"])
