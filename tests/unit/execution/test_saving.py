"""States that are written while training goes on: the same reports as if each had been written at once, in order, and
none before its state is durable."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hpstage.checkpoints import FolderCheckpoints, LiveCache, leaves
from hpstage.checkpoints.host_memory import HostMemory
from hpstage.checkpoints.patient_store import PatientStore
from hpstage.checkpoints.state_tree import digest
from hpstage.errors import CheckpointFull, CheckpointUnreachable, StopTraining
from hpstage.execution import saving
from hpstage.plan.facts import Kept, StateKey, WorkerId
from hpstage.plan.messages import BoundaryReached, ChainEnded, ChainReport
from hpstage.schedule import Scalar
from hpstage.testing.chains import chain, key
from tests.unit.execution.background import WORKER, Played, files_of

pytestmark = pytest.mark.sampled(4)

WAIT = 60.0


class Sums:
    """Its state is the array that it trains in place, as large as not to be written at once."""

    size = 20_000

    def __init__(self, at: Mapping[int, Callable[[], None]] | None = None) -> None:
        self.at = at or {}
        self.array = np.zeros(self.size)

    def setup(self, hp: Mapping[str, Scalar]) -> None:
        self.array = np.zeros(self.size)

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        if step in self.at:
            self.at[step]()
        self.array += hp["x"]

    def evaluate(self) -> dict[str, float]:
        return {"total": float(self.array[0])}

    def state_dict(self) -> dict[str, np.ndarray]:
        return {"array": self.array}

    def load_state_dict(self, state: Any) -> None:
        self.array = state["array"].copy()


class Shaky(FolderCheckpoints):
    """Does something before it saves some states: fails, waits."""

    def __init__(self, path: Path, before: Mapping[StateKey, Callable[[], None]] | None = None) -> None:
        super().__init__(path, "w")
        self.before = dict(before or {})
        self.saved: list[StateKey] = []

    def save(self, key: StateKey, state: object, *, step: int, parent: StateKey | None) -> Kept:
        if key in self.before:
            self.before[key]()
        kept = super().save(key, state, step=step, parent=parent)
        self.saved.append(key)
        return kept


def waits(event: threading.Event) -> Callable[[], None]:
    def wait() -> None:
        assert event.wait(WAIT)

    return wait


def raises(error: Exception, times: int = 10**9) -> Callable[[], None]:
    left = [times]

    def fail() -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise error

    return fail


def but_for_time(reports: list[ChainReport], *, whole: bool = True) -> list[Any]:
    """The reports without what is measured; of an end whose place is not compared, only its outcome."""
    bare: list[Any] = []
    for report in reports:
        if isinstance(report, BoundaryReached):
            reached = replace(report.reached, at=0.0, train_seconds=0.0, load_seconds=0.0, evaluate_seconds=0.0)
            ending = None if report.ending is None else replace(report.ending, at=0.0)
            bare.append(replace(report, reached=replace(reached, save_seconds=0.0), ending=ending))
        elif isinstance(report, ChainEnded) and not whole:
            bare.append((report.chain, report.outcome, report.message))
        elif isinstance(report, ChainEnded):
            failure = None if report.failure is None else replace(report.failure, traceback="")
            bare.append(replace(report, at=0.0, wasted_seconds=0.0, failure=failure))
        else:
            bare.append(replace(report, at=0.0))
    return bare


def steps(reports: list[ChainReport]) -> list[int]:
    return [report.reached.step for report in reports if isinstance(report, BoundaryReached)]


def test_training_continues_while_a_state_is_written_without_changing_the_written_state(tmp_path: Path) -> None:
    trained_on = threading.Event()
    store = Shaky(tmp_path, {key(3): waits(trained_on)})
    played = Played(Sums({6: trained_on.set}), store, background=True)
    reports = played.run(chain("c", 8, 3))
    assert steps(reports) == [3, 8]
    for step in (3, 8):
        state = store.load(key(step))
        assert isinstance(state, dict)
        assert state["array"].tolist() == [float(step)] * Sums.size
    assert store.manifest(key(8)).parent == key(3)


def test_reports_are_sent_in_order_and_only_after_their_states_are_written(tmp_path: Path) -> None:
    """Also of boundaries that keep no state."""
    go_on, looked = threading.Event(), threading.Event()
    store = Shaky(tmp_path, {key(3): waits(go_on)})

    def look() -> None:
        seen.extend(played.given())
        looked.set()
        go_on.set()

    seen: list[ChainReport] = []
    played = Played(Sums({7: look}), store, background=True)
    two = chain("c", 8, 2, 3, 5)
    bare = [replace(each, keep=each.step != 5) for each in two.boundaries]
    reports = played.run(replace(two, boundaries=tuple(bare)))
    assert looked.is_set()
    assert set(steps(seen)) <= {2}, "the states at 3 and 5 were reached, and no report was given"
    assert steps(seen + reports) == [2, 3, 5, 8]


def test_training_waits_while_two_states_are_queued_for_writing(tmp_path: Path) -> None:
    """Training stands still instead, also while the store is away."""
    at, stood = [0], threading.Event()
    store = Shaky(tmp_path, {key(1): waits(stood)})

    class Watched(Sums):
        def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
            at[0] = step
            super().train(step, hp)

        def state_dict(self) -> dict[str, np.ndarray]:
            if at[0] == 2:  # two are waiting: the third is not copied before one of them is written
                threading.Timer(0.2, stood.set).start()
            assert at[0] < 3 or stood.is_set()
            return super().state_dict()

    reports = Played(Watched(), store, background=True).run(chain("c", 9, *range(1, 9)))
    assert steps(reports) == list(range(1, 10))
    assert store.saved == [key(step) for step in range(1, 10)]


def test_states_larger_than_the_write_queue_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_BYTES", 1)
    store = Shaky(tmp_path)
    assert steps(Played(Sums(), store, background=True).run(chain("c", 5, 1, 2, 3))) == [1, 2, 3, 5]


def test_states_are_written_if_memory_for_preparing_them_cannot_be_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def room(leaf: object, value: object) -> object:
        raise MemoryError("Unable to allocate 160 kB")

    monkeypatch.setattr(leaves, "room", room)
    store = Shaky(tmp_path)
    assert steps(Played(Sums(), store, background=True).run(chain("c", 5, 1, 2, 3))) == [1, 2, 3, 5]
    assert store.saved == [key(step) for step in (1, 2, 3, 5)]


def test_copies_of_written_states_are_freed_without_the_garbage_collector(tmp_path: Path) -> None:
    """At once: until Python looks for cycles, a search could fill the memory with them."""
    copies: list[weakref.ref[np.ndarray]] = []

    class Watched(Shaky):
        def save(self, key: StateKey, state: Any, *, step: int, parent: StateKey | None) -> Kept:
            copies.append(weakref.ref(state["array"]))
            return super().save(key, state, step=step, parent=parent)

    gc.disable()
    try:
        live = LiveCache(host_bytes=int(1.5 * 8 * Sums.size))
        Played(Sums(), Watched(tmp_path), background=True, live=live).run(chain("c", 9, *range(1, 9)))
        assert sum(copy() is not None for copy in copies) <= 2
    finally:
        gc.enable()
    assert len(copies) == 9


class Filled(HostMemory):
    """Has room for the first states, and for none later."""

    def __init__(self) -> None:
        super().__init__(1)
        self.requests = 0

    def has_room(self, size: int) -> bool:
        self.requests += size > 0
        return self.requests < 4


def test_reports_are_unchanged_if_memory_is_too_short_to_copy_states_for_background_writes(tmp_path: Path) -> None:
    stops = chain("c", 9, *range(1, 9))
    at_once = Played(Sums(), Shaky(tmp_path / "a"), background=False).run(stops)
    live = LiveCache(memory=Filled())
    background = Played(Sums(), Shaky(tmp_path / "b"), background=True, live=live).run(stops)

    def reached(reports: list[ChainReport]) -> list[object]:
        return [(r.reached.step, r.reached.kept) for r in reports if isinstance(r, BoundaryReached)]

    assert reached(background) == reached(at_once)
    assert len(live) < 9


def test_the_trained_state_is_written_even_if_the_live_cache_holds_another_under_its_key(tmp_path: Path) -> None:
    """Otherwise a difference from what was trained before would not be found out."""
    live = LiveCache()
    live.put(key(4), {"array": np.full(Sums.size, 7.0)})
    [reached] = [
        report.reached
        for report in Played(Sums(), Shaky(tmp_path), background=True, live=live).run(chain("c", 4))
        if isinstance(report, BoundaryReached)
    ]
    assert reached.kept is not None
    assert reached.kept.digest == digest({"array": np.full(Sums.size, 4.0)})


def test_small_states_are_written_by_the_training_thread(tmp_path: Path) -> None:
    threads: list[str] = []
    store = Shaky(tmp_path, {key(step): lambda: threads.append(threading.current_thread().name) for step in (2, 4)})

    class Small(Sums):
        size = 10

    reports = Played(Small(), store, background=True).run(chain("c", 4, 2))
    assert steps(reports) == [2, 4]
    assert set(threads) == {threading.current_thread().name}
    assert Played(Sums(), store, background=True).run(chain("d", 4, 2))
    assert "hpstage-saves" in threads


@pytest.mark.parametrize("error", [CheckpointFull("no room"), CheckpointUnreachable("no mount")])
def test_a_state_that_cannot_be_written_ends_its_chain_and_later_steps_count_as_wasted(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PatientStore.__init__, "__kwdefaults__", {"patience": 0.0})
    trained_on = threading.Event()

    def fail() -> None:
        waits(trained_on)()
        raise error

    store = Shaky(tmp_path, {key(4): fail})
    reports = Played(Sums({6: trained_on.set}), store, background=True).run(chain("c", 9, 2, 4, 5))
    assert steps(reports) == [2]
    end = reports[-1]
    assert isinstance(end, ChainEnded)
    assert end.outcome == ("full" if isinstance(error, CheckpointFull) else "cut_off")
    assert end.step is not None and end.step >= 6
    assert end.wasted_steps == end.step - 2, "all that was trained since the last report"
    assert store.saved == [key(2)], "what comes after it is not written: its parent is missing"


def test_an_error_of_training_is_reported_after_the_states_before_it(tmp_path: Path) -> None:
    def boom() -> None:
        failed.set()
        raise ZeroDivisionError("in step 5")

    failed = threading.Event()
    store = Shaky(tmp_path, {key(4): waits(failed)})
    reports = Played(Sums({5: boom}), store, background=True).run(chain("c", 9, 2, 4))
    assert steps(reports) == [2, 4]
    end = reports[-1]
    assert isinstance(end, ChainEnded)
    assert (end.outcome, end.step, end.wasted_steps) == ("failed", 5, 1)
    assert end.failure is not None and "in step 5" in end.failure.summary


def test_a_failed_write_before_an_error_of_training_is_reported_instead_of_the_error(tmp_path: Path) -> None:
    """Nobody knows of the state from which that step was trained."""

    def boom() -> None:
        failed.set()
        raise ZeroDivisionError

    def full() -> None:
        waits(failed)()
        raise CheckpointFull("no room")

    failed = threading.Event()
    reports = Played(Sums({5: boom}), Shaky(tmp_path, {key(4): full}), background=True).run(chain("c", 9, 2, 4))
    assert steps(reports) == [2]
    end = reports[-1]
    assert isinstance(end, ChainEnded)
    assert (end.outcome, end.failure, end.wasted_steps) == ("full", None, 3)


def test_stop_training_is_reported_with_the_last_state(tmp_path: Path) -> None:
    ended = threading.Event()

    def stop() -> None:
        ended.set()
        raise StopTraining("enough")

    store = Shaky(tmp_path, {key(4): waits(ended)})
    reports = Played(Sums({6: stop}), store, background=True).run(chain("c", 9, 2, 4))
    assert steps(reports)[:2] == [2, 4]
    last = reports[-2]
    assert isinstance(last, BoundaryReached) and last.ending is not None
    assert last.ending.message == "enough" and last.reached.kept is not None


def test_a_stopped_chain_does_not_wait_for_an_unreachable_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PatientStore.__init__, "__kwdefaults__", {"patience": 3600.0})
    store = Shaky(tmp_path, {key(3): raises(CheckpointUnreachable("no mount"))})
    played = Played(Sums({5: lambda: played.control.stop()}), store, background=True)
    reports = played.run(chain("c", 9, 3))
    end = reports[-1]
    assert isinstance(end, ChainEnded) and end.outcome == "cut_off"
    assert steps(reports) == []


def test_a_pause_does_not_cancel_background_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another chain that joins a bundle is no reason to give up, unless training waits for the store."""
    monkeypatch.setattr(PatientStore.__init__, "__kwdefaults__", {"patience": 3600.0})
    store = Shaky(tmp_path, {key(3): raises(CheckpointUnreachable("no mount"), 2)})
    played = Played(Sums({step: lambda: played.bundle.pause() for step in (4, 5, 6)}), store, background=True)
    assert steps(played.run(chain("c", 9, 3))) == [3, 9]


