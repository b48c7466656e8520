"""The Leases port: who may train what, by tokens that a late writer cannot forge."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hpstage.errors import UsageError


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease that has not expired: whose it is, its fencing token, and the seconds that are left."""

    owner: str
    token: int
    seconds: float


class Leases(ABC):
    """Named rights that one owner holds at a time, for so many seconds.

    An owner names one life of one process (a process that starts again takes another name). A token is positive and
    larger than every token that the store has given before, so also than every earlier one of its name.

    A lease is *held* by a token from ``acquire`` until it is released or another ``acquire`` takes it; it *expires*
    after its seconds, and from then on everyone may take it. Expiry alone takes nothing from the holder: it can still
    renew, and commit what it has trained, as long as nobody else has come. So an owner that stood still for a while, or
    was cut off by a restart of the store, loses work only to one who does it instead. That two cannot both commit is
    due to the tokens (``fences`` of :meth:`Journal.append`), not to the clock.

    Obligations. *Atomic*: each call is done as a whole, and one after the other for all threads and processes. *Time is
    the store's*: no call carries a time of the caller's, so that a host whose clock is wrong by an hour does no harm; a
    store whose own clock is set back neither shortens nor lengthens a lease by more than the lease's own seconds.
    *Durable* and *safe* as the :class:`Journal` is. Failures are :class:`StoreError`.
    """

    @abstractmethod
    def acquire_all(self, names: Iterable[str], owner: str, seconds: float) -> dict[str, int] | None:
        """The tokens of all ``names``, held by ``owner`` for ``seconds`` from now; ``None``: one is another's.

        All or none, so that of two who want parts of the same chain one gets on. A lease that ``owner`` holds and that
        has not expired keeps its token.
        """

    @abstractmethod
    def renew_all(self, tokens: Mapping[str, int], seconds: float) -> set[str]:
        """Let the leases expire ``seconds`` from now; returns the names that are not held with their tokens (any more).

        Those that are held are renewed though others are not. A lease that has expired, but that nobody has taken, is
        renewed.
        """

    @abstractmethod
    def release_all(self, tokens: Mapping[str, int]) -> set[str]:
        """Give the leases back; returns the names that were not held with their tokens (any more)."""

    @abstractmethod
    def holder(self, name: str) -> Lease | None:
        """The lease of ``name``, if there is one that has not expired."""

    def acquire(self, name: str, owner: str, seconds: float) -> int | None:
        """The token of ``name``, held by ``owner`` for ``seconds`` from now; ``None``: it is another's."""
        tokens = self.acquire_all([name], owner, seconds)
        return None if tokens is None else tokens[name]

    def release(self, name: str, token: int) -> bool:
        """Give the lease back; was it held with ``token``?"""
        return not self.release_all({name: token})


def check_seconds(seconds: float) -> None:
    """Raises :class:`UsageError` unless a lease can last so long."""
    if not (math.isfinite(seconds) and seconds > 0):
        raise UsageError(f"a lease of {seconds} seconds: give a positive, finite number")
