"""The connection of RedisJournal to its server: survives restarts, explains failures, keeps secrets."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.exceptions import AuthenticationError, InvalidResponse, NoScriptError, RedisError, ResponseError
from redis.retry import Retry

from hpstage.errors import StoreError, UsageError
from hpstage.store.redaction import redacted, shown, shown_cause
from hpstage.store.redis_scripts import Script

Answer = TypeVar("Answer")
Argument = bytes | str | int

# Maximum seconds for connecting, and for a reply; a blocking read must wait for less.
SOCKET_TIMEOUT = 5.0
# Seconds between two attempts at an unavailable server: the first pause, and the maximum.
PAUSES = (0.02, 0.5)

# Seconds of silence after which a warning is logged that the search waits for the server.
SILENCE = 2.0

logger = logging.getLogger("hpstage")

# Matched as words in the server's error, since Redis 6.2 wraps the code of an error inside a script in another text.
_REMEDIES = {
    "OOM": "the server is out of memory; raise its maxmemory or free some, and run again: nothing acknowledged is lost",
    "READONLY": "it is a read-only replica; give the address of the primary",
    "MISCONF": "the server cannot write to its disk; free some space there and run again, nothing acknowledged is lost",
    "NOREPLICAS": "the server has fewer replicas than configured (min-replicas-to-write); fix them",
    "WRONGTYPE": "a key of this prefix holds something else; choose another prefix",
    "NOPERM": "this user may not do that; allow it the commands EVAL, EVALSHA, INFO, XLEN, XRANGE, XREAD and those of "
    "scripts (TIME, TYPE, EXISTS, EXPIRE, PERSIST, RENAME, hashes, XADD) on the keys of the prefix",
    "(MOVED|CROSSSLOT|CLUSTERDOWN)": "the server is a node of a Redis Cluster, which is not supported; use a single "
    "server",
    "(?i:unknown (redis )?command)": "the server does not know a command that hpstage needs; undo its rename-command, "
    "or use another server",
    "(?i:DB index)": "the server has no database of this number; give another in the URL, redis://HOST:PORT/0, or "
    "raise its setting databases",
}
# Temporary: the server will answer once it has loaded its file, or ended a long script.
_PASSING = re.compile(r"\b(LOADING|BUSY|MASTERDOWN|TRYAGAIN)\b")
_WITHOUT_CODE = {
    "OutOfMemoryError": "OOM",
    "ReadOnlyError": "READONLY",
    "NoPermissionError": "NOPERM",
    "MovedError": "MOVED",
    "ClusterCrossSlotError": "CROSSSLOT",
    "ClusterDownError": "CLUSTERDOWN",
    "BusyLoadingError": "LOADING",
    "MasterDownError": "MASTERDOWN",
    "TryAgainError": "TRYAGAIN",
}


class RedisServer:
    """Connections to the server at ``url``, one for each call in flight.

    Calls are retried while the server cannot be reached, for ``patience`` seconds, so they must be safe to repeat.
    """

    def __init__(self, url: str, patience: float) -> None:
        self.where = _shown(url)
        self._url = url
        self.answered = True
        """Whether every call so far was answered at its first attempt, so that none may still be in flight."""
        self._patience = patience
        self._closed = threading.Event()
        self._away = threading.Lock()  # held by the call that reported the server unavailable, until it is back
        settings: dict[str, Any] = {
            "protocol": 2,
            "decode_responses": False,
            "socket_timeout": SOCKET_TIMEOUT,
            "retry": Retry(NoBackoff(), 0),  # _persist retries: it knows when to give up, and whether this is closed
        }
        try:
            settings = parse_url(url) | settings  # type: ignore[no-untyped-call]  # it has no annotations
            if not url.startswith("unix:"):
                settings |= {"socket_connect_timeout": SOCKET_TIMEOUT, "socket_keepalive": True}
            self._pool = redis.ConnectionPool(**settings)
            self._pool.connection_class(**self._pool.connection_kwargs)  # validates the options without connecting
        except (ValueError, TypeError):
            # Not chained, since the text may quote the URL and thereby the password.
            raise UsageError(f"{self.where}: the options of this Redis URL cannot be understood; fix them") from None
        client = redis.Redis(connection_pool=self._pool)
        # Raw (id, [name, value]) replies: converting them to dicts would double the time.
        for command in ("XRANGE", "XREAD"):
            client.set_response_callback(command, lambda response, **options: response)
        self._execute: Callable[..., Any] = client.execute_command

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def command(self, *arguments: Argument, patience: float | None = None) -> Any:
        """Return the server's reply to a command."""
        return self._persist(lambda: self._execute(*arguments), patience)

    def run(self, script: Script, keys: Sequence[str], arguments: Sequence[Argument]) -> list[Any]:
        """Return the result of a script. It is sent by its digest, and in full to a server that does not know it."""

        def evaluate() -> Any:
            try:
                return self._execute("EVALSHA", script.digest, len(keys), *keys, *arguments)
            except NoScriptError:
                return self._execute("EVAL", script.source, len(keys), *keys, *arguments)

        answer: list[Any] = self._persist(evaluate, None)
        return answer

    def close(self) -> None:
        """Close all connections; calls in flight raise :class:`StoreError`."""
        self._closed.set()
        self._pool.disconnect()

    def forget(self) -> None:
        """Refuse further calls, and leave the connections to the process that opened them."""
        self._closed.set()

    def _persist(self, action: Callable[[], Answer], patience: float | None) -> Answer:
        began = time.monotonic()
        deadline = began + (self._patience if patience is None else patience)
        pause, longest = PAUSES
        warned = False
        try:
            while True:
                if self.closed:
                    raise StoreError(f"the connection to {self.where} is closed")
                try:
                    answer = action()
                    if warned:
                        logger.warning("%s answers again, after %.0f s", self.where, time.monotonic() - began)
                    return answer
                except Exception as error:
                    if not isinstance(error, ResponseError):
                        self.answered = False
                    # close() closes the socket under readers in flight, which then fail in various ways.
                    if not self.closed:
                        if not isinstance(error, RedisError):
                            raise
                        problem = self._explain(error, last=time.monotonic() + pause >= deadline)
                        if problem is not None:
                            raise problem from shown_cause(error, self._url)
                        if not warned and time.monotonic() - began > SILENCE and self._away.acquire(blocking=False):
                            warned = True
                            wait = deadline - time.monotonic()
                            logger.warning(
                                "%s does not answer (%s); waiting for it, for %.0f s more at most",
                                self.where,
                                _plain(error, self._url),
                                wait,
                            )
                except BaseException:
                    self.answered = False
                    raise
                self._closed.wait(pause)
                pause = min(2 * pause, longest)
        finally:
            if warned:
                self._away.release()

    def _explain(self, error: RedisError, *, last: bool) -> StoreError | None:
        """Explain the failure; return ``None`` if it is temporary and this was not the last attempt."""
        reason = _plain(error, self._url)
        if isinstance(error, AuthenticationError) or (isinstance(error, ResponseError) and "AUTH" in str(error)):
            return StoreError(
                f"{self.where} refuses the user name or password ({reason}); give them in the URL, "
                f"redis://USER:PASSWORD@HOST:PORT, with signs such as / or @ as %2F or %40"
            )
        text = f"{_WITHOUT_CODE.get(type(error).__name__, '')} {error}"
        if "CERTIFICATE_VERIFY_FAILED" in text:
            return StoreError(
                f"{self.where}: the server's certificate is not trusted ({reason}); give its authority's in the "
                f"URL, ?ssl_ca_certs=FILE"
            )
        if isinstance(error, InvalidResponse):
            return StoreError(f"{self.where}: what answers there is no Redis server; fix the address")
        if isinstance(error, redis.ConnectionError | redis.TimeoutError) or re.search(_PASSING, text):
            if not last:
                return None
            tls = ", speaks TLS there" if self.where.startswith("rediss:") else ""
            return StoreError(
                f"{self.where} does not answer ({reason}); see that the server runs{tls} and can be reached "
                f"from here, then run again: nothing acknowledged is lost"
            )
        for word, remedy in _REMEDIES.items():
            if re.search(rf"\b{word}\b", text):
                return StoreError(f"{self.where}: {remedy} ({reason})")
        return StoreError(f"{self.where}: {reason}: this should not happen, please report it")


def _shown(url: str) -> str:
    """Return the part of a URL that may be shown. Raise :class:`UsageError`, whose message shows no more."""
    scheme = url.partition("://")[0] if "://" in url else ""
    if scheme not in ("redis", "rediss", "unix"):
        raise UsageError("a Redis URL begins with redis://, rediss:// (TLS) or unix:// (a socket's path)")
    place = shown(url)
    try:
        parts, seen = urlsplit(url), urlsplit(place)
        host, port = parts.hostname or "localhost", parts.port or 6379
        if (parts.hostname, parts.port, parts.path) != (seen.hostname, seen.port, seen.path):
            raise ValueError("it is not clear where the password ends")
    except ValueError:
        raise UsageError(
            f"this {scheme}:// URL cannot be read (not shown, for its password); write signs of the password such as "
            f"/, # or @ as %2F, %23 or %40"
        ) from None
    if scheme == "unix":
        return place
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{parts.path.rstrip('/')}"


def _plain(error: Exception, url: str) -> str:
    return redacted(" ".join(str(error).split()).rstrip("."), url) or type(error).__name__
