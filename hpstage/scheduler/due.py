"""The running chains whose orders have to be updated in a turn. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hpstage.plan.facts import ChainId
from hpstage.scheduler.orders import Orders
from hpstage.scheduler.stage_tree import StageTree


@dataclass(eq=False, repr=False)
class Due:
    """The chains whose orders depend on what has changed since they were last updated: the rest of their branches in
    the stage tree, or their own progress.

    A turn costs as much as has changed, regardless of the number of running chains.
    """

    tree: StageTree
    running: Mapping[ChainId, Orders]  # the orders of the driver's chains
    _marked: dict[ChainId, Orders] = field(default_factory=dict)

    def mark(self, orders: Orders) -> None:
        self._marked[orders.chain.id] = orders

    def mark_all(self) -> None:
        self._marked.update(self.running)

    def chains(self) -> list[Orders]:
        """Return the chains that are due, in the order in which they began."""
        if self.tree.changed_all:
            self.tree.changed_all = False
            self.mark_all()
        for branch in self.tree.changed.values():
            for id in branch.covers:
                if id in self.running:
                    self._marked[id] = self.running[id]
        self.tree.changed.clear()
        return sorted(
            [orders for id, orders in self._marked.items() if id in self.running], key=lambda orders: orders.number
        )

    def clear(self) -> None:
        """Record that the orders of the due chains are up to date."""
        self._marked.clear()
