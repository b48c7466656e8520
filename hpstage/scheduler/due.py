"""The running chains whose orders have to be updated in a turn. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from hpstage.plan.facts import ChainId
from hpstage.scheduler.orders import Orders
from hpstage.scheduler.stage_tree import StageTree


class Due:
    """The chains whose orders depend on what has changed since they were last updated: the rest of their branches in
    the stage tree, or their own progress.

    A turn costs as much as has changed, regardless of the number of running chains.

    Args:
        running: the orders of the driver's chains.
    """

    def __init__(self, tree: StageTree, running: Mapping[ChainId, Orders]) -> None:
        self._tree = tree
        self._running = running
        self._marked: dict[ChainId, Orders] = {}

    def mark(self, orders: Orders) -> None:
        self._marked[orders.chain.id] = orders

    def mark_all(self) -> None:
        self._marked.update(self._running)

    def chains(self) -> list[Orders]:
        """Return the chains that are due, in the order in which they began."""
        if self._tree.changed_all:
            self._tree.changed_all = False
            self.mark_all()
        for branch in self._tree.changed.values():
            for id in branch.covers:
                if id in self._running:
                    self._marked[id] = self._running[id]
        self._tree.changed.clear()
        return sorted(
            [orders for id, orders in self._marked.items() if id in self._running], key=lambda orders: orders.number
        )

    def clear(self) -> None:
        """Note that their orders are up to date."""
        self._marked.clear()
