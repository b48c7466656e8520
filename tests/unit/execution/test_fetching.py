"""States for the chains to come are loaded while training continues, which changes no bit and fails nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from hpstage.checkpoints import LiveCache
from hpstage.errors import CheckpointCorrupt, CheckpointMissing, CheckpointUnreachable
from hpstage.execution.fetching import Fetcher
from hpstage.plan.facts import StateKey, StateReached
from hpstage.plan.messages import BoundaryReached, ChainEnded, ChainReport
from hpstage.testing.chains import chain, key
from tests.unit.execution.background import Played
from tests.unit.execution.test_saving import WAIT, Shaky, Sums, waits


class Watched(Shaky):
    """Records which states were loaded by whom, and runs a function before."""

    def __init__(self, path: Path, loading: Mapping[StateKey, Callable[[], None]] | None = None) -> None:
        super().__init__(path)
        self.loading = dict(loading or {})
        self.loaded: list[tuple[StateKey, str]] = []

    def load(self, key: StateKey) -> object:
        self.loaded.append((key, threading.current_thread().name))
        if key in self.loading:
            self.loading[key]()
        return super().load(key)


def kept_by_another(folder: Path, *steps: int) -> None:
    """States that another worker has kept."""
    Played(Sums(), Shaky(folder), background=False).run(chain("other", max(steps), *steps))


def reached(reports: list[ChainReport]) -> list[StateReached]:
    return [report.reached for report in reports if isinstance(report, BoundaryReached)]


def test_a_chain_starts_from_a_state_loaded_in_the_background_during_the_previous_chain(tmp_path: Path) -> None:
    kept_by_another(tmp_path, 3, 6)
    fetched = threading.Event()
    store = Watched(tmp_path, {key(6): fetched.set})

    def expect() -> None:
        played.bundle.expect([key(6)])
        assert fetched.wait(WAIT), "it is loaded though training stands in its step"

    played = Played(Sums({4: expect}), store, background=True)
    played.run(chain("a", 5, start=3))
    [last] = reached(played.run(chain("b", 9, start=6)))
    assert (last.source, last.metrics) == ("live", {"total": 9.0})
    assert [(of, name == "hpstage-fetch") for of, name in store.loaded] == [(key(3), False), (key(6), True)]


def test_a_state_needed_while_it_loads_in_the_background_is_not_loaded_twice(tmp_path: Path) -> None:
    kept_by_another(tmp_path, 6)
    wanted = threading.Event()
    store = Watched(tmp_path, {key(6): waits(wanted)})
    live = LiveCache()
    fetcher = Fetcher(store, live)
    fetcher.expect([key(6)])
    threading.Timer(0.05, wanted.set).start()
    assert fetcher.get(key(6)) is not None
    assert len(store.loaded) == 1


def test_a_state_needed_before_its_background_load_starts_is_not_loaded_in_the_background(tmp_path: Path) -> None:
    kept_by_another(tmp_path, 3, 6)
    go_on = threading.Event()
    store = Watched(tmp_path, {key(3): waits(go_on)})
    fetcher = Fetcher(store, LiveCache())
    fetcher.expect([key(3), key(6)])
    assert fetcher.get(key(6)) is None, "the caller loads it"
    go_on.set()
    assert fetcher.get(key(3)) is not None
    assert [of for of, _ in store.loaded] == [key(3)]


def test_a_new_list_of_expected_states_replaces_the_previous_list(tmp_path: Path) -> None:
    kept_by_another(tmp_path, 2, 4, 6)
    go_on = threading.Event()
    store = Watched(tmp_path, {key(2): waits(go_on)})
    live = LiveCache()
    fetcher = Fetcher(store, live)
    fetcher.expect([key(2), key(4)])
    fetcher.expect([key(6), key(2)])
    go_on.set()
    assert fetcher.get(key(2)) is not None
    for thread in threading.enumerate():
        if thread.name == "hpstage-fetch":
            thread.join(WAIT)
    assert [of for of, _ in store.loaded] == [key(2), key(6)]
    assert [each in live for each in (key(2), key(4), key(6))] == [True, False, True]


@pytest.mark.parametrize("error", [CheckpointMissing, CheckpointCorrupt, CheckpointUnreachable, MemoryError])
def test_a_state_that_cannot_be_loaded_in_the_background_fails_only_the_chain_that_needs_it(
    error: type[Exception], tmp_path: Path
) -> None:
    kept_by_another(tmp_path, 3)
    failed = threading.Event()

    def fail() -> None:
        failed.set()
        raise error("no")

    store = Watched(tmp_path, {key(6): fail})

    def expect() -> None:
        played.bundle.expect([key(6), key(3)])
        assert failed.wait(WAIT)

    played = Played(Sums({2: expect}), store, background=True)
    assert [r.step for r in reached(played.run(chain("a", 5)))] == [5]
    [last] = reached(played.run(chain("b", 9, start=3)))
    assert last.metrics == {"total": 9.0}
    if error is CheckpointMissing:
        end = played.run(chain("c", 9, start=6))[-1]
        assert isinstance(end, ChainEnded) and end.outcome == "unreadable"


def test_a_store_that_forbids_background_access_is_read_only_by_the_training_thread(tmp_path: Path) -> None:
    kept_by_another(tmp_path, 3)

    class Drawing(Watched):
        beside_training = False

    store, live = Drawing(tmp_path), LiveCache()
    Fetcher(store, live).expect([key(3)])
    played = Played(Sums(), store, background=True, live=live)
    assert [r.source for r in reached(played.run(chain("b", 9, start=3)))] == ["disk"]
    assert {name for _, name in store.loaded} == {threading.current_thread().name}
