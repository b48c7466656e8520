"""The stage tree as it is laid out, folded and searched: branches in depth-first order. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from hpstage.plan.facts import NodeId, TrialId
from hpstage.report.book import Book
from hpstage.report.lanes import Lane, foremost, rows
from hpstage.report.measured import merit
from hpstage.report.tree.branches import State, changes, states

ROWS = 60
"""Maximum number of rows that are unfolded at first: so many can be read."""
ROOT = -1
"""The index of the parent of branches without a parent."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A lane in depth-first order: its descendants are the branches up to, not including, ``stop``."""

    lane: Lane
    row: int
    parent: int
    stop: int
    label: str
    state: State
    rank: float | None
    """1 for the branches with the best metric on or below them, 0 for the worst; ``None`` if nothing was measured."""


@dataclass(frozen=True, slots=True)
class Folded:
    """What is folded away beneath a branch."""

    nodes: int
    trials: int


@dataclass(frozen=True)
class Layout:
    """The whole tree of a book's trials, laid out."""

    book: Book
    branches: list[Branch]
    leaves: dict[TrialId, int]
    """The index of the branch on which each trial ends."""

    @cached_property
    def place(self) -> dict[NodeId, int]:
        """The index of each node's branch."""
        return {branch.lane.node.id: i for i, branch in enumerate(self.branches)}

    @cached_property
    def best(self) -> set[int]:
        """The branches on the path of the best trial."""
        id = self.book.best
        if id is None:
            return set()
        trial = self.book.trials[id]
        return {self.place[node.id] for node, _, _ in trial.path_to(trial.asked)}

    def unfolded(self, most: int = ROWS) -> set[int]:
        """Return the branches that fit into ``most`` rows: those of most trials, and the best among equals. The best
        trial's path is always among them, and every branch's parent."""
        book = self.book
        always = [self.branches[i].lane.node.id for i in self.best]
        return {self.place[lane.node.id] for lane in foremost(book.lanes, book.ranking, most, always=always)}

    def folded(self, shown: Iterable[int]) -> dict[int, Folded]:
        """Return what is folded away beneath each of the branches ``shown``, and beneath ``ROOT``, where anything is.

        The parent of every branch shown must be shown.
        """
        there = set(shown)
        found: dict[int, Folded] = {}
        i = 0
        while i < len(self.branches):
            branch = self.branches[i]
            if i in there:
                i += 1
                continue
            before = found.get(branch.parent, Folded(0, 0))
            found[branch.parent] = Folded(before.nodes + branch.stop - i, before.trials + branch.lane.trials)
            i = branch.stop
        return found


def lay_out(book: Book) -> Layout:
    """Lay out the tree of a book's trials. O(n log n)."""
    lanes = book.lanes
    found = rows(lanes.values())  # in depth-first order
    place = {id: i for i, id in enumerate(found)}
    stops = list(range(1, len(place) + 1))
    parents = [ROOT if (node := lanes[id].node).parent is None else place[node.parent.id] for id in found]
    for i in reversed(range(len(parents))):
        if parents[i] != ROOT:
            stops[parents[i]] = max(stops[parents[i]], stops[i])
    told, ranks = states(book.account, lanes), _ranks(book)
    branches = [
        Branch(lanes[id], row, parents[i], stops[i], changes(lanes[id].node), told[id], ranks.get(id))
        for i, (id, row) in enumerate(found.items())
    ]
    leaves = {id: place[trial.node_at(trial.asked).id] for id, trial in book.trials.items() if trial.asked}
    return Layout(book, branches, leaves)


def _ranks(book: Book) -> dict[NodeId, float]:
    """Rank the lanes by the best value on them or below: equal values have the same rank."""
    values = {
        id: merit(its.value, maximize=book.maximize) for id, its in book.measured.items() if its.value is not None
    }
    order = {value: i for i, value in enumerate(sorted(set(values.values())))}
    last = len(order) - 1
    return {id: order[value] / last if last else 1.0 for id, value in values.items()}
