"""The branches of a stage tree, one per node of the plan, and sums over all of them. Pure.

A step of a branch is *wanted* if a trial waits for its metrics, or if a child attached there needs its state. A *cover*
is the part of a branch that a running chain will train.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from operator import attrgetter

from hpstage.plan.facts import ChainId, Span
from hpstage.plan.nodes import Node
from hpstage.plan.ordered import Ordered


class Wanted:
    """A wanted step of a branch, and the reasons why it is."""

    __slots__ = ("children", "evaluate", "step")

    def __init__(self, step: int) -> None:
        self.step = step
        self.evaluate = False
        self.children = _NO_CHILDREN  # needy branches attached here, by node id

    def attach(self, child: Branch) -> None:
        if self.children is _NO_CHILDREN:
            self.children = {}
        self.children[child.node.id] = child


_NO_CHILDREN: dict[int, Branch] = {}


class WantedSteps(list[Wanted]):
    """The wanted steps of a branch, ascending."""

    __slots__ = ()

    def at(self, step: int) -> Wanted | None:
        if len(self) == 1:  # as on most branches
            wanted = self[0]
            return wanted if wanted.step == step else None
        index = bisect_left(self, step, key=_step)
        return self[index] if index < len(self) and self[index].step == step else None

    def drop(self, step: int) -> None:
        """Remove a wanted step."""
        del self[bisect_left(self, step, key=_step)]

    def after(self, step: int) -> Wanted | None:
        """Return the first wanted step after a step."""
        index = bisect_right(self, step, key=_step)
        return self[index] if index < len(self) else None

    def between(
        self, step: int, stop: int | None, inclusive: tuple[bool, bool], most: int | None = None
    ) -> list[Wanted]:
        """Return the wanted steps from ``step`` to ``stop``, at most ``most`` of them (``None``: no limit)."""
        first = (bisect_left if inclusive[0] else bisect_right)(self, step, key=_step)
        end = len(self) if stop is None else (bisect_right if inclusive[1] else bisect_left)(self, stop, key=_step)
        return self[first : end if most is None else min(end, first + most)]


_step = attrgetter("step")


# Empty collections, which many branches share and which are never changed: see Branch.
_NO_WANTED = WantedSteps()
_NO_SOURCES: Ordered[int] = Ordered()
_NO_COVERS: dict[ChainId, Span] = {}
_NO_FAR: list[tuple[float, int, int]] = []
_NONE_READY: dict[int, float] = {}


class Branch:
    """The transient data of a node.

    There is one per node, and most of its collections are empty. The method that first adds to a collection creates it.
    """

    __slots__ = (
        "above",
        "cost",
        "covers",
        "far",
        "length",
        "needy",
        "node",
        "rated",
        "ready",
        "seconds",
        "sources",
        "steps",
        "unfinished",
        "wanted",
    )

    def __init__(self, node: Node, above: Branch | None, cost: float) -> None:
        self.node = node
        self.above = above  # the branch of its parent
        self.cost = cost  # seconds per step, as used in ``far`` and ``length``
        self.wanted = _NO_WANTED
        self.sources = _NO_SOURCES  # steps after the start whose states are saved
        self.covers = _NO_COVERS  # the part of the branch that each chain will still train
        self.needy = False
        self.length = 0.0  # seconds of the longest remaining path, from the branch's start
        # Heap of (-seconds from the branch's start, step, child node id or -1). Stale entries are dropped or
        # renewed when they reach the top.
        self.far = _NO_FAR
        self.ready = _NONE_READY  # step of each ready stage -> the priority it is queued with
        self.rated = 0  # the number of the estimates on which these priorities are based
        # Its contribution to the sums of WorkLeft.
        self.seconds = 0.0
        self.steps = 0
        self.unfinished = False

    def want(self, step: int) -> Wanted:
        """Return the entry of a wanted step; a new one has no reasons yet."""
        wanted = self.wanted.at(step)
        if wanted is None:
            wanted = Wanted(step)
            if self.wanted is _NO_WANTED:
                self.wanted = WantedSteps((wanted,))
            else:
                insort(self.wanted, wanted, key=_step)
        return wanted

    def add_source(self, step: int) -> None:
        if self.sources is _NO_SOURCES:
            self.sources = Ordered()
        self.sources.add(step)

    def cover(self, chain: ChainId, span: Span) -> None:
        """Cover a span that a chain will train; it becomes the last of the branch's covers."""
        if self.covers is _NO_COVERS:
            self.covers = {}
        self.covers.pop(chain, None)
        self.covers[chain] = span

    def queue_stage(self, step: int, priority: float) -> None:
        if self.ready is _NONE_READY:
            self.ready = {}
        self.ready[step] = priority

    def lengthen(self, seconds: float, step: int, child: int) -> None:
        """Add a path via ``step`` that ends ``seconds`` after the branch's start."""
        if self.far is _NO_FAR:
            self.far = []
        heapq.heappush(self.far, (-seconds, step, child))


class WorkLeft:
    """Remaining seconds, steps, evaluations and stages, summed over the branches of a stage tree.

    A change of one branch costs O(log n) of its targets, regardless of the number of branches.
    """

    __slots__ = ("evaluations", "seconds", "stages_left", "steps")

    def __init__(self) -> None:
        self.seconds = 0.0  # of training
        self.steps = 0
        self.evaluations = 0
        self.stages_left = 0

    def weigh(self, branch: Branch) -> None:
        """Replace a branch's contribution to the sums by that of its current state."""
        steps = steps_left(branch)
        seconds = steps * branch.cost
        unfinished = steps > 0 or bool(branch.wanted)
        self.seconds += seconds - branch.seconds
        self.steps += steps - branch.steps
        self.stages_left += unfinished - branch.unfinished
        branch.seconds, branch.steps, branch.unfinished = seconds, steps, unfinished


def steps_left(branch: Branch) -> int:
    """Count the steps of a branch that chains will train, and those missing up to its first and last wanted steps."""
    covers = branch.covers.values()
    left = 0
    for cover in covers:
        left += cover.stop - cover.start
    if branch.wanted:
        begun, first, last = branch.node.start, branch.wanted[0].step, branch.wanted[-1].step
        for step in (first, last) if first != last else (first,):
            if branch.sources:
                begun = max(begun, branch.sources.last(step) or 0)
            for cover in covers:
                if cover.start < step <= cover.stop:
                    break
                if begun < cover.stop <= step:
                    begun = cover.stop
            else:
                left += step - begun
            begun = step
    return left
