"""The Leases port: the right to train, protected by tokens that a late writer cannot forge."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hpstage.errors import UsageError


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease that has not expired: its owner, its fencing token, and the remaining seconds."""

    owner: str
    token: int
    seconds: float


class Leases(ABC):
    """Named rights, each held by one owner at a time, for a limited time.

    An owner names one life of a process (a process that restarts takes another name). A token is positive and larger
    than every token that the store has given before, hence also than every earlier one of its name.

    A lease is *held* by a token from ``acquire`` until it is released or taken by another ``acquire``. It *expires*
    after its seconds, and from then on anyone may take it. Expiry alone takes nothing from the holder: it can still
    renew, and commit what it has trained, as long as no other owner has taken the lease. So an owner that was suspended
    for a while, or cut off by a restart of the store, loses work only to an owner that does it instead. It is the
    tokens (``fences`` of :meth:`Journal.append`), not the clock, that prevent two owners from both committing.

    Obligations. *Atomic*: each call is executed as a whole, and calls are serialized over all threads and processes.
    *Time is the store's*: no call carries the caller's time, so that a host whose clock is wrong by an hour does no
    harm. A store whose clock is set back neither shortens nor lengthens a lease by more than the lease's duration.
    *Durable* and *safe* as the :class:`Journal` is. Failures are :class:`StoreError`.
    """

    @abstractmethod
    def acquire_all(self, names: Iterable[str], owner: str, seconds: float) -> dict[str, int] | None:
        """Acquire all ``names`` for ``owner`` for ``seconds`` and return their tokens; ``None`` if any is another's.

        All or none, so that of two owners that want parts of the same chain one succeeds. A lease that ``owner`` holds
        and that has not expired keeps its token.
        """

    @abstractmethod
    def renew_all(self, tokens: Mapping[str, int], seconds: float) -> set[str]:
        """Renew the leases for ``seconds`` from now; return the names that are not held with their tokens (any more).

        The held ones are renewed even if others are not held. A lease that has expired, but was not taken, is renewed.
        """

    @abstractmethod
    def release_all(self, tokens: Mapping[str, int]) -> set[str]:
        """Release the leases; return the names that were not held with their tokens (any more)."""

    @abstractmethod
    def holder(self, name: str) -> Lease | None:
        """Return the lease of ``name``, if it exists and has not expired."""

    def acquire(self, name: str, owner: str, seconds: float) -> int | None:
        """Acquire ``name`` for ``owner`` for ``seconds`` from now and return its token; ``None`` if it is another's."""
        tokens = self.acquire_all([name], owner, seconds)
        return None if tokens is None else tokens[name]

    def release(self, name: str, token: int) -> bool:
        """Release the lease; return whether it was held with ``token``."""
        return not self.release_all({name: token})


def check_seconds(seconds: float) -> None:
    """Raise :class:`UsageError` unless ``seconds`` is a valid duration of a lease."""
    if not (math.isfinite(seconds) and seconds > 0):
        raise UsageError(f"a lease of {seconds} seconds: give a positive, finite number")
