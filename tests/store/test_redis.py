"""What RedisJournal promises beyond the contract: servers that die, stall, refuse and forget; TLS, passwords."""

from __future__ import annotations

import json
import logging
import shutil
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from hpstage.errors import HistoryChanged, StoreError, UsageError
from hpstage.store import Cursor, RedisJournal, redis_scripts
from hpstage.store import redis_server as redis_server_module
from hpstage.store.redis import CHUNK
from hpstage.store.redis_plans import open_redis
from tests.redis_server import RedisServer
from tests.tls_proxy import make_certificate, tls_proxy

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
def test_kill_9_of_the_server_amid_three_writers_loses_nothing_acknowledged_and_applies_nothing_twice(
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


def test_an_append_to_a_server_that_stands_still_is_applied_once_when_it_continues(
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


def test_an_append_that_was_given_up_is_not_applied_after_the_next(
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


def test_readers_and_leases_ride_through_a_restart(redis_server: RedisServer) -> None:
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


def test_a_server_that_stays_away_is_named_with_the_remedy_and_the_handle_works_when_it_is_back(
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


def test_a_server_that_is_away_for_longer_is_waited_for_aloud_once_and_greeted_when_it_is_back(
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


def test_a_short_absence_of_the_server_is_not_spoken_of(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(RedisJournal(redis_server.url)) as journal:
        redis_server.kill()
        redis_server.start()
        assert journal.append([b"a"]) == 0
    assert not caplog.records


# --- servers that refuse ------------------------------------------------------------------------------------


def test_a_server_out_of_memory_is_named_with_the_remedy_and_nothing_is_half_done(redis_server: RedisServer) -> None:
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


def test_a_replica_can_be_read_and_says_that_it_is_read_only(start_redis: StartRedis) -> None:
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
def test_foreign_keys_under_the_prefix_are_refused_and_left_unchanged(
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


def test_a_key_overwritten_while_in_use_is_named_with_the_remedy(shared_redis: RedisServer) -> None:
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


def test_a_server_that_is_too_old_is_refused(shared_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    # No such server can be had here: only what it says of itself is made up.
    monkeypatch.setattr(redis_server_module.RedisServer, "command", lambda *_, **__: {"redis_version": "6.0.16"})
    with pytest.raises(StoreError, match=r"is Redis 6\.0\.16; hpstage needs 6\.2"):
        RedisJournal(shared_redis.url)


def test_a_server_that_may_throw_keys_away_is_refused(start_redis: StartRedis) -> None:
    server = start_redis("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    with pytest.raises(StoreError, match=r"allkeys-lru.*set it to noeviction"):
        RedisJournal(server.url)


@pytest.mark.parametrize("name", ["EVALSHA", "XADD", "XRANGE", "INFO"])
@pytest.mark.parametrize("new", ["", "hidden"])
def test_a_server_whose_commands_are_renamed_is_named_with_the_remedy(
    start_redis: StartRedis, name: str, new: str
) -> None:
    url = start_redis("--rename-command", name, new).url

    def use() -> None:
        with closing(RedisJournal(url)) as journal:
            journal.append([b"a"])
            journal.read()

    with pytest.raises(StoreError, match="does not know a command that hpstage needs; undo its rename-command"):
        use()


def test_a_database_that_is_not_there_is_named_with_the_remedy(shared_redis: RedisServer) -> None:
    with pytest.raises(StoreError, match="no database of this number; give another in the URL"):
        RedisJournal(f"{shared_redis.url}/99")


def test_a_server_that_speaks_something_else_is_named_plainly() -> None:
    class Web(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1000)
            self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Web) as web:
        threading.Thread(target=web.serve_forever, args=(0.01,), daemon=True).start()
        with pytest.raises(StoreError, match="no Redis server; fix the address"):
            RedisJournal(f"redis://127.0.0.1:{web.server_address[1]}", patience=0.2)
        web.shutdown()


def test_a_record_that_is_no_bytes_is_refused_at_once_and_changes_nothing(shared_redis: RedisServer) -> None:
    with closing(RedisJournal(shared_redis.url, prefix="no bytes")) as journal:
        with pytest.raises(StoreError):
            journal.append([b"a", object()])  # type: ignore[list-item]
        assert len(journal) == 0
        assert journal.append([b"a"]) == 0


# --- servers that forget ------------------------------------------------------------------------------------


def test_a_server_without_an_append_only_file_is_warned_of(
    start_redis: StartRedis, shared_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    RedisJournal(shared_redis.url, prefix="warned of").close()
    assert caplog.messages == []
    RedisJournal(start_redis("--appendonly", "no").url).close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "set appendonly yes" in caplog.messages[0]


@pytest.mark.parametrize("new_store", [False, True])
def test_a_server_that_forgot_what_this_handle_has_seen_is_refused(start_redis: StartRedis, new_store: bool) -> None:
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
def test_a_server_that_lost_acknowledged_records_is_noticed_also_when_another_has_filled_it_again(
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
def test_a_log_of_which_somebody_has_removed_entries_is_noticed(
    redis_server: RedisServer, remove: tuple[str, ...]
) -> None:
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


def test_a_log_that_is_put_back_while_it_is_read_gives_nothing_of_two_histories(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(RedisJournal(redis_server.url)) as journal, redis_server.client() as client:
        old, new = (RedisJournal(redis_server.url, prefix=prefix) for prefix in ("old", "new"))
        journal.append([b"a"])
        old.append([b"0"] * (CHUNK + 1))
        new.append([b"1"] * (CHUNK + 1))
        replies = 0

        def swap_after(self: object, *arguments: object, command: Any = RedisJournal._command) -> Any:
            nonlocal replies
            reply = command(self, *arguments)
            replies += 1
            client.restore("{old}:log", 0, client.dump("{new}:log"), replace=True)
            return reply

        monkeypatch.setattr(RedisJournal, "_command", swap_after)
        with pytest.raises(HistoryChanged):
            old.read_on(Cursor())
        assert replies == 2
        old.close()
        new.close()


def test_tokens_grow_on_when_the_log_fell_back_to_an_earlier_state(redis_server: RedisServer) -> None:
    with closing(RedisJournal(redis_server.url)) as journal, redis_server.client() as client:
        earlier = {key: client.dump(key) for key in client.keys("{hpstage}:*")}
        token = journal.acquire("node", "me", 100)
        for key, content in earlier.items():
            client.restore(key, 0, content, replace=True)
        client.delete("{hpstage}:leases")
        new = journal.acquire("node", "you", 100)
        assert token is not None and new is not None and new > token


def test_records_that_were_deleted_are_missed(shared_redis: RedisServer) -> None:
    with closing(RedisJournal(shared_redis.url, prefix="trimmed")) as journal, shared_redis.client() as client:
        journal.append([b"a", b"b", b"c"])
        client.xtrim("{trimmed}:log", maxlen=1, approximate=False)
        with pytest.raises(StoreError, match="has lost records"):
            journal.read()


def test_a_deleted_log_is_not_started_again(shared_redis: RedisServer) -> None:
    with closing(RedisJournal(shared_redis.url, prefix="deleted")) as journal, shared_redis.client() as client:
        assert journal.read() == []
        journal.append([b"a"])
        client.delete("{deleted}:log")
        with closing(RedisJournal(shared_redis.url, prefix="deleted")) as other:
            for use in (other.read, lambda: other.append([b"b"]), journal.read):
                with pytest.raises(StoreError, match=r"has lost records .*DEL"):
                    use()


# --- addresses, passwords, TLS ------------------------------------------------------------------------------

PASSWORD = "s3cret/@:#x"
ENCODED = "s3cret%2F%40%3A%23x"


def everything_said(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error)


def test_passwords_are_used_and_never_shown(start_redis: StartRedis) -> None:
    server = start_redis("--requirepass", PASSWORD)
    with closing(RedisJournal(f"redis://:{ENCODED}@127.0.0.1:{server.port}/3")) as journal:
        assert journal.append([b"a"]) == 0
        assert repr(journal) == f"RedisJournal('redis://127.0.0.1:{server.port}/3', prefix='hpstage')"
        server.kill()
        journal._server._patience = 0.1
        with pytest.raises(StoreError) as away:
            journal.append([b"b"])
        assert "s3cret" not in everything_said(away.value)
    server.start()
    for user in ("", ":wrongs3cret@", "nobody:wrongs3cret@"):
        with pytest.raises(StoreError, match="refuses the user name or password") as refused:
            RedisJournal(f"redis://{user}127.0.0.1:{server.port}")
        assert "s3cret" not in everything_said(refused.value)


def test_a_password_for_a_server_that_has_none_is_named_plainly(shared_redis: RedisServer) -> None:
    with pytest.raises(StoreError, match="refuses the user name or password"):
        RedisJournal(f"redis://:s3cret@127.0.0.1:{shared_redis.port}")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3cret", "begins with redis://"),
        ("http://:s3cret@host", "begins with redis://"),
        (f"redis://:{PASSWORD}@host:6379", "as %2F"),
        ("redis://:s3cret@host:s3cret", "as %2F"),
        ("redis://:s3cret@host?s3cret=1", "options of this Redis URL cannot be understood"),
        ("redis://:s3cret@host?socket_timeout=s3cret", "options of this Redis URL cannot be understood"),
    ],
)
def test_a_url_that_cannot_be_read_is_refused_without_showing_it(url: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        RedisJournal(url)
    assert "s3cret" not in everything_said(refused.value)


@pytest.mark.parametrize("prefix", ["", "{a}", "a}"])
def test_a_prefix_that_cannot_be_is_refused(prefix: str) -> None:
    with pytest.raises(UsageError, match="without braces"):
        RedisJournal("redis://localhost", prefix=prefix)


def test_a_user_needs_no_more_than_the_keys_of_its_prefix(start_redis: StartRedis) -> None:
    server = start_redis()
    with server.client() as client:
        client.acl_setuser(
            "hp", enabled=True, passwords=["+pw"], keys=["{mine}:*"], categories=["+@all", "-@admin", "-@keyspace"]
        )
    url = f"redis://hp:pw@127.0.0.1:{server.port}"
    with pytest.raises(StoreError, match="this user may not do that; allow it"):
        RedisJournal(url, prefix="yours")
    with server.client() as client:
        client.acl_setuser("hp", commands=["+type", "+exists"], keys=["{mine}:*"])
        client.execute_command("ACL", "SETUSER", "hp", "on", "+type", "+exists")
    with closing(RedisJournal(url, prefix="mine")) as journal:
        assert journal.append([b"a"]) == 0
        assert journal.read() == [b"a"]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_tls_is_spoken_and_the_certificate_is_checked(
    shared_redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = make_certificate(tmp_path)
    with tls_proxy(shared_redis.port, certificate, key) as port:
        url = f"rediss://127.0.0.1:{port}"
        with closing(RedisJournal(f"{url}?ssl_ca_certs={certificate}", prefix="tls")) as journal:
            assert journal.append([b"x" * 100_000]) == 0
            assert journal.read() == [b"x" * 100_000]
            assert repr(journal) == f"RedisJournal('{url}', prefix='tls')"
        with pytest.raises(StoreError, match=r"certificate is not trusted.*ssl_ca_certs=FILE"):
            RedisJournal(url, prefix="tls")
    monkeypatch.setattr(redis_server_module, "SOCKET_TIMEOUT", 0.2)
    with pytest.raises(StoreError, match="see that the server runs, speaks TLS there and can be reached"):
        RedisJournal(f"rediss://127.0.0.1:{shared_redis.port}", patience=0.2)


def test_a_unix_socket_is_an_address(start_redis: StartRedis) -> None:
    with tempfile.TemporaryDirectory() as folder:  # a socket's path must be short
        start_redis("--unixsocket", f"{folder}/redis")
        with closing(RedisJournal(f"unix://{folder}/redis")) as journal:
            assert journal.append([b"a"]) == 0
            assert repr(journal) == f"RedisJournal('unix://{folder}/redis', prefix='hpstage')"
        with closing(open_redis(f"unix://{folder}/redis?db=0&prefix=ours", "theirs")) as journal:
            assert repr(journal) == f"RedisJournal('unix://{folder}/redis', prefix='ours')"


# --- the rest -----------------------------------------------------------------------------------------------


def test_prefixes_are_stores_of_their_own(shared_redis: RedisServer) -> None:
    with (
        closing(RedisJournal(shared_redis.url, prefix="one")) as one,
        closing(RedisJournal(shared_redis.url, prefix="two")) as two,
    ):
        one.append([b"a"])
        assert one.acquire("node", "me", 100) is not None
        assert two.append([b"b"], expect=Cursor()) == 0
        assert two.acquire("node", "you", 100) is not None
        assert (one.read(), two.read()) == ([b"a"], [b"b"])


def test_a_log_longer_than_one_reply_is_read_whole(shared_redis: RedisServer) -> None:
    records = [b"%d" % number for number in range(2 * CHUNK + 10)]
    with closing(RedisJournal(shared_redis.url, prefix="long")) as journal:
        journal.append(records)
        assert journal.read() == records
        assert journal.read(5, CHUNK + 7) == records[5 : CHUNK + 12]
        assert journal.read(2 * CHUNK) == records[2 * CHUNK :]


def test_scripts_that_the_server_has_forgotten_are_sent_again(shared_redis: RedisServer) -> None:
    with closing(RedisJournal(shared_redis.url, prefix="scripts")) as journal, shared_redis.client() as client:
        journal.append([b"a"])
        client.script_flush()
        assert journal.append([b"b"]) == 1


def test_what_is_remembered_of_a_handle_goes_with_it(shared_redis: RedisServer) -> None:
    with shared_redis.client() as client:
        with closing(RedisJournal(shared_redis.url, prefix="handles")) as journal:
            for _ in range(10):
                journal.append([b"a"])
            assert client.hlen("{handles}:handles") == 1
        assert client.hlen("{handles}:handles") == 0


def test_a_handle_from_before_a_fork_is_refused_in_the_child(shared_redis: RedisServer) -> None:
    # In a process of its own: pytest may run threads, which do not go well with a fork.
    done = subprocess.run([sys.executable, "-c", FORK, shared_redis.url], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["child: StoreError", "parent: 0"], done.stderr


def test_closing_in_the_midst_of_calls_is_named_plainly_to_each(shared_redis: RedisServer) -> None:
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
