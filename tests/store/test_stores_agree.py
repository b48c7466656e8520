"""Memory, SQLite and Redis, driven by the same calls in any order, agree at every step."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from hpstage.errors import HistoryChanged, LeaseLost
from hpstage.store import Cursor, Journal, MemoryJournal, RedisJournal, SQLiteJournal
from tests.redis_server import RedisServer

NAMES = ["a", "b", "c"]
HANDLE = st.integers(0, 1)
RECORDS = st.lists(st.binary(max_size=8), max_size=4)
CURSOR = RECORDS.map(Cursor().after)
OWNER = st.sampled_from(["me", "you"])
SEVERAL = st.lists(st.sampled_from(NAMES), max_size=4)
# Redis runs by real time besides: with steps of 100 s the seconds that the test takes make no difference.
SECONDS = st.integers(1, 3).map(lambda count: 100.0 * count)
# By name, which of the tokens given so far is presented, counted from the last; at times 0, which is never given.
PRESENTED = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 4), max_size=3)

_prefixes = (f"agree {number}" for number in itertools.count())


class StoresAgree(RuleBasedStateMachine):
    """SQLite and Redis have two handles each. Tokens differ between stores: they are compared by their order."""

    def __init__(self, server: RedisServer | None) -> None:
        super().__init__()
        self.server = server
        self.folder = tempfile.TemporaryDirectory()
        self.now = 0.0
        memory = MemoryJournal(clock=lambda: self.now)
        self.open: dict[str, Callable[[], Journal]] = {"memory": lambda: memory, "sqlite": self.open_sqlite}
        if server is not None:
            self.prefix = next(_prefixes)
            self.open["redis"] = lambda: RedisJournal(server.url, prefix=self.prefix)
        self.handles = {store: [self.open[store](), self.open[store]()] for store in self.open}
        # For each store and name, its tokens in the order in which they were given.
        self.tokens: dict[str, dict[str, list[int]]] = {store: {name: [] for name in NAMES} for store in self.open}

    def open_sqlite(self) -> Journal:
        return SQLiteJournal(Path(self.folder.name) / "journal.db", clock=lambda: self.now)

    def all_agree(self, handle: int, call: Callable[[Journal, str], Any]) -> Any:
        """What the call does to each store; it must be the same. ``call`` is given the store's name too."""
        outcomes: dict[str, Any] = {}
        for store, handles in self.handles.items():
            try:
                outcomes[store] = call(handles[handle], store)
            except LeaseLost as lost:
                outcomes[store] = lost.names
            except HistoryChanged:
                outcomes[store] = HistoryChanged
        assert all(outcome == outcomes["memory"] for outcome in outcomes.values()), outcomes
        return outcomes["memory"]

    def presented(self, store: str, presented: dict[str, int]) -> dict[str, int]:
        return {
            name: self.tokens[store][name][-1 - back] if back < len(self.tokens[store][name]) else 0
            for name, back in presented.items()
        }

    @initialize(records=RECORDS, owner=OWNER, seconds=SECONDS, names=SEVERAL)
    def begin(self, records: list[bytes], owner: str, seconds: float, names: list[str]) -> None:
        self.append(0, records, None, {})
        self.acquire(0, names, owner, seconds)

    @rule(handle=HANDLE, records=RECORDS, expect=st.none() | CURSOR, fences=PRESENTED)
    def append(self, handle: int, records: list[bytes], expect: Cursor | None, fences: dict[str, int]) -> None:
        self.all_agree(
            handle,
            lambda journal, store: journal.append(records, expect=expect, fences=self.presented(store, fences)),
        )

    @rule(handle=HANDLE, records=RECORDS, name=st.sampled_from(NAMES))
    def append_with_the_last_token_to_what_was_read(self, handle: int, records: list[bytes], name: str) -> None:
        self.append(handle, records, Cursor().after(self.handles["memory"][0].read()), {name: 0})

    @rule(handle=HANDLE, start=st.integers(0, 20), limit=st.none() | st.integers(0, 20))
    def read(self, handle: int, start: int, limit: int | None) -> None:
        self.all_agree(handle, lambda journal, store: journal.read(start, limit))

    @rule(handle=HANDLE, cursor=CURSOR, limit=st.none() | st.integers(0, 20))
    def read_on(self, handle: int, cursor: Cursor, limit: int | None) -> None:
        self.all_agree(handle, lambda journal, store: journal.read_on(cursor, limit))

    @rule(handle=HANDLE, passed=st.integers(0, 20), limit=st.none() | st.integers(0, 20))
    def read_on_from_what_was_read(self, handle: int, passed: int, limit: int | None) -> None:
        self.read_on(handle, Cursor().after(self.handles["memory"][0].read(0, passed)), limit)

    @rule(handle=HANDLE, names=SEVERAL, owner=OWNER, seconds=SECONDS)
    def acquire(self, handle: int, names: list[str], owner: str, seconds: float) -> None:
        def acquire(leases: Journal, store: str) -> dict[str, int] | None:
            before = self.tokens[store]
            last = max((token for tokens in before.values() for token in tokens), default=0)
            given = leases.acquire_all(names, owner, seconds)
            if given is None:
                return None
            for name, token in given.items():
                if token not in before[name]:
                    assert token > last
                    before[name].append(token)
            return {name: before[name].index(token) for name, token in given.items()}

        self.all_agree(handle, acquire)

    @rule(handle=HANDLE, tokens=PRESENTED, seconds=SECONDS)
    def renew(self, handle: int, tokens: dict[str, int], seconds: float) -> None:
        self.all_agree(handle, lambda leases, store: leases.renew_all(self.presented(store, tokens), seconds))

    @rule(handle=HANDLE, tokens=PRESENTED)
    def release(self, handle: int, tokens: dict[str, int]) -> None:
        self.all_agree(handle, lambda leases, store: leases.release_all(self.presented(store, tokens)))

    @rule(count=st.integers(1, 3))
    def time_passes(self, count: int) -> None:
        self.now += 100 * count
        if self.server is not None:
            with self.server.client() as client:
                client.hincrby(f"{{{self.prefix}}}:about", "offset", 100_000_000 * count)

    @rule(handle=HANDLE)
    def reopen(self, handle: int) -> None:
        for store in self.handles.keys() - {"memory"}:
            self.handles[store][handle].close()
            self.handles[store][handle] = self.open[store]()

    @rule()
    def connections_break(self) -> None:
        if self.server is not None:
            with self.server.client() as client:
                client.client_kill_filter(_type="normal")

    @invariant()
    def lengths_agree(self) -> None:
        self.all_agree(0, lambda journal, store: len(journal))
        self.all_agree(1, lambda journal, store: len(journal))

    @invariant()
    def holders_agree(self) -> None:
        def holder(leases: Journal, store: str, name: str) -> tuple[str, int, int] | None:
            lease = leases.holder(name)
            if lease is None:
                return None
            return lease.owner, self.tokens[store][name].index(lease.token), -int(-lease.seconds // 100)

        for name in NAMES:
            self.all_agree(0, lambda leases, store, name=name: holder(leases, store, name))

    def teardown(self) -> None:
        for handles in self.handles.values():
            for handle in handles:
                handle.close()
        self.folder.cleanup()


def drive(server: RedisServer | None, examples: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        lambda: StoresAgree(server),
        settings=settings(max_examples=examples, stateful_step_count=30, deadline=None, derandomize=True),
    )


def test_memory_and_sqlite_journals_give_equal_answers_to_random_calls() -> None:
    drive(None, 10)


@pytest.mark.ci
@pytest.mark.redis
def test_memory_sqlite_and_redis_journals_give_equal_answers_to_random_calls(shared_redis: RedisServer) -> None:
    drive(shared_redis, 20)


@pytest.mark.redis
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_journals_give_equal_answers_in_a_thousand_random_sequences_of_calls(shared_redis: RedisServer) -> None:
    drive(shared_redis, 1000)
