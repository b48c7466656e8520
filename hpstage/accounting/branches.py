"""The stage tree for drawings: its branches in rows, ranked, with the metric measured on each. Pure.

Used by the report's pictures and by the page on Dask's dashboard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import TypeVar

from hpstage.plan.facts import NodeId, TrialId
from hpstage.plan.nodes import Node, PlannedTrial


@dataclass(slots=True)
class TreeBranch:
    """The part of a node up to ``reach``, which ``trials`` trials use."""

    node: Node
    reach: int
    trials: int = 0
    children: list[TreeBranch] = field(default_factory=list)


_Branch = TypeVar("_Branch", bound=TreeBranch)


def branches_of(trials: Mapping[TrialId, PlannedTrial]) -> dict[NodeId, TreeBranch]:
    """Return the branches of the trials' tree up to the steps requested, parents before children."""
    branches: dict[NodeId, TreeBranch] = {}
    for trial in trials.values():
        extend(branches, trial, 0, trial.requested, _new)
    return branches


def _new(node: Node) -> TreeBranch:
    return TreeBranch(node, node.start)


def extend(
    branches: dict[NodeId, _Branch], trial: PlannedTrial, before: int, step: int, new: Callable[[Node], _Branch]
) -> list[_Branch]:
    """Extend the branches of a trial from ``before`` to ``step`` and return the new branches.

    Args:
        new: creates the branch of a node of which no step was requested before.
    """
    found = []
    for node, start, stop in trial.path_to(step):
        branch = branches.get(node.id)
        if branch is not None and stop <= before:
            continue
        if branch is None:
            branch = branches[node.id] = new(node)
            if node.parent is not None:
                branches[node.parent.id].children.append(branch)
            found.append(branch)
        if stop > branch.reach:
            branch.reach = stop
        branch.trials += start >= before or branch.trials == 0
    return found


def rows(branches: Collection[_Branch]) -> dict[NodeId, int]:
    """Assign each branch a row, from top to bottom. The parent of every branch must be among the branches.

    The children of a branch are below it, the latest to fork first, so that no connector crosses another branch. A
    child that starts where its parent's branch ends continues in the same row.
    """
    children: dict[NodeId | None, list[_Branch]] = {}
    for branch in branches:
        children.setdefault(None if branch.node.parent is None else branch.node.parent.id, []).append(branch)
    found: dict[NodeId, int] = {}
    waiting = sorted(children.get(None, ()), key=lambda branch: -branch.node.id)
    row, last = -1, None
    while waiting:
        branch = waiting.pop()
        node = branch.node
        if last is None or node.parent is not last.node or node.start != last.reach:
            row += 1
        found[node.id] = row
        below = children.get(node.id, ())
        waiting += sorted(below, key=lambda child: (child.node.start, -child.trials, -child.node.id))
        last = branch
    return found


def ranking(branches: Iterable[TreeBranch], merit: Callable[[TreeBranch], float]) -> list[TreeBranch]:
    """Return the branches ranked by number of trials, then by merit. Parents come before their children, since they
    have at least as many trials and the smaller id.

    Args:
        merit: greater is better; no child of a branch may have a greater merit than the branch.
    """
    # By the least significant criterion first: sorting by three numbers is faster than by triples.
    ranked = sorted(branches, key=lambda branch: branch.node.id)
    ranked.sort(key=merit, reverse=True)
    ranked.sort(key=attrgetter("trials"), reverse=True)
    return ranked


def foremost(
    branches: Mapping[NodeId, TreeBranch], ranked: Iterable[TreeBranch], most: int, *, always: Iterable[NodeId] = ()
) -> list[TreeBranch]:
    """Return the first branches of the ranking that fit into ``most`` rows, in the order of their nodes.

    Args:
        ranked: the branches by :func:`ranking`.
        most: number of rows.
        always: nodes to include in any case, with their ancestors.
    """
    first = dict.fromkeys(node.id for id in always if id in branches for node in branches[id].node.ancestry())
    chosen: dict[NodeId, TreeBranch] = {}
    taken: set[NodeId] = set()  # branches whose row is continued by a child
    used = 0
    for branch in chain([branches[id] for id in first], ranked):
        node = branch.node
        if node.id in chosen:
            continue
        parent = node.parent
        continues = parent is not None and parent.id not in taken and node.start == branches[parent.id].reach
        if used + (not continues) > most and node.id not in first:
            break
        used += not continues
        if continues and parent is not None:
            taken.add(parent.id)
        chosen[node.id] = branch
    return sorted(chosen.values(), key=lambda branch: branch.node.id)


# Beyond this, sums and margins of an axis overflow. Values this large have diverged.
_LARGEST = 1e300


@dataclass(slots=True)
class Measured:
    """The values measured on a branch, by step; ``value`` is the best of the branch and its descendants."""

    points: list[tuple[int, float]] = field(default_factory=list)
    value: float | None = None


def can_be_drawn(value: float) -> bool:
    return abs(value) <= _LARGEST


def points_of(branch: TreeBranch, metric: str | None) -> list[tuple[int, float]]:
    """Return the values of the metric on a branch that can be drawn, by step."""
    known = ((step, state.metrics or {}) for step, state in branch.node.states.items() if step <= branch.reach)
    return sorted((step, found[metric]) for step, found in known if metric in found and can_be_drawn(found[metric]))


def measured(branches: dict[NodeId, TreeBranch], metric: str | None, *, maximize: bool) -> dict[NodeId, Measured]:
    """Return the values of the metric on each branch. ``branches`` must have parents before children."""
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
    """Return the value, negated unless it is maximized, so that greater is better; without a value, the worst."""
    return -math.inf if value is None else value if maximize else -value
