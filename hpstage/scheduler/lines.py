"""The lines of a stage tree, one per node of the plan, and sums over all of them. Pure.

A step of a line is *wanted* if a trial waits for its metrics, or if a child attached there needs its state. A *cover*
is the part of a line that a running chain will train.
"""

from __future__ import annotations

from hpstage.plan.facts import ChainId, Span
from hpstage.plan.nodes import Node
from hpstage.plan.ordered import Ordered, StepMap


class Wanted:
    """The reasons why a step of a line is wanted."""

    __slots__ = ("children", "evaluate")

    def __init__(self) -> None:
        self.evaluate = False
        self.children: dict[int, Line] = {}  # needy lines attached here, by node id


class Line:
    """The transient data of a node."""

    __slots__ = ("cost", "covers", "far", "heads", "length", "needy", "node", "sources", "wanted", "weighed")

    def __init__(self, node: Node, cost: float) -> None:
        self.node = node
        self.cost = cost  # seconds per step, as used in ``far`` and ``length``
        self.wanted: StepMap[Wanted] = StepMap()
        self.sources: Ordered[int] = Ordered()  # kept steps after the start
        self.covers: dict[ChainId, Span] = {}  # the part of the line that each chain will still train
        self.needy = False
        self.length = 0.0  # seconds of the longest remaining path, from the line's start
        # Heap of (-seconds from the line's start, step, child node id or -1). Stale entries are dropped or
        # renewed when they reach the top.
        self.far: list[tuple[float, int, int]] = []
        self.heads: dict[int, float] = {}  # step of each queued head -> the priority it is queued with
        self.weighed = Weight()


class Weight:
    """A line's contribution to the sums."""

    __slots__ = ("done", "seconds", "unfinished")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.unfinished = False
        self.done = False


class WorkLeft:
    """Sums over the lines of a stage tree. Each change of a line costs O(log), regardless of the number of lines."""

    __slots__ = ("evaluations", "seconds", "stages_done", "stages_left")

    def __init__(self) -> None:
        self.seconds = 0.0  # of training
        self.evaluations = 0
        self.stages_done = 0
        self.stages_left = 0

    def weigh(self, line: Line) -> None:
        """Replace a line's contribution to the sums by that of its current state."""
        steps = steps_left(line)
        seconds = steps * line.cost
        unfinished = steps > 0 or bool(line.wanted)
        done = not unfinished and line.node.trained > 0
        before = line.weighed
        self.seconds += seconds - before.seconds
        self.stages_left += unfinished - before.unfinished
        self.stages_done += done - before.done
        before.seconds, before.unfinished, before.done = seconds, unfinished, done


def steps_left(line: Line) -> int:
    """Count the steps of a line that chains will train, and the further ones to its first and last wanted steps."""
    covers = line.covers.values()
    left = sum(cover.stop - cover.start for cover in covers)
    if line.wanted:
        steps = line.wanted.steps
        begun = line.node.start
        for step in dict.fromkeys((steps[0], steps[-1])):
            if not any(cover.start < step <= cover.stop for cover in covers):
                stops = (cover.stop for cover in covers if cover.stop <= step)
                left += step - max(begun, line.sources.last(step) or 0, *stops)
            begun = step
    return left
