"""Covers of running chains: steps that no other chain may train, and workers that are busy. Pure.

This includes the chains of other drivers, which the plan has from the journal.
"""

from __future__ import annotations

from collections.abc import Iterable

from hpstage.plan.facts import ChainId, DriverId, Span
from hpstage.plan.open_chain import OpenChain
from hpstage.plan.plan import SearchPlan
from hpstage.scheduler.stage_tree import StageTree
from hpstage.scheduler.workers import Worker, Workers


class Covers:
    """Tracks the plan's open chains in the stage tree and on the workers.

    Args:
        workers: the workers of this driver's executor.
        driver: this driver.
        pool: the cluster of these workers. Workers with the same id in another pool are different workers.
    """

    def __init__(
        self,
        plan: SearchPlan,
        tree: StageTree,
        workers: Workers,
        driver: DriverId,
        pool: str,
    ) -> None:
        self._plan = plan
        self._tree = tree
        self._workers = workers
        self._driver = driver
        self.pool = pool

    def begin(self, id: ChainId) -> None:
        """Cover the spans of a chain that has begun, and mark its worker as busy."""
        chain = self._plan.chains[id]
        self.extend(id, chain.spans)
        if chain.reached is not None:
            self.advance(id, chain.reached.step)
        if self._in_pool(chain):
            for worker in self._present(chain):
                self._workers.assign(worker, id)

    def find_on(self, worker: Worker) -> None:
        """Assign to a worker that has joined the chain that already runs on it, if any."""
        for id, chain in self._plan.chains.items():
            if worker.id in chain.workers and self._in_pool(chain):
                self._workers.assign(worker, id)

    def _present(self, chain: OpenChain) -> list[Worker]:
        return [self._workers[id] for id in chain.workers if id in self._workers]

    def _in_pool(self, chain: OpenChain) -> bool:
        joined = self._plan.drivers.get(chain.driver)
        return chain.driver == self._driver or (joined is not None and joined.pool == self.pool)

    def extend(self, id: ChainId, spans: Iterable[Span]) -> None:
        for span in spans:
            branch = self._tree.branch_of(span)
            start = span.start
            ahead = branch.covers.get(id)
            wanted = branch.wanted.at(start)
            if ahead is not None:
                start = min(start, ahead.start)  # the untrained rest of its earlier cover stays covered
            elif wanted is not None and wanted.evaluate:
                start -= 1  # the chain also evaluates the state that it starts from
            self._tree.cover(id, Span(span.node, start, span.stop))

    def advance(self, id: ChainId, step: int) -> None:
        """Uncover the steps behind a state that a chain has reached."""
        chain = self._plan.chains[id]
        index = chain.index_at(step)
        for behind in range(index - 1, -1, -1):
            if not self._tree.uncover(id, self._tree.branch_of(chain.spans[behind])):
                break  # uncovered earlier
        span = chain.spans[index]
        if step < span.stop:
            self._tree.cover(id, Span(span.node, step, span.stop))
        else:
            self._tree.uncover(id, self._tree.branch_of(span))

    def end(self, id: ChainId) -> None:
        """Uncover the remaining steps of a chain that has ended or whose driver is gone."""
        chain = self._plan.chains[id]
        for span in reversed(chain.spans):
            self._tree.uncover(id, self._tree.branch_of(span))
        for worker in self._present(chain):
            if worker.chain == id:
                self._workers.assign(worker, None)
