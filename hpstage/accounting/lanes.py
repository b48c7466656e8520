"""Layout of the stage tree in rows: its lanes and their positions. Pure.

Used by the report's pictures and by the page on Dask's dashboard.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import TypeVar

from hpstage.plan.facts import NodeId, TrialId
from hpstage.plan.nodes import Node, PlannedTrial


@dataclass(slots=True)
class Lane:
    """The part of a node that is used by some trials, ``trials`` of them."""

    node: Node
    reach: int
    trials: int = 0
    children: list[Lane] = field(default_factory=list)


_Lane = TypeVar("_Lane", bound=Lane)


def lanes_of(trials: Mapping[TrialId, PlannedTrial]) -> dict[NodeId, Lane]:
    """Return the lanes of the trials' tree up to the steps asked for, parents before children."""
    lanes: dict[NodeId, Lane] = {}
    for trial in trials.values():
        extend(lanes, trial, 0, trial.asked, _new)
    return lanes


def _new(node: Node) -> Lane:
    return Lane(node, node.start)


def extend(
    lanes: dict[NodeId, _Lane], trial: PlannedTrial, before: int, step: int, new: Callable[[Node], _Lane]
) -> list[_Lane]:
    """Extend the lanes of a trial from ``before`` to ``step`` and return the new lanes.

    Args:
        new: creates the lane of a node of which nothing has been asked for yet.
    """
    found = []
    for node, start, stop in trial.path_to(step):
        lane = lanes.get(node.id)
        if lane is not None and stop <= before:
            continue
        if lane is None:
            lane = lanes[node.id] = new(node)
            if node.parent is not None:
                lanes[node.parent.id].children.append(lane)
            found.append(lane)
        if stop > lane.reach:
            lane.reach = stop
        lane.trials += start >= before or lane.trials == 0
    return found


def rows(lanes: Collection[_Lane]) -> dict[NodeId, int]:
    """Assign each lane a row, from top to bottom. The parent of every lane must be among the lanes.

    The children of a lane are below it, the latest to fork first, so that no connector crosses a line. A child that
    starts where its parent's lane ends takes over its row.
    """
    children: dict[NodeId | None, list[_Lane]] = {}
    for lane in lanes:
        children.setdefault(None if lane.node.parent is None else lane.node.parent.id, []).append(lane)
    found: dict[NodeId, int] = {}
    waiting = sorted(children.get(None, ()), key=lambda lane: -lane.node.id)
    row, last = -1, None
    while waiting:
        lane = waiting.pop()
        node = lane.node
        if last is None or node.parent is not last.node or node.start != last.reach:
            row += 1
        found[node.id] = row
        below = children.get(node.id, ())
        waiting += sorted(below, key=lambda child: (child.node.start, -child.trials, -child.node.id))
        last = lane
    return found


def ranking(lanes: Iterable[Lane], merit: Callable[[Lane], float]) -> list[Lane]:
    """Return the lanes ranked by number of trials, then by merit. Parents come before their children, since they have
    at least as many trials and the smaller id.

    Args:
        merit: greater is better; no child of a lane may have a greater merit than the lane.
    """
    # By the least significant criterion first: sorting by three numbers is faster than by triples.
    ranked = sorted(lanes, key=lambda lane: lane.node.id)
    ranked.sort(key=merit, reverse=True)
    ranked.sort(key=attrgetter("trials"), reverse=True)
    return ranked


def foremost(
    lanes: Mapping[NodeId, Lane], ranked: Iterable[Lane], most: int, *, always: Iterable[NodeId] = ()
) -> list[Lane]:
    """Return the first lanes of the ranking that fit into ``most`` rows, in the order of their nodes.

    Args:
        ranked: the lanes by :func:`ranking`.
        most: number of rows.
        always: nodes to include in any case, with their ancestors.
    """
    first = dict.fromkeys(node.id for id in always if id in lanes for node in lanes[id].node.ancestry())
    chosen: dict[NodeId, Lane] = {}
    taken: set[NodeId] = set()  # lanes whose row is continued by a child
    used = 0
    for lane in chain([lanes[id] for id in first], ranked):
        node = lane.node
        if node.id in chosen:
            continue
        parent = node.parent
        goes_on = parent is not None and parent.id not in taken and node.start == lanes[parent.id].reach
        if used + (not goes_on) > most and node.id not in first:
            break
        used += not goes_on
        if goes_on and parent is not None:
            taken.add(parent.id)
        chosen[node.id] = lane
    return sorted(chosen.values(), key=lambda lane: lane.node.id)
