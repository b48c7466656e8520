"""Opening plans on a Redis server by their URLs."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlencode

from hpstage.errors import UsageError
from hpstage.store.redis import RedisJournal
from hpstage.store.redis_server import RedisServer


def open_redis(url: str, name: str | None, *, read_only: bool = False) -> RedisJournal:
    """Open the plan that ``url`` names by ``?prefix=``, or else the workload's own plan, called ``name``.

    Args:
        name: ``None`` opens an existing plan only; with a name, a missing one is created.
        read_only: has no effect, since readers and writers open a server in the same way.

    Raises:
        UsageError: the URL is invalid, or names no existing plan (the message lists those that exist).
        StoreError: the server does not answer.
    """
    address, prefix = _split(url)
    if name is None:
        _check(address, prefix)
    return RedisJournal(address, prefix=prefix or f"hpstage:{name}")


def _split(url: str) -> tuple[str, str | None]:
    """Return the URL of a server without ``?prefix=``, and the prefix."""
    # Not by urlunsplit: it makes unix:/path out of unix:///path.
    base, _, query = url.partition("?")
    options = dict(parse_qsl(query))
    prefix = options.pop("prefix", None)
    return f"{base}?{urlencode(options)}" if options else base, prefix


def _check(address: str, prefix: str | None) -> None:
    server = RedisServer(address, patience=5.0)
    try:
        cursor, there = 0, set()
        while True:
            cursor, found = server.command("SCAN", cursor, "MATCH", "{*}:about", "COUNT", 1000)
            there |= {key.decode().removeprefix("{").removesuffix("}:about") for key in found}
            if not int(cursor):
                break
    finally:
        server.close()
    if prefix in there:
        return
    plans = ", ".join(f"?prefix={name}" for name in sorted(there)) or "none"
    what = "name one" if prefix is None else f"{prefix!r} is none of them"
    raise UsageError(f"plans at {server.where}: {plans}; {what}")
