"""Plans on a Redis server, as URLs name them."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlencode

from hpstage.errors import UsageError
from hpstage.store.redis import RedisJournal
from hpstage.store.redis_server import RedisServer


def open_redis(url: str, name: str | None, *, read_only: bool = False) -> RedisJournal:
    """The plan that ``url`` names by ``?prefix=``, else the one of this workload's own ``name``.

    Args:
        name: ``None`` for a plan that is there: to open another would make it.
        read_only: for one who looks on; a server has no other way for them.

    Raises:
        UsageError: the URL cannot be, or names no plan that is there (the message lists those that are).
        StoreError: the server does not answer.
    """
    address, prefix = _split(url)
    if name is None:
        _check(address, prefix)
    return RedisJournal(address, prefix=prefix or f"hpstage:{name}")


def _split(url: str) -> tuple[str, str | None]:
    """The URL of a server without ``?prefix=``, and the prefix."""
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
