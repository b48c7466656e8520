"""How RedisJournal reaches its server: URLs, prefixes, passwords, TLS and sockets."""

from __future__ import annotations

import shutil
import tempfile
import traceback
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from hpstage.errors import StoreError, UsageError
from hpstage.store import RedisJournal
from hpstage.store import redis_server as redis_server_module
from hpstage.store.opening import find_journal, open_or_make
from hpstage.store.redis_plans import open_redis
from tests.redis_server import RedisServer
from tests.tls_proxy import make_certificate, tls_proxy

pytestmark = pytest.mark.redis
StartRedis = Callable[..., RedisServer]

PASSWORD = "s3cret/@:#x"
ENCODED = "s3cret%2F%40%3A%23x"


def everything_said(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error)


def test_a_redis_password_is_used_and_never_shown(start_redis: StartRedis) -> None:
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


def test_a_password_for_a_redis_server_without_one_is_reported(shared_redis: RedisServer) -> None:
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
def test_an_invalid_redis_url_is_refused_without_showing_its_password(url: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        RedisJournal(url)
    assert "s3cret" not in everything_said(refused.value)


@pytest.mark.parametrize("prefix", ["", "{a}", "a}"])
def test_an_empty_redis_prefix_or_one_with_braces_is_refused(prefix: str) -> None:
    with pytest.raises(UsageError, match="without braces"):
        RedisJournal("redis://localhost", prefix=prefix)


def test_a_redis_user_needs_access_only_to_the_keys_of_its_prefix(start_redis: StartRedis) -> None:
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
def test_a_rediss_url_uses_tls_and_checks_the_certificate(
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


def test_a_unix_socket_is_accepted_as_a_redis_address(start_redis: StartRedis) -> None:
    with tempfile.TemporaryDirectory() as folder:  # a socket's path must be short
        start_redis("--unixsocket", f"{folder}/redis")
        with closing(RedisJournal(f"unix://{folder}/redis")) as journal:
            assert journal.append([b"a"]) == 0
            assert repr(journal) == f"RedisJournal('unix://{folder}/redis', prefix='hpstage')"
        with closing(open_redis(f"unix://{folder}/redis?db=0&prefix=ours", "theirs")) as journal:
            assert repr(journal) == f"RedisJournal('unix://{folder}/redis', prefix='ours')"


def test_looking_for_a_plan_creates_none(start_redis: StartRedis) -> None:
    server = start_redis()
    with ExitStack() as stack:
        assert find_journal(server.url, "Digits", "0123456789ab", stack) is None
        with pytest.raises(UsageError, match=r"plans at .*: none; name one"):
            open_redis(server.url, None)
        made, _ = open_or_make(server.url, "Digits", "0123456789ab", stack)
        made.append([b"a"])
        found = find_journal(server.url, "Digits", "0123456789ab", stack)
        assert found is not None and found.read() == [b"a"]
        assert find_journal(server.url, "Digits", "", stack) is None
        with pytest.raises(UsageError, match=r"plans at [^,]*: \?prefix=hpstage:Digits-0123456789ab; name one"):
            open_redis(server.url, None)
