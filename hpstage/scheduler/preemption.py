"""Preemption: at which steps running chains end early: to yield to a longer path, so that all workers finish together,
or because they are no longer wanted. Pure.

Forking is exact and cheap here, so a chain may be cut anywhere and continue elsewhere with the same result. Schedules
with cuts come closer to the lower bound (``accounting/bound.py``) than schedules without: three equal chains on two
workers take 1.5 times their length instead of 2 (McNaughton, "Scheduling with deadlines and loss functions", 1959).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from hpstage.plan.facts import ChainId
from hpstage.plan.messages import AmendChain, Amendment, Boundary, Instruction, StopChain
from hpstage.plan.open_chain import OpenChain
from hpstage.plan.plan import SearchPlan
from hpstage.scheduler.branches import Branch
from hpstage.scheduler.chain_builder import NOTICE, ChainBuilder
from hpstage.scheduler.orders import Orders
from hpstage.scheduler.stage_tree import StageTree

# A cut must save at least this multiple of its cost.
WORTH = 10.0
# Up to this many running chains, cuts are updated in every turn; with more chains, in proportionally fewer turns.
_EACH_TURN = 16
# Stale entries of queues before they are rebuilt.
_STALE = 1000


@dataclass(eq=False, repr=False)
class Preemption:
    """Sets the ends of running chains."""

    plan: SearchPlan
    tree: StageTree
    builder: ChainBuilder
    _cut: dict[ChainId, int] = field(default_factory=dict)  # where chains are cut
    _turns: int = 0  # turns until the cuts are updated
    # Chains by the limits of Orders.holds. Entries may be stale.
    _up_to: list[tuple[float, ChainId]] = field(default_factory=list)
    _above: list[tuple[float, ChainId]] = field(default_factory=list)

    def switch_seconds(self) -> float:
        """Return the cost of leaving a branch and returning to it: a message, a save, a load."""
        totals = self.plan.totals
        save = totals.save_seconds / totals.saves if totals.saves else 0.0
        load = totals.load_seconds / totals.loads if totals.loads else save
        return 0.01 + load + save

    def update_ends(
        self, due: Iterable[Orders], running: Mapping[ChainId, Orders], workers: int, now: float
    ) -> tuple[list[Orders], list[Instruction]]:
        """Return the running chains whose ends may have changed, and the instructions that update them.

        Args:
            due: chains that have changed. Those whose ends depend on the waiting paths are found here.
        """
        waiting = self._waiting(1) if self.plan.sharing else []
        # Without sharing, a trial never yields: after a cut it would continue from a checkpoint.
        rivals = waiting[0] - self.switch_seconds() if waiting else 0.0
        if waiting and self._can_wait(waiting[0], workers):
            rivals = 0.0
        found = {orders.chain.id: orders for orders in (*due, *self._moved(running, rivals))}
        going, instructions = self._going(sorted(found.values(), key=lambda orders: orders.number))
        cuts = self._update_cuts(running, bool(waiting), workers, now)
        if cuts:
            more = {id: running[id] for id in cuts if id in running and id not in found}
            found |= more
            going += self._going(more.values())[0]
            going.sort(key=lambda pair: pair[0].number)
        for orders, last in going:
            end = self._before_longer(orders, last, rivals)
            cut = self._cut.get(orders.chain.id, end)
            if max(orders.chain.at, orders.passed) < cut < end:
                end = cut
            if orders.regroup:
                end = min(end, orders.marks[0])
            boundaries: tuple[Boundary, ...] = ()
            if end not in orders.marks:
                orders.marks.add(end)
                boundaries = (self.builder.boundary_at(self._branch_at(orders, end), end),)
            wish = end if end != orders.marks[-1] else None
            if wish != orders.end or boundaries:
                orders.end = wish
                instructions.append(AmendChain(Amendment(orders.chain.id, (), boundaries, orders.end_ref)))
        if len(self._up_to) + len(self._above) > 4 * len(running) + _STALE:
            self._up_to = [(orders.holds[1], id) for id, orders in running.items() if orders.holds is not None]
            self._above = [(-orders.holds[0], id) for id, orders in running.items() if orders.holds is not None]
            heapq.heapify(self._up_to)
            heapq.heapify(self._above)
        return list(found.values()), instructions

    def _update_cuts(
        self, running: Mapping[ChainId, Orders], waiting: bool, workers: int, now: float
    ) -> Collection[ChainId]:
        """Update where chains are cut. Return the chains that are cut now, and those that were cut before.

        This looks at every chain. So the more chains run, the fewer turns do it.
        """
        before = self._cut
        if not (waiting and self.tree.ready < workers <= len(running) and self.plan.totals.saves):
            self._cut = {}  # no cut is needed, or its cost is not known yet
            return before
        if self._turns > 0:
            self._turns -= 1
            return ()
        self._turns = len(running) // _EACH_TURN
        going = [orders for orders in running.values() if orders.marks and not orders.stopping]
        self._cut = self._cuts(going, self._waiting(workers), workers, now)
        return before.keys() | self._cut.keys()

    def _waiting(self, most: int) -> list[float]:
        """Return the seconds of the longest paths that wait."""
        return [seconds for seconds, _, _ in self.tree.ready_stages(most)]

    def _moved(self, running: Mapping[ChainId, Orders], rivals: float) -> Iterator[Orders]:
        """Yield the chains whose ends are out of date, given the paths that wait now."""
        while self._up_to and self._up_to[0][0] < rivals:
            up_to, id = heapq.heappop(self._up_to)
            if id in running and (holds := running[id].holds) is not None and holds[1] == up_to:
                running[id].holds = None
                yield running[id]
        while self._above and -self._above[0][0] >= rivals:
            negative, id = heapq.heappop(self._above)
            if id in running and (holds := running[id].holds) is not None and holds[0] == -negative:
                running[id].holds = None
                yield running[id]

    def _hold(self, orders: Orders, above: float, up_to: float) -> None:
        """Record that a chain's end remains valid while the longest waiting path takes more than ``above`` and at most
        ``up_to`` seconds, less the cost of switching to it."""
        if orders.holds == (above, up_to):
            return  # both limits are queued: it is reset when one of them is exceeded
        orders.holds = above, up_to
        if up_to < math.inf:
            heapq.heappush(self._up_to, (up_to, orders.chain.id))
        if above > 0.0:
            heapq.heappush(self._above, (-above, orders.chain.id))

    def stop_all(self, running: Iterable[Orders]) -> list[Instruction]:
        """Return the instructions that end all chains at their next steps, keeping the states of wanted chains."""
        going, instructions = self._going(running)
        return instructions + self.interrupt(orders for orders, _ in going)

    def interrupt(self, running: Iterable[Orders]) -> list[Instruction]:
        """Return the instructions that end chains at their next steps, keeping their states."""
        going = [orders for orders in running if not orders.stopping]
        for orders in going:
            orders.stopping = True
        return [StopChain(orders.chain.id, keep=True) for orders in going]

    def _going(self, running: Iterable[Orders]) -> tuple[list[tuple[Orders, int]], list[Instruction]]:
        """Return the chains that are still wanted, each with its last wanted mark, and instructions to stop the
        others."""
        instructions: list[Instruction] = []
        going = []
        for orders in running:
            if orders.stopping or not orders.marks:
                continue
            last = next(
                (mark for mark in reversed(orders.marks) if self._branch_at(orders, mark).wanted.at(mark)), None
            )
            if last is None:
                orders.stopping = True
                instructions.append(StopChain(orders.chain.id, keep=False))
            else:
                going.append((orders, last))
        return going, instructions

    def _branch_at(self, orders: Orders, step: int) -> Branch:
        return self.tree.branch_of(orders.chain.span_at(step))

    def _beyond(self, chain: OpenChain) -> float:
        """Return the seconds of the path beyond the chain's last state, which is not part of the chain yet."""
        return self.tree.remaining(self.tree.branch_of(chain.spans[-1]), chain.spans[-1].stop)

    def _can_wait(self, waiting: float, workers: int) -> bool:
        """Whether the longest waiting path can wait until a chain ends by itself.

        Only shorter chains would yield to it. It can wait as long as one of them and then the path take less time than
        all remaining work divided among the workers. Yielding earlier would only cost a load and a save.
        """
        return 2 * waiting * workers <= self.tree.left.seconds

    def _before_longer(self, orders: Orders, last: int, rivals: float) -> int:
        """Return the first yield step after which the rest of the chain's own path takes fewer seconds than ``rivals``;
        if there is none, ``last``.

        Args:
            rivals: seconds of the longest path that waits for a worker, less the cost of switching to it.
        """
        end = last
        left = self._beyond(orders.chain) if last == orders.marks[-1] else 0.0
        if rivals <= 0.0:
            self._hold(orders, 0.0, left)
            return end
        above, up_to = 0.0, math.inf
        later = last
        for mark in self._yield_steps(orders, last):
            if left >= rivals:
                up_to = left
                break
            left += self.tree.seconds_between(orders.chain, mark, later)
            later = mark
            if left < rivals:
                end, above = mark, left
        else:
            if left >= rivals:
                up_to = left
        self._hold(orders, above, up_to)
        return end

    def _yield_steps(self, orders: Orders, last: int) -> Iterator[int]:
        """Yield the steps before ``last`` at which the state is kept anyway, in descending order."""
        yield from reversed(orders.marks.irange(high=last, inclusive=(True, False)))
        step = self.builder.yield_step(orders)
        if step < orders.marks[0]:
            yield step

    def _cuts(self, running: list[Orders], waiting: list[float], workers: int, now: float) -> dict[ChainId, int]:
        """Return where to cut chains when fewer ready stages wait than there are workers, so that all workers finish at
        about the same time."""
        if len(waiting) >= workers or len(running) < workers:
            return {}
        left = [(self.left(orders, now), orders) for orders in running]
        left.sort(key=lambda pair: (pair[0], pair[1].chain.id))
        together = (sum(seconds for seconds, _ in left) + sum(waiting)) / workers
        together = max(together, left[-1][0], waiting[0])
        cuts: dict[ChainId, int] = {}
        # The chain that ends first is followed by the longest waiting path; the part that does not fit goes to others.
        for length, (seconds, orders) in zip(waiting, left, strict=False):
            over = seconds + length - together
            if over > WORTH * self.switch_seconds() and over < seconds:
                cut = self._place(orders, over, now)
                if cut is not None:
                    cuts[orders.chain.id] = cut
        return cuts

    def left(self, orders: Orders, now: float) -> float:
        """Estimate the seconds to the end of the chain's path, on one worker."""
        chain = orders.chain
        whole = self.tree.seconds_between(chain, chain.at, chain.spans[-1].stop) + self._beyond(chain)
        return max(0.0, whole - orders.spent(now))

    def to_next_mark(self, orders: Orders, now: float) -> float:
        """Estimate the seconds until the chain is at its next mark."""
        ahead = self.tree.seconds_between(orders.chain, orders.chain.at, orders.marks[0])
        return max(0.0, ahead - orders.spent(now)) / orders.speed

    def _place(self, orders: Orders, left: float, now: float) -> int | None:
        """Return the step of the chain with ``left`` seconds to go, if an amendment can still reach it in time."""
        if orders.end is not None and orders.end in orders.marks and orders.cut == orders.end:
            return orders.end  # a cut is never moved, since each one leaves a saved state behind
        chain = orders.chain
        left -= self._beyond(chain)
        if left < 0:
            return None
        step = self.tree.step_before_end(chain, left)
        if step <= max(chain.at, orders.passed) or step == chain.spans[-1].stop:
            return None
        if self.tree.seconds_between(chain, chain.at, step) - orders.spent(now) < NOTICE * orders.speed:
            return None
        orders.cut = step
        return step
