"""What other drivers of the plan do: their chains cover what is not to be trained here, and hold workers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hpstage.plan.facts import ChainId, DriverId, Span, StateReached, WorkerId
from hpstage.plan.plan import SearchPlan
from hpstage.scheduler.chains import Leg, RunningChain
from hpstage.scheduler.stage_tree import StageTree
from hpstage.scheduler.workers import Worker


class Others:
    """The chains of other drivers, in the stage tree and on the workers.

    Args:
        workers: of this driver's executor.
        mine: this driver's running chains.
        pool: the cluster of these workers: those of the same id in another one are others.
    """

    def __init__(
        self,
        plan: SearchPlan,
        tree: StageTree,
        workers: Mapping[WorkerId, Worker],
        mine: Mapping[ChainId, RunningChain],
        pool: str,
    ) -> None:
        self._plan = plan
        self._tree = tree
        self._workers = workers
        self._mine = mine
        self.pool = pool

    def occupy(self, id: ChainId) -> None:
        """A chain has begun: what it covers is not to be trained here, and its worker is not idle."""
        chain = self._plan.chains[id]
        self.cover(id, chain.spans)
        worker = self._workers.get(chain.worker)
        if worker is not None and self._in_pool(chain.driver):
            worker.other = id

    def find_on(self, worker: Worker) -> None:
        """A worker has joined: does another driver's chain run on it already?"""
        for id, chain in self._plan.chains.items():
            if chain.worker == worker.id and id not in self._mine and self._in_pool(chain.driver):
                worker.other = id

    def _in_pool(self, driver: DriverId) -> bool:
        joined = self._plan.drivers.get(driver)
        return joined is not None and joined.pool == self.pool

    def cover(self, id: ChainId, spans: Iterable[Span]) -> None:
        for span in spans:
            node = self._plan.nodes[span.node]
            # What it is yet to train of the node before this stays its own.
            ahead = [cover.start for cover in self._tree.line(node).covers if cover.chain == id]
            self._tree.cover(node, id, min([span.start, *ahead]), span.stop)

    def advance(self, id: ChainId, fact: StateReached) -> None:
        """A chain has come to a state: what lies behind it is not covered any more."""
        for span in self._plan.chains[id].spans:
            node = self._plan.nodes[span.node]
            if span.node == fact.node and fact.step < span.stop:
                self._tree.cover(node, id, fact.step, span.stop)
                return
            self._tree.uncover(node, id)
            if span.node == fact.node and fact.step == span.stop:
                return

    def vacate(self, id: ChainId) -> None:
        """A chain is over, or its driver gone: what it did not reach is open again."""
        chain = self._plan.chains.get(id)
        if chain is None:
            return
        for span in reversed(chain.spans):
            self._tree.uncover(self._plan.nodes[span.node], id)
        worker = self._workers.get(chain.worker)
        if worker is not None and worker.other == id:
            worker.other = None

    def have(self, leg: Leg) -> bool:
        """Does another driver train a part of this?"""
        return any(
            cover.chain not in self._mine and cover.start < leg.stop and leg.start < cover.stop
            for cover in leg.line.covers
        )