@pytest.mark.ci
def test_closing_a_bundle_leaves_no_half_written_file_and_sends_no_more_reports(tmp_path: Path) -> None:
    closed = threading.Event()
    store = Shaky(tmp_path, {key(3): waits(closed)})
    played = Played(Sums({5: lambda: played.bundle.pause()}), store, background=True)
    played.bundle.start(WORKER, chain("c", 9, 3, 4), played.control)
    assert played.bundle.run() is None
    assert played.bundle.close() == ["c"]
    closed.set()
    for thread in threading.enumerate():
        if thread.name == "hpstage-saves":
            thread.join(WAIT)
    assert played.given() == [] and files_of(tmp_path) == []


def test_seconds_of_background_writes_during_training_are_not_counted_twice(tmp_path: Path) -> None:
    """Seconds of writing during training are not counted twice; the wait for the last state is."""
    trained_on = threading.Event()
    store = Shaky(tmp_path, {key(3): waits(trained_on), key(8): lambda: threading.Event().wait(0.3)})
    played = Played(Sums({6: lambda: (threading.Event().wait(0.3), trained_on.set())}), store, background=True)
    reports = [report.reached for report in played.run(chain("c", 8, 3)) if isinstance(report, BoundaryReached)]
    first, last = reports
    assert first.save_seconds < last.train_seconds, "it was being written during the long step"
    assert last.save_seconds > 0.15  # the rest was written during training
    end = first.at - first.save_seconds - first.evaluate_seconds - first.train_seconds - first.load_seconds
    spent = sum(r.train_seconds + r.load_seconds + r.evaluate_seconds + r.save_seconds for r in reports)
    assert spent <= last.at - end + 0.02 * spent


