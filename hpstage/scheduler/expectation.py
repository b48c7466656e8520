"""Predicts which checkpoints the workers will need next, so that they can fetch them while they train. Pure.

It is only a hint: it may be wrong, and nothing depends on whether a worker follows it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hpstage.plan.facts import ChainId, StateKey, StateRef, WorkerId
from hpstage.plan.messages import ExpectStates, host_of
from hpstage.plan.plan import SearchPlan
from hpstage.scheduler.branches import Branch
from hpstage.scheduler.orders import Orders
from hpstage.scheduler.stage_tree import StageTree

# Maximum number of workers with a hint at a time (those that finish first), and of states in a hint.
EXPECTING, _STATES = 4, 2
# Stale entries of the queue before it is rebuilt.
_STALE = 1000


def source_of(branch: Branch, step: int) -> StateRef | None:
    """Return the state that a ready stage starts from, or ``None`` for the start of training."""
    if step > branch.node.start:
        return StateRef(branch.node.id, step)
    return None if branch.node.parent is None else StateRef(branch.node.parent.id, step)


@dataclass(eq=False, repr=False)
class Expectation:
    """Follows which states the workers that finish first will start from next.

    The worker that finishes first gets the longest waiting path, the next one the second longest. Each hint has one
    more state, since the workers may finish in another order.
    """

    plan: SearchPlan
    tree: StageTree
    running: Mapping[ChainId, Orders]  # the orders of the driver's chains
    _sent: dict[WorkerId, tuple[StateKey, ...]] = field(default_factory=dict)
    _soonest: list[tuple[float, ChainId]] = field(default_factory=list)  # when chains end; entries may be stale
    _ends: dict[ChainId, float] = field(default_factory=dict)
    _seen: tuple[list[StateRef | None], int] | None = None
    _changes: int = 0  # number of chains begun or ended

    def forget(self, worker: WorkerId) -> None:
        """Forget the hint of a worker that has left."""
        self._sent.pop(worker, None)
        self._seen = None

    def ended(self, chain: ChainId) -> None:
        """Forget a chain that has ended."""
        self._changes += self._ends.pop(chain, None) is not None

    def update(self, changed: Iterable[Orders], ready: Sequence[tuple[float, Branch, int]]) -> list[ExpectStates]:
        """Return the hints that have changed since they were last sent: other chains run, or other paths wait.

        Args:
            changed: chains that have begun since, or whose ends may have changed.
            ready: the ready stages with the longest paths.
        """
        for orders in changed:
            self._note(orders)
        waiting = [source_of(branch, step) for _, branch, step in ready[:EXPECTING]]
        seen = waiting, self._changes if waiting else -1
        if seen == self._seen:
            return []
        self._seen = seen
        expected = self._expected([self._key(source) for source in waiting]) if waiting else {}
        hints = [ExpectStates(worker, keys) for worker, keys in expected.items() if self._sent.get(worker, ()) != keys]
        hints += [ExpectStates(worker, ()) for worker, keys in self._sent.items() if keys and worker not in expected]
        for hint in hints:
            if hint.keys:
                self._sent[hint.worker] = hint.keys
            else:
                self._sent.pop(hint.worker, None)
        return hints

    def _note(self, orders: Orders) -> None:
        chain = orders.chain
        stop = orders.end if orders.end is not None else orders.marks[-1] if orders.marks else chain.spans[-1].stop
        at = chain.since + self.tree.seconds_between(chain, chain.at, stop)
        before = self._ends.get(chain.id)
        self._changes += before is None
        if before != at:
            self._ends[chain.id] = at
            heapq.heappush(self._soonest, (at, chain.id))
            if len(self._soonest) > 4 * len(self._ends) + _STALE:
                self._soonest = [(at, id) for id, at in self._ends.items()]
                heapq.heapify(self._soonest)

    def _key(self, source: StateRef | None) -> StateKey | None:
        state = None if source is None else self.plan.nodes[source.node].state(source.step)
        return None if state is None or state.kept is None else state.kept.key

    def _expected(self, waiting: Sequence[StateKey | None]) -> dict[WorkerId, tuple[StateKey, ...]]:
        expected: dict[WorkerId, tuple[StateKey, ...]] = {}
        kept = [key for key in waiting if key is not None]
        for rank, orders in enumerate(self._first()):
            host = host_of(orders.chain.worker)
            own = [key for key in waiting[rank : rank + 1] if key is not None]
            keys = [*dict.fromkeys(own + kept)][:_STATES]
            of_other_slots = expected.get(host, ())
            expected[host] = tuple(dict.fromkeys((*of_other_slots, *keys)))
        return expected

    def _first(self) -> list[Orders]:
        """Return the chains that end first."""
        first: dict[ChainId, float] = {}
        while self._soonest and len(first) < EXPECTING:
            at, id = heapq.heappop(self._soonest)
            if self._ends.get(id) == at:
                first[id] = at
        for id, at in first.items():
            heapq.heappush(self._soonest, (at, id))
        return [self.running[id] for id in first]
