"""Laying chains through the stage tree: their way, their boundaries, where states are kept. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from hpstage.plan.facts import ChainId, StateRef, WorkerId
from hpstage.plan.messages import Boundary, Stage, Verify
from hpstage.plan.nodes import Node
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

    def prolong(self, chain: RunningChain) -> tuple[list[Stage], list[Boundary]]:
        """Go on past the chain's last state, if something hangs there that nothing else leads to."""
        if len(chain.marks) > _HORIZON // 2:
            return [], []  # it knows its way far enough for now
        last = chain.legs[-1]
        if chain.at == last.stop:
            return [], []  # it stands at its end: it is over before word can reach it
        line, step = last.line, last.stop
        wanted = line.wanted.get(step)
        children = wanted.children if wanted is not None else {}
        ahead = line.wanted.steps.first(step, inclusive=False)
        limit = self._tree.limit(line, step)
        if not children and (ahead is None or (limit is not None and ahead >= limit)):
            return [], []
        legs = self.route(line, step)
        if legs and legs[0].line is line and legs[0].stop == step:
            legs = legs[1:]
        return self.lay(chain, legs)

    def route(self, line: Line, step: int) -> list[Leg]:
        """The longest remaining way from a state, as legs."""
        legs: list[Leg] = []
        while True:
            far = self._tree.farthest(line, step)
            if far is None:
                return legs
            _, at, child = far
            legs.append(Leg(line, step, at))
            if child < 0:
                return legs
            line = self._tree.line(self._plan.nodes[child])
            step = line.node.start

    def lay(self, chain: RunningChain, legs: Sequence[Leg]) -> tuple[list[Stage], list[Boundary]]:
        """Append legs to a chain: stages, the boundaries on them, and the cover."""
        begun = bool(chain.legs)
        stages: list[Stage] = []
        boundaries: list[Boundary] = []
        for leg in legs:
            line, node = leg.line, leg.line.node
            # Of a first step that another stage follows there is nothing to fork: it is trained from where it began.
            verify = (bool(chain.legs) or leg.stop - leg.start > 1 or len(legs) == 1) and self._verifies(chain, node)
            if chain.legs and chain.legs[-1].line is line:
                chain.legs[-1].stop = leg.stop
            else:
                chain.legs.append(Leg(line, leg.start, leg.stop))
            # A kept state that is only to be evaluated has its boundary at the source itself.
            steps = list(
                islice(line.wanted.steps.irange(leg.start, leg.stop, (leg.start > node.start, True)), _HORIZON)
            )
            cut = len(steps) == _HORIZON and steps[-1] < leg.stop
            if cut:
                leg.stop = chain.legs[-1].stop = steps[-1]
            elif not steps or steps[-1] != leg.stop:
                steps.append(leg.stop)
            steps = sorted([*steps, *self._likely_forks(line, leg.start, steps)])
            forms = dict(zip(node.names, node.forms, strict=True))
            stages.append(Stage(node.id, leg.start, leg.stop, forms, node.seen(leg.start + 1).digest, verify))
            covered_from = max(chain.at, chain.legs[-1].start)
            for step in steps:
                if step in chain.marks or (begun and step <= chain.at):
                    continue
                chain.marks.add(step)
                boundary = self.boundary_at(line, step)
                if boundary.evaluate:
                    chain.evaluated.add(step)
                boundaries.append(boundary)
                covered_from = min(covered_from, step - 1)
            self._tree.cover(node, chain.id, covered_from, leg.stop)
            if cut or len(chain.marks) >= _HORIZON:
                break
        return stages, boundaries

    def _verifies(self, chain: RunningChain, node: Node) -> bool:
        """Is a fork to be verified where the chain comes to this node? One is enough that does so under its regime."""
        if self._verify == "off":
            return False
        regime = node.regime
        under_way = set[Regime]().union(chain.verifying, *(other.verifying for other in self._running.values()))
        verify = is_news(regime, self._plan.verified | under_way) or (self._verify == "all" and not chain.legs)
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
