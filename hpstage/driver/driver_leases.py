"""DriverLeases: the leases of a driver and its study on a shared plan, and detection of dead drivers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence

from hpstage.checkpoints.processes import host_identity, is_alive, start_of
from hpstage.errors import StoreError, UsageError
from hpstage.plan.checks import VERSION
from hpstage.plan.facts import DriverId, DriverJoined
from hpstage.store.journal import Journal

# Seconds after which a silent driver is considered dead. A shorter time loses work when its process or the store
# pauses; a longer one delays the work that a dead driver had begun. The environment variable is only for testing this;
# all drivers of a plan must use the same value.
LEASE_SECONDS = float(os.environ.get("HPSTAGE_LEASE_SECONDS", "30"))

_active: set[DriverId] = set()
"""The drivers of this process whose calls have not ended."""


class DriverLeases:
    """Holds the leases of a driver and of its study, and renews them in a background thread.

    A process that is stopped or cut off loses them after ``LEASE_SECONDS``; by then at the latest, other drivers
    continue the work it had begun. Its own writes are fenced with the driver's lease, so no write can follow later.
    """

    def __init__(self, leases: Journal, driver: DriverId) -> None:
        self._leases = leases
        self._driver = driver
        self._seconds = LEASE_SECONDS
        self._host = host_identity()
        self._closing = threading.Event()
        self._tokens: dict[str, int] = {}
        self._renewing: threading.Thread | None = None

    def enter(
        self, study: str, identity: str, pool: str, checkpoints: str, others: Sequence[DriverJoined]
    ) -> DriverJoined:
        """Acquire the leases of this driver and of the study; return the fact that announces this driver to others.

        Raises:
            UsageError: another process drives the study.
        """
        name = f"study/{identity}"
        _active.add(self._driver)
        self._free(name, others)
        began = time.monotonic()
        while (tokens := self._leases.acquire_all([_of(self._driver), name], self._driver, self._seconds)) is None:
            held = self._leases.holder(name)
            # A live owner renews its lease, so more seconds are left than a dead owner's lease could have.
            waited = time.monotonic() - began
            renewed = held is not None and waited > 1.0 and held.seconds > self._seconds - waited + 1.0
            if held is not None and (renewed or any(o.driver == held.owner and self._is_here(o) for o in others)):
                raise UsageError(
                    f"study {study!r} is being driven by another process ({held.owner}); wait until it ends, or give "
                    f"this study another name"
                )
            time.sleep(0.1)
        self._tokens = tokens
        self._renewing = threading.Thread(target=self._renew, name="hpstage-leases", daemon=True)
        self._renewing.start()
        pid = os.getpid()
        return DriverJoined(self._driver, pool, self._host, pid, time.time(), checkpoints, start_of(pid), VERSION)

    @property
    def fences(self) -> dict[str, int]:
        """The leases, with their tokens, that this driver's writes depend on."""
        return dict(self._tokens)

    def is_gone(self, other: DriverJoined, studies: Iterable[str] = ()) -> bool:
        """Whether the other driver has died, or its lease has expired. If so, it can no longer write.

        ``studies``: identities of the plan's studies. If the other driver drove one of them, that study's lease is
        released, so that the study's next call need not wait until it expires.
        """
        name = _of(other.driver)
        if self._has_died(other):
            held = self._leases.holder(name)
            if held is not None:
                self._leases.release(name, held.token)
        token = self._leases.acquire(name, self._driver, self._seconds)
        if token is None:
            return False
        self._leases.release(name, token)
        for study in studies:
            held = self._leases.holder(f"study/{study}")
            if held is not None and held.owner == other.driver:
                self._leases.release(f"study/{study}", held.token)
        return True

    def seems_gone(self, other: DriverJoined) -> bool:
        """Like :meth:`is_gone`, but without changing anything: an expired lease may still be renewed."""
        return self._has_died(other) or self._leases.holder(_of(other.driver)) is None

    def _free(self, name: str, others: Sequence[DriverJoined]) -> None:
        """Release the lease of a study whose driver died on this host, so that no other driver waits for it."""
        held = self._leases.holder(name)
        for other in others:
            if held is not None and held.owner == other.driver and self._has_died(other):
                self._leases.release(name, held.token)

    def _has_died(self, other: DriverJoined) -> bool:
        return other.host == self._host and not _lives(other)

    def _is_here(self, other: DriverJoined) -> bool:
        return other.host == self._host and _lives(other)

    def close(self) -> None:
        """Release the leases."""
        _active.discard(self._driver)
        self._closing.set()
        if self._renewing is not None:
            self._renewing.join()
            self._renewing = None
            self._leases.release_all(self._tokens)
            self._tokens = {}

    def _renew(self) -> None:
        while not self._closing.wait(self._seconds / 6):
            try:
                self._leases.renew_all(self._tokens, self._seconds)
            except StoreError:
                continue  # the driver's own writes report it; renewal resumes when the store is back


def _lives(other: DriverJoined) -> bool:
    """Whether a driver of this host lives. One of this process may have ended without the store, on a full disk."""
    return is_alive(other.pid, other.start) and (other.pid != os.getpid() or other.driver in _active)


def _of(driver: DriverId) -> str:
    return f"driver/{driver}"
