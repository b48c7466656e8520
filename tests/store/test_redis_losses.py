"""What RedisJournal does about servers and people that make records disappear: it notices, and refuses to go back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from hpstage.errors import HistoryChanged, StoreError
from hpstage.store import Cursor, RedisJournal
from hpstage.store.redis import CHUNK
from tests.redis_server import RedisServer

pytestmark = pytest.mark.redis
StartRedis = Callable[..., RedisServer]


def test_a_redis_server_without_an_append_only_file_causes_a_warning(
    start_redis: StartRedis, shared_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    RedisJournal(shared_redis.url, prefix="warned of").close()
    assert caplog.messages == []
    RedisJournal(start_redis("--appendonly", "no").url).close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "set appendonly yes" in caplog.messages[0]


@pytest.mark.parametrize("new_store", [False, True])
def test_an_open_journal_refuses_a_redis_server_that_lost_its_records(start_redis: StartRedis, new_store: bool) -> None:
    server = start_redis("--appendonly", "no")
    with closing(RedisJournal(server.url)) as journal:
        token = journal.acquire("node", "me", 100)
        assert token is not None
        journal.append([b"a", b"b"])
        server.kill()
        server.start()
        if new_store:
            with closing(RedisJournal(server.url)) as other:
                other.append([b"another", b"log", b"longer"])
        for call in (
            lambda: journal.append([b"c"]),
            lambda: journal.read(),
            lambda: len(journal),
            lambda: journal.acquire("other", "me", 100),
            lambda: journal.renew_all({"node": token}, 100),
        ):
            with pytest.raises(StoreError, match="has lost records"):
                call()


@pytest.mark.parametrize("refilled", [0, 1, 2, 3])
def test_lost_redis_records_are_detected_even_if_another_process_appended_new_ones(
    redis_server: RedisServer, refilled: int
) -> None:
    with closing(RedisJournal(redis_server.url)) as journal, closing(RedisJournal(redis_server.url)) as other:
        journal.append([b"a"])
        copy = redis_server.save()
        read = Cursor().after([b"a"])
        assert journal.append([b"b", b"c"], expect=read) == 1
        read = read.after([b"b", b"c"])
        redis_server.kill()
        redis_server.put_back(copy)
        redis_server.start()
        current = Cursor().after([b"a"])
        for record in (b"b", b"x", b"y")[:refilled]:
            assert other.append([record], expect=current) == current.position
            current = current.after([record])
        for call in (lambda: journal.append([b"d"], expect=read), lambda: journal.read_on(read)):
            with pytest.raises(HistoryChanged, match="has lost records: the 3 that this process has read are not"):
                call()
        # A reader that starts at the beginning continues from the current records.
        assert journal.read_on(Cursor())[1] == current
        assert journal.append([b"d"], expect=current) == current.position


@pytest.mark.parametrize(
    "remove", [("XTRIM", "MAXLEN", "2"), ("XTRIM", "MAXLEN", "0"), ("XDEL", "2-0"), ("XDEL", "4-0")], ids=" ".join
)
def test_entries_removed_from_the_redis_log_are_detected(redis_server: RedisServer, remove: tuple[str, ...]) -> None:
    records = [b"a", b"b", b"c", b"d"]
    with closing(RedisJournal(redis_server.url)) as journal, redis_server.client() as client:
        journal.append(records)
        client.execute_command(remove[0], "{hpstage}:log", *remove[1:])
        with closing(RedisJournal(redis_server.url)) as current:
            for call in (
                lambda: journal.append([b"e"], expect=Cursor().after(records)),
                lambda: journal.append([b"e"]),
                lambda: journal.read_on(Cursor().after(records)),
                lambda: len(journal),
                lambda: current.read(),
            ):
                with pytest.raises(StoreError, match="XTRIM"):
                    call()


def test_reading_raises_if_the_redis_log_is_replaced_between_two_replies(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(RedisJournal(redis_server.url)) as journal, redis_server.client() as client:
        old, new = (RedisJournal(redis_server.url, prefix=prefix) for prefix in ("old", "new"))
        journal.append([b"a"])
        old.append([b"0"] * (CHUNK + 1))
        new.append([b"1"] * (CHUNK + 1))
        replies = 0
        command: Any = old._server.command

        def swap_after(*arguments: object) -> Any:
            nonlocal replies
            reply = command(*arguments)
            replies += 1
            client.restore("{old}:log", 0, client.dump("{new}:log"), replace=True)
            return reply

        monkeypatch.setattr(old._server, "command", swap_after)
        with pytest.raises(HistoryChanged):
            old.read_on(Cursor())
        assert replies == 2
        monkeypatch.undo()
        old.close()
        new.close()


def test_lease_tokens_keep_growing_after_redis_is_restored_to_an_earlier_state(redis_server: RedisServer) -> None:
    with closing(RedisJournal(redis_server.url)) as journal, redis_server.client() as client:
        earlier = {key: client.dump(key) for key in client.keys("{hpstage}:*")}
        token = journal.acquire("node", "me", 100)
        for key, content in earlier.items():
            client.restore(key, 0, content, replace=True)
        client.delete("{hpstage}:leases")
        new = journal.acquire("node", "you", 100)
        assert token is not None and new is not None and new > token


def test_reading_raises_if_records_were_trimmed_from_the_redis_log(shared_redis: RedisServer) -> None:
    with closing(RedisJournal(shared_redis.url, prefix="trimmed")) as journal, shared_redis.client() as client:
        journal.append([b"a", b"b", b"c"])
        client.xtrim("{trimmed}:log", maxlen=1, approximate=False)
        with pytest.raises(StoreError, match="has lost records"):
            journal.read()


def test_a_deleted_redis_log_is_refused_and_not_started_again(shared_redis: RedisServer) -> None:
    with closing(RedisJournal(shared_redis.url, prefix="deleted")) as journal, shared_redis.client() as client:
        assert journal.read() == []
        journal.append([b"a"])
        client.delete("{deleted}:log")
        with closing(RedisJournal(shared_redis.url, prefix="deleted")) as other:
            for use in (other.read, lambda: other.append([b"b"]), journal.read):
                with pytest.raises(StoreError, match=r"has lost records .*DEL"):
                    use()
