"""Opening plans on a Redis server by their URLs."""

from __future__ import annotations

from contextlib import closing
from urllib.parse import parse_qsl, urlencode

from hpstage.errors import UsageError
from hpstage.store.redis import OPENING, RedisJournal
from hpstage.store.redis_server import RedisServer


def open_redis(url: str, name: str | None, *, read_only: bool = False) -> RedisJournal:
    """Open the plan that ``url`` names by ``?prefix=``, or else the workload's own plan, called ``name``.

    Args:
        name: ``None`` opens an existing plan that the URL names.
        read_only: opens an existing plan only. Otherwise one with a name is created if it is missing.

    Raises:
        UsageError: the URL is invalid, or names no existing plan (the message lists those that exist).
        StoreError: the server does not answer.
    """
    address, prefix = _split(url)
    own = prefix if name is None else prefix or f"hpstage:{name}"
    if name is None or read_only:
        with closing(RedisServer(address, patience=OPENING)) as server:
            if own is None or not server.command("EXISTS", f"{{{own}}}:log"):
                raise UsageError(_missing(server, prefix) if name is None else f"there is no plan {own!r}")
    assert own is not None
    return RedisJournal(address, prefix=own)


def _split(url: str) -> tuple[str, str | None]:
    """Return the URL of a server without ``?prefix=``, and the prefix."""
    # Not by urlunsplit: it makes unix:/path out of unix:///path.
    base, _, query = url.partition("?")
    options = dict(parse_qsl(query))
    prefix = options.pop("prefix", None)
    return f"{base}?{urlencode(options)}" if options else base, prefix


def _missing(server: RedisServer, prefix: str | None) -> str:
    cursor, there = 0, set()
    while True:
        cursor, found = server.command("SCAN", cursor, "MATCH", "{*}:log", "COUNT", 1000)
        there |= {key.decode().removeprefix("{").removesuffix("}:log") for key in found}
        if not int(cursor):
            break
    plans = ", ".join(f"?prefix={name}" for name in sorted(there)) or "none"
    what = "name one" if prefix is None else f"{prefix!r} is none of them"
    return f"plans at {server.where}: {plans}; {what}"
