"""What RedisJournal promises beyond the contract: servers that die, stall and refuse."""

from __future__ import annotations

import json
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import pytest

from hpstage.errors import StoreError
from hpstage.store import Cursor, RedisJournal, redis_scripts
from hpstage.store import redis_server as redis_server_module
from hpstage.store.redis import CHUNK
from tests.redis_server import RedisServer

pytestmark = pytest.mark.redis
StartRedis = Callable[..., RedisServer]

# Appends batches of 1 to 4 records, and writes down the position of each when it is acknowledged.
WRITER = """
import sys
from hpstage.store import RedisJournal
url, writer, batches = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
journal = RedisJournal(url)
for batch in range(batches):
    records = [b"%d %d %d" % (writer, batch, part) for part in range(1 + batch % 4)]
    print(journal.append(records), flush=True)
"""

FORK = """
import os, sys
from hpstage.errors import StoreError
from hpstage.store import RedisJournal
journal = RedisJournal(sys.argv[1], prefix="fork")
if os.fork() == 0:
    try:
        journal.append([b"x"])
    except StoreError as error:
        print("child:", type(error).__name__, flush=True)
    journal.close()
    os._exit(0)
os.wait()
print("parent:", journal.append([b"y"]))
"""


def check_writers(records: list[bytes], positions: list[list[int]]) -> None:
    """Every batch is there, whole, once, at the position that its writer received."""
    assert len(records) == sum(1 + batch % 4 for starts in positions for batch in range(len(starts)))
    for writer, starts in enumerate(positions):
        assert starts == sorted(starts)
        for batch, start in enumerate(starts):
            expected = [b"%d %d %d" % (writer, batch, part) for part in range(1 + batch % 4)]
            assert records[start : start + len(expected)] == expected


# --- servers that die and stall -----------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_a_killed_redis_server_loses_no_acknowledged_record_and_applies_none_twice(
    redis_server: RedisServer, kills: int
) -> None:
    batches = 150 * kills
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, redis_server.url, str(writer), str(batches)], stdout=subprocess.PIPE
        )
        for writer in range(3)
    ]
    with closing(RedisJournal(redis_server.url)) as journal, ThreadPoolExecutor(3) as pool:
        outputs = [pool.submit(writer.communicate) for writer in writers]
        for kill in range(kills):
            # All three are in the middle of their work, at a moment that differs from kill to kill.
            while len(journal) <= 100 + 500 * kill:
                assert any(writer.poll() is None for writer in writers)
                time.sleep(0.005)
            redis_server.kill()
            redis_server.start()
        positions = [list(map(int, output.result()[0].split())) for output in outputs]
        assert [writer.returncode for writer in writers] == [0, 0, 0]
        assert [len(starts) for starts in positions] == [batches] * 3
        check_writers(journal.read(), positions)


def test_an_append_to_a_paused_redis_server_is_applied_once_when_the_server_continues(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_server_module, "SOCKET_TIMEOUT", 0.1)
    with closing(RedisJournal(redis_server.url)) as journal:
        journal.append([b"a"])
        redis_server.freeze()
        thaw = threading.Timer(0.5, redis_server.thaw)  # after some tries, each on a connection of its own
        thaw.start()
        assert journal.append([b"b", b"c"]) == 1
        thaw.join()
        assert journal.append([b"d"]) == 3
        assert journal.read() == [b"a", b"b", b"c", b"d"]


def test_an_append_that_timed_out_is_not_applied_after_a_later_append(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_server_module, "SOCKET_TIMEOUT", 0.1)
    with closing(RedisJournal(redis_server.url, patience=0.2)) as journal:
        journal.append([b"a"])
        redis_server.freeze()
        with pytest.raises(StoreError, match="does not answer"):
            journal.append([b"given up"])
        redis_server.thaw()
        position = journal.append([b"b"])
        assert journal.read() in ([b"a", b"b"], [b"a", b"given up", b"b"])
        assert position == len(journal) - 1
        # As it would come by a network that held it back.
        late: list[Any] = [journal._id, journal._handle, 2, "", "", 0, b"given up"]
        assert journal._server.run(redis_scripts.APPEND, journal._keys, late) == [b"late"]


