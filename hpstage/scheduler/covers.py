"""Covers of running chains: steps that no other chain may train, and workers that are busy. Pure.

This includes the chains of other drivers, which the plan knows from the journal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hpstage.plan.facts import ChainId, DriverId, Span
from hpstage.plan.open_chain import OpenChain
from hpstage.plan.plan import SearchPlan
from hpstage.scheduler.stage_tree import StageTree
from hpstage.scheduler.workers import Worker, Workers


@dataclass(eq=False, repr=False)
class Covers:
    """Tracks the plan's open chains in the stage tree and on the workers."""

    plan: SearchPlan
    tree: StageTree
    workers: Workers  # of this driver's executor
    driver: DriverId  # this driver
    pool: str  # the cluster of these workers; workers with the same id in another pool are different workers

    def begin(self, id: ChainId) -> None:
        """Cover the spans of a chain that has begun, and mark its worker as busy."""
        chain = self.plan.chains[id]
        self.extend(id, chain.spans)
        if chain.reached is not None:
            self.advance(id, chain.reached.step)
        if self._in_pool(chain):
            for worker in self._present(chain):
                self.workers.assign(worker, id)

    def find_on(self, worker: Worker) -> None:
        """Assign to a worker that has joined the chain that already runs on it, if any."""
        for id, chain in self.plan.chains.items():
            if worker.id in chain.workers and self._in_pool(chain):
                self.workers.assign(worker, id)

    def _present(self, chain: OpenChain) -> list[Worker]:
        return [self.workers[id] for id in chain.workers if id in self.workers]

    def _in_pool(self, chain: OpenChain) -> bool:
        joined = self.plan.drivers.get(chain.driver)
        return chain.driver == self.driver or (joined is not None and joined.pool == self.pool)

    def extend(self, id: ChainId, spans: Iterable[Span]) -> None:
        for span in spans:
            branch = self.tree.branch_of(span)
            start = span.start
            ahead = branch.covers.get(id)
            wanted = branch.wanted.at(start)
            if ahead is not None:
                start = min(start, ahead.start)  # the untrained rest of its earlier cover stays covered
            elif wanted is not None and wanted.evaluate:
                start -= 1  # the chain also evaluates the state that it starts from
            self.tree.cover(id, Span(span.node, start, span.stop))

    def advance(self, id: ChainId, step: int) -> None:
        """Uncover the steps up to ``step``, at which a chain has reached a state."""
        chain = self.plan.chains[id]
        index = chain.index_at(step)
        for behind in range(index - 1, -1, -1):
            if not self.tree.uncover(id, self.tree.branch_of(chain.spans[behind])):
                break  # uncovered earlier
        span = chain.spans[index]
        if step < span.stop:
            self.tree.cover(id, Span(span.node, step, span.stop))
        else:
            self.tree.uncover(id, self.tree.branch_of(span))

    def end(self, id: ChainId) -> None:
        """Uncover the remaining steps of a chain that has ended or whose driver is gone."""
        chain = self.plan.chains[id]
        for span in reversed(chain.spans):
            self.tree.uncover(id, self.tree.branch_of(span))
        for worker in self._present(chain):
            if worker.chain == id:
                self.workers.assign(worker, None)
