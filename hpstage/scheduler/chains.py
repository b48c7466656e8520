"""Laying chains through the stage tree: their way, their boundaries, where states are kept. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from hpstage.plan.facts import ChainId, ChainStarted, Span, StateRef, WorkerId
from hpstage.plan.messages import Boundary, Stage, Verify
from hpstage.plan.nodes import Node, State
from hpstage.plan.ordered import Ordered
from hpstage.plan.plan import SearchPlan
from hpstage.plan.regimes import Regime, is_news
from hpstage.scheduler.lines import Line
from hpstage.scheduler.stage_tree import StageTree

# Boundaries that a chain is laid ahead: laying costs no more than that, however many there are on the way.
_HORIZON = 64
# Milestones that are looked at on one leg.
_CONSIDERED = 256
# Seconds that word of a new boundary may take to reach a worker.
NOTICE = 0.05
# What a boundary costs besides saving: messages (scripts/bench_overhead.py).
_BOUNDARY_SECONDS = 0.005


@dataclass(slots=True)
class Leg:
    line: Line
    start: int
    stop: int


@dataclass(slots=True)
class RunningChain:
    """A chain in flight, as the scheduler knows it.

    A place on its course is a step, counted from the beginning of training: the legs follow one another.
    """

    id: ChainId
    worker: WorkerId
    legs: list[Leg]
    source: StateRef | None
    at: int  # last reported
    kept: int  # where a state was last kept: if the worker dies, training goes on from there
    passed: int = 0  # where it is known to have been, if that is beyond ``at``
    marks: Ordered[int] = field(default_factory=Ordered)  # boundaries ahead, but for those that the worker sets itself
    evaluated: set[int] = field(default_factory=set)  # marks that are to be evaluated
    since: float = 0.0  # when it came to ``at``, or when the chain was started, on the executor's clock
    end: int | None = None
    cut: int | None = None  # where it is cut so that all workers end together
    rest: int | None = None  # where it may give way before its next mark
    stopping: bool = False
    verifying: set[Regime] = field(default_factory=set)  # a fork is verified on it under each of these

    def leg_at(self, step: int) -> int:
        """Index of the leg on which the state at ``step`` is reached; of the first for the state before it."""
        return bisect_left(self.legs, step, key=_stop)

    def line_at(self, step: int) -> Line:
        return self.legs[self.leg_at(step)].line

    @classmethod
    def of(cls, fact: ChainStarted, source: State | None) -> RunningChain:
        start = fact.spans[0].start
        return cls(
            id=fact.chain,
            worker=fact.worker,
            legs=[],
            source=None if source is None else source.ref,
            at=start,
            kept=start,
            since=fact.at,
        )

    def go_on(self, legs: Iterable[Leg]) -> None:
        for leg in legs:
            if self.legs and self.legs[-1].line is leg.line:
                self.legs[-1].stop = leg.stop
            else:
                self.legs.append(leg)

    def seconds_between(self, a: int, b: int) -> float:
        """Estimated training seconds along the chain from one step to a later one."""
        total = 0.0
        index = self.leg_at(a)
        while a < b:
            leg = self.legs[index]
            stop = min(b, leg.stop)
            total += (stop - a) * leg.line.cost
            a, index = stop, index + 1
        return total

    def step_after(self, a: int, seconds: float) -> int:
        """The step to which training gets from step ``a`` in so many seconds: the next at least, the last at most."""
        left, step = seconds, a
        for leg in self.legs[self.leg_at(a + 1) :]:
            steps = int(left / leg.line.cost)
            if steps < leg.stop - step:
                return max(step + steps, a + 1)
            left -= (leg.stop - step) * leg.line.cost
            step = leg.stop
        return step

    def step_before_end(self, seconds: float) -> int:
        """The first step with at most so many seconds of training to go on the legs."""
        left = seconds
        for leg in reversed(self.legs):
            steps = int(left / leg.line.cost)
            if steps < leg.stop - leg.start:
                return leg.stop - steps
            left -= (leg.stop - leg.start) * leg.line.cost
        return self.legs[0].start

    def ref(self, step: int | None) -> StateRef | None:
        return None if step is None else StateRef(self.line_at(step).node.id, step)


def _stop(leg: Leg) -> int:
    return leg.stop


class Layer:
    """Lays and lengthens chains.

    Args:
        checkpoint_seconds: bounds the work that the loss of a worker can cost, in seconds of training.
        checkpoint_every: in place of that, the multiple of steps at which states are kept.
        verify: which forks are verified.
        running: the driver's chains.
    """

    def __init__(
        self,
        plan: SearchPlan,
        tree: StageTree,
        *,
        checkpoint_seconds: float,
        checkpoint_every: int | None,
        verify: Verify,
        running: Mapping[ChainId, RunningChain],
    ) -> None:
        self._plan = plan
        self._tree = tree
        self._verify = verify
        self._running = running
        self.checkpoint_seconds = None if checkpoint_every is not None else checkpoint_seconds
        self.checkpoint_every = checkpoint_every

    def prolongation(self, chain: RunningChain) -> tuple[Span, ...]:
        """The way on past the chain's last state, if something hangs there that nothing else leads to."""
        if len(chain.marks) > _HORIZON // 2:
            return ()  # it knows its way far enough for now
        last = chain.legs[-1]
        if chain.at == last.stop:
            return ()  # it stands at its end: it is over before word can reach it
        line, step = last.line, last.stop
        wanted = line.wanted.get(step)
        children = wanted.children if wanted is not None else {}
        ahead = line.wanted.steps.first(step, inclusive=False)
        limit = self._tree.limit(line, step)
        if not children and (ahead is None or (limit is not None and ahead >= limit)):
            return ()
        way = self.way(line, step, len(chain.marks))
        if way and way[0].stop == way[0].start:
            way = way[1:]  # a child attached there
        return way

    def way(self, line: Line, step: int, marks: int = 0) -> tuple[Span, ...]:
        """The longest remaining way from a state, as far as a chain with so many boundaries ahead is laid."""
        spans: list[Span] = []
        while marks < _HORIZON:
            far = self._tree.farthest(line, step)
            if far is None:
                break
            _, stop, child = far
            steps = self._wanted_on(line, step, stop)
            if len(steps) == _HORIZON and steps[-1] < stop:
                spans.append(Span(line.node.id, step, steps[-1]))
                break
            spans.append(Span(line.node.id, step, stop))
            if child < 0:
                break
            marks += len(steps)
            line = self._tree.line(self._plan.nodes[child])
            step = line.node.start
        return tuple(spans)

    @staticmethod
    def _wanted_on(line: Line, start: int, stop: int) -> list[int]:
        """Wanted steps on a leg, as many as are looked ahead; a kept state that is only to be evaluated is its own."""
        steps = line.wanted.steps.irange(start, stop, (start > line.node.start, True))
        return list(islice(steps, _HORIZON))

    def lay(
        self, chain: RunningChain, spans: Sequence[Span], *, begins: bool = False
    ) -> tuple[list[Stage], list[Boundary]]:
        """The stages of a chain's latest spans, and the boundaries on them, of which the chain takes note.

        Args:
            begins: the chain begins with these.
        """
        stages: list[Stage] = []
        boundaries: list[Boundary] = []
        for index, span in enumerate(spans):
            node = self._plan.nodes[span.node]
            line = self._tree.line(node)
            # Of a first step that another stage follows there is nothing to fork: it is trained from where it began.
            first = begins and index == 0
            verify = (not first or span.stop - span.start > 1 or len(spans) == 1) and self._verifies(chain, node, first)
            steps = self._wanted_on(line, span.start, span.stop)
            if not steps or steps[-1] != span.stop:
                steps.append(span.stop)
            forms = dict(zip(node.names, node.forms, strict=True))
            stages.append(Stage(node.id, span.start, span.stop, forms, node.seen(span.start + 1).digest, verify))
            for step in sorted([*steps, *self._likely_forks(line, span.start, steps)]):
                if step in chain.marks or (not begins and step <= chain.at):
                    continue
                chain.marks.add(step)
                boundary = self.boundary_at(line, step)
                if boundary.evaluate:
                    chain.evaluated.add(step)
                boundaries.append(boundary)
        return stages, boundaries

    def _verifies(self, chain: RunningChain, node: Node, first: bool) -> bool:
        """Is a fork to be verified where the chain comes to this node? One is enough that does so under its regime."""
        if self._verify == "off":
            return False
        regime = node.regime
        under_way = set[Regime]().union(chain.verifying, *(other.verifying for other in self._running.values()))
        verify = is_news(regime, self._plan.verified | under_way) or (self._verify == "all" and first)
        if verify:
            chain.verifying.add(regime)
        return verify

    def _likely_forks(self, line: Line, start: int, marks: list[int]) -> list[int]:
        """Steps between ``marks`` where keeping the state is worth more than it costs, though nobody asks for it yet.

        Worth is the training from the last kept state on, times the chance that somebody forks here: an even one
        where a trial parts that nobody asked to come so far, else the share of the plan's nodes that begin at this
        step (the milestones that the space names).
        """
        totals = self._plan.totals
        price = _BOUNDARY_SECONDS + (totals.save_seconds / totals.saves if totals.saves else 0.0)
        found = []
        last, ahead = start, 0
        for step in islice(self._plan.milestones.irange(start, marks[-1], (False, False)), _CONSIDERED):
            while marks[ahead] < step:
                last = max(last, marks[ahead])
                ahead += 1
            if marks[ahead] == step:
                continue
            parts_here = step in line.node.children
            chance = 0.5 if parts_here else self._plan.partings[step] / len(self._plan.nodes)
            if (step - last) * line.cost * chance > price:
                found.append(step)
                last = step
        return found

    def boundary_at(self, line: Line, step: int) -> Boundary:
        wanted = line.wanted.get(step)
        return Boundary(
            node=line.node.id,
            step=step,
            key=self._plan.key(line.node, step),
            evaluate=wanted is not None and wanted.evaluate,
            keep=True,
        )

    def rest(self, chain: RunningChain) -> int:
        """The next step at which the chain may give way before its next mark; about where its state is kept anyway."""
        place = max(chain.at, chain.passed)
        if chain.rest is None or chain.rest <= place:  # told once, though estimates change
            if self.checkpoint_seconds is not None:
                chain.rest = chain.step_after(place, self.checkpoint_seconds)
            else:
                assert self.checkpoint_every is not None
                every = self.checkpoint_every
                chain.rest = -(-chain.step_after(place, NOTICE) // every) * every
        return chain.rest
