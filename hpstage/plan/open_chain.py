"""Chains that are under way, as the plan knows them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hpstage.plan.events import DriverId, StateRef, Stretch, WorkerId
from hpstage.plan.nodes import State


@dataclass(slots=True)
class OpenChain:
    """A chain that its driver runs: what it may train."""

    driver: DriverId
    worker: WorkerId
    stretches: list[Stretch]  # one on each node, in order
    reached: State | None = None  # the last that it told of; by then it has loaded what it starts from

    def ahead(self) -> Iterator[Stretch]:
        """What it has still to pass, the farthest first."""
        for stretch in reversed(self.stretches):
            if self.reached is not None and stretch.node == self.reached.node.id:
                if self.reached.step < stretch.stop:
                    yield Stretch(stretch.node, max(stretch.start, self.reached.step), stretch.stop)
                if stretch.start <= self.reached.step:
                    return
            else:
                yield stretch

    def will_pass(self, ref: StateRef) -> bool:
        return any(stretch.node == ref.node and stretch.start < ref.step <= stretch.stop for stretch in self.ahead())

    def prolong(self, stretches: Iterable[Stretch]) -> None:
        for stretch in stretches:
            last = self.stretches[-1] if self.stretches else None
            if last is not None and last.node == stretch.node:
                self.stretches[-1] = Stretch(stretch.node, last.start, stretch.stop)
            else:
                self.stretches.append(stretch)
