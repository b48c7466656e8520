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


def points_of(branch: Branch, metric: str | None) -> list[tuple[int, float]]:
    """Return the values of the metric on a branch that can be drawn, by step."""
    known = ((step, state.metrics or {}) for step, state in branch.node.states.items() if step <= branch.reach)
    return sorted((step, found[metric]) for step, found in known if metric in found and can_be_drawn(found[metric]))


def measured(branches: dict[NodeId, Branch], metric: str | None, *, maximize: bool) -> dict[NodeId, Measured]:
    """Return what was measured of the metric on each branch. ``branches`` must have parents before children."""
    found = {id: Measured(points_of(branch, metric)) for id, branch in branches.items()}
    best = max if maximize else min
    # From the leaves up, so that a branch's value is known before it is passed to its parent.
    for id, branch in reversed(branches.items()):
        mine, parent = found[id], branch.node.parent
        values = [value for _, value in mine.points] + ([] if mine.value is None else [mine.value])
        if values:
            mine.value = best(values)
            if parent is not None:
                above = found[parent.id]
                above.value = mine.value if above.value is None else best(above.value, mine.value)
    return found


def merit(value: float | None, *, maximize: bool) -> float:
    """Return the value such that greater is better."""
    return -math.inf if value is None else value if maximize else -value
