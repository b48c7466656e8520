"""The stage tree on rows: its lanes, and where each lies. Pure.

The one lay-out of the report's pictures and of the page on Dask's dashboard.
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
    """A node as far as some trials go along it, ``trials`` of them."""

    node: Node
    reach: int
    trials: int = 0
    children: list[Lane] = field(default_factory=list)


_Lane = TypeVar("_Lane", bound=Lane)


def lanes_of(trials: Mapping[TrialId, PlannedTrial]) -> dict[NodeId, Lane]:
    """The lanes of the trials' tree, as far as they were asked for, parents before children."""
    lanes: dict[NodeId, Lane] = {}
    for trial in trials.values():
        extend(lanes, trial, 0, trial.asked, _new)
    return lanes


def _new(node: Node) -> Lane:
    return Lane(node, node.start)


def extend(
    lanes: dict[NodeId, _Lane], trial: PlannedTrial, before: int, step: int, new: Callable[[Node], _Lane]
) -> list[_Lane]:
    """Let a trial whose lanes up to ``before`` are there go on to ``step``; returns the lanes that are new.

    Args:
        new: makes the lane of a node, nothing of which is asked for yet.
    """
    found = []
    for node, start, stop in trial.legs(step):
        if stop <= before:
            continue
        lane = lanes.get(node.id)
        if lane is None:
            lane = lanes[node.id] = new(node)
            if node.parent is not None:
                lanes[node.parent.id].children.append(lane)
            found.append(lane)
        if stop > lane.reach:
            lane.reach = stop
        lane.trials += start >= before
    return found


def rows(lanes: Collection[_Lane]) -> dict[NodeId, int]:
    """A row for each lane; with a lane, its parent's is among them. From the top row to the lowest.

    Below a lane come its children, the latest to part first, so that no connector crosses a line; one that goes on
    where its parent's lane ends takes over its row.
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
    """The lanes that most trials go along first, among equals the best. Parents come before their children: they have
    as many trials, and the smaller id.

    Args:
        merit: the greater the better; none of a lane's children has more than the lane itself.
    """
    # By the last criterion first: sorting by three numbers is faster than by triples.
    ranked = sorted(lanes, key=lambda lane: lane.node.id)
    ranked.sort(key=merit, reverse=True)
    ranked.sort(key=attrgetter("trials"), reverse=True)
    return ranked


def foremost(
    lanes: Mapping[NodeId, Lane], ranked: Iterable[Lane], most: int, *, always: Iterable[NodeId] = ()
) -> list[Lane]:
    """As many lanes as ``most`` rows hold, the first of the ranking; in the order of their nodes.

    Args:
        ranked: the lanes by :func:`ranking`.
        most: rows.
        always: these are among them in any case, and so are those above them.
    """
    first = dict.fromkeys(node.id for id in always if id in lanes for node in lanes[id].node.ancestry())
    chosen: dict[NodeId, Lane] = {}
    taken: set[NodeId] = set()  # lanes whose row a child goes on with
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
