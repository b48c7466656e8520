"""Trials whose making was cut off are made again; those of another plan are left alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

import hpstage
from hpstage import schedule as s
from hpstage.algorithm import Algorithm
from hpstage.algos import ASHA, FullTraining, PopulationBasedTraining, SuccessiveHalving
from hpstage.testing.toys import Tape

pytestmark = [
    pytest.mark.sampled(5),
    pytest.mark.filterwarnings("ignore:.*is experimental:optuna.exceptions.ExperimentalWarning"),
]

STORAGES: dict[str, Callable[[Path], BaseStorage]] = {
    "journal": lambda folder: JournalStorage(JournalFileBackend(str(folder / "study.log"))),
    "database": lambda folder: RDBStorage(f"sqlite:///{folder / 'study.db'}"),
}
SAMPLERS: dict[str, Callable[[], optuna.samplers.BaseSampler]] = {
    "random": lambda: optuna.samplers.RandomSampler(seed=1),
    "tpe": lambda: optuna.samplers.TPESampler(seed=1, n_startup_trials=3, multivariate=True),
}


class Other(Tape):
    """The same, but for its code."""

    version = 2


def search(
    folder: Path,
    storage: str,
    sampler: str,
    *,
    trainable: Tape | None = None,
    store: str = "plan",
    algorithm: Algorithm | None = None,
    stop_at: int = 0,
    n_trials: int = 6,
) -> hpstage.Result:
    """The same call in a new process, simulated in this one. ``stop_at``: the parameter, counted through all
    trials, after which it is cut off as by kill -9: nothing of ours is done any more for the trial."""
    folder.mkdir(exist_ok=True)
    suggested = 0

    def space(trial: optuna.Trial) -> dict[str, object]:
        def cut(value: float) -> float:
            nonlocal suggested
            ours = trial.study.study_name == "x"  # not one of those with which the space is tried out
            suggested += ours
            if ours and suggested == stop_at:
                raise KeyboardInterrupt
            return value

        first, late = cut(trial.suggest_float("first", 0.0, 1.0)), cut(trial.suggest_int("late", 1, 5))
        return {"a": s.piecewise({0: first, 4: late}), "b": cut(trial.suggest_float("b", 0.0, 1.0, log=False))}

    study = optuna.create_study(
        study_name="x",
        storage=STORAGES[storage](folder),
        sampler=SAMPLERS[sampler](),
        direction="maximize",
        load_if_exists=True,
    )
    return hpstage.optimize(
        study,
        trainable or Tape(),
        space,
        metric="score",
        steps=8,
        n_trials=n_trials,
        algorithm=algorithm or FullTraining(window=2),
        executor=hpstage.InlineExecutor(),
        store=folder / store,
    )


def outcome(study: optuna.Study) -> list[tuple[object, ...]]:
    return [(t.number, t.params, t.state, t.values, t.intermediate_values) for t in study.trials]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("storage", "sampler"),
    [
        pytest.param("database", "tpe", marks=pytest.mark.ci),
        ("journal", "random"),
        pytest.param("database", "random", marks=pytest.mark.slow),
        pytest.param("journal", "tpe", marks=pytest.mark.slow),
    ],
)
def test_a_search_interrupted_while_it_proposes_a_trial_resumes_to_the_same_study(
    storage: str, sampler: str, tmp_path: Path
) -> None:
    expected = outcome(search(tmp_path / "undisturbed", storage, sampler).study)
    assert len(expected) == 6
    for stop_at in (1, 5, 9, 17):
        folder = tmp_path / str(stop_at)
        with pytest.raises(KeyboardInterrupt):
            search(folder, storage, sampler, stop_at=stop_at)
        assert outcome(search(folder, storage, sampler).study) == expected


@pytest.mark.ci
def test_a_search_interrupted_while_it_forks_a_trial_resumes_to_the_same_study(tmp_path: Path) -> None:
    def evolve(folder: str, stop_at: int = 0) -> list[tuple[object, ...]]:
        algorithm = PopulationBasedTraining(interval=2, seed=1)
        found = search(tmp_path / folder, "journal", "random", algorithm=algorithm, stop_at=stop_at, n_trials=4)
        return outcome(found.study)

    expected = evolve("undisturbed")
    assert len(expected) > 4
    for stop_at in (13, 14, 15):  # in the first fork
        with pytest.raises(KeyboardInterrupt):
            evolve(str(stop_at), stop_at)
        assert evolve(str(stop_at)) == expected


@pytest.mark.ci
@pytest.mark.parametrize("seed", range(4))
def test_an_interrupted_fork_keeps_its_parameters_when_the_search_resumes(seed: int, tmp_path: Path) -> None:
    algorithm = PopulationBasedTraining(interval=2, seed=seed)
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path, "journal", "random", algorithm=algorithm, stop_at=14, n_trials=4)
    result = search(tmp_path, "journal", "random", algorithm=algorithm, n_trials=5)  # which draws others
    for proposed in result.plan.searches["x"].proposed:
        if proposed.fork is not None and proposed.number is not None:
            given = result.study.trials[proposed.number].system_attrs["fixed_params"]
            assert {name: repr(value) for name, value in given.items()} == proposed.fork.params


@pytest.mark.parametrize("algorithm", [FullTraining(window=2), SuccessiveHalving(2, 2), ASHA(2, 2)], ids=repr)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.one_in(2)
def test_resuming_a_study_in_one_store_leaves_its_unfinished_trials_of_another_store(
    storage: str, algorithm: Algorithm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def call(trainable: Tape, store: str, stop_at: int = 0) -> optuna.Study:
        return search(
            tmp_path, storage, "random", trainable=trainable, store=store, algorithm=algorithm, stop_at=stop_at
        ).study

    # Both are cut off with trials open, at times while they propose one.
    for stop_at in (7, 4):
        with pytest.raises(KeyboardInterrupt):
            call(Tape(), "one", stop_at)
        with pytest.raises(KeyboardInterrupt):
            call(Other(), "two", stop_at)
    before = outcome(optuna.load_study(study_name="x", storage=STORAGES[storage](tmp_path)))
    running = [number for number, _, state, *_ in before if state == TrialState.RUNNING]
    with caplog.at_level(logging.WARNING, "hpstage"):
        call(Tape(), "one")
    left = optuna.load_study(study_name="x", storage=STORAGES[storage](tmp_path)).trials
    assert not [trial.number for trial in left if trial.state == TrialState.FAIL]
    assert 0 < sum(trial.state == TrialState.RUNNING for trial in left) < len(running)
    trials = call(Other(), "two").trials
    assert all(trial.state in (TrialState.COMPLETE, TrialState.PRUNED) for trial in trials)
    plans = [trial.user_attrs["hpstage:plan"] for trial in trials]
    assert [plans.count(plan) for plan in sorted(set(plans))] == [6, 6]
