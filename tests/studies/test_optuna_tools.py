"""Optuna's own tools on a study that hpstage drives: pictures, callbacks, stale trials, the dashboard and artifacts."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import numpy as np
import optuna
import pytest
from optuna import storages
from optuna.samplers import TPESampler
from optuna.storages import RDBStorage
from optuna.study import MaxTrialsCallback, StudyDirection
from optuna.terminator import (
    BaseErrorEvaluator,
    BestValueStagnationEvaluator,
    CrossValidationErrorEvaluator,
    StaticErrorEvaluator,
    Terminator,
    TerminatorCallback,
    report_cross_validation_scores,
)
from optuna.trial import FrozenTrial, TrialState

import hpstage
from hpstage import schedule as s
from hpstage.algorithm import Algorithm
from hpstage.algos import ASHA, FullTraining, OptunaPruner, PopulationBasedTraining, SuccessiveHalving
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Tape, alone

optuna.logging.set_verbosity(optuna.logging.ERROR)
pytestmark = [
    pytest.mark.sampled(5),
    pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning"),
    pytest.mark.filterwarnings("ignore:.*(Terminator|failed_trial_callback|RetryFailed).*:FutureWarning"),
]

STEPS = 8


def space(trial: optuna.trial.BaseTrial) -> dict[str, Any]:
    first, late = trial.suggest_int("first", 1, 3), trial.suggest_categorical("late", [1, 2, 5])
    return {"a": s.piecewise({0: first, 4: late}), "b": s.constant(trial.suggest_float("b", 0.5, 2.0))}


def search(study: optuna.Study, trainable: object = None, **options: Any) -> hpstage.Result:
    settings: dict[str, Any] = {"metric": "score", "steps": STEPS, "n_trials": 12, "store": MemoryJournal()}
    settings |= {"space": space, "executor": hpstage.InlineExecutor()} | options
    return hpstage.optimize(study, trainable or Tape(), **settings)


def value_without_sharing(trial: optuna.trial.FrozenTrial, step: int) -> float:
    return alone(space(optuna.trial.FixedTrial(trial.params)), step).score


def create(**options: Any) -> optuna.Study:
    return optuna.create_study(direction="maximize", sampler=TPESampler(seed=0), **options)


# --- pictures -------------------------------------------------------------------------------------------------


@pytest.fixture
def plots() -> Any:
    pytest.importorskip("plotly")
    return optuna.visualization


def as_in_optuna(study: optuna.Study) -> optuna.Study:
    """The same trials with the values that each has without sharing, in a study that hpstage never saw."""
    plain = create()
    plain.set_metric_names(["score"])
    for trial in study.trials:
        values = {step: value_without_sharing(trial, step) for step in trial.intermediate_values}
        own = {"state": trial.state, "params": trial.params, "distributions": trial.distributions}
        plain.add_trial(optuna.trial.create_trial(**own, value=values[max(values)], intermediate_values=values))
    return plain


@pytest.mark.ci
@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        (FullTraining(window=2), {}),
        (FullTraining(window=2), {"evaluate_every": 3}),
        (SuccessiveHalving(2, 2), {}),
        (ASHA(2, 2), {}),
        (OptunaPruner(interval=2), {}),
    ],
    ids=["full", "full-every-3", "halving", "asha", "pruner"],
)
def test_optuna_plots_equal_those_of_trials_trained_without_sharing(
    plots: Any, algorithm: Algorithm, options: dict[str, Any]
) -> None:
    study = create(pruner=optuna.pruners.MedianPruner(n_startup_trials=3))
    search(study, algorithm=algorithm, **options)
    plain = as_in_optuna(study)
    for name in ("intermediate_values", "param_importances", "parallel_coordinate", "optimization_history", "slice"):
        draw = getattr(plots, f"plot_{name}")
        if name == "param_importances":  # its trees are drawn
            draw = lambda of: plots.plot_param_importances(of, optuna.importance.FanovaImportanceEvaluator(seed=0))  # noqa: E731
        assert draw(study).to_json() == draw(plain).to_json(), name
    lines = [line.x for line in plots.plot_intermediate_values(study).data]
    assert len(lines) == 12 and all(line[-1] <= STEPS for line in lines)
    if options:
        assert lines == [(3, 6, 8)] * 12
    elif not isinstance(algorithm, FullTraining):
        assert len({line[0] for line in lines}) == 1 and len({len(line) for line in lines}) > 1


def test_optuna_plots_draw_forked_trials_from_the_step_of_their_fork(plots: Any) -> None:
    study = create()
    search(study, n_trials=6, algorithm=PopulationBasedTraining(2))
    forked = {trial.number: trial for trial in study.trials if "hpstage:forked_at" in trial.user_attrs}
    assert forked
    for line in plots.plot_intermediate_values(study).data:
        number = int(line.name.removeprefix("Trial"))
        if number in forked:
            assert min(line.x) > forked[number].user_attrs["hpstage:forked_at"]


# --- callbacks that stop --------------------------------------------------------------------------------------


def test_max_trials_callback_ends_at_its_number_with_a_window_of_one() -> None:
    study = create()
    search(study, n_trials=30, callbacks=[MaxTrialsCallback(5)], algorithm=FullTraining(window=1))
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 5


@pytest.mark.parametrize("algorithm", [FullTraining(), SuccessiveHalving(2, 2), ASHA(2, 2)], ids=repr)
def test_max_trials_callback_leaves_no_unfinished_trial(algorithm: Algorithm) -> None:
    study = create()
    search(study, n_trials=30, callbacks=[MaxTrialsCallback(5)], algorithm=algorithm)
    states = [trial.state for trial in study.trials]
    assert states.count(TrialState.COMPLETE) >= 5 and all(state.is_finished() for state in states)


def test_each_call_after_max_trials_callback_was_reached_adds_one_trial_with_a_window_of_one(tmp_path: Path) -> None:
    """Callbacks are called after a trial: in Optuna, too, each further call makes one more."""
    study = create()
    for _ in range(3):
        search(study, n_trials=30, callbacks=[MaxTrialsCallback(5)], algorithm=FullTraining(window=1))
    assert sum(trial.state == TrialState.COMPLETE for trial in study.trials) == 7


def terminator(stagnation: int = 4) -> TerminatorCallback:
    improvement = BestValueStagnationEvaluator(max_stagnation_trials=stagnation)
    return TerminatorCallback(Terminator(improvement, StaticErrorEvaluator(0), min_n_trials=5))


def test_a_terminator_callback_stops_at_the_same_trial_as_in_optunas_own_loop() -> None:
    study, plain = create(), create()
    search(study, n_trials=60, callbacks=[terminator()], algorithm=FullTraining(window=1))
    plain.optimize(lambda trial: alone(space(trial), STEPS).score, n_trials=60, callbacks=[terminator()])
    assert 5 < len(plain.trials) < 60
    assert [(t.params, t.value) for t in study.trials] == [(t.params, t.value) for t in plain.trials]


def folds(score: float) -> list[float]:
    """Stand-ins for the scores of a cross-validation."""
    return [score * factor for factor in (0.999, 1.0, 1.001)]


class Folded(Tape):
    version = "folded"

    def evaluate(self) -> dict[str, float]:
        found = super().evaluate()
        return {**found} | {f"fold_{number}": score for number, score in enumerate(folds(found["score"]))}


class OfMetrics(BaseErrorEvaluator):
    """As CrossValidationErrorEvaluator, of the scores that a trial has as metrics."""

    def evaluate(self, trials: list[FrozenTrial], study_direction: StudyDirection) -> float:
        best = max(trials, key=lambda trial: trial.value or 0.0)
        scores = [value for name, value in best.user_attrs.items() if name.startswith("fold_")]
        return float(np.sqrt((1 / len(scores) + 1 / (len(scores) - 1)) * np.var(scores)))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_terminator_callback_can_use_cross_validation_scores_that_are_metrics() -> None:
    def stop(error: BaseErrorEvaluator) -> TerminatorCallback:
        return TerminatorCallback(Terminator(BestValueStagnationEvaluator(4), error, min_n_trials=5))

    def objective(trial: optuna.Trial) -> float:
        score = alone(space(trial), STEPS).score
        report_cross_validation_scores(trial, folds(score))
        return score

    study, plain = create(), create()
    options: dict[str, Any] = {"n_trials": 60, "algorithm": FullTraining(window=1)}
    search(study, trainable=Folded(), callbacks=[stop(OfMetrics())], **options)
    plain.optimize(objective, n_trials=60, callbacks=[stop(CrossValidationErrorEvaluator())])
    assert 5 < len(plain.trials) < 60
    assert [(t.params, t.value) for t in study.trials] == [(t.params, t.value) for t in plain.trials]


def test_trials_of_a_study_with_constraints_can_be_pruned() -> None:
    study = create()
    search(study, algorithm=SuccessiveHalving(2, 2), constraints=lambda metrics: {"score": metrics["score"] - 4})
    assert {TrialState.PRUNED, TrialState.COMPLETE} == {trial.state for trial in study.trials}
    assert all(trial.constraints.keys() == {"score"} for trial in study.trials if hasattr(trial, "constraints"))


def test_a_terminator_callback_without_scores_raises_and_the_search_can_be_continued() -> None:
    study, journal = create(), MemoryJournal()
    with pytest.raises(ValueError, match="Cross-validation scores have not been reported"):
        search(study, n_trials=24, callbacks=[TerminatorCallback()], store=journal)
    search(study, n_trials=24, store=journal)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 24


# --- stale trials ---------------------------------------------------------------------------------------------


def with_heartbeats(folder: Path, **options: Any) -> RDBStorage:
    """A storage whose stale trials are queued again."""
    # As they are called since Optuna 5, and before.
    retry: Any = getattr(storages, "RetryHeartbeatStaleTrialCallback", None)
    name = "failed_trial_callback" if retry is None else "heartbeat_stale_trial_callback"
    retry = retry or storages.RetryFailedTrialCallback
    return RDBStorage(
        f"sqlite:///{folder / 'study.db'}", heartbeat_interval=1, grace_period=1, **{name: retry(**options)}
    )


def killed(study: optuna.Study) -> optuna.Trial:
    """A trial of Optuna's own loop in a process that is no more."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # heartbeats are for study.optimize
        trial = study.ask()
    space(trial)
    trial.report(99.0, 3)
    study._storage.record_heartbeat(trial._trial_id)  # type: ignore[attr-defined]
    deadline = time.monotonic() + 30
    while not study._storage._get_stale_trial_ids(study._study_id):  # type: ignore[attr-defined]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return trial


