"""Chains that are under way, as the plan knows them. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hpstage.plan.facts import ChainId, ChainStarted, DriverId, Span, StateReached, StateRef, WorkerId
from hpstage.plan.nodes import State


@dataclass(slots=True)
class OpenChain:
    """A chain that its driver runs: what it may train, and how far it has come.

    A place on it is a step, counted from the beginning of training: its spans follow one another.
    """

    id: ChainId
    driver: DriverId
    worker: WorkerId
    spans: list[Span]  # one on each node, in order
    since: float  # when it came to where it was last, or was started
    kept: int  # where a state was last kept: if the worker dies, training goes on from there
    reached: State | None = None  # the last that it told of; by then it has loaded what it starts from

    @classmethod
    def begun(cls, fact: ChainStarted) -> OpenChain:
        spans = list(fact.spans)
        return cls(fact.chain, fact.driver, fact.worker, spans, since=fact.at, kept=spans[0].start)

    @property
    def at(self) -> int:
        """Where it was last."""
        return self.spans[0].start if self.reached is None else self.reached.step

    def advance(self, state: State, fact: StateReached) -> None:
        self.reached, self.since = state, fact.at
        if fact.kept is not None:
            self.kept = fact.step

    def prolong(self, spans: Iterable[Span]) -> None:
        for span in spans:
            last = self.spans[-1]
            if last.node == span.node:
                self.spans[-1] = Span(span.node, last.start, span.stop)
            else:
                self.spans.append(span)

    def index_at(self, step: int) -> int:
        """Index of the span on which the state at ``step`` is reached; of the first for the state before it."""
        return bisect_left(self.spans, step, key=_stop)

    def span_at(self, step: int) -> Span:
        return self.spans[self.index_at(step)]

    def ahead(self) -> Iterator[Span]:
        """What it has still to pass, the farthest first."""
        at = self.at
        for span in reversed(self.spans):
            if self.reached is not None and span.stop <= at:
                return
            yield span if span.start >= at else Span(span.node, at, span.stop)

    def will_pass(self, ref: StateRef) -> bool:
        return any(span.node == ref.node and span.start < ref.step <= span.stop for span in self.ahead())


def _stop(span: Span) -> int:
    return span.stop