def test_an_open_journal_and_its_leases_survive_a_restart_of_the_redis_server(redis_server: RedisServer) -> None:
    with closing(RedisJournal(redis_server.url)) as journal, ThreadPoolExecutor(1) as pool:
        journal.append([b"a"])
        token = journal.acquire("node", "me", 100)
        assert token is not None
        redis_server.kill()
        length = pool.submit(len, journal)
        redis_server.start()
        assert length.result() == 1
        assert journal.acquire("node", "you", 100) is None
        assert not journal.renew_all({"node": token}, 100)
        assert journal.append([b"b"], fences={"node": token}) == 1
        assert journal.read() == [b"a", b"b"]


def test_a_journal_names_an_unreachable_redis_server_and_works_again_after_its_restart(
    redis_server: RedisServer,
) -> None:
    with closing(RedisJournal(redis_server.url, patience=0.2)) as journal:
        redis_server.kill()
        with pytest.raises(StoreError, match=rf"redis://127.0.0.1:{redis_server.port}.*does not answer.*run again"):
            journal.append([b"a"])
        with pytest.raises(StoreError, match="does not answer"):
            RedisJournal(redis_server.url, patience=0.2)
        redis_server.start()
        assert journal.append([b"b"]) == 0


def test_a_long_outage_of_the_server_and_its_end_are_logged_once(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_server_module, "SILENCE", 0.1)
    with closing(RedisJournal(redis_server.url)) as journal, ThreadPoolExecutor(3) as pool:
        redis_server.kill()
        appended = [pool.submit(journal.append, [record]) for record in (b"a", b"b", b"c")]
        while not caplog.records and not any(future.done() for future in appended):
            threading.Event().wait(0.01)
        redis_server.start()
        assert sorted(future.result() for future in appended) == [0, 1, 2]
    where = f"redis://127.0.0.1:{redis_server.port}"
    away, back = (record.getMessage() for record in caplog.records)
    assert away.startswith(f"{where} does not answer") and "waiting for it" in away
    assert back.startswith(f"{where} answers again, after ")


def test_a_short_outage_of_the_server_is_not_logged(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(RedisJournal(redis_server.url)) as journal:
        redis_server.kill()
        redis_server.start()
        assert journal.append([b"a"]) == 0
    assert not caplog.records


# --- servers that refuse ------------------------------------------------------------------------------------


def test_a_redis_server_out_of_memory_is_reported_with_a_remedy_and_no_append_is_partial(
    redis_server: RedisServer,
) -> None:
    with closing(RedisJournal(redis_server.url)) as journal, redis_server.client() as client:
        token = journal.acquire("node", "me", 100)
        assert token is not None
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 2_000_000)
        acknowledged = 0

        def append_on_and_on() -> None:
            nonlocal acknowledged
            while True:
                journal.append([b"x" * 50_000] * 3)
                acknowledged += 3

        with pytest.raises(StoreError, match="out of memory; raise its maxmemory"):
            append_on_and_on()
        assert len(journal) == acknowledged > 0
        client.config_set("maxmemory", 1)  # a small value might still fit
        with pytest.raises(StoreError, match="out of memory"):
            journal.acquire("other", "me", 100)
        assert journal.release("node", token)
        assert journal.holder("other") is None
        client.config_set("maxmemory", 0)
        assert journal.append([b"x"]) == acknowledged
        assert len(journal) == acknowledged + 1


