"""The number of workers that ready and future stages can use. Pure.

A worker is allocated as soon as it is requested, but takes a while to start: that time is the price of a start. Hence a
worker stays if the search is expected to need it again within that time. A new worker is requested if, by the time it
has started, more paths will wait than the present workers can take, and it will train for longer than it took to start.

The next requests of an algorithm, such as the next rung of a synchronous search, are not known here, but may be
foreseen (:attr:`Demands.foresee`). A worker that was needed until now, or is starting, is kept for as long as
starting one takes: at most twice what it would have cost to know (the ski rental problem; Karlin et al.,
"Competitive snoopy caching", 1988).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from hpstage.plan.facts import ChainId, DriverId
from hpstage.plan.open_chain import OpenChain
from hpstage.plan.plan import SearchPlan
from hpstage.scheduler.branches import Branch, Wanted
from hpstage.scheduler.list_schedule import ListSchedule
from hpstage.scheduler.orders import Orders
from hpstage.scheduler.stage_tree import StageTree
from hpstage.scheduler.workers import Workers

# Maximum number of waiting paths that are considered.
_LOOKED_AT = 1000

# A worker for paths that are only foreseen must train for this many times as long as it takes to start.
_WORTH = 5.0

_ReadyStage = tuple[float, Branch, int]
_Path = Iterator[tuple[float, list[_ReadyStage]]]
"""A worker's future events: when it saves a state, and which paths can be trained from that state."""


@dataclass(frozen=True, slots=True)
class _Expected:
    """A forecast for the present workers over some seconds."""

    most: int  # maximum number of workers busy at a time
    usable: int  # number of paths that are being trained at the end, or could be
    seconds: float  # work left at the end


@dataclass(eq=False, repr=False)
class Demands:
    """Computes how many workers a search can use. It matters little which of the surplus workers leave: if a path could
    continue from a state that an idle worker holds live, that worker would already be training it."""

    plan: SearchPlan
    tree: StageTree
    workers: Workers
    running: Mapping[ChainId, Orders]
    driver: DriverId
    foresee: Callable[[float, float, float], int] | None = None
    """Given the time now, a delay and a length in seconds, returns how many paths of at least that length will be
    trained at a time after the delay, including steps that are not requested yet."""
    _earlier: deque[tuple[float, int]] = field(default_factory=deque)  # earlier numbers that no later one exceeds

    def at(self, now: float, start_seconds: float) -> int:
        """Return how many workers to have at ``now``, if starting one takes ``start_seconds``.

        If several drivers share a plan and a cluster, one of them counts for all. O(n log n) in the waiting paths and
        the stages that can begin within ``start_seconds``.
        """
        if self._is_counted():
            return 0
        paths = self._paths(now, start_seconds)
        slots = self.workers.able(now) / self.workers.hosts if self.workers else 1.0
        needed = math.ceil(paths / slots) if slots else self.workers.hosts
        while self._earlier and self._earlier[-1][1] <= needed:
            self._earlier.pop()
        self._earlier.append((now, needed))
        while self._earlier[0][0] < now - start_seconds:
            self._earlier.popleft()
        return max(needed, self._earlier[0][1])

    def _is_counted(self) -> bool:
        """Whether another driver on the same workers requests workers for this one, too. It sees all targets and
        chains."""
        me = self.plan.drivers.get(self.driver)
        return me is not None and any(
            other.driver < self.driver for other in self.plan.drivers.values() if other.pool == me.pool
        )

    def _paths(self, now: float, start_seconds: float) -> int:
        """Return how many paths should be trained at a time."""
        if not self.tree.left.stages_left:
            return 0
        expected = self._expect(now, start_seconds)
        if not self.plan.totals.steps_trained:
            return max(1, expected.most)  # the time of a step is not known yet
        worth = int(expected.seconds / start_seconds) if start_seconds else expected.usable
        foreseen = self.foresee(now, start_seconds, _WORTH * start_seconds) if self.foresee and start_seconds else 0
        return max(1, expected.most, min(expected.usable, worth), foreseen)

    def _expect(self, now: float, seconds: float) -> _Expected:
        """Simulate the next ``seconds``, in which free workers take the longest waiting path."""
        able = self.workers.able(now)
        schedule: ListSchedule[tuple[Branch, int], tuple[list[_ReadyStage], _Path, int]] = ListSchedule(able)
        able, most, worked = max(0, able), 0, 0.0

        def follow(path: _Path, workers: int) -> None:
            """Wait for the next event on a path; if it has ended, its workers are free."""
            event = next(path, None)
            if event is None:
                schedule.free += workers
            else:
                schedule.at(event[0], (event[1], path, workers))

        def wait(ready: list[_ReadyStage]) -> None:
            for length, branch, step in ready:
                schedule.wait(length, (branch, step))

        for chain in self.plan.chains.values():
            mine = (self.workers.get(worker) for worker in chain.workers)  # None for workers of another cluster
            held = sum(worker is not None and worker.chain == chain.id for worker in mine)
            schedule.free -= held
            follow(self._course(chain, now), held)
        wait(self.tree.ready_stages(_LOOKED_AT))
        while True:
            for branch, step in schedule.take():
                schedule.free -= 1
                follow(self._along(branch, step, schedule.now), 1)
            busy, began = able - schedule.free, schedule.now
            most = max(most, busy)
            event = schedule.advance(seconds)
            if event is None:
                break
            ready, path, workers = event
            worked += busy * (schedule.now - began)
            wait(ready)
            follow(path, workers)
        worked += busy * max(0.0, seconds - schedule.now)
        left = self.tree.left.seconds + self.tree.left.evaluations * self.tree.evaluate_seconds
        left -= sum(orders.spent(now) for orders in self.running.values())
        return _Expected(most, busy + schedule.waiting, max(0.0, left - worked))

    def _course(self, chain: OpenChain, now: float) -> _Path:
        """Yield the events of a running chain, in seconds from ``now``."""
        orders = self.running.get(chain.id)
        speed = 1.0 if orders is None else orders.speed
        at, seconds = chain.at, -max(0.0, now - chain.since)
        for span in chain.spans[chain.index_at(at) :]:
            branch = self.tree.branch_of(span)
            for wanted in branch.wanted.between(at, span.stop, (False, True)):
                seconds += (wanted.step - at) * branch.cost / speed
                at = wanted.step
                seconds += self.tree.evaluate_seconds if wanted.evaluate else 0.0
                yield max(0.0, seconds), _below(wanted)
            seconds += (span.stop - at) * branch.cost / speed
            at = span.stop
        tail = self.tree.branch_of(chain.spans[-1])
        beyond = self.tree.remaining(tail, at)
        yield max(0.0, seconds), [(beyond, tail, at)] if beyond > 0.0 else []

    def _along(self, branch: Branch, step: int, seconds: float) -> _Path:
        """Yield the events of training a branch from its source at ``step``."""
        limit = self.tree.limit(branch, step)
        for wanted in branch.wanted.between(step, limit, (True, False)):
            seconds += (wanted.step - step) * branch.cost
            seconds += self.tree.evaluate_seconds if wanted.evaluate else 0.0
            step = wanted.step
            yield seconds, _below(wanted)


def _below(wanted: Wanted) -> list[_ReadyStage]:
    return [(child.length, child, child.node.start) for child in wanted.children.values()]
