"""Which kept states the workers will need next, so that they can fetch them while they train. Pure.

A hint alone: what it says may turn out otherwise, and nothing depends on whether it is followed.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import islice

from hpstage.plan.facts import ChainId, StateKey, StateRef, WorkerId
from hpstage.plan.messages import ExpectStates, host_of
from hpstage.plan.plan import SearchPlan
from hpstage.scheduler.lines import Line
from hpstage.scheduler.orders import Orders
from hpstage.scheduler.pace import seconds_between
from hpstage.scheduler.stage_tree import StageTree

# The most workers that are told at a time, those that finish first, and how many states each of them is told.
_WORKERS, _STATES = 4, 2


def source_of(line: Line, step: int) -> StateRef | None:
    """Return the state that a head starts from, or ``None`` for the start of training."""
    if step > line.node.start:
        return StateRef(line.node.id, step)
    return None if line.node.parent is None else StateRef(line.node.parent.id, step)


class Expectation:
    """Follows which states the workers that finish first will start from next.

    The worker that finishes first gets the longest path that waits, the next one the second longest. Each is told of
    one more, since they may finish in another order.
    """

    def __init__(self, plan: SearchPlan, tree: StageTree) -> None:
        self._plan = plan
        self._tree = tree
        self._told: dict[WorkerId, tuple[StateKey, ...]] = {}
        self._seen: tuple[list[StateRef | None], list[ChainId]] = [], []

    def forget(self, worker: WorkerId) -> None:
        """Forget what a worker was told, which has left."""
        self._told.pop(worker, None)
        self._seen = [], []

    def update(
        self, running: Sequence[Orders], heads: Sequence[tuple[float, Line, int]], now: float
    ) -> list[ExpectStates]:
        """Return what has changed; ``heads``: those with the longest paths. Looks at the running chains only if they,
        or the first heads, are others than before."""
        waiting = [source_of(line, step) for _, line, step in heads[:_WORKERS]]
        seen = waiting, [orders.chain.id for orders in running] if waiting else []
        if seen == self._seen:
            return []
        self._seen = seen
        expected = self._expected(running, [self._key(source) for source in waiting], now) if waiting else {}
        changed = [ExpectStates(worker, keys) for worker, keys in expected.items() if self._told.get(worker) != keys]
        changed += [ExpectStates(worker, ()) for worker, keys in self._told.items() if keys and worker not in expected]
        self._told.update((change.worker, change.keys) for change in changed)
        return changed

    def _key(self, source: StateRef | None) -> StateKey | None:
        return None if source is None else self._plan.key(self._plan.nodes[source.node], source.step)

    def _expected(
        self, running: Sequence[Orders], waiting: Sequence[StateKey | None], now: float
    ) -> dict[WorkerId, tuple[StateKey, ...]]:
        soonest = heapq.nsmallest(_WORKERS, running, key=lambda orders: (self._left(orders, now), orders.chain.id))
        expected: dict[WorkerId, tuple[StateKey, ...]] = {}
        for rank, orders in enumerate(soonest):
            host = host_of(orders.chain.worker)
            own = [waiting[rank]] if rank < len(waiting) else []
            keys = dict.fromkeys(key for key in (*own, *waiting) if key is not None)
            told = expected.get(host, ())  # of another lane
            expected[host] = tuple(dict.fromkeys((*told, *islice(keys, _STATES))))
        return expected

    def _left(self, orders: Orders, now: float) -> float:
        """Estimate the seconds until a chain ends."""
        chain = orders.chain
        end = orders.end if orders.end is not None else orders.marks[-1] if orders.marks else chain.spans[-1].stop
        spent = max(0.0, now - chain.since)
        return max(0.0, seconds_between(self._tree, chain, chain.at, end) - spent)
