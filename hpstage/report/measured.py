"""What was measured on the lanes of a stage tree. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from hpstage.events import NodeId
from hpstage.report.lanes import Lane

# Beyond it, sums and margins of an axis overflow: what grew so large has diverged.
_LARGEST = 1e300


@dataclass(slots=True)
class Measured:
    """What was measured on a lane, by step; ``value`` is the best of it and of what lies below."""

    points: list[tuple[int, float]] = field(default_factory=list)
    value: float | None = None


def can_be_drawn(value: float) -> bool:
    """Finite, and no larger than an axis can show."""
    return abs(value) <= _LARGEST


def measured(lanes: Mapping[NodeId, Lane], metric: str | None, *, maximize: bool) -> dict[NodeId, Measured]:
    """The metric on each lane, as far as it can be drawn. ``lanes``: parents before children."""
    better = max if maximize else min
    found = {id: Measured() for id in lanes}
    # From the leaves on: what a lane came to is known before its parent asks.
    for id, lane in reversed(list(lanes.items())):
        mine = found[id]
        best = mine.value
        for step, state in lane.node.states.items():
            value = None if state.metrics is None or metric is None else state.metrics.get(metric)
            if value is not None and step <= lane.reach and can_be_drawn(value):
                mine.points.append((step, value))
                best = value if best is None else better(best, value)
        mine.points.sort()
        mine.value = best
        parent = lane.node.parent
        if best is not None and parent is not None:
            above = found[parent.id]
            above.value = best if above.value is None else better(above.value, best)
    return found


def merit(value: float | None, *, maximize: bool) -> float:
    """The greater the better."""
    return -math.inf if value is None else value if maximize else -value
