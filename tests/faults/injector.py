"""Faults, drawn by a seed: what breaks, where, and for how long."""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

from tests.faults.memory_group import can_limit
from tests.faults.processes import OUT_OF_MEMORY, Processes
from tests.faults.redis_faults import Redis
from tests.faults.site import Process, Site, can_mount
from tests.faults.storage import DISKS, Storage

_PARTS = (Processes, Redis, Storage)
KINDS = tuple(kind for part in _PARTS for kind in part.ACTS)


def impossible() -> dict[str, str]:
    """Kinds that this user cannot cause, and why."""
    found = {} if can_mount() else dict.fromkeys(DISKS, "this user may not mount a disk to fill")
    return found if can_limit() else found | {OUT_OF_MEMORY: "this user may not limit the memory of processes"}


class Injector:
    """Injects one fault into a site at each call; ends in time those faults that do not end by themselves.

    The order of faults follows from the seed; when each comes, and what it meets, does not.

    Args:
        drivers: returns those that are at work now.
    """

    def __init__(self, site: Site, drivers: Callable[[], list[Process]], *, seed: int, kinds: set[str]) -> None:
        self.site = site
        self.drivers = drivers
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.damaged: set[str] = set()  # keys of checkpoints that were spoilt
        self.lost: set[tuple[int, str]] = set()  # places and hashes of acknowledged records that Redis lost
        self.story: list[str] = []
        self.violations: list[str] = []
        self.clock_of_next: dict[str, float] = {}  # of a driver, by name: the error of its clock when it starts again
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._began = time.monotonic()
        self._acts: dict[str, Callable[[], str | None]] = {}
        for broken in (part(self) for part in _PARTS):
            self._acts |= {kind: partial(act, broken) for kind, act in broken.ACTS.items() if kind in kinds}

    def inject(self) -> None:
        """One fault, of a kind that finds something to break; the rarest so far first."""
        kinds = self.rng.sample(sorted(self._acts), len(self._acts))
        for kind in sorted(kinds, key=lambda kind: self.counts[kind]):
            what = self._acts[kind]()
            if what is not None:
                self.counts[kind] += 1
                self.story.append(f"{time.monotonic() - self._began:8.2f} s  {kind}: {what}")
                return

    def mend(self) -> None:
        """Do what is due: thaw, free the disk, start Redis again."""
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()

    def mend_all(self) -> None:
        while self._due:
            heapq.heappop(self._due)[2]()

    @property
    def busy(self) -> bool:
        """Is something to be put right yet?"""
        return bool(self._due)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._number), action))

    def pick(self, processes: list[Process]) -> Process | None:
        able = [p for p in processes if not p.frozen and p.popen.poll() is None]
        return self.rng.choice(able) if able else None