def test_a_redis_replica_can_be_read_and_refuses_writes_with_a_remedy(start_redis: StartRedis) -> None:
    primary = start_redis()
    replica = start_redis("--replicaof", "127.0.0.1", str(primary.port))
    with closing(RedisJournal(primary.url)) as journal, primary.client() as client:
        token = journal.acquire("node", "me", 100)
        assert token is not None
        journal.append([b"a"])
        assert client.wait(1, 30_000) == 1
        with closing(RedisJournal(replica.url)) as copy:
            assert copy.read() == [b"a"]
            lease = copy.holder("node")
            assert lease is not None and lease.token == token
            for call in (
                lambda: copy.append([b"b"]),
                lambda: copy.acquire("node", "you", 100),
                lambda: copy.renew_all({"node": token}, 100),
                lambda: copy.release("node", token),
            ):
                with pytest.raises(StoreError, match="read-only replica; give the address of the primary"):
                    call()
    with pytest.raises(StoreError, match="read-only replica"):
        RedisJournal(replica.url, prefix="new")


@pytest.mark.parametrize("key", ["log", "about", "handles", "leases", "snapshot"])
@pytest.mark.parametrize("kind", ["text", "hash", "stream"])
def test_redis_keys_of_other_programs_under_the_prefix_are_refused_and_left_unchanged(
    shared_redis: RedisServer, key: str, kind: str
) -> None:
    name = f"{{foreign {key} {kind}}}:{key}"
    with shared_redis.client() as client:
        match kind:
            case "text":
                client.set(name, "x")
            case "hash":
                client.hset(name, "x", "y")
            case _:
                client.xadd(name, {"x": "y"})
        before = client.dump(name)
        with pytest.raises(StoreError, match=f"key {name} holds something else.*choose another prefix"):
            RedisJournal(shared_redis.url, prefix=f"foreign {key} {kind}")
        assert client.dump(name) == before
        assert client.keys(f"{{foreign {key} {kind}}}*") == [name.encode()]


def test_a_redis_key_overwritten_while_in_use_is_reported_with_a_remedy(shared_redis: RedisServer) -> None:
    with closing(RedisJournal(shared_redis.url, prefix="overwritten")) as journal, shared_redis.client() as client:
        journal.append([b"a"])
        client.set("{overwritten}:log", "x")
        with pytest.raises(StoreError, match="holds something else; choose another prefix"):
            journal.append([b"b"])


@pytest.mark.parametrize(
    ("by", "said"), [(1, r"newer hpstage \(format \d+.*upgrade"), (-1, r"older hpstage \(format \d+.*another prefix")]
)
def test_a_journal_of_another_format_is_refused(shared_redis: RedisServer, by: int, said: str) -> None:
    prefix = f"format{by}"
    RedisJournal(shared_redis.url, prefix=prefix).close()
    with shared_redis.client() as client:
        client.hset(f"{{{prefix}}}:about", "format", redis_scripts.FORMAT + by)
    with pytest.raises(StoreError, match=said):
        RedisJournal(shared_redis.url, prefix=prefix)