@pytest.mark.ci
def test_a_stale_trial_of_optunas_own_loop_is_failed_and_trained_again(tmp_path: Path) -> None:
    study = create(storage=with_heartbeats(tmp_path, max_retry=1))
    stale = killed(study)
    search(study, n_trials=3)
    assert study.trials[stale.number].state == TrialState.FAIL
    again = study.trials[1]
    assert again.params == stale.params and again.state == TrialState.COMPLETE
    assert again.value == value_without_sharing(again, STEPS) and 3 not in again.intermediate_values
    assert [trial.state for trial in study.trials].count(TrialState.COMPLETE) == 3


@pytest.mark.ci
def test_unfinished_trials_of_an_interrupted_search_are_not_stale_and_the_next_call_resumes_them(
    tmp_path: Path,
) -> None:
    def stop(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        raise KeyboardInterrupt

    study, journal = create(storage=with_heartbeats(tmp_path)), MemoryJournal()
    with pytest.raises(KeyboardInterrupt):
        search(study, n_trials=6, store=journal, callbacks=[stop])
    assert any(not trial.state.is_finished() for trial in study.trials)
    killed(study)  # by then a heartbeat is too old
    study.sampler = TPESampler(seed=0)
    search(study, n_trials=6, store=journal)
    states = [trial.state for trial in study.trials]
    assert states[:6] == [TrialState.COMPLETE] * 6 and states.count(TrialState.FAIL) == 1


# --- the dashboard, and artifacts -----------------------------------------------------------------------------


def served(study: optuna.Study, path: str) -> str:
    dashboard = pytest.importorskip("optuna_dashboard")
    environ: dict[str, Any] = {"PATH_INFO": path}
    setup_testing_defaults(environ)
    statuses: list[str] = []
    answer = dashboard.wsgi(study._storage)(environ, lambda status, *rest: statuses.append(status))
    body = b"".join(answer)
    getattr(answer, "close", lambda: None)()
    assert statuses == ["200 OK"], path
    return body.decode()


def test_optuna_dashboard_shows_a_study_while_it_runs(tmp_path: Path) -> None:
    """Every answer has the trials as they are at that moment, those that run with the values that they have."""
    seen: list[dict[str, int]] = []

    def look(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        of_others = optuna.load_study(study_name="x", storage=url)  # as the dashboard's own process sees it
        id = of_others._study_id
        assert "<html" in served(of_others, f"/dashboard/studies/{id}").lower()
        shown = json.loads(served(of_others, f"/api/studies/{id}"))["trials"]
        now = study.trials
        assert [one["number"] for one in shown] == [one.number for one in now]
        for one, known in zip(shown, now, strict=True):
            assert one["state"].lower() == known.state.name.lower()
            values = {point["step"]: point["value"] for point in one["intermediate_values"]}
            assert values == known.intermediate_values
            assert {p["name"] for p in one["params"]} == known.params.keys()
        seen.append({"running": sum(one["state"] == "Running" and bool(one["intermediate_values"]) for one in shown)})

    url = f"sqlite:///{tmp_path / 'study.db'}"
    study = create(study_name="x", storage=url)
    search(study, callbacks=[look], algorithm=SuccessiveHalving(2, 2))
    assert len(seen) == 12 and any(one["running"] for one in seen)


def test_optuna_dashboard_shows_trials_that_the_space_rejected(tmp_path: Path) -> None:
    def picky(trial: optuna.Trial) -> dict[str, Any]:
        found = space(trial)
        if trial.number % 2:
            raise optuna.TrialPruned
        return found

    study = create(storage=f"sqlite:///{tmp_path / 'study.db'}")
    search(study, space=picky, n_trials=4)
    shown = json.loads(served(study, f"/api/studies/{study._study_id}"))["trials"]
    assert [one["state"] for one in shown] == ["Complete", "Pruned"] * 2


def test_the_best_model_can_be_uploaded_as_an_artifact_of_the_study(tmp_path: Path) -> None:
    """Optuna gives none to a trial that is over."""
    study = create(storage=f"sqlite:///{tmp_path / 'study.db'}")
    result = search(study, n_trials=4, store=tmp_path / "store")
    best = result.load(study.best_trial.number)
    file = tmp_path / "best.json"
    file.write_text(json.dumps(best.trainable.state_dict()))
    (tmp_path / "artifacts").mkdir()
    store = optuna.artifacts.FileSystemArtifactStore(tmp_path / "artifacts")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        id = optuna.artifacts.upload_artifact(artifact_store=store, file_path=str(file), study_or_trial=study)
        (shown,) = optuna.artifacts.get_all_artifact_meta(study)
    assert (shown.artifact_id, shown.filename) == (id, "best.json")
    with store.open_reader(id) as reader:
        assert json.load(reader)["score"] == study.best_value
