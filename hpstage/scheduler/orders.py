"""What workers were last ordered to do on this driver's chains, and which orders a turn has to update. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hpstage.plan.facts import ChainId, StateRef
from hpstage.plan.open_chain import OpenChain
from hpstage.plan.ordered import Ordered
from hpstage.plan.regimes import Regime
from hpstage.scheduler.stage_tree import StageTree


@dataclass(slots=True)
class Orders:
    """The orders given to a chain's worker: where to keep states, and where to end."""

    chain: OpenChain
    number: int  # in the order of the chains' starts
    marks: Ordered[int] = field(default_factory=Ordered)  # boundaries ahead, except those that the worker sets itself
    evaluated: set[int] = field(default_factory=set)  # marks to evaluate
    verifying: set[Regime] = field(default_factory=set)  # regimes under which the chain verifies a fork
    passed: int = 0  # step that it is known to have passed, if beyond its last reported one
    end: int | None = None
    cut: int | None = None  # where it is cut so that all workers finish together
    yield_at: int | None = None  # where it may yield before its next mark
    speed: float = 1.0  # of its workers, relative to one worker
    regroup: bool = False  # it ends at its next mark, to continue with other workers
    stopping: bool = False
    holds: tuple[float, float] | None = None  # above, up to: the longest waiting path for which its end is valid

    def spent(self, now: float) -> float:
        """The seconds that one worker would have needed for the training since the chain's last report."""
        return max(0.0, now - self.chain.since) * self.speed

    @property
    def end_ref(self) -> StateRef | None:
        return None if self.end is None else StateRef(self.chain.span_at(self.end).node, self.end)


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