class Led(Sums):
    """Leads gangs whose others are not there."""

    virtual_nodes = 2

    def open_gang(self, host: str) -> str:
        return f"{host}:1"

    def lead(self, size: int, timeout: float, in_vain: Any) -> None: ...

    def follow(self, address: str, rank: int, size: int, timeout: float) -> str:
        return ""

    def dismiss(self, word: str) -> None: ...

    def shared_seconds(self) -> float:
        return 0.0


def test_the_wait_for_the_last_write_is_counted_for_each_worker_of_a_gang(tmp_path: Path) -> None:
    """So that the chain has begun when it has."""
    store = Shaky(tmp_path, {key(2): lambda: time.sleep(0.6)})
    trains: list[float] = []
    led = Led({0: lambda: trains.append(time.time())})
    reports = Played(led, store, background=True).run(replace(chain("c", 2), gang=(WorkerId("other"),)))
    [reached] = [report.reached for report in reports if isinstance(report, BoundaryReached)]
    assert reached.save_seconds > 0.6  # twice what it was waited for
    assert reached.began <= trains[0] + 0.2


def test_wasted_seconds_of_a_gang_after_a_failed_write_are_counted_for_each_worker(tmp_path: Path) -> None:
    store = Shaky(tmp_path, {key(2): raises(CheckpointFull("no room"))})
    pauses = Led({0: lambda: time.sleep(0.3)})
    before = time.perf_counter()
    reports = Played(pauses, store, background=True).run(replace(chain("c", 4, 2), gang=(WorkerId("other"),)))
    passed = time.perf_counter() - before
    end = reports[-1]
    assert isinstance(end, ChainEnded) and end.outcome == "full"
    assert 2 * 0.3 <= end.wasted_seconds <= 2 * passed


