"""The stage tree: steps still to train, where training can start, and the length of the path from there. Pure.

The tree is transient: it is derived from the plan (kept states), the targets (wanted states) and the running
chains. It is updated incrementally; an event costs O(depth x log), regardless of the number of trials.

Vocabulary of this file. A state is a *source* if training can start from it (it is kept, or it is the beginning).
A step of a line is *wanted* if a trial waits for its metrics, or if a child attached there needs its state. A
*cover* is the part of a line that a running chain will train. A line is *needy* if a wanted step on it is reached
neither from a source on the line nor by a cover: then it needs its parent's state. A *head* is a source from which
a wanted, uncovered step can be trained now.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from hpstage.plan.facts import ChainId, Span
from hpstage.plan.nodes import Node, PlannedTrial
from hpstage.plan.plan import SearchPlan
from hpstage.scheduler.branches import Line, Wanted, WorkLeft, steps_left
from hpstage.scheduler.ready import Head, Heads

# Relative changes of a node's measured seconds per step below this do not trigger re-sorting.
_DRIFT = 0.1


class StageTree:
    """Wanted steps, sources and covers of a plan's lines; ready heads by the longest remaining path."""

    def __init__(self, plan: SearchPlan) -> None:
        self._plan = plan
        self._lines: list[Line] = []
        self._heads = Heads(self._lines, self.remaining)
        self._default_cost = plan.totals.average_step_seconds
        self._drifted = 0
        self.evaluate_seconds = 0.0  # estimate for one evaluation
        self._left = WorkLeft()
        self._unweighed: dict[int, Line] = {}  # by node id: lines that have changed since they were added up
        self.fresh: list[tuple[Line, int]] = []  # newly wanted or to be kept, consumed by the scheduler
        self.changed: dict[int, Line] = {}  # lines that changed, by node id, consumed by the scheduler
        self.changed_all = False  # estimates of all lines did
        for state in plan.kept.values():
            self.line(state.node).add_source(state.step)
        self._unweighed = {node.id: self.line(node) for node in plan.nodes if node.trained}

    def line(self, node: Node) -> Line:
        lines = self._lines
        while len(lines) <= node.id:
            fresh = self._plan.nodes[len(lines)]
            lines.append(Line(fresh, None if fresh.parent is None else lines[fresh.parent.id], self._estimate(fresh)))
        return lines[node.id]

    def line_of(self, span: Span) -> Line:
        return self._lines[span.node] if span.node < len(self._lines) else self.line(self._plan.nodes[span.node])

    @property
    def left(self) -> WorkLeft:
        """What is left to do. Amortised O(changes)."""
        for line in self._unweighed.values():
            self._left.weigh(line)
        self._unweighed.clear()
        return self._left

    # --- changes ------------------------------------------------------------------------------------------

    def want(self, node: Node, step: int) -> None:
        """Mark the metrics of a state as waited for by a trial."""
        line = self.line(node)
        wanted = line.want(step)
        if not wanted.evaluate:
            wanted.evaluate = True
            self._left.evaluations += 1
            self._lengthen(line, self._to(line, step) + self.evaluate_seconds, step, -1)
            self._settle(line, step)
            self.fresh.append((line, step))

    def unwant(self, node: Node, step: int) -> None:
        """Clear :meth:`want`: the metrics of this state are known, or no longer waited for."""
        line = self.line(node)
        wanted = line.wanted.at(step)
        if wanted is not None and wanted.evaluate:
            wanted.evaluate = False
            self._left.evaluations -= 1
            if not wanted.children:
                line.wanted.drop(step)
            self._raise(line, step)
            self._settle(line, step)

    def keep(self, trial: PlannedTrial) -> None:
        """Let the scheduler know of the steps at which a new trial is to be kept, for chains that run."""
        for step in trial.keep_at:
            if step <= trial.steps:
                line = self.line(trial.node_at(step))
                self.fresh.append((line, step))
                self._change(line)

    def kept(self, node: Node, step: int) -> None:
        """Make a state a source."""
        line = self.line(node)
        if step in line.sources:
            return
        line.add_source(step)
        wanted = line.wanted.at(step)
        if wanted is not None and wanted.children:
            children = list(wanted.children.values())
            wanted.children.clear()
            if not wanted.evaluate:
                line.wanted.drop(step)
            for child in children:
                self._queue_head(child, child.node.start)
            self._raise(line, step)
        self._settle(line, step)
        before = line.sources.last(step - 1)
        if before is not None and before in line.heads:
            self._queue_head(line, before)  # the steps that it was to train are nearer now

    def lost(self, node: Node, step: int) -> None:
        """Make a state no longer a source."""
        line = self.line(node)
        line.sources.discard(step)
        self._heads.drop(line, step)
        for child in node.children_at(step):
            below = self.line(child)
            self._heads.drop(below, step)
            if below.needy:
                self._need(line, below)
        self._settle(line, step)

    def cover(self, chain: ChainId, span: Span) -> None:
        """Cover a span that a chain will train, replacing the chain's earlier cover of the line."""
        line = self.line_of(span)
        before = line.covers.get(chain, span)
        line.cover(chain, span)
        self._settle(line, span.stop)
        # Wanted steps that the chain passed without stopping, since the amendment came too late, are open again.
        if before.start < span.start:
            for wanted in line.wanted.between(before.start, span.start, (False, True)):
                self._settle(line, wanted.step)

    def uncover(self, chain: ChainId, line: Line) -> bool:
        """Remove the chain's cover of a line. Return whether it had one."""
        cover = line.covers.pop(chain, None)
        if cover is None:
            return False
        self._settle(line, cover.start)
        for source in line.sources.irange(cover.start, cover.stop):
            self._queue_head(line, source)
        return True

    def measured(self, node: Node) -> None:
        """Update the estimates after the plan measured a node's seconds per step; re-sort if they changed enough."""
        line = self.line(node)
        cost = self._estimate(node)
        default = self._plan.totals.average_step_seconds
        if abs(default - self._default_cost) > 0.5 * self._default_cost:
            self._default_cost = default
            self._drifted = max(16, len(self._lines))
        elif abs(cost - line.cost) > _DRIFT * line.cost:
            self._drifted += 1
            self._heads.renew()
            line.cost = cost
            self._resort(line)
            self._raise(line, node.start + 1)
        self._unweighed[node.id] = line
        if self._drifted >= max(16, len(self._lines)):
            self._reestimate()

    def _estimate(self, node: Node) -> float:
        return max(self._plan.step_seconds(node), 1e-9)

    def _reestimate(self) -> None:
        """Recompute every line, leaves first. O(tree), once per as many drifts."""
        self._drifted = 0
        self.changed_all = True
        self._heads.renew()
        for line in self._lines:
            line.cost = self._estimate(line.node)
            self._unweighed[line.node.id] = line
        for line in reversed(self._lines):  # children come after their parents
            self._resort(line)
        for line in self._lines:
            for step in list(line.heads):
                self._queue_head(line, step)

    def evaluated(self, seconds: float) -> None:
        """Update the estimate for one evaluation, if it changed enough."""
        if abs(seconds - self.evaluate_seconds) > _DRIFT * self.evaluate_seconds:
            self.evaluate_seconds = seconds
            self.changed_all = True
            self._heads.renew()

    # --- needs and heads ----------------------------------------------------------------------------------

    def source_of(self, line: Line, step: int) -> int | None:
        """Return the source from which ``step`` of the line can be trained now; ``None`` if it waits for a chain or the
        parent."""
        source = line.sources.last(step) if line.sources else None
        for cover in line.covers.values():
            if cover.start < step and (source is None or cover.stop >= source):
                return None
        if source is None and self._begins(line):
            source = line.node.start
        return source

    def _begins(self, line: Line) -> bool:
        """Whether the line can be started: its parent's state is a source."""
        return line.above is None or line.node.start in line.above.sources

    def _settle(self, line: Line, step: int) -> None:
        """Update neediness and queued heads of the line, and of the lines above it, after a change at ``step``."""
        while self._settle_one(line, step):
            assert line.above is not None
            line, step = line.above, line.node.start

    def _settle_one(self, line: Line, step: int) -> bool:
        """Settle one line. Return whether its parent must be settled too."""
        self._change(line)
        needy = above = False
        if line.wanted:
            first = line.wanted[0].step
            needy = (not line.sources or line.sources[0] > first) and (
                not line.covers or all(cover.start >= first for cover in line.covers.values())
            )
        if needy != line.needy:
            line.needy = needy
            if not needy:
                self._heads.drop(line, line.node.start)
                above = line.above is not None and self._relieve(line.above, line)
            elif line.above is None or self._begins(line):
                self._queue_head(line, line.node.start)
            else:
                self._need(line.above, line)
                above = True
        source = line.sources.last(step) if line.sources else None
        if source is not None:
            self._queue_head(line, source)
        elif needy and self._begins(line):
            self._queue_head(line, line.node.start)
        self._unweighed[line.node.id] = line
        return above

    def _need(self, parent: Line, child: Line) -> None:
        step = child.node.start
        parent.want(step).attach(child)
        self._lengthen(parent, self._to(parent, step) + child.length, step, child.node.id)
        self.fresh.append((parent, step))

    def _relieve(self, parent: Line, child: Line) -> bool:
        """Remove ``child`` from the parent's wanted step. Return whether it was there."""
        step = child.node.start
        wanted = parent.wanted.at(step)
        if wanted is None or wanted.children.pop(child.node.id, None) is None:
            return False
        if not wanted.children and not wanted.evaluate:
            parent.wanted.drop(step)
        self._raise(parent, step)
        return True

    def _change(self, line: Line) -> None:
        self.changed[line.node.id] = line

    def _queue_head(self, line: Line, step: int) -> None:
        if self._is_open(line, step):
            self._heads.put(line, step)
        else:
            self._heads.drop(line, step)

    def _is_open(self, line: Line, step: int) -> bool:
        """Whether training from ``step`` would serve a wanted step."""
        if step == line.node.start:
            return line.needy and self._begins(line)
        if step not in line.sources:
            return False
        first = line.wanted.after(step - 1)
        return first is not None and self.source_of(line, first.step) == step

    @property
    def ready(self) -> int:
        """The number of heads."""
        return self._heads.count

    def heads(self, most: int) -> list[Head]:
        """Return ready heads, those with the longest paths first, at most so many."""
        return self._heads.first(most)

    # --- lengths ------------------------------------------------------------------------------------------

    def remaining(self, line: Line, step: int) -> float:
        """Return the seconds of the longest path from the source ``step`` of the line (its remaining critical path)."""
        best = self.farthest(line, step)
        if best is None:
            return 0.0
        return best[0] - (step - line.node.start) * line.cost

    def farthest(self, line: Line, step: int) -> tuple[float, int, int] | None:
        """Return the end of the longest path from ``step``: ``(seconds from line start, step, child id or -1)``."""
        limit = self.limit(line, step) if line.sources or line.covers else None
        if limit is None:
            top = self._top(line)
            if top is not None and top[1] >= step:
                return -top[0], top[1], top[2]
        best: tuple[float, int, int] | None = None
        for wanted in line.wanted.between(step, limit, (True, False)):
            for seconds, child in self._ends(line, wanted):
                if best is None or seconds > best[0]:
                    best = seconds, wanted.step, child
        return best

    def limit(self, line: Line, step: int) -> int | None:
        """Return the first step after ``step`` that is reached from elsewhere: a later source, or just after a cover's
        start."""
        later = line.sources.first(step, inclusive=False) if line.sources else None
        for cover in line.covers.values():
            if cover.start >= step and (later is None or cover.start + 1 < later):
                later = cover.start + 1
        return later

    def _value(self, line: Line, step: int, child: int) -> float | None:
        """Return the seconds from the line's start to the end of the path via ``child`` (-1: the evaluation there)."""
        wanted = line.wanted.at(step)
        if wanted is None:
            return None
        if child < 0:
            return self._to(line, step) + self.evaluate_seconds if wanted.evaluate else None
        below = wanted.children.get(child)
        return None if below is None else self._to(line, step) + below.length

    def _ends(self, line: Line, wanted: Wanted) -> Iterator[tuple[float, int]]:
        """Yield the seconds from the line's start to the end of each path via a wanted step, and the child that it
        goes on with (-1: the evaluation there)."""
        ahead = self._to(line, wanted.step)
        if wanted.evaluate:
            yield ahead + self.evaluate_seconds, -1
        for id, child in wanted.children.items():
            yield ahead + child.length, id

    @staticmethod
    def _to(line: Line, step: int) -> float:
        """Return the seconds from the line's start to a step."""
        return (step - line.node.start) * line.cost

    def _top(self, line: Line) -> tuple[float, int, int] | None:
        far = line.far
        while far:
            negative, step, child = far[0]
            value = self._value(line, step, child)
            if value is None:
                heapq.heappop(far)
            elif value != -negative:
                heapq.heapreplace(far, (-value, step, child))
            else:
                return far[0]
        return None

    def _resort(self, line: Line) -> None:
        line.far = [
            (-seconds, wanted.step, child) for wanted in line.wanted for seconds, child in self._ends(line, wanted)
        ]
        heapq.heapify(line.far)
        top = self._top(line)
        line.length = -top[0] if top is not None else 0.0

    def _lengthen(self, line: Line, seconds: float, step: int, child: int) -> None:
        """Add a new path on the line, and propagate it upwards if it is the longest."""
        line.lengthen(seconds, step, child)
        self._raise(line, step)

    def _raise(self, line: Line, step: int) -> None:
        """Recompute the length of a line whose paths via ``step`` changed, and propagate it to heads and parents."""
        while True:
            self._change(line)
            top = self._top(line)
            length = -top[0] if top is not None else 0.0
            changed = length != line.length
            line.length = length
            if not changed and not line.sources and not line.covers:
                return  # nor has its only head, if it is one
            source = self.source_of(line, step)
            if source is not None:
                self._queue_head(line, source)
                return
            above = line.above
            if not changed or not line.needy or above is None:
                return
            step = line.node.start
            above.lengthen(self._to(above, step) + length, step, line.node.id)
            line = above

    # --- reading ------------------------------------------------------------------------------------------

    def is_done(self) -> bool:
        """Whether nothing is wanted. O(lines): for tests and the end of a run."""
        return not any(line.wanted for line in self._lines)

    def validate(self) -> None:
        """Assert that the incremental structures equal a recomputation. O(tree)."""
        for line in self._lines:
            node = line.node
            assert list(line.sources) == sorted(s for s, state in node.states.items() if state.kept is not None)
            assert [wanted.step for wanted in line.wanted] == sorted({wanted.step for wanted in line.wanted})
            for wanted in line.wanted:
                step = wanted.step
                assert step > node.start
                assert wanted.evaluate or wanted.children
                if wanted.evaluate:
                    assert self._plan.open_targets.waiting(node.states[step])
                for id, child in wanted.children.items():
                    assert child.needy and child.node.id == id and child.node.start == step
                    assert step not in line.sources
                source = self.source_of(line, step)
                if source is not None:
                    assert source in line.heads, f"wanted step {step} of node {node.id} has no head"
                elif line.sources.last(step) is None and all(c.start >= step for c in line.covers.values()):
                    assert line.needy and node.parent is not None
                    assert self._is_needed_above(line)
            if line.wanted and line.needy and node.parent is not None and not self._begins(line):
                assert self._is_needed_above(line)
            assert all(self._is_open(line, step) for step in line.heads), f"node {node.id} has a closed head"
        assert self.ready == sum(len(line.heads) for line in self._lines)
        left = self.left
        seconds = sum(steps_left(line) * line.cost for line in self._lines)
        assert abs(left.seconds - seconds) <= 1e-6 * (1.0 + seconds)
        assert left.evaluations == sum(wanted.evaluate for line in self._lines for wanted in line.wanted)
        assert left.stages_left == sum(bool(line.wanted or steps_left(line)) for line in self._lines)

    @staticmethod
    def _is_needed_above(line: Line) -> bool:
        wanted = None if line.above is None else line.above.wanted.at(line.node.start)
        return wanted is not None and line.node.id in wanted.children
