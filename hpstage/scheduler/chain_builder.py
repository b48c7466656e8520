"""Builds chains: their path through the stage tree, their boundaries, and where states are saved. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from hpstage.plan.facts import Span
from hpstage.plan.messages import Boundary, Chain, Stage, Verify
from hpstage.plan.nodes import Node
from hpstage.plan.plan import SearchPlan
from hpstage.plan.regimes import Regimes, is_news
from hpstage.plan.segments import stage_of
from hpstage.scheduler.branches import Branch
from hpstage.scheduler.orders import Orders
from hpstage.scheduler.stage_tree import StageTree

# Maximum number of boundaries that a chain has ahead, which bounds the cost of building it.
_HORIZON = 64
# Maximum number of milestones considered on one span.
_CONSIDERED = 256
# Seconds that an amendment may take to reach a worker.
NOTICE = 0.05
# Cost of a boundary besides saving: messages (scripts/bench_overhead.py).
_BOUNDARY_SECONDS = 0.005


@dataclass(eq=False, repr=False)
class ChainBuilder:
    """Builds chains and prolongs them."""

    plan: SearchPlan
    tree: StageTree
    checkpoint_seconds: float | None  # the maximum work lost with a worker, in seconds of training
    checkpoint_every: int | None  # instead of that, the multiple of steps at which states are kept
    verify: Verify  # which forks are verified
    numerics: str  # the step backend, where the trainable leaves the choice to the search
    verifying: Regimes = field(default_factory=Regimes)  # regimes under which running chains verify forks

    def prolongation(self, orders: Orders) -> tuple[Span, ...]:
        """Return the path beyond the chain's last state, if wanted steps there are reached in no other way."""
        if len(orders.marks) > _HORIZON // 2:
            return ()  # it has enough boundaries ahead for now
        last = orders.chain.spans[-1]
        if orders.chain.at == last.stop:
            return ()  # it is at its end: it will end before an amendment can reach it
        branch, step = self.tree.branch_of(last), last.stop
        wanted = branch.wanted.at(step)
        children = wanted.children if wanted is not None else {}
        ahead = branch.wanted.after(step)
        limit = self.tree.limit(branch, step)
        if not children and (ahead is None or (limit is not None and ahead.step >= limit)):
            return ()
        path = self.path(branch, step, len(orders.marks))
        if path and path[0].stop == path[0].start:
            path = path[1:]  # it continues on a child that is attached to the last state
        return self.for_gang(path) if orders.chain.gang else path

    def for_gang(self, path: tuple[Span, ...]) -> tuple[Span, ...]:
        """Return the path up to its first node whose fork is still to be verified, which a gang cannot do."""
        return tuple(takewhile(lambda span: self.is_verified(self.plan.nodes[span.node]), path))

    def path(self, branch: Branch, step: int, marks: int = 0) -> tuple[Span, ...]:
        """Return the longest remaining path from a state, up to the horizon of a chain with ``marks`` boundaries
        ahead."""
        spans: list[Span] = []
        while marks < _HORIZON:
            far = self.tree.farthest(branch, step)
            if far is None:
                break
            _, stop, child = far
            steps = self._wanted_on(branch, step, stop)
            if len(steps) == _HORIZON and steps[-1] < stop:
                spans.append(Span(branch.node.id, step, steps[-1]))
                break
            spans.append(Span(branch.node.id, step, stop))
            if child < 0:
                break
            marks += len(steps)
            branch = self.tree.branch(self.plan.nodes[child])
            step = branch.node.start
        return tuple(spans)

    @staticmethod
    def _wanted_on(branch: Branch, start: int, stop: int) -> list[int]:
        """Return wanted steps on a span, up to the horizon, including the start if it is a saved state to evaluate."""
        inclusive = start > branch.node.start, True
        return [wanted.step for wanted in branch.wanted.between(start, stop, inclusive, _HORIZON)]

    def begin(self, orders: Orders, *, time_first: bool) -> Chain:
        """Return the message that starts a chain; its boundaries are recorded in its orders."""
        chain, plan = orders.chain, self.plan
        stages, boundaries = self.build(orders, chain.spans, begins=True)
        source = plan.source_of(chain)
        root = plan.nodes[chain.spans[0].node].ancestry()[0]
        return Chain(
            id=chain.id,
            source=None if source is None else plan.key(source.node, source.step),
            initial=root.hyperparameters(0),
            stages=tuple(stages),
            boundaries=tuple(boundaries),
            verify_new=self.verify != "off" and not chain.gang,
            numerics=self.numerics,
            gang=chain.gang,
            keep_every=self.checkpoint_every,
            keep_seconds=self.checkpoint_seconds,
            step_times=() if plan.step_times is None else plan.step_times.seconds,
            time_first=time_first,
        )

    def build(
        self, orders: Orders, spans: Sequence[Span], *, begins: bool = False
    ) -> tuple[list[Stage], list[Boundary]]:
        """Return the stages of a chain's latest spans and their boundaries, which are recorded in its orders.

        Args:
            begins: whether the chain begins with these spans.
        """
        stages: list[Stage] = []
        boundaries: list[Boundary] = []
        for index, span in enumerate(spans):
            branch = self.tree.branch_of(span)
            node = branch.node
            # A first stage of one step that is followed by another has no state in between from which to fork.
            first = begins and index == 0
            verify = (not first or span.stop - span.start > 1 or len(spans) == 1) and self._verifies(
                orders, node, first
            )
            steps = self._wanted_on(branch, span.start, span.stop)
            if not steps or steps[-1] != span.stop:
                steps.append(span.stop)
            if keep := node.keep_at and node.keep_at.irange(span.start, span.stop, (False, True)):
                steps = sorted({*steps, *(step for step in keep if step not in branch.sources)})
            stages.append(stage_of(node, span.start, span.stop, verify=verify))
            for step in sorted([*steps, *self._likely_forks(branch, span.start, steps)]):
                if step in orders.marks or (not begins and step <= orders.chain.at):
                    continue
                orders.marks.add(step)
                boundary = self.boundary_at(branch, step)
                if boundary.evaluate:
                    orders.evaluated.add(step)
                boundaries.append(boundary)
        return stages, boundaries

    def is_verified(self, node: Node) -> bool:
        """Whether a fork under the node's regime was verified, or need not be: a gang verifies none."""
        return self.verify == "off" or not is_news(node.regime, self.plan.verified)

    def _verifies(self, orders: Orders, node: Node, first: bool) -> bool:
        """Whether to verify a fork where the chain reaches this node. One such chain per regime is enough."""
        if self.verify == "off" or orders.chain.gang:
            return False
        regime = node.regime
        if regime in self.plan.verified and not (self.verify == "all" and first):
            return False
        verify = is_news(regime, self.plan.verified, self.verifying) or (self.verify == "all" and first)
        if verify and regime not in orders.verifying:
            orders.verifying.add(regime)
            self.verifying.add(regime)
        return verify

    def ended(self, orders: Orders) -> None:
        """Remove the forks that an ended chain was to verify."""
        for regime in orders.verifying:
            self.verifying.remove(regime)

    def _likely_forks(self, branch: Branch, start: int, marks: list[int]) -> list[int]:
        """Return steps between ``marks`` where keeping the state is worth its cost, although it is not wanted yet.

        The worth is the training since the last checkpoint, times the probability of a fork here: one half where a
        trial diverges whose later steps are not requested yet, otherwise the share of the plan's nodes that begin
        at this step (the milestones of the space).
        """
        totals = self.plan.totals
        price = _BOUNDARY_SECONDS + (totals.save_seconds / totals.saves if totals.saves else 0.0)
        found = []
        last, ahead = start, 0
        for step in self.plan.milestones.irange(start, marks[-1], (False, False), _CONSIDERED):
            while marks[ahead] < step:
                last = max(last, marks[ahead])
                ahead += 1
            if marks[ahead] == step:
                continue
            diverges = branch.node.children_at(step)
            chance = 0.5 if diverges else self.plan.branch_points[step] / len(self.plan.nodes)
            if (step - last) * branch.cost * chance > price:
                found.append(step)
                last = step
        return found

    def boundary_at(self, branch: Branch, step: int) -> Boundary:
        wanted = branch.wanted.at(step)
        return Boundary(
            node=branch.node.id,
            step=step,
            key=self.plan.key(branch.node, step),
            evaluate=wanted is not None and wanted.evaluate,
            keep=True,
        )

    def yield_step(self, orders: Orders) -> int:
        """Return the next step at which the chain may yield before its next mark, near a state that it saves anyway."""
        place = max(orders.chain.at, orders.passed)
        if orders.yield_at is None or orders.yield_at <= place:  # fixed once computed, although estimates change
            if self.checkpoint_seconds is not None:
                orders.yield_at = self.tree.step_after(orders.chain, place, self.checkpoint_seconds * orders.speed)
            else:
                assert self.checkpoint_every is not None
                every = self.checkpoint_every
                orders.yield_at = -(-self.tree.step_after(orders.chain, place, NOTICE) // every) * every
        return orders.yield_at
