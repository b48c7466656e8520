"""Workers that cannot use the checkpoints: benched, tried again, and nothing written off on their word alone."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any, ClassVar

import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.checkpoints import FolderCheckpoints, patient_store
from hpstage.checkpoints.patient_store import PatientStore
from hpstage.driver.driver import Driver
from hpstage.driver.state_probe import StateProbe
from hpstage.errors import CheckpointCorrupt, CheckpointError, CheckpointFull, CheckpointMissing, CheckpointUnreachable
from hpstage.execution.simulated import SimulatedExecutor, value_of_key
from hpstage.plan.facts import StateKey, StateLost, WorkerId
from hpstage.plan.log import open_plan
from hpstage.plan.messages import Chain, ChainEnded
from hpstage.scheduler.scheduler import Scheduler
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Tape
from tests.invariants import validate_scheduler
from tests.records import separated
from tests.unit.searches import WORKLOAD, Search, histories, trial

TRIALS = [trial(i, {"a": s.piecewise({0: 1, 4: 1 + i})}, 12) for i in range(4)]
STOPS = [12] * 4


class CutOff(SimulatedExecutor):
    """Some workers are turned away from the checkpoints, by intervals of virtual time."""

    def __init__(self, workers: int, away: dict[str, tuple[float, float]]) -> None:
        super().__init__(workers)
        self.away = away
        self.turned_away: list[tuple[str, float]] = []

    def start(self, worker: WorkerId, chain: Chain) -> None:
        begin, end = self.away.get(worker, (0.0, 0.0))
        if begin <= self.clock() < end:
            self.turned_away.append((worker, self.clock()))
            ended = ChainEnded(chain.id, worker, "cut_off", self.clock(), message="no such mount")
            self.cluster.at(0.0, lambda: self.inbox.append(ended))
        else:
            super().start(worker, chain)


def test_a_worker_that_cannot_use_checkpoints_is_tried_again_after_doubling_pauses(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trials = [trial(i, {"a": s.constant(i)}, 12) for i in range(4)]
    executor = CutOff(2, {"sim-1": (0.0, 6.5)})
    search = Search(executor, checkpoint_every=1)  # time advances by steps of one second
    with caplog.at_level(logging.WARNING, "hpstage"):
        answers = search.run(trials, STOPS)
    assert {a.trial for a in answers} == {t.trial for t in trials}
    tried = [at for _, at in executor.turned_away]
    assert tried == [0.0, 1.0, 3.0]
    assert search.plan.totals.steps_trained == 4 * 12
    assert not any(b"StateLost" in record for record in search.journal.read())
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 2, "once when it is benched, and when it is back"
    assert "sim-1" in logged[0] and "no such mount" in logged[0] and "sim-1 can use the checkpoints again" in logged[1]


def test_a_search_waits_while_no_worker_can_use_checkpoints(caplog: pytest.LogCaptureFixture) -> None:
    executor = CutOff(2, {"sim-0": (0.0, 100.0), "sim-1": (0.0, 100.0)})
    search = Search(executor)
    with caplog.at_level(logging.WARNING, "hpstage"):
        answers = search.run(TRIALS, STOPS)
    assert len(answers) == len(TRIALS) and executor.clock() > 100
    assert search.plan.totals.steps_trained == len(histories(TRIALS, STOPS))
    assert len(executor.turned_away) <= 2 * 8, "less and less often"


def test_a_search_ends_with_the_cause_if_no_worker_can_use_checkpoints_within_the_timeout() -> None:
    executor = CutOff(2, {"sim-0": (0.0, 1e9), "sim-1": (0.0, 1e9)})
    executor.worker_timeout = 0.0
    search = Search(executor)
    with pytest.raises(CheckpointError, match=r"no worker .*\(no such mount\); fix that and run the same command"):
        search.run(TRIALS, STOPS)
    assert not any(b"StateLost" in record for record in search.journal.read())
    again = Search(SimulatedExecutor(2), search.journal)
    assert len(again.run(TRIALS, STOPS)) == len(TRIALS)


def test_a_search_does_not_give_up_while_one_worker_can_use_checkpoints() -> None:
    executor = CutOff(2, {"sim-1": (0.0, 1e9)})
    executor.worker_timeout = 0.0
    assert len(Search(executor).run(TRIALS, STOPS)) == len(TRIALS)


# --- missing or corrupt: for whom? ------------------------------------------------------------------------


class Shelf(FolderCheckpoints):
    """Of imaginary states, what the driver sees."""

    def __init__(self, kept: set[StateKey], trouble: Exception | None = None) -> None:
        super().__init__("/nowhere", "w", sweep=False)
        self.kept, self.trouble = kept, trouble
        self.looked = threading.Event()

    def verify(self, key: StateKey) -> None:
        try:
            if self.trouble is not None:
                raise self.trouble
            if key not in self.kept:
                raise CheckpointMissing(f"no checkpoint of state {key}")
        finally:
            self.looked.set()


class Blind(SimulatedExecutor):
    """One worker reports every checkpoint as missing until some time."""

    def __init__(self, kept: set[StateKey], until: float) -> None:
        super().__init__(2, kept=kept)
        self.until = until
        self.missed = 0

    def start(self, worker: WorkerId, chain: Chain) -> None:
        if worker == "sim-1" and chain.source is not None and self.clock() < self.until:
            self.missed += 1
            ended = ChainEnded(chain.id, worker, "unreadable", self.clock(), message=f"no checkpoint of {chain.source}")
            self.cluster.at(0.0, lambda: self.inbox.append(ended))
        else:
            super().start(worker, chain)


def searched(executor: SimulatedExecutor, shelf: Shelf) -> tuple[Driver, MemoryJournal, int]:
    journal = MemoryJournal()
    plan = open_plan(journal, WORKLOAD, {})
    scheduler = Scheduler(plan, checkpoint_every=2)
    driver = Driver(plan, scheduler, executor, journal, probe=StateProbe(shelf))
    driver.add(TRIALS)
    for added, stop in zip(TRIALS, STOPS, strict=True):
        driver.ask(added.trial, stop)
    answers = []
    while len(answers) < len(TRIALS):
        if driver.probe is not None and driver.probe.held:
            assert shelf.looked.wait(30)
        answers += driver.wait()
        validate_scheduler(scheduler)
    driver.finish()
    for answer in answers:
        node = plan.trials[answer.trial].node_at(answer.step)
        assert answer.metrics == value_of_key(plan.key(node, answer.step), answer.step)
    return driver, journal, sum(b"StateLost" in record for record in separated(journal).read())


def test_a_state_that_only_one_worker_misses_is_not_recorded_as_lost(caplog: pytest.LogCaptureFixture) -> None:
    kept: set[StateKey] = set()
    executor = Blind(kept, 1e9)
    with caplog.at_level(logging.WARNING, "hpstage"):
        driver, _, lost = searched(executor, Shelf(kept))
    assert executor.missed and lost == 0
    assert driver.plan.totals.steps_trained == len(histories(TRIALS, STOPS))
    assert "sim-1 cannot use the checkpoints" in caplog.text and "the driver finds it there and sound" in caplog.text


def test_a_state_that_a_worker_and_the_driver_miss_is_recorded_as_lost_and_trained_again() -> None:
    kept: set[StateKey] = set()
    executor = Blind(kept, 1e9)
    executor.until = 0.0

    class Losing(Blind):
        def start(self, worker: WorkerId, chain: Chain) -> None:
            if chain.source is not None and not self.missed:
                self.missed += 1
                kept.discard(chain.source)
            super().start(worker, chain)

    losing = Losing(kept, 0.0)
    _, _, lost = searched(losing, Shelf(kept))
    assert losing.missed == 1 and lost == 1


def test_a_state_that_two_workers_miss_at_the_same_time_is_recorded_as_lost_once() -> None:
    class Missing(SimulatedExecutor):
        """Both report in one message."""

        held: ClassVar[list[ChainEnded]] = []

        def start(self, worker: WorkerId, chain: Chain) -> None:
            if chain.source is None or chain.source in self.kept:
                super().start(worker, chain)
                return
            self.held.append(ChainEnded(chain.id, worker, "unreadable", self.clock(), message="missing"))
            if len(self.held) == 2:
                self.cluster.at(0.0, lambda: self.inbox.extend(self.held))

    executor = Missing(2, kept=set())
    search = Search(executor)
    beginning = s.constant(1)
    search.run([trial(0, {"lr": beginning}, 4)], [4])
    executor.kept.clear()
    ways = [trial(n, {"lr": beginning.until(4).then(s.constant(n))}, 8) for n in (2, 3)]
    assert len(search.run(ways, [8, 8])) == 2
    assert sum(b"StateLost" in record for record in separated(search.journal).read()) == 1


@pytest.mark.parametrize("trouble", [CheckpointUnreachable("timed out"), RuntimeError("a bug in a store")])
def test_no_state_is_recorded_as_lost_if_the_driver_cannot_check_it(trouble: Exception) -> None:
    kept: set[StateKey] = set()
    executor = Blind(kept, 30.0)
    _, _, lost = searched(executor, Shelf(kept, trouble))
    assert executor.missed and lost == 0


# --- the worker's side ------------------------------------------------------------------------------------


class Refusing(FolderCheckpoints):
    """A place that refuses so many calls, from a given one on."""

    def __init__(self, path: Path, error: CheckpointError, times: int, after: int = 0) -> None:
        super().__init__(path, "w", sweep=False)
        self.error, self.times, self.after = error, times, after
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if len(self.calls) > self.after and self.times > 0:
            self.times -= 1
            raise self.error

    def save(self, key: StateKey, state: object, **options: Any) -> Any:
        self._call("save")
        return super().save(key, state, **options)

    def load(self, key: StateKey) -> object:
        self._call("load")
        return super().load(key)

    def check(self) -> None:
        self._call("check")
        super().check()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts follow fast on each other."""
    monkeypatch.setattr(patient_store, "_PAUSES", (0.001, 0.004))