FAILURES = st.dictionaries(
    st.integers(1, 12),
    st.sampled_from(["slow", "full", "away once", "away"]),
    max_size=3,
)


@pytest.mark.ci
@pytest.mark.parametrize("ending", ["", "boom", "stop"])
@given(marks=st.sets(st.integers(1, 11), max_size=8), bare=st.sets(st.integers(1, 11)), failures=FAILURES)
def test_background_writes_give_the_reports_and_states_of_synchronous_writes(
    ending: str, marks: set[int], bare: set[int], failures: dict[int, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    def stop() -> None:
        raise StopTraining("enough") if ending == "stop" else ZeroDivisionError("boom")

    def run_chain(background: bool) -> tuple[list[Any], dict[StateKey, Any]]:
        ways: dict[str, Callable[[], Callable[[], None]]] = {
            "slow": lambda: lambda: threading.Event().wait(0.002),
            "full": lambda: raises(CheckpointFull("no room")),
            "away once": lambda: raises(CheckpointUnreachable("no mount"), 1),
            "away": lambda: raises(CheckpointUnreachable("no mount")),
        }
        store = Shaky(tmp_path_factory.mktemp("states"), {key(step): ways[way]() for step, way in failures.items()})
        played = Played(Sums({10: stop} if ending else {}), store, background=background)
        planned = chain("c", 12, *marks)
        boundaries = tuple(replace(each, keep=each.step not in bare) for each in planned.boundaries)
        reports = played.run(replace(planned, boundaries=boundaries))
        by_store = isinstance(reports[-1], ChainEnded) and reports[-1].outcome in ("full", "cut_off")
        assert files_of(store.path) == []
        return but_for_time(reports, whole=not by_store), dict(
            zip(store.keys(), map(store.manifest, store.keys()), strict=True)
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PatientStore.__init__, "__kwdefaults__", {"patience": 0.1})
        patch.setattr("hpstage.checkpoints.patient_store._PAUSES", (0.01, 0.05))
        assert run_chain(background=True) == run_chain(background=False)


def test_background_writes_do_not_change_random_numbers_of_training(tmp_path: Path) -> None:
    drawn: dict[bool, list[float]] = {}

    class Draws(Sums):
        def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
            drawn[background] += [random.random() for _ in range(200)] + np.random.rand(200).tolist()
            super().train(step, hp)

    for background in (True, False):
        drawn[background] = []
        random.seed(1)
        np.random.seed(1)
        Played(Draws(), Shaky(tmp_path / str(background)), background=background).run(chain("c", 30, *range(1, 30)))
    assert drawn[True] == drawn[False]


ENDING = """
import threading
from hpstage.execution.saving import Save, Saves, Writer
from hpstage.plan.facts import StateKey

class Slow(Saves):
    def write(self, save):
        import time
        time.sleep(0.3)
        save.kept = "kept"
    def prepare(self, save):
        print("prepared", flush=True)

writer = Writer(print)
saves = Slow(None, None, None, writer)
with writer.changed:
    writer.begin(saves, Save(StateKey("a"), None, 1, 1, None))
"""


def test_a_process_with_an_unfinished_background_write_ends_without_errors() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "prepared\n", "")
