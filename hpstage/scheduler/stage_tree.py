"""The stage tree: steps still to train, where training can start, and the length of the path from there. Pure.

The tree is transient: it is derived from the plan (checkpoints), the targets (wanted states) and the running
chains. It is updated incrementally; an event costs O(depth x log), regardless of the number of trials.

Vocabulary of this file. A state is a *source* if training can start from it (it is kept, or it is the beginning).
A step of a branch is *wanted* if a trial waits for its metrics, or if a child attached there needs its state. A
*cover* is the part of a branch that a running chain will train. A branch is *needy* if a wanted step on it is reached
neither from a source on the branch nor by a cover: then it needs its parent's state. A *ready stage* is a source from
which a wanted, uncovered step can be trained now.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from hpstage.plan.facts import ChainId, Span
from hpstage.plan.nodes import Node, PlannedTrial
from hpstage.plan.open_chain import OpenChain
from hpstage.plan.plan import SearchPlan
from hpstage.scheduler.branches import Branch, Wanted, WorkLeft
from hpstage.scheduler.ready import ReadyStage, ReadyStages

# Relative changes of a node's measured seconds per step below this do not trigger re-sorting.
_DRIFT = 0.1


class StageTree:
    """Wanted steps, sources and covers of a plan's branches; ready stages by the longest remaining path."""

    def __init__(self, plan: SearchPlan) -> None:
        self._plan = plan
        self._branches: list[Branch] = []
        self._ready = ReadyStages(self._branches, self.remaining)
        self._default_cost = plan.totals.average_step_seconds
        self._drifted = 0
        self.evaluate_seconds = 0.0  # estimate for one evaluation
        self._left = WorkLeft()
        self._unweighed: dict[int, Branch] = {}  # by node id: branches that have changed since they were added up
        self.fresh: list[tuple[Branch, int]] = []  # steps newly wanted or to be saved, consumed by the scheduler
        self.changed: dict[int, Branch] = {}  # branches that changed, by node id, consumed by the scheduler
        self.changed_all = False  # the estimates of all branches changed
        for state in plan.kept.values():
            self.branch(state.node).add_source(state.step)

    def branch(self, node: Node) -> Branch:
        branches = self._branches
        while len(branches) <= node.id:
            fresh = self._plan.nodes[len(branches)]
            branches.append(
                Branch(fresh, None if fresh.parent is None else branches[fresh.parent.id], self._estimate(fresh))
            )
        return branches[node.id]

    def branch_of(self, span: Span) -> Branch:
        return (
            self._branches[span.node] if span.node < len(self._branches) else self.branch(self._plan.nodes[span.node])
        )

    @property
    def left(self) -> WorkLeft:
        """The remaining work. Amortised O(changes)."""
        for branch in self._unweighed.values():
            self._left.weigh(branch)
        self._unweighed.clear()
        return self._left

    # --- changes ------------------------------------------------------------------------------------------

    def want(self, node: Node, step: int) -> None:
        """Record that a trial waits for the metrics of a state."""
        branch = self.branch(node)
        wanted = branch.want(step)
        if not wanted.evaluate:
            wanted.evaluate = True
            self._left.evaluations += 1
            self._lengthen(branch, self._to(branch, step) + self.evaluate_seconds, step, -1)
            self._settle(branch, step)
            self.fresh.append((branch, step))

    def unwant(self, node: Node, step: int) -> None:
        """Undo :meth:`want`: the metrics of this state are known, or no trial waits for them any more."""
        branch = self.branch(node)
        wanted = branch.wanted.at(step)
        if wanted is not None and wanted.evaluate:
            wanted.evaluate = False
            self._left.evaluations -= 1
            if not wanted.children:
                branch.wanted.drop(step)
            self._raise(branch, step)
            self._settle(branch, step)

    def keep(self, trial: PlannedTrial) -> None:
        """Record the steps at which a new trial saves states: running chains that pass them save states there, too."""
        for step in trial.keep_at:
            if step <= trial.steps:
                branch = self.branch(trial.node_at(step))
                self.fresh.append((branch, step))
                self._change(branch)

    def kept(self, node: Node, step: int) -> None:
        """Let training start from a saved state."""
        branch = self.branch(node)
        if step in branch.sources:
            return
        branch.add_source(step)
        wanted = branch.wanted.at(step)
        if wanted is not None and wanted.children:
            children = list(wanted.children.values())
            wanted.children.clear()
            if not wanted.evaluate:
                branch.wanted.drop(step)
            for child in children:
                self._queue_stage(child, child.node.start)
            self._raise(branch, step)
        self._settle(branch, step)
        before = branch.sources.last(step - 1)
        if before is not None and before in branch.ready:
            self._queue_stage(branch, before)  # its path is shorter now, or empty

    def lost(self, node: Node, step: int) -> None:
        """Let no training start from a lost state."""
        branch = self.branch(node)
        branch.sources.discard(step)
        self._ready.drop(branch, step)
        for child in node.children_at(step):
            below = self.branch(child)
            self._ready.drop(below, step)
            if below.needy:
                self._need(branch, below)
        self._settle(branch, step)

    def cover(self, chain: ChainId, span: Span) -> None:
        """Cover a span that a chain will train, replacing the chain's earlier cover of the branch."""
        branch = self.branch_of(span)
        before = branch.covers.get(chain, span)
        branch.cover(chain, span)
        self._settle(branch, span.stop)
        # Wanted steps that the chain passed without stopping, since the amendment came too late, are open again.
        if before.start < span.start:
            for wanted in branch.wanted.between(before.start, span.start, (False, True)):
                self._settle(branch, wanted.step)

    def uncover(self, chain: ChainId, branch: Branch) -> bool:
        """Remove the chain's cover of a branch. Return whether it had one."""
        cover = branch.covers.pop(chain, None)
        if cover is None:
            return False
        self._settle(branch, cover.start)
        for source in branch.sources.irange(cover.start, cover.stop):
            self._queue_stage(branch, source)
        return True

    def measured(self, node: Node) -> None:
        """Update the estimates after the plan measured a node's seconds per step; re-sort if they changed enough."""
        branch = self.branch(node)
        cost = self._estimate(node)
        default = self._plan.totals.average_step_seconds
        if abs(default - self._default_cost) > 0.5 * self._default_cost:
            self._default_cost = default
            self._drifted = max(16, len(self._branches))
        elif abs(cost - branch.cost) > _DRIFT * branch.cost:
            self._drifted += 1
            self._ready.renew()
            branch.cost = cost
            self._resort(branch)
            self._raise(branch, node.start + 1)
        self._unweighed[node.id] = branch
        if self._drifted >= max(16, len(self._branches)):
            self._reestimate()

    def _estimate(self, node: Node) -> float:
        return max(self._plan.step_seconds(node), 1e-9)

    def _reestimate(self) -> None:
        """Recompute every branch, leaves first. O(tree), once per as many drifts."""
        self._drifted = 0
        self.changed_all = True
        self._ready.renew()
        for branch in self._branches:
            branch.cost = self._estimate(branch.node)
            self._unweighed[branch.node.id] = branch
        for branch in reversed(self._branches):  # children come after their parents
            self._resort(branch)
        for branch in self._branches:
            for step in list(branch.ready):
                self._queue_stage(branch, step)

    def evaluated(self, seconds: float) -> None:
        """Update the estimate for one evaluation, if it changed enough."""
        if abs(seconds - self.evaluate_seconds) > _DRIFT * self.evaluate_seconds:
            self.evaluate_seconds = seconds
            self.changed_all = True
            self._ready.renew()

    # --- needs and ready stages ----------------------------------------------------------------------------------

    def source_of(self, branch: Branch, step: int) -> int | None:
        """Return the source from which ``step`` of the branch can be trained now; ``None`` if it waits for a chain or
        the parent."""
        source = branch.sources.last(step) if branch.sources else None
        for cover in branch.covers.values():
            if cover.start < step and (source is None or cover.stop >= source):
                return None
        if source is None and self._begins(branch):
            source = branch.node.start
        return source

    def _begins(self, branch: Branch) -> bool:
        """Whether the branch can be started: its parent's state is a source."""
        return branch.above is None or branch.node.start in branch.above.sources

    def _settle(self, branch: Branch, step: int) -> None:
        """Update neediness and ready stages of the branch, and of those above it, after a change at ``step``."""
        while self._settle_one(branch, step):
            assert branch.above is not None
            branch, step = branch.above, branch.node.start

    def _settle_one(self, branch: Branch, step: int) -> bool:
        """Settle one branch. Return whether its parent must be settled too."""
        self._change(branch)
        needy = above = False
        if branch.wanted:
            first = branch.wanted[0].step
            needy = (not branch.sources or branch.sources[0] > first) and (
                not branch.covers or all(cover.start >= first for cover in branch.covers.values())
            )
        if needy != branch.needy:
            branch.needy = needy
            if not needy:
                self._ready.drop(branch, branch.node.start)
                above = branch.above is not None and self._relieve(branch.above, branch)
            elif branch.above is None or self._begins(branch):
                self._queue_stage(branch, branch.node.start)
            else:
                self._need(branch.above, branch)
                above = True
        source = branch.sources.last(step) if branch.sources else None
        if source is not None:
            self._queue_stage(branch, source)
        elif needy and self._begins(branch):
            self._queue_stage(branch, branch.node.start)
        self._unweighed[branch.node.id] = branch
        return above

    def _need(self, parent: Branch, child: Branch) -> None:
        step = child.node.start
        parent.want(step).attach(child)
        self._lengthen(parent, self._to(parent, step) + child.length, step, child.node.id)
        self.fresh.append((parent, step))

    def _relieve(self, parent: Branch, child: Branch) -> bool:
        """Remove ``child`` from the parent's wanted step. Return whether it was there."""
        step = child.node.start
        wanted = parent.wanted.at(step)
        if wanted is None or wanted.children.pop(child.node.id, None) is None:
            return False
        if not wanted.children and not wanted.evaluate:
            parent.wanted.drop(step)
        self._raise(parent, step)
        return True

    def _change(self, branch: Branch) -> None:
        self.changed[branch.node.id] = branch

    def _queue_stage(self, branch: Branch, step: int) -> None:
        if self._is_open(branch, step):
            self._ready.put(branch, step)
        else:
            self._ready.drop(branch, step)

    def _is_open(self, branch: Branch, step: int) -> bool:
        """Whether training from ``step`` would serve a wanted step."""
        if step == branch.node.start:
            return branch.needy and self._begins(branch)
        if step not in branch.sources:
            return False
        first = branch.wanted.after(step - 1)
        return first is not None and self.source_of(branch, first.step) == step

    @property
    def ready(self) -> int:
        """The number of ready stages."""
        return self._ready.count

    def ready_stages(self, most: int) -> list[ReadyStage]:
        """Return at most ``most`` ready stages, those with the longest paths first."""
        return self._ready.first(most)

    # --- along a chain ------------------------------------------------------------------------------------

    def seconds_between(self, chain: OpenChain, a: int, b: int) -> float:
        """Estimate the seconds of training from step ``a`` of a chain to a later step ``b``."""
        total = 0.0
        index = chain.index_at(a)
        while a < b:
            span = chain.spans[index]
            stop = min(b, span.stop)
            total += (stop - a) * self.branch_of(span).cost
            a, index = stop, index + 1
        return total

    def step_after(self, chain: OpenChain, a: int, seconds: float) -> int:
        """Return the step that training from step ``a`` reaches in ``seconds``: at least the next, at most the last."""
        left, step = seconds, a
        for span in chain.spans[chain.index_at(a + 1) :]:
            cost = self.branch_of(span).cost
            steps = int(left / cost)
            if steps < span.stop - step:
                return max(step + steps, a + 1)
            left -= (span.stop - step) * cost
            step = span.stop
        return step

    def step_before_end(self, chain: OpenChain, seconds: float) -> int:
        """Return the first step with at most ``seconds`` of training left on the chain."""
        left = seconds
        for span in reversed(chain.spans):
            cost = self.branch_of(span).cost
            steps = int(left / cost)
            if steps < span.stop - span.start:
                return span.stop - steps
            left -= (span.stop - span.start) * cost
        return chain.spans[0].start

    # --- lengths ------------------------------------------------------------------------------------------

    def remaining(self, branch: Branch, step: int) -> float:
        """Return the seconds of the longest path from the source ``step`` of the branch (its remaining critical
        path)."""
        best = self.farthest(branch, step)
        if best is None:
            return 0.0
        return best[0] - (step - branch.node.start) * branch.cost

    def farthest(self, branch: Branch, step: int) -> tuple[float, int, int] | None:
        """Return the end of the longest path from ``step``: ``(seconds from branch start, step, child id or -1)``."""
        limit = self.limit(branch, step) if branch.sources or branch.covers else None
        if limit is None:
            top = self._top(branch)
            if top is not None and top[1] >= step:
                return -top[0], top[1], top[2]
        best: tuple[float, int, int] | None = None
        for wanted in branch.wanted.between(step, limit, (True, False)):
            for seconds, child in self._ends(branch, wanted):
                if best is None or seconds > best[0]:
                    best = seconds, wanted.step, child
        return best

    def limit(self, branch: Branch, step: int) -> int | None:
        """Return the first step after ``step`` that is reached from elsewhere: a later source, or just after a cover's
        start."""
        later = branch.sources.first(step, inclusive=False) if branch.sources else None
        for cover in branch.covers.values():
            if cover.start >= step and (later is None or cover.start + 1 < later):
                later = cover.start + 1
        return later

    def _value(self, branch: Branch, step: int, child: int) -> float | None:
        """Return the length of the path via ``child``, in seconds from the branch's start (-1: the path that ends with
        an evaluation at ``step``)."""
        wanted = branch.wanted.at(step)
        if wanted is None:
            return None
        if child < 0:
            return self._to(branch, step) + self.evaluate_seconds if wanted.evaluate else None
        below = wanted.children.get(child)
        return None if below is None else self._to(branch, step) + below.length

    def _ends(self, branch: Branch, wanted: Wanted) -> Iterator[tuple[float, int]]:
        """Yield the length of each path that passes a wanted step, in seconds from the branch's start, and the child
        through which it continues (-1: it ends with an evaluation at the step)."""
        ahead = self._to(branch, wanted.step)
        if wanted.evaluate:
            yield ahead + self.evaluate_seconds, -1
        for id, child in wanted.children.items():
            yield ahead + child.length, id

    @staticmethod
    def _to(branch: Branch, step: int) -> float:
        """Return the seconds from the branch's start to a step."""
        return (step - branch.node.start) * branch.cost

    def _top(self, branch: Branch) -> tuple[float, int, int] | None:
        far = branch.far
        while far:
            negative, step, child = far[0]
            value = self._value(branch, step, child)
            if value is None:
                heapq.heappop(far)
            elif value != -negative:
                heapq.heapreplace(far, (-value, step, child))
            else:
                return far[0]
        return None

    def _resort(self, branch: Branch) -> None:
        branch.far = [
            (-seconds, wanted.step, child) for wanted in branch.wanted for seconds, child in self._ends(branch, wanted)
        ]
        heapq.heapify(branch.far)
        top = self._top(branch)
        branch.length = -top[0] if top is not None else 0.0

    def _lengthen(self, branch: Branch, seconds: float, step: int, child: int) -> None:
        """Add a new path on the branch, and propagate it upwards if it is the longest."""
        branch.lengthen(seconds, step, child)
        self._raise(branch, step)

    def _raise(self, branch: Branch, step: int) -> None:
        """Recompute the length of a branch whose paths via ``step`` changed, and propagate it to ready stages and
        parents."""
        while True:
            self._change(branch)
            top = self._top(branch)
            length = -top[0] if top is not None else 0.0
            changed = length != branch.length
            branch.length = length
            if not changed and not branch.sources and not branch.covers:
                return  # and so its only ready stage, if it has one, is as long as before
            source = self.source_of(branch, step)
            if source is not None:
                self._queue_stage(branch, source)
                return
            above = branch.above
            if not changed or not branch.needy or above is None:
                return
            step = branch.node.start
            above.lengthen(self._to(above, step) + length, step, branch.node.id)
            branch = above