def test_a_redis_server_that_is_too_old_is_refused(shared_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    # No such server can be had here: only what it says of itself is made up.
    monkeypatch.setattr(redis_server_module.RedisServer, "command", lambda *_, **__: {"redis_version": "6.0.16"})
    with pytest.raises(StoreError, match=r"is Redis 6\.0\.16; hpstage needs 6\.2"):
        RedisJournal(shared_redis.url)


def test_a_redis_server_that_may_evict_keys_is_refused(start_redis: StartRedis) -> None:
    server = start_redis("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    with pytest.raises(StoreError, match=r"allkeys-lru.*set it to noeviction"):
        RedisJournal(server.url)


@pytest.mark.parametrize("name", ["EVALSHA", "XADD", "XRANGE", "INFO"])
@pytest.mark.parametrize("new", ["", "hidden"])
def test_a_redis_server_with_renamed_commands_is_refused_with_a_remedy(
    start_redis: StartRedis, name: str, new: str
) -> None:
    url = start_redis("--rename-command", name, new).url

    def use() -> None:
        with closing(RedisJournal(url)) as journal:
            journal.append([b"a"])
            journal.read()

    with pytest.raises(StoreError, match="does not know a command that hpstage needs; undo its rename-command"):
        use()


def test_a_missing_redis_database_number_is_refused_with_a_remedy(shared_redis: RedisServer) -> None:
    with pytest.raises(StoreError, match="no database of this number; give another in the URL"):
        RedisJournal(f"{shared_redis.url}/99")


def test_the_address_of_a_server_that_is_not_redis_is_refused() -> None:
    class Web(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1000)
            self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Web) as web:
        threading.Thread(target=web.serve_forever, args=(0.01,), daemon=True).start()
        with pytest.raises(StoreError, match="no Redis server; fix the address"):
            RedisJournal(f"redis://127.0.0.1:{web.server_address[1]}", patience=0.2)
        web.shutdown()


def test_a_record_that_is_not_bytes_is_refused_and_nothing_is_appended(shared_redis: RedisServer) -> None:
    with closing(RedisJournal(shared_redis.url, prefix="no bytes")) as journal:
        with pytest.raises(StoreError):
            journal.append([b"a", object()])  # type: ignore[list-item]
        assert len(journal) == 0
        assert journal.append([b"a"]) == 0


# --- the rest -----------------------------------------------------------------------------------------------


def test_each_prefix_is_a_separate_store(shared_redis: RedisServer) -> None:
    with (
        closing(RedisJournal(shared_redis.url, prefix="one")) as one,
        closing(RedisJournal(shared_redis.url, prefix="two")) as two,
    ):
        one.append([b"a"])
        assert one.acquire("node", "me", 100) is not None
        assert two.append([b"b"], expect=Cursor()) == 0
        assert two.acquire("node", "you", 100) is not None
        assert (one.read(), two.read()) == ([b"a"], [b"b"])


def test_a_journal_longer_than_one_redis_reply_is_read_completely(shared_redis: RedisServer) -> None:
    records = [b"%d" % number for number in range(2 * CHUNK + 10)]
    with closing(RedisJournal(shared_redis.url, prefix="long")) as journal:
        journal.append(records)
        assert journal.read() == records
        assert journal.read(5, CHUNK + 7) == records[5 : CHUNK + 12]
        assert journal.read(2 * CHUNK) == records[2 * CHUNK :]


def test_lua_scripts_are_sent_again_after_the_redis_server_has_flushed_them(shared_redis: RedisServer) -> None:
    with closing(RedisJournal(shared_redis.url, prefix="scripts")) as journal, shared_redis.client() as client:
        journal.append([b"a"])
        client.script_flush()
        assert journal.append([b"b"]) == 1


def test_a_closed_journal_leaves_no_handle_on_the_redis_server(shared_redis: RedisServer) -> None:
    with shared_redis.client() as client:
        with closing(RedisJournal(shared_redis.url, prefix="handles")) as journal:
            for _ in range(10):
                journal.append([b"a"])
            assert client.hlen("{handles}:handles") == 1
        assert client.hlen("{handles}:handles") == 0


def test_a_journal_opened_before_a_fork_is_refused_in_the_child_process(shared_redis: RedisServer) -> None:
    # In a process of its own: pytest may run threads, which do not go well with a fork.
    done = subprocess.run([sys.executable, "-c", FORK, shared_redis.url], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["child: StoreError", "parent: 0"], done.stderr


def test_calls_in_progress_raise_a_store_error_when_the_journal_is_closed(shared_redis: RedisServer) -> None:
    for _ in range(20):
        journal = RedisJournal(shared_redis.url, prefix="closing")
        started = threading.Barrier(4)

        def work(journal: RedisJournal = journal, started: threading.Barrier = started) -> None:
            started.wait()
            with suppress(StoreError):
                while True:
                    journal.append([json.dumps(len(journal)).encode()])
                    journal.read(len(journal) - 1)

        with ThreadPoolExecutor(3) as pool:
            working = [pool.submit(work) for _ in range(3)]
            started.wait()
            enough = len(journal) + 5
            while len(journal) <= enough:
                time.sleep(0.001)
            journal.close()
            for each in working:
                each.result()
