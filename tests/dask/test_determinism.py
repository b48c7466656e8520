"""One seed gives one study, whatever the number of workers: every synchronous algorithm on real clusters."""

from __future__ import annotations

from collections.abc import Iterator

import optuna
import pytest
from distributed import Client

import hpstage
from hpstage import schedule as s
from hpstage.algorithm import Algorithm
from hpstage.algos import (
    FullTraining,
    Hyperband,
    MedianStopping,
    OptunaPruner,
    PopulationBasedTraining,
    SuccessiveHalving,
)
from hpstage.cluster import DaskExecutor, local_cluster
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Tape

optuna.logging.set_verbosity(optuna.logging.ERROR)

ALGORITHMS = [
    FullTraining(window=4),
    SuccessiveHalving(2, 2),
    Hyperband(2, 2),
    MedianStopping(2, 2, 3, window=5),
    OptunaPruner(2, 2, window=5),
    PopulationBasedTraining(2),
]


def space(trial: optuna.Trial) -> dict[str, object]:
    return {
        "a": s.piecewise({0: trial.suggest_int("a", 1, 3), 4: trial.suggest_int("late", 1, 3)}),
        "b": s.linear(trial.suggest_categorical("b", [1.0, 2.0]), total_iters=trial.suggest_int("iters", 2, 6)),
    }


@pytest.fixture(scope="module")
def four() -> Iterator[Client]:
    with local_cluster(4, gpus=0) as cluster, Client(cluster, set_as_default=False) as client:
        yield client


@pytest.mark.ci
@pytest.mark.parametrize("workers", ["client", pytest.param("four", marks=pytest.mark.slow)])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
@pytest.mark.one_in(3)
def test_one_two_and_four_workers_give_the_same_study(
    request: pytest.FixtureRequest, workers: str, algorithm: Algorithm
) -> None:
    def outcome(executor: hpstage.Executor) -> tuple[list[tuple[object, ...]], int]:
        sampler = optuna.samplers.TPESampler(seed=2, n_startup_trials=4)
        study = optuna.create_study(study_name="x", direction="maximize", sampler=sampler)
        result = hpstage.optimize(
            study,
            Tape(),
            space,
            metric="score",
            steps=8,
            n_trials=14,
            algorithm=algorithm,
            executor=executor,
            store=MemoryJournal(),
        )
        trials = [(t.number, t.params, t.state, t.value, t.intermediate_values) for t in study.trials]
        return trials, result.best_trial.number

    client: Client = request.getfixturevalue(workers)
    client.wait_for_workers(4 if workers == "four" else 2, timeout=120)
    assert outcome(DaskExecutor(client)) == outcome(hpstage.InlineExecutor())  # which is one worker
