"""Searches on every storage that Optuna has, and storages that are away for a while."""

from __future__ import annotations

import sqlite3
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalRedisBackend
from optuna.trial import TrialState

import hpstage
from hpstage import schedule as s
from hpstage.algos import ASHA, Hyperband, PopulationBasedTraining, SuccessiveHalving
from hpstage.errors import StoreError
from hpstage.optuna.ledger import Ledger
from hpstage.store import MemoryJournal
from tests.redis_server import RedisServer
from tests.toys import Failing, Tape

optuna.logging.set_verbosity(optuna.logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore:.*is experimental:optuna.exceptions.ExperimentalWarning")

STORAGES = ["memory", "journal-file", "journal-redis", "rdb"]


def redis_storage(server: RedisServer) -> JournalStorage:
    return JournalStorage(JournalRedisBackend(server.url))


def sqlite_storage(folder: Path, timeout: float = 5.0) -> RDBStorage:
    return RDBStorage(f"sqlite:///{folder / 'optuna.db'}", engine_kwargs={"connect_args": {"timeout": timeout}})


@pytest.fixture(params=STORAGES)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> BaseStorage:
    match request.param:
        case "memory":
            return InMemoryStorage()
        case "journal-file":
            return JournalStorage(JournalFileBackend(str(tmp_path / "optuna.log")))
        case "journal-redis":
            return redis_storage(request.getfixturevalue("redis_server"))
        case _:
            return sqlite_storage(tmp_path)


def space(trial: optuna.Trial) -> dict[str, object]:
    return {
        "a": s.piecewise({0: trial.suggest_int("a", 1, 3), 4: trial.suggest_categorical("late", [1, 2, 5, 7])}),
        "b": trial.suggest_float("b", 0.5, 2.0, step=0.5),
    }


def run(study: optuna.Study, trainable: object = None, **options: Any) -> hpstage.Result:
    settings: dict[str, Any] = {"metric": "score", "steps": 8, "n_trials": 10, "store": MemoryJournal()}
    settings |= {"executor": hpstage.InlineExecutor(), "checkpoint_every": 1, "space": space} | options
    return hpstage.optimize(study, trainable or Failing(), settings.pop("space"), **settings)


def create(storage: BaseStorage, **options: Any) -> optuna.Study:
    sampler = optuna.samplers.RandomSampler(seed=3)
    return optuna.create_study(study_name="x", direction="maximize", storage=storage, sampler=sampler, **options)


def outcome(study: optuna.Study) -> list[tuple[object, ...]]:
    return [(t.number, t.params, t.state, t.value, t.intermediate_values) for t in study.trials]


@pytest.mark.parametrize("algorithm", [SuccessiveHalving(2, 2), PopulationBasedTraining(2)], ids=repr)
def test_every_storage_holds_the_same_study(storage: BaseStorage, algorithm: Any) -> None:
    # Numbers differ by nothing but what storages store: seconds are not compared.
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a repeated report would warn
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study = create(storage)
        run(study, algorithm=algorithm, store=(journal := MemoryJournal()))
        run(study, algorithm=algorithm, store=journal, extend=True, steps=12, n_trials=12)
    expected = create(InMemoryStorage())
    run(expected, algorithm=algorithm, store=(journal := MemoryJournal()))
    run(expected, algorithm=algorithm, store=journal, extend=True, steps=12, n_trials=12)
    again = optuna.load_study(study_name="x", storage=storage)
    assert outcome(again) == outcome(expected)
    states = {trial.state for trial in again.trials}
    assert states == {TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL}


@pytest.mark.parametrize("algorithm", [SuccessiveHalving(2, 2), Hyperband(2, 2), ASHA(2, 2)], ids=repr)
def test_numbers_written_to_the_study_add_up_to_those_of_the_plan(storage: BaseStorage, algorithm: Any) -> None:
    result = run(create(storage), Tape(), algorithm=algorithm)
    trials = optuna.load_study(study_name="x", storage=storage).trials
    assert sum(trial.user_attrs["hpstage:steps"] for trial in trials) == result.savings.steps_asked
    shared = sum(trial.user_attrs["hpstage:steps_shared"] for trial in trials)
    assert shared == result.savings.steps_asked - result.savings.steps_unique > 0
    for trial in trials:
        assert trial.user_attrs["hpstage:steps"] == trial.last_step
        assert 0 <= trial.user_attrs["hpstage:steps_shared"] <= trial.last_step
        seconds = trial.user_attrs["hpstage:gpu_seconds_saved"]
        assert isinstance(seconds, float) and (seconds == 0) >= (trial.user_attrs["hpstage:steps_shared"] == 0)


def test_what_is_written_is_shown_by_optunas_own_pictures(tmp_path: Path) -> None:
    study = create(sqlite_storage(tmp_path))
    run(study, Tape(), algorithm=SuccessiveHalving(2, 2), space=lambda trial: space(trial) | {"c": 1.0})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        axes = optuna.visualization.matplotlib.plot_intermediate_values(study)
        optuna.visualization.matplotlib.plot_optimization_history(study)
        optuna.visualization.matplotlib.plot_param_importances(study)
    assert len(axes.get_lines()) == 10
    frame = study.trials_dataframe()
    assert {"user_attrs_hpstage:steps_shared", "user_attrs_hpstage:gpu_seconds_saved"} <= set(frame.columns)


# --- storages that are away -------------------------------------------------------------------------------


def undisturbed(**options: Any) -> list[tuple[object, ...]]:
    study = create(InMemoryStorage())
    run(study, **options)
    return outcome(study)


def after(seconds: float, act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=lambda: (time.sleep(seconds), act()))
    thread.start()
    return thread


def test_a_redis_server_that_is_killed_and_restarted_costs_nothing(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    back: list[threading.Thread] = []

    def outage(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if sum(t.state.is_finished() for t in study.trials) in (2, 5):
            redis_server.kill()
            back.append(after(0.3, redis_server.start))

    study = create(redis_storage(redis_server))
    algorithm = SuccessiveHalving(2, 2)
    run(study, algorithm=algorithm, callbacks=[outage])
    assert len(back) == 2
    for thread in back:
        thread.join()
    again = optuna.load_study(study_name="x", storage=redis_storage(redis_server))
    assert outcome(again) == undisturbed(algorithm=algorithm)
    assert caplog.text.count("is back after") == 2


def test_a_database_that_is_locked_for_a_while_costs_nothing(tmp_path: Path) -> None:
    study = create(sqlite_storage(tmp_path, timeout=0.05))

    def lock(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if sum(t.state.is_finished() for t in study.trials) in (2, 5):
            other = sqlite3.connect(tmp_path / "optuna.db", check_same_thread=False, isolation_level=None)
            other.execute("PRAGMA locking_mode=EXCLUSIVE")
            other.execute("BEGIN EXCLUSIVE")
            threads.append(after(0.4, other.close))

    threads: list[threading.Thread] = []
    algorithm = SuccessiveHalving(2, 2)
    run(study, algorithm=algorithm, callbacks=[lock])
    assert len(threads) == 2
    for thread in threads:
        thread.join()
    assert outcome(study) == undisturbed(algorithm=algorithm)


def test_a_storage_that_stays_away_ends_the_call_with_the_remedy_and_the_next_call_goes_on(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = create(redis_storage(redis_server))
    monkeypatch.setattr("hpstage.front_door.Ledger", partial(Ledger, patience=0.3))
    algorithm = SuccessiveHalving(2, 2)
    with pytest.raises(StoreError, match=r"away for 0 s .*run the same command again"):
        run(
            study,
            algorithm=algorithm,
            store=tmp_path / "plan",
            callbacks=[lambda study, trial: redis_server.kill()],
        )
    redis_server.start()
    study = optuna.load_study(
        study_name="x", storage=redis_storage(redis_server), sampler=optuna.samplers.RandomSampler(seed=3)
    )
    run(study, algorithm=algorithm, store=tmp_path / "plan")
    assert outcome(study) == undisturbed(algorithm=algorithm)


def test_errors_of_the_users_space_are_not_taken_for_the_storages(storage: BaseStorage) -> None:
    calls: list[int] = []

    def broken(trial: optuna.Trial) -> dict[str, object]:
        calls.append(trial.number)
        raise OSError("a file of the user's is missing")

    with pytest.raises(OSError, match="a file of the user's"):
        run(create(storage), space=broken)
    assert calls == [0]
