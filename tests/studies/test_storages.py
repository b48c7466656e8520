"""Searches on every storage that Optuna has, and storages that are away for a while."""

from __future__ import annotations

import copy
import resource
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
import redis
import sqlalchemy
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalRedisBackend
from optuna.trial import TrialState

import hpstage
from hpstage import schedule as s
from hpstage.algos import ASHA, Hyperband, PopulationBasedTraining, SuccessiveHalving
from hpstage.errors import StoreError
from hpstage.optuna.patient_storage import patient
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Failing, Tape, alone
from tests.redis_server import RedisServer

optuna.logging.set_verbosity(optuna.logging.ERROR)
pytestmark = [
    pytest.mark.sampled(16),
    pytest.mark.filterwarnings("ignore:.*is experimental:optuna.exceptions.ExperimentalWarning"),
]

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


@pytest.mark.ci
@pytest.mark.parametrize("algorithm", [SuccessiveHalving(2, 2), PopulationBasedTraining(2)], ids=repr)
@pytest.mark.one_in(3)
def test_every_optuna_storage_holds_the_same_study(storage: BaseStorage, algorithm: Any) -> None:
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
@pytest.mark.one_in(4)
def test_steps_written_to_the_trials_of_a_study_add_up_to_those_of_the_plan(
    storage: BaseStorage, algorithm: Any
) -> None:
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


def test_optuna_plots_and_data_frames_work_on_a_study_of_hpstage(tmp_path: Path) -> None:
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


