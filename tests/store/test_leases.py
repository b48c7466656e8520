"""Leases outlast what happens to those who hold them: death, standstill, clocks that jump, hosts that restart."""

from __future__ import annotations

import functools
import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from hpstage.errors import LeaseLost, StoreError
from hpstage.store import Journal, RedisJournal, SQLiteJournal
from tests.redis_server import RedisServer

_prefixes = (f"leases {number}" for number in itertools.count())

# Takes a lease, prints its token, and commits with it each line that it reads.
OWNER = """
import sys
from hpstage.errors import LeaseLost
from hpstage.store import RedisJournal, SQLiteJournal
kind, place, prefix, seconds = sys.argv[1:]
store = SQLiteJournal(place) if kind == "sqlite" else RedisJournal(place, prefix=prefix)
token = store.acquire("node", "owner", float(seconds))
print(token, flush=True)
for line in sys.stdin:
    try:
        print(store.append([line.strip().encode()], fences={"node": token}), flush=True)
    except LeaseLost as error:
        print(error, flush=True)
"""


class Place:
    """A store of this test, for this process and for others."""

    def __init__(self, open_store: Callable[[], Journal], *arguments: str) -> None:
        self.open = open_store
        self._arguments = arguments

    def start_owner(self, seconds: float) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", OWNER, *self._arguments, str(seconds)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.redis)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "sqlite":
        path = tmp_path / "journal.db"
        return Place(functools.partial(SQLiteJournal, path), "sqlite", str(path), "")
    server: RedisServer = request.getfixturevalue("shared_redis")
    prefix = next(_prefixes)
    return Place(functools.partial(RedisJournal, server.url, prefix=prefix), "redis", server.url, prefix)


def take_over(store: Journal) -> int:
    """Ask for the lease until its owner's time is over."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        token = store.acquire("node", "heir", 100)
        if token is not None:
            return token
    raise AssertionError("the lease has not expired")


def say(owner: subprocess.Popen[str], line: str) -> str:
    assert owner.stdin is not None and owner.stdout is not None
    owner.stdin.write(line)
    owner.stdin.flush()
    return owner.stdout.readline().strip()


def test_the_lease_of_a_killed_owner_can_be_acquired_after_it_expires(place: Place) -> None:
    with place.start_owner(0.5) as owner, closing(place.open()) as store:
        token = int(say(owner, ""))
        owner.kill()
        assert take_over(store) > token


def test_a_suspended_owner_cannot_append_after_another_has_taken_its_lease(place: Place) -> None:
    with place.start_owner(0.5) as owner, closing(place.open()) as store:
        say(owner, "")
        assert say(owner, "in time\n") == "0"
        owner.send_signal(signal.SIGSTOP)
        token = take_over(store)
        assert store.append([b"the heir's"], fences={"node": token}) == 1
        owner.send_signal(signal.SIGCONT)
        assert say(owner, "too late\n").startswith("the leases 'node' are no longer held")
        assert store.read() == [b"in time", b"the heir's"]


def test_a_suspended_owner_can_append_if_nobody_took_its_expired_lease(place: Place) -> None:
    with place.start_owner(0.05) as owner, closing(place.open()) as store:
        say(owner, "")
        owner.send_signal(signal.SIGSTOP)
        while store.holder("node") is not None:
            pass
        owner.send_signal(signal.SIGCONT)
        assert say(owner, "late, but alone\n") == "0"


def test_a_wall_clock_that_is_wrong_by_an_hour_neither_frees_nor_prolongs_leases(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(place.open()) as store:
        token = store.acquire("node", "me", 100)
        right = time.time
        for wrong in (3600, -3600):
            monkeypatch.setattr(time, "time", lambda wrong=wrong: right() + wrong)
            with closing(place.open()) as other:
                assert other.acquire("node", "you", 100) is None
                lease = other.holder("node")
                assert lease is not None and lease.token == token and 0 < lease.seconds <= 100


def test_leases_from_before_a_restart_of_the_host_can_be_acquired(tmp_path: Path) -> None:
    now = 1_000_000.0
    with closing(SQLiteJournal(tmp_path / "journal.db", clock=lambda: now)) as store:
        token = store.acquire("node", "me", 1e9)
        assert token is not None
        now = 20.0  # the clock counts from the host's start
        assert store.holder("node") is None
        new = store.acquire("node", "you", 100)
        assert new is not None and new > token
        with pytest.raises(LeaseLost):
            store.append([b"a"], fences={"node": token})


@pytest.mark.redis
def test_a_redis_server_whose_clock_is_set_back_neither_frees_nor_prolongs_leases(shared_redis: RedisServer) -> None:
    prefix = next(_prefixes)
    with closing(RedisJournal(shared_redis.url, prefix=prefix)) as store, shared_redis.client() as client:

        def set_clock(seconds: float) -> None:
            client.hincrby(f"{{{prefix}}}:about", "offset", round(seconds * 1_000_000))

        token = store.acquire("node", "me", 100)
        assert token is not None
        set_clock(-3600)
        assert store.acquire("node", "you", 100) is None
        lease = store.holder("node")
        assert lease is not None and 90 < lease.seconds <= 100
        set_clock(101)
        assert store.holder("node") is None
        new = store.acquire("node", "you", 100)
        assert new is not None and new > token


@pytest.mark.redis
def test_an_owner_keeps_its_lease_by_renewing_it_after_the_redis_clock_is_set_ahead(shared_redis: RedisServer) -> None:
    prefix = next(_prefixes)
    with closing(RedisJournal(shared_redis.url, prefix=prefix)) as store, shared_redis.client() as client:
        token = store.acquire("node", "me", 100)
        assert token is not None
        client.hincrby(f"{{{prefix}}}:about", "offset", 3_600_000_000)
        assert store.append([b"a"], fences={"node": token}) == 0
        assert not store.renew_all({"node": token}, 100)
        assert store.acquire("node", "you", 100) is None


@pytest.mark.redis
def test_fifty_leases_survive_a_restart_of_the_redis_server(redis_server: RedisServer) -> None:
    with closing(RedisJournal(redis_server.url)) as store:
        tokens = store.acquire_all([f"node {number}" for number in range(50)], "me", 100)
        assert tokens is not None
        redis_server.kill()
        redis_server.start()
        assert store.renew_all(tokens, 100) == set()
        assert store.append([b"a"], fences=tokens) == 0


def test_lease_lost_is_a_store_error_that_names_the_leases() -> None:
    error = LeaseLost(["b", "a"])
    assert isinstance(error, StoreError)
    assert error.names == ("a", "b")
    assert "'a', 'b'" in str(error)
