"""Lower bounds on the makespan of a tree of training, for a fleet of workers. Pure.

The depth of work is the least time from the start of training to it. No work deeper than ``d`` can start before ``d``
seconds have passed, and at that moment all of it is left. Therefore no schedule is shorter than ``d + work below d /
workers``, for any ``d``. The maximum over ``d`` is at least the critical path (the greatest depth) and at least ``work
/ workers`` (``d = 0``), and more than both where a narrow trunk keeps workers idle before the tree is wide.

Loading and saving states, verifying forks, and repeated training are left out: they only add to the makespan.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpstage.accounting.accounting import Accounting
from hpstage.plan.facts import NodeId
from hpstage.plan.nodes import Node, PlannedTrial
from hpstage.plan.step_times import ALONE, StepTimes


class Work(NamedTuple):
    """Work on a branch of the tree: it starts at ``depth`` or later, takes ``seconds`` or longer, and workers spend at
    least ``worker_seconds`` on it, the same in each of these seconds."""

    depth: float
    seconds: float
    worker_seconds: float


def lower_bound(tree: Iterable[Work], workers: int) -> float:
    """Return a lower bound on the seconds that ``workers`` workers take for all the work. O(n log n).

    The maximum is taken over all depths, not only over those at which the tree forks.
    """
    changes: dict[float, float] = defaultdict(float)  # of the worker seconds per second, by depth
    left = critical = 0.0
    for depth, seconds, worker_seconds in tree:
        left += worker_seconds
        critical = max(critical, depth + seconds)
        if seconds > 0.0:
            changes[depth] += worker_seconds / seconds
            changes[depth + seconds] -= worker_seconds / seconds
    # Between two changes the sum is linear in the depth, so that it is greatest at one of them.
    best = max(critical, left / workers)
    before = width = 0.0
    for depth in sorted(changes):
        left -= width * (depth - before)
        best = max(best, depth + left / workers)
        width, before = width + changes[depth], depth
    return best


@dataclass(frozen=True, slots=True)
class Speeds:
    """The highest speed of workers, relative to one that trains one chain at a time.

    Where several workers may train a chain together, a branch takes less time but not less work; where a worker trains
    siblings as one, there is less work but a branch takes no less time.
    """

    branch: float = 1.0
    """Maximum number of seconds of training on a branch per second."""
    worker: float = 1.0
    """Maximum number of seconds of training by a worker per second."""
    evaluations: int = 1
    """Maximum number of evaluations that a worker does at a time."""


ONE_CHAIN = Speeds()


def speeds(
    workers: int, *, slots: int = 1, step_times: StepTimes = ALONE, widest: int = 1, speedup: Callable[[int], float]
) -> Speeds:
    """Return the speeds of a configured fleet.

    Args:
        workers: number of workers.
        slots: maximum number of chains that a worker trains side by side.
        step_times: the time of a step by the number of chains side by side.
        widest: maximum number of workers that train a chain together.
        speedup: returns the speed of this many workers together, relative to one.
    """
    gangs = {width: speedup(width) for width in range(2, min(widest, workers) + 1)}
    return Speeds(
        branch=max([1.0, *gangs.values()]),
        worker=max([1.0, *(gained / width for width, gained in gangs.items())])
        * max(1.0 / step_times.share(width) for width in range(1, slots + 1)),
        evaluations=slots,
    )


def measured_speeds(accounting: Accounting, workers: int) -> Speeds:
    """Return the highest speeds of ``workers`` workers: in gangs, by their reports; side by side, by measured times."""
    times = accounting.plan.step_times or ALONE
    slots, _ = times.seconds[-1]
    widths = accounting.widths
    return speeds(workers, slots=slots, step_times=times, widest=accounting.widest, speedup=widths.speedup)


class _NodeWork:
    """The steps and evaluations that some trials request on a node."""

    __slots__ = ("cost", "depth", "evaluated", "passed", "reach", "waits")

    def __init__(self, cost: float) -> None:
        self.cost = cost  # least seconds per step
        self.reach = 0
        self.evaluated: set[int] = set()
        self.passed: set[int] = set()  # evaluated steps that a trial passes without requesting their metrics
        self.waits: list[int] = []  # the other evaluated steps, in order
        self.depth = 0.0  # of the node's start

    def depth_at(self, start: int, step: int, evaluate_seconds: float) -> float:
        """Return the depth of the work after the state at ``step``."""
        return self.depth + (step - start) * self.cost + bisect_right(self.waits, step) * evaluate_seconds


def tree_work(
    trials: Sequence[tuple[PlannedTrial, Sequence[int]]],
    step_seconds: Callable[[Node], float],
    evaluate_seconds: float,
    fleet: Speeds = ONE_CHAIN,
) -> Iterator[Work]:
    """Yield the work of a tree: all steps once, and one evaluation of each target. O(segments and targets).

    All steps of a node take the same time. Training beyond a target waits for the target's evaluation if every trial
    that continues from there has requested it; otherwise the target may be evaluated while training continues.

    Args:
        trials: trials, each with its targets in ascending order, the last of which is where it ends.
        step_seconds: seconds per step of a node, on a worker that trains nothing else.
    """
    nodes: dict[NodeId, Node] = {}  # parents before children, as in each path
    branches: dict[NodeId, _NodeWork] = {}
    for trial, targets in trials:
        for node, _, stop in trial.path_to(targets[-1]):
            branch = branches.get(node.id)
            if branch is None:
                nodes[node.id], branch = node, _NodeWork(step_seconds(node) / fleet.branch)
                branches[node.id] = branch
            branch.reach = max(branch.reach, stop)
        for step in targets:
            branches[trial.node_at(step).id].evaluated.add(step)
    for trial, targets in trials:
        for node, start, stop in trial.path_to(targets[-1]):
            branch = branches[node.id]
            others = branch.evaluated.difference(targets)
            branch.passed.update(step for step in others if start < step <= stop)
    for id, node in nodes.items():
        branch = branches[id]
        branch.waits = sorted(branch.evaluated - branch.passed)
        if node.parent is not None:
            above = branches[node.parent.id]
            branch.depth = above.depth_at(node.parent.start, node.start, evaluate_seconds)
        began, at = branch.depth, node.start
        for step in sorted({*branch.evaluated, branch.reach}):
            seconds = (step - at) * branch.cost
            yield Work(began, seconds, seconds * fleet.branch / fleet.worker)
            if step in branch.evaluated:
                yield Work(began + seconds, evaluate_seconds, evaluate_seconds / fleet.evaluations)
            began, at = branch.depth_at(node.start, step, evaluate_seconds), step