def once_missed(caplog: pytest.LogCaptureFixture, act: Callable[[], None]) -> threading.Thread:
    """Act once the log repeats that the storage is waited for."""
    before = caplog.text.count("waiting for it")

    def wait() -> None:
        deadline = time.monotonic() + 120
        while caplog.text.count("waiting for it") == before and time.monotonic() < deadline:
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_a_killed_and_restarted_redis_storage_does_not_change_the_study(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    back: list[threading.Thread] = []

    def outage(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if sum(t.state.is_finished() for t in study.trials) in (2, 5):
            redis_server.kill()
            back.append(once_missed(caplog, redis_server.start))

    study = create(redis_storage(redis_server))
    algorithm = SuccessiveHalving(2, 2)
    run(study, algorithm=algorithm, callbacks=[outage])
    assert len(back) == 2
    for thread in back:
        thread.join()
    again = optuna.load_study(study_name="x", storage=redis_storage(redis_server))
    assert outcome(again) == undisturbed(algorithm=algorithm)
    assert caplog.text.count("is back after") == 2


def test_a_temporarily_locked_database_does_not_change_the_study(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    study = create(sqlite_storage(tmp_path, timeout=0.05))

    def lock(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if sum(t.state.is_finished() for t in study.trials) in (2, 5):
            other = sqlite3.connect(tmp_path / "optuna.db", check_same_thread=False, isolation_level=None)
            other.execute("PRAGMA locking_mode=EXCLUSIVE")
            other.execute("BEGIN EXCLUSIVE")
            threads.append(once_missed(caplog, other.close))

    threads: list[threading.Thread] = []
    algorithm = SuccessiveHalving(2, 2)
    run(study, algorithm=algorithm, callbacks=[lock])
    assert len(threads) == 2
    for thread in threads:
        thread.join()
    assert outcome(study) == undisturbed(algorithm=algorithm)


def test_an_unreachable_storage_ends_the_call_with_the_remedy_and_the_next_call_resumes(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = create(redis_storage(redis_server))
    monkeypatch.setattr("hpstage.search.call.patient", partial(patient, patience=0.3))
    algorithm = SuccessiveHalving(2, 2)
    with pytest.raises(StoreError, match=r"been away for 0 s .*bring it back, and run the same command again"):
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


def test_deleting_a_study_during_its_search_raises_an_error_and_a_new_study_can_be_searched(
    storage: BaseStorage,
) -> None:
    def delete(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if storage.get_all_studies():
            optuna.delete_study(study_name="x", storage=storage)

    journal = MemoryJournal()
    study = create(storage)
    if isinstance(storage, InMemoryStorage):
        pytest.skip("nobody else can delete it")
    with pytest.raises(StoreError, match="the study was deleted from its storage while it was searched"):
        run(study, store=journal, callbacks=[delete])
    run(again := create(storage), store=journal)
    assert all(trial.state.is_finished() for trial in again.trials)


def test_a_full_disk_under_a_database_raises_an_error_and_the_next_call_resumes(tmp_path: Path) -> None:
    storage = sqlite_storage(tmp_path)
    study = create(storage)
    limits = [0]

    @sqlalchemy.event.listens_for(storage.engine, "connect")
    def limit(connection: sqlite3.Connection, _: object) -> None:
        if limits[0]:
            connection.execute(f"PRAGMA max_page_count = {limits[0]}")

    def fill(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if trial.number == 1:
            limits[0] = 1  # SQLite takes it for the pages that there are
            storage.engine.dispose()

    with pytest.raises(StoreError, match=r"cannot be written \(disk is full\): fix that and run the same command"):
        run(study, algorithm=SuccessiveHalving(2, 2), store=tmp_path / "plan", callbacks=[fill], n_trials=40)
    limits[0] = 0
    storage.engine.dispose()
    result = run(study, algorithm=SuccessiveHalving(2, 2), store=tmp_path / "plan", n_trials=40)
    assert all(trial.state.is_finished() for trial in result.study.trials)


@pytest.mark.parametrize("room", [1, 100, 1000])
def test_a_full_disk_under_an_optuna_journal_raises_an_error_and_the_next_call_resumes(
    tmp_path: Path, room: int
) -> None:
    path, store = tmp_path / "optuna.log", MemoryJournal()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if trial.number == 1:  # the next lines are written in part
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, limits[1]))

    def study() -> optuna.Study:
        return create(JournalStorage(JournalFileBackend(str(path))), load_if_exists=True)

    try:
        with pytest.raises(StoreError, match=r"cannot be written \(.*\): fix that and run the same command"):
            run(study(), algorithm=SuccessiveHalving(2, 2), store=store, callbacks=[fill])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    run(study(), algorithm=SuccessiveHalving(2, 2), store=store)
    expected = create(InMemoryStorage())
    run(expected, algorithm=SuccessiveHalving(2, 2))
    assert outcome(study()) == outcome(expected)


def test_half_a_line_at_the_end_of_an_optuna_journal_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "optuna.log"
    study = create(JournalStorage(JournalFileBackend(str(path))))
    with path.open("a") as file:
        file.write('{"op_code":4,"worker')
    run(study)
    again = optuna.load_study(study_name="x", storage=JournalStorage(JournalFileBackend(str(path))))
    assert len(again.trials) == 10


@pytest.mark.ci
def test_a_storage_that_keeps_refusing_writes_ends_the_call_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpstage.search.call.patient", partial(patient, patience=1.0))
    study = create(sqlite_storage(tmp_path, timeout=0.05))
    other = sqlite3.connect(tmp_path / "optuna.db", isolation_level=None)

    def lock(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if not other.in_transaction:
            other.execute("BEGIN IMMEDIATE")  # others may read

    with pytest.raises(StoreError, match=r"refused a call for \d+ s .*see its disk, permissions and log"):
        run(study, callbacks=[lock])
    other.close()


def test_an_os_error_of_the_space_is_not_mistaken_for_a_storage_error(storage: BaseStorage) -> None:
    calls: list[int] = []

    def broken(trial: optuna.Trial) -> dict[str, object]:
        calls.append(trial.number)
        raise OSError("a file of the user's is missing")

    with pytest.raises(OSError, match="a file of the user's"):
        run(create(storage), space=broken)
    assert calls == [*range(8), 0], "the trial run, and the proposal"


class Flaky(JournalStorage):
    """A storage whose ``at``-th call fails for want of the server: before it takes effect, or only its answer."""

    CALLS = (
        "create_new_trial",
        "set_trial_param",
        "set_trial_state_values",
        "set_trial_intermediate_value",
        "set_trial_user_attr",
        "set_trial_system_attr",
        "get_trial",
        "get_all_trials",
    )

    def __init__(self, path: Path) -> None:
        super().__init__(JournalFileBackend(str(path)))
        self.at, self.calls, self.after = 0, 0, False

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        if name not in Flaky.CALLS:
            return method

        def flaky(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            fails = self.calls == self.at
            if fails and not self.after:
                raise redis.ConnectionError("the request was lost")
            done = method(*args, **kwargs)
            if fails:
                raise redis.ConnectionError("the answer was lost")
            return done

        return flaky


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("kind", ["pbt", "grid", "queued"])
@pytest.mark.one_in(3)
def test_a_storage_call_that_fails_once_is_retried_and_takes_effect_once(
    tmp_path: Path, kind: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpstage.optuna.patient_storage._PAUSES", (0.001, 0.001))

    def play(folder: Path, at: int) -> tuple[list[tuple[object, ...]], int]:
        folder.mkdir()
        storage = Flaky(folder / "optuna.log")
        samplers = {
            "pbt": optuna.samplers.RandomSampler(seed=1),
            "grid": optuna.samplers.GridSampler({"a": [1, 2], "late": [1, 5], "b": [0.5]}, seed=1),
            "queued": optuna.samplers.TPESampler(seed=1, n_startup_trials=2),
        }
        study = optuna.create_study(study_name="x", direction="maximize", storage=storage, sampler=samplers[kind])
        if kind == "queued":
            study.enqueue_trial({"a": 3})
        storage.at, storage.calls, storage.after = at, 0, after
        algorithm = PopulationBasedTraining(4, quantile=0.5) if kind == "pbt" else SuccessiveHalving(4, 2)
        run(study, algorithm=algorithm, n_trials=4)
        calls, storage.at = storage.calls, 0  # calls from here on are the test's own
        return outcome(study), calls

    expected, calls = play(tmp_path / "undisturbed", 0)
    assert calls > 50 and all(trial[2].is_finished() for trial in expected)
    for at in range(1, calls + 1, 19):
        assert play(tmp_path / f"{at}", at)[0] == expected, f"call {at} of {calls}"


def test_two_studies_of_the_same_name_can_share_a_store() -> None:
    journal = MemoryJournal()
    for seed in (1, 2):
        study = create(InMemoryStorage())
        study.sampler = optuna.samplers.RandomSampler(seed=seed)
        result = run(study, Tape(), store=journal)
        for trial in study.trials:
            assert trial.value == alone(result.schedules(trial), 8).score
        assert len(study.trials) == 10


@pytest.mark.parametrize("algorithm", [SuccessiveHalving(2, 2), PopulationBasedTraining(2)], ids=repr)
@pytest.mark.one_in(3)
def test_a_grid_can_be_searched_extended_and_replaced_on_every_storage(storage: BaseStorage, algorithm: Any) -> None:
    journal = MemoryJournal()
    study = create(storage)
    study.sampler = optuna.samplers.GridSampler({"a": [1, 2, 3], "late": [1, 2], "b": [0.5]}, seed=0)
    run(study, Tape(), algorithm=algorithm, store=journal, n_trials=5)
    run(study, Tape(), algorithm=algorithm, store=journal, n_trials=6, steps=12, extend=True)
    assert all(trial.state.is_finished() for trial in study.trials)
    study.sampler = optuna.samplers.GridSampler({"a": [1, 2], "late": [5], "b": [1.0]}, seed=0)
    before = len(study.trials)
    run(study, Tape(), store=journal, n_trials=None)
    assert len(study.trials) == before + 2


@pytest.mark.one_in(2)
def test_user_attributes_of_a_trial_are_copied_to_its_extension(storage: BaseStorage) -> None:
    def marked(trial: optuna.Trial) -> dict[str, object]:
        if isinstance(trial, optuna.Trial):
            trial.set_user_attr("mine", trial.number)
        assert trial.study.study_name == "x"
        return {"a": trial.suggest_float("a", 0, 1), "fold": trial.number % 3}

    journal = MemoryJournal()
    study = create(storage)
    run(study, Tape(), store=journal, n_trials=4, space=marked)
    before = [copy.deepcopy(trial) for trial in study.trials]
    for steps in (12, 16):
        run(study, Tape(), store=journal, n_trials=4, steps=steps, space=marked, extend=True)
    assert study.trials[:4] == before
    assert [trial.user_attrs["mine"] for trial in study.trials] == [0, 1, 2, 3] * 3
    assert [trial.last_step for trial in study.trials] == [8] * 4 + [12] * 4 + [16] * 4