KEY = StateKey("k" * 32)


@pytest.mark.usefixtures("hasty")
def test_a_transient_failure_of_a_checkpoint_store_is_retried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Refusing(tmp_path, CheckpointUnreachable("a time-out"), 3)
    patient = PatientStore(store, patience=3600.0)
    patient.enter(lambda: False)
    with caplog.at_level(logging.WARNING, "hpstage"):
        patient.save(KEY, {"a": 1}, step=1, parent=None)
    assert store.calls == ["save"] * 4 and patient.load(KEY) == {"a": 1}
    assert [r.getMessage() for r in caplog.records] == ["a time-out. Trying again for 3600 s."]


@pytest.mark.parametrize("error", [CheckpointFull("full"), CheckpointMissing("gone"), CheckpointCorrupt("spoilt")])
def test_a_permanent_failure_of_a_checkpoint_store_is_not_retried(tmp_path: Path, error: CheckpointError) -> None:
    store = Refusing(tmp_path, error, 1)
    with pytest.raises(type(error)):
        PatientStore(store).load(KEY)
    assert store.calls == ["load"]


def test_a_chain_that_must_stop_does_not_wait_for_the_checkpoint_store(tmp_path: Path) -> None:
    store = Refusing(tmp_path, CheckpointUnreachable("away"), 10**6)
    patient = PatientStore(store, patience=3600.0)
    patient.enter(lambda: len(store.calls) >= 2)
    with pytest.raises(CheckpointUnreachable):
        patient.save(KEY, {"a": 1}, step=1, parent=None)
    assert store.calls == ["save"] * 2


