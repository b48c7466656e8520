"""Laying chains through the stage tree: their way, their boundaries, where states are kept. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from hpstage.errors import InternalError
from hpstage.events import Boundary, ChainId, NodeId, Stage, StateRef, WorkerId
from hpstage.ordered import Ordered
from hpstage.plan import SearchPlan
from hpstage.stage_tree import Line, StageTree

# Boundaries that a chain is laid ahead: laying costs no more than that, however many there are on the way.
_HORIZON = 64
# Milestones that are looked at on one leg.
_CONSIDERED = 256
# What a boundary costs besides saving: messages (scripts/bench_overhead.py).
_BOUNDARY_SECONDS = 0.005


@dataclass(slots=True)
class Leg:
    line: Line
    start: int
    stop: int


@dataclass(slots=True)
class RunningChain:
    """A chain in flight, as the scheduler knows it."""

    id: ChainId
    worker: WorkerId
    legs: list[Leg]
    source: StateRef | None
    at: tuple[int, int]  # leg and step last reported
    passed: tuple[int, int] = (0, 0)  # where it is known to have been, if that is beyond ``at``
    marks: Ordered[tuple[int, int]] = field(default_factory=Ordered)  # (leg, step) of each boundary ahead
    evaluated: set[tuple[int, int]] = field(default_factory=set)  # marks that are to be evaluated
    fleeting: set[tuple[int, int]] = field(default_factory=set)  # marks that are only timed: no state is kept there
    since: float = 0.0  # when that was, or when the chain was started, on the executor's clock
    end: tuple[int, int] | None = None
    cut: tuple[int, int] | None = None  # where it is cut so that all workers end together
    stopping: bool = False
    verifying: bool = False  # it verifies a fork where it begins
    periodic: tuple[int, int] | None = None  # the mark that the interval has set
    lateness: int = 0  # how often that mark came too late

    def seconds_between(self, a: tuple[int, int], b: tuple[int, int]) -> float:
        """Estimated training seconds along the chain from one mark to a later one."""
        total = 0.0
        for i in range(a[0], b[0] + 1):
            leg = self.legs[i]
            start = a[1] if i == a[0] else leg.start
            stop = b[1] if i == b[0] else leg.stop
            total += (stop - start) * leg.line.cost
        return total

    def leg_of(self, node: NodeId) -> int:
        """Index of the leg on a node."""
        for index, leg in enumerate(self.legs):
            if leg.line.node.id == node:
                return index
        raise InternalError(f"{self.id} does not pass node {node}")

    def ref(self, mark: tuple[int, int] | None) -> StateRef | None:
        return None if mark is None else StateRef(self.legs[mark[0]].line.node.id, mark[1])


class Layer:
    """Lays and lengthens chains.

    Args:
        checkpoint_seconds: bounds the work that the loss of a worker can cost, in seconds of training.
        checkpoint_every: the same in steps, in place of seconds.
    """

    def __init__(
        self, plan: SearchPlan, tree: StageTree, *, checkpoint_seconds: float, checkpoint_every: int | None
    ) -> None:
        self._plan = plan
        self._tree = tree
        self._checkpoint_seconds = checkpoint_seconds
        self._checkpoint_every = checkpoint_every

    def prolong(self, chain: RunningChain) -> tuple[list[Stage], list[Boundary]]:
        """Go on past the chain's last state, if something hangs there that nothing else leads to."""
        if len(chain.marks) > _HORIZON // 2:
            return [], []  # it knows its way far enough for now
        last = chain.legs[-1]
        if chain.at == (len(chain.legs) - 1, last.stop):
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

    def lay(self, chain: RunningChain, legs: Iterable[Leg]) -> tuple[list[Stage], list[Boundary]]:
        """Append legs to a chain: stages, the boundaries on them, and the cover."""
        begun = bool(chain.legs)
        stages: list[Stage] = []
        boundaries: list[Boundary] = []
        for leg in legs:
            line, node = leg.line, leg.line.node
            if chain.legs and chain.legs[-1].line is line:
                chain.legs[-1].stop = leg.stop
            else:
                chain.legs.append(Leg(line, leg.start, leg.stop))
            index = len(chain.legs) - 1
            # A kept state that is only to be evaluated has its boundary at the source itself.
            steps = list(
                islice(line.wanted.steps.irange(leg.start, leg.stop, (leg.start > node.start, True)), _HORIZON)
            )
            cut = len(steps) == _HORIZON and steps[-1] < leg.stop
            if cut:
                leg.stop = chain.legs[index].stop = steps[-1]
            elif not steps or steps[-1] != leg.stop:
                steps.append(leg.stop)
            steps = sorted([*steps, *self._likely_forks(line, leg.start, steps)])
            stages.append(Stage(node.id, leg.start, leg.stop, dict(zip(node.names, node.forms, strict=True))))
            covered_from = chain.at[1] if index == chain.at[0] else chain.legs[index].start
            for step in steps:
                mark = (index, step)
                if mark in chain.marks or (begun and mark <= chain.at):
                    continue
                chain.marks.add(mark)
                boundary = self.boundary_at(line, step)
                if boundary.evaluate:
                    chain.evaluated.add(mark)
                boundaries.append(boundary)
                covered_from = min(covered_from, step - 1)
            self._tree.cover(node, chain.id, covered_from, leg.stop)
            if cut or len(chain.marks) >= _HORIZON:
                break
        return stages, boundaries

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

    def boundary_at(self, line: Line, step: int, *, keep: bool = True) -> Boundary:
        wanted = line.wanted.get(step)
        return Boundary(
            node=line.node.id,
            step=step,
            key=self._plan.key(line.node, step),
            evaluate=wanted is not None and wanted.evaluate,
            keep=keep,
        )

    def interval(self, chain: RunningChain) -> list[Boundary]:
        """The next boundary ahead that bounds what a crash can lose.

        On a workload without measurements the first step alone is timed, so that the bound soon holds in seconds.
        """
        leg, step = place = max(chain.at, chain.passed)
        line, stop = chain.legs[leg].line, chain.legs[leg].stop
        measured = self._plan.totals.steps_trained > 0
        if self._checkpoint_every is not None:
            spacing = self._checkpoint_every
        elif measured:
            spacing = max(1, int(self._checkpoint_seconds / line.cost))
        else:
            spacing = 1
        # Where steps are faster than messages, the mark is set further ahead until word of it comes in time.
        spacing <<= chain.lateness
        ahead = chain.marks.first(place, inclusive=False)
        if step + spacing >= stop or (ahead is not None and ahead <= (leg, step + spacing)):
            return []
        chain.periodic = mark = (leg, step + spacing)
        chain.marks.add(mark)
        keep = measured or self._checkpoint_every is not None
        if not keep:
            chain.fleeting.add(mark)
        return [self.boundary_at(line, step + spacing, keep=keep)]
