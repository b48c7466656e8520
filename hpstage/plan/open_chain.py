"""Chains that are under way, as the plan knows them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hpstage.plan.facts import DriverId, Span, StateRef, WorkerId
from hpstage.plan.nodes import State


@dataclass(slots=True)
class OpenChain:
    """A chain that its driver runs: what it may train."""

    driver: DriverId
    worker: WorkerId
    spans: list[Span]  # one on each node, in order
    reached: State | None = None  # the last that it told of; by then it has loaded what it starts from

    def ahead(self) -> Iterator[Span]:
        """What it has still to pass, the farthest first."""
        for span in reversed(self.spans):
            if self.reached is not None and span.node == self.reached.node.id:
                if self.reached.step < span.stop:
                    yield Span(span.node, max(span.start, self.reached.step), span.stop)
                if span.start <= self.reached.step:
                    return
            else:
                yield span

    def will_pass(self, ref: StateRef) -> bool:
        return any(span.node == ref.node and span.start < ref.step <= span.stop for span in self.ahead())

    def prolong(self, spans: Iterable[Span]) -> None:
        for span in spans:
            last = self.spans[-1] if self.spans else None
            if last is not None and last.node == span.node:
                self.spans[-1] = Span(span.node, last.start, span.stop)
            else:
                self.spans.append(span)