@pytest.mark.usefixtures("hasty")
def test_a_checkpoint_store_refuses_new_chains_after_its_patience_until_it_is_writable(tmp_path: Path) -> None:
    store = Refusing(tmp_path, CheckpointUnreachable("refused"), 10**6)
    patient = PatientStore(store, patience=0.05)
    patient.enter(lambda: False)
    with pytest.raises(CheckpointUnreachable):
        patient.save(KEY, {"a": 1}, step=1, parent=None)
    before = len(store.calls)
    with pytest.raises(CheckpointUnreachable):
        patient.enter(lambda: False)
    store.times = 0
    patient.enter(lambda: False)
    patient.enter(lambda: False)
    assert store.calls[before:] == ["check"] * 2, "one look each, and none once it is proven"


# --- a whole search ---------------------------------------------------------------------------------------


def space(trial: optuna.Trial) -> dict[str, object]:
    return {"a": s.piecewise({0: 1, 4: trial.suggest_int("late", 1, 4)})}


def searching(store: object, journal: MemoryJournal, **options: Any) -> hpstage.Result:
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.GridSampler({"late": [1, 2, 3, 4]}, 0))
    executor = hpstage.InlineExecutor()
    executor.worker_timeout = options.pop("worker_timeout", 60.0)
    options |= {"metric": "score", "steps": 8, "n_trials": 4, "checkpoint_every": 2}
    return hpstage.optimize(study, Tape(), space, executor=executor, store=journal, checkpoints=store, **options)


@pytest.mark.ci
@pytest.mark.usefixtures("hasty")
def test_no_state_is_recorded_as_lost_after_three_refused_checkpoint_writes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PatientStore.__init__, "__kwdefaults__", {"patience": 0.0})
    expected = searching(tmp_path / "undisturbed", MemoryJournal())
    journal = MemoryJournal()
    refusing = Refusing(tmp_path / "refusing", CheckpointUnreachable("Permission denied"), 3, after=4)
    with caplog.at_level(logging.WARNING, "hpstage"):
        result = searching(refusing, journal)
    assert refusing.times == 0
    assert [t.value for t in result.study.trials] == [t.value for t in expected.study.trials]
    assert not any(isinstance(fact, StateLost) for fact in result.journal)
    assert "Worker inline cannot use the checkpoints: Permission denied" in caplog.text
    assert "can use the checkpoints again" in caplog.text and "disk is full" not in caplog.text
    # What was trained since the last checkpoint is trained again, and nothing else.
    assert result.plan.totals.steps_trained == expected.plan.totals.steps_trained


@pytest.mark.ci
@pytest.mark.usefixtures("hasty")
def test_an_unreachable_checkpoint_store_ends_the_search_and_the_next_call_resumes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PatientStore.__init__, "__kwdefaults__", {"patience": 0.05})
    expected = searching(tmp_path / "undisturbed", MemoryJournal())
    journal = MemoryJournal()
    refusing = Refusing(tmp_path / "refusing", CheckpointUnreachable("expired token"), 10**6, after=4)
    with pytest.raises(CheckpointError, match=r"no worker .*expired token.*all progress is kept"):
        searching(refusing, journal, worker_timeout=0.0)
    refusing.times = 0
    result = searching(refusing, journal)
    assert not any(isinstance(fact, StateLost) for fact in result.journal)
    assert {t.value for t in result.study.trials} == {t.value for t in expected.study.trials}
    assert result.plan.totals.steps_trained == expected.plan.totals.steps_trained
