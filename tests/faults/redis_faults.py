"""Faults of the Redis server, and of what it holds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hpstage.plan.log import split
from tests.faults.oracles import raw_journal, record_hash

if TYPE_CHECKING:
    from tests.faults.injector import Injector


def in_common(before: Sequence[bytes], after: Sequence[bytes]) -> int:
    """How many records, from the first on, are in both."""
    return next(
        (place for place, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]),
        min(len(before), len(after)),
    )


def evicted(records: Sequence[bytes], start: int) -> set[str]:
    """Keys of the states that these records, from ``start`` on, say to be evicted."""
    keys: dict[tuple[int, int], str] = {}
    found = set()
    facts = ((place, json.loads(fact)) for place, record in enumerate(records) for fact in split(record))
    for place, fact in facts:
        ref = (fact.get("node"), fact.get("step"))
        if fact["type"] == "StateReached" and fact.get("kept") is not None:
            keys[ref] = fact["kept"]["key"]
        elif fact["type"] == "StateLost" and fact["reason"] == "evicted" and place >= start:
            found.add(keys[ref])
    return found


class Redis:
    def __init__(self, injector: Injector) -> None:
        self._at = injector
        self._is_frozen = False
        self._is_to_lose = False
        self._is_short = False

    def _kill_redis(self) -> str | None:
        if self._is_frozen:
            return None
        self._at.site.redis.kill()
        self._is_frozen = True
        seconds = self._at.rng.uniform(0.1, 1.5)
        self._at.later(seconds, self._start_redis)
        return f"away for {seconds:.1f} s"

    def _start_redis(self) -> None:
        self._at.site.redis.start()
        self._is_frozen = False

    def _freeze_redis(self) -> str | None:
        if self._is_frozen:
            return None
        self._at.site.redis.freeze()
        self._is_frozen = True
        seconds = self._at.rng.uniform(1.0, 3.0)
        self._at.later(seconds, self._thaw_redis)
        return f"for {seconds:.1f} s"

    def _thaw_redis(self) -> None:
        self._at.site.redis.thaw()
        self._is_frozen = False

    def _save_records(self) -> str | None:
        """What a failover to a replica does that lags behind: whatever is acknowledged from now on is lost in a while,
        and those who write on fill its place."""
        if self._is_frozen or self._is_to_lose or len(self._journal()) < 20:
            return None
        self._is_to_lose = True
        copy = self._at.site.redis.save()
        seconds = self._at.rng.uniform(0.5, 3.0)
        self._at.later(seconds, partial(self._lose_records, copy))
        return f"those of the next {seconds:.1f} s"

    def _lose_records(self, copy: Path) -> None:
        redis = self._at.site.redis
        if self._is_frozen:
            self._at.later(0.2, partial(self._lose_records, copy))
            return
        with redis.client() as client:
            client.client_pause(60_000, all=False)  # from here on nothing is acknowledged that we do not see
        before = self._journal()
        redis.kill()
        redis.put_back(copy)
        redis.start()
        there = in_common(before, self._journal())  # others may have written on already
        self._at.lost |= {(place, record_hash(before[place])) for place in range(there, len(before))}
        self._at.damaged |= evicted(before, there)  # gone, and nobody knows any more that they are
        shutil.rmtree(copy)
        self._is_to_lose = False

    def _journal(self) -> list[bytes]:
        with self._at.site.redis.client() as client:
            return raw_journal(client, self._at.site.prefix)

    def _trim(self) -> str | None:
        """Somebody removes the plan's first records, and puts them back after a while."""
        return self._without_log("XTRIM", self._log, "MAXLEN", 3)

    def _delete_log(self) -> str | None:
        return self._without_log("DEL", self._log)

    def _delete_records(self) -> str | None:
        return self._without_log("XDEL", self._log, f"{self._at.rng.randrange(1, 20)}-0")

    @property
    def _log(self) -> str:
        return f"{{{self._at.site.prefix}}}:log"

    def _without_log(self, *command: str | int) -> str | None:
        if self._is_frozen or self._is_short or self._is_to_lose or len(self._journal()) < 20:
            return None
        self._is_to_lose = True
        with self._at.site.redis.client() as client, client.pipeline(transaction=True) as both:
            both.dump(self._log)
            both.execute_command(*command)
            copy, _ = both.execute()
        seconds = self._at.rng.uniform(0.2, 2.0)
        self._at.later(seconds, partial(self._put_back_log, copy))
        return f"for {seconds:.1f} s"

    def _put_back_log(self, copy: bytes) -> None:
        if self._is_frozen or self._is_short:
            self._at.later(0.2, partial(self._put_back_log, copy))
            return
        with self._at.site.redis.client() as client:
            client.restore(self._log, 0, copy, replace=True)
        self._is_to_lose = False

    def _cut_connections(self) -> str | None:
        if self._is_frozen:
            return None
        with self._at.site.redis.client() as client:
            return f"{client.client_kill_filter(_type='normal', skipme=True)} of them"

    def _run_out_of_memory(self) -> str | None:
        if self._is_frozen or self._is_short or self._is_to_lose:
            return None
        with self._at.site.redis.client() as client:
            client.config_set("maxmemory", "1mb")
        self._is_short = True
        seconds = self._at.rng.uniform(0.5, 2.0)
        self._at.later(seconds, self._free_memory)
        return f"for {seconds:.1f} s"

    def _free_memory(self) -> None:
        if self._is_frozen:
            self._at.later(0.2, self._free_memory)
            return
        with self._at.site.redis.client() as client:
            client.config_set("maxmemory", "0")
        self._is_short = False

    def _spoil_snapshot(self) -> str | None:
        """What a snapshot says must never be believed beyond its checksums."""
        key = f"{{{self._at.site.prefix}}}:snapshot"
        if self._is_frozen or self._is_short:
            return None
        with self._at.site.redis.client() as client:
            content = client.hget(key, "0")
            if not content:
                return None
            place = self._at.rng.randrange(len(content))
            client.hset(key, "0", content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
        return f"byte {place} of {len(content)}"

    ACTS: ClassVar[dict[str, Callable[[Redis], str | None]]] = {
        "redis killed": _kill_redis,
        "redis frozen": _freeze_redis,
        "redis out of memory": _run_out_of_memory,
        "redis connections cut": _cut_connections,
        "records lost": _save_records,
        "records trimmed": _trim,
        "record deleted": _delete_records,
        "plan deleted": _delete_log,
        "snapshot flipped": _spoil_snapshot,
    }
