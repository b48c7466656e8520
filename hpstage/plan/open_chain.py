"""OpenChain: what the plan knows of a chain that is being trained: its worker, spans and progress. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hpstage.plan.facts import ChainId, ChainStarted, DriverId, Span, StateReached, StateRef, WorkerId
from hpstage.plan.nodes import State


@dataclass(slots=True)
class OpenChain:
    """A running chain: the spans that it may train, and its progress.

    Positions are steps counted from the start of training; its spans are contiguous.
    """

    id: ChainId
    driver: DriverId
    worker: WorkerId
    spans: list[Span]  # one per node, in order
    since: float  # time of its last report, or of its start
    kept: int  # step at which it last kept a state: if the worker dies, training continues from there
    gang: tuple[WorkerId, ...] = ()  # further workers that train it
    reached: State | None = None  # the last state reported; by then the source has been loaded

    @classmethod
    def begun(cls, fact: ChainStarted) -> OpenChain:
        spans = list(fact.spans)
        return cls(fact.chain, fact.driver, fact.worker, spans, since=fact.at, kept=spans[0].start, gang=fact.gang)

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        return self.worker, *self.gang

    @property
    def at(self) -> int:
        """The chain's last reported position."""
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
        """Return the index of the span that reaches the state at ``step``, or of the first span for the source."""
        return bisect_left(self.spans, step, key=lambda span: span.stop)

    def span_at(self, step: int) -> Span:
        return self.spans[self.index_at(step)]

    @property
    def begins_again(self) -> StateRef:
        """The node and step at which training begins again, from the chain's last checkpoint, if its worker dies."""
        return StateRef(self.span_at(min(self.kept + 1, self.spans[-1].stop)).node, self.kept)

    def ahead(self) -> Iterator[Span]:
        """Yield the spans that it has still to pass, the farthest first."""
        at = self.at
        for span in reversed(self.spans):
            if self.reached is not None and span.stop <= at:
                return
            yield span if span.start >= at else Span(span.node, at, span.stop)

    @property
    def continues(self) -> bool:
        """Whether the chain will still reach a state, which it may save."""
        return next(self.ahead(), None) is not None

    def will_pass(self, ref: StateRef) -> bool:
        return any(span.node == ref.node and span.start < ref.step <= span.stop for span in self.ahead())
