"""Metrics measured on the branches of a stage tree. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hpstage.accounting.branches import Branch
from hpstage.plan.facts import NodeId

# Beyond this, sums and margins of an axis overflow. Values this large have diverged.
_LARGEST = 1e300


@dataclass(slots=True)
class Measured:
    """The values measured on a branch, by step; ``value`` is the best of the branch and its descendants."""

    points: list[tuple[int, float]] = field(default_factory=list)
    value: float | None = None


def can_be_drawn(value: float) -> bool:
    """Whether the value is finite and not too large for an axis."""
    return abs(value) <= _LARGEST


def measured(branches: dict[NodeId, Branch], metric: str | None, *, maximize: bool) -> dict[NodeId, Measured]:
    """Return the values of the metric on each branch that can be drawn. ``branches`` must have parents before
    children."""
    found = {id: Measured() for id in branches}
    # From the leaves up, so that a branch's value is known before it is passed to its parent.
    for branch in reversed(branches.values()):
        node, reach = branch.node, branch.reach
        mine = found[node.id]
        points, best = mine.points, mine.value
        for step, state in node.states.items():
            value = None if state.metrics is None or metric is None else state.metrics.get(metric)
            if value is not None and step <= reach and can_be_drawn(value):
                points.append((step, value))
                if best is None or (value > best if maximize else value < best):
                    best = value
        if best is None:
            continue
        if len(points) > 1:
            points.sort()
        mine.value = best
        if node.parent is not None:
            above = found[node.parent.id]
            if above.value is None or (best > above.value if maximize else best < above.value):
                above.value = best
    return found


def merit(value: float | None, *, maximize: bool) -> float:
    """Return the value such that greater is better."""
    return -math.inf if value is None else value if maximize else -value
