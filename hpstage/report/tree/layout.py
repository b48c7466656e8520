"""The layout of the stage tree: branches in depth-first order, their rows, and which of them are folded. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from hpstage.accounting.book import Book
from hpstage.accounting.branch_states import BranchState, states
from hpstage.accounting.branches import TreeBranch, foremost, merit, rows
from hpstage.plan.facts import NodeId, TrialId
from hpstage.report.tree.branches import changes

ROWS = 60
"""Maximum number of rows of a picture; more are not legible."""
ROOT = -1
"""The parent index of branches without a parent."""


@dataclass(frozen=True, slots=True)
class LaidBranch:
    """A branch in the layout, in depth-first order. Its descendants follow it, up to index ``stop`` (exclusive)."""

    branch: TreeBranch
    parent: int
    stop: int
    label: str
    state: BranchState
    rank: float | None
    """1 for the branches with the best metric on or below them, 0 for the worst; ``None`` if nothing was measured."""


@dataclass(frozen=True, slots=True)
class Folded:
    """The number of branches folded away below a branch, and of their trials."""

    nodes: int
    trials: int


@dataclass(frozen=True, slots=True)
class Stub:
    """The row that counts the folded children of ``branch`` (or of ``ROOT``), if other children of it are shown."""

    branch: int
    row: int
    folded: Folded


@dataclass(frozen=True, slots=True)
class Placed:
    """The rows of the branches that are shown. ``branches.js`` places them in the same way."""

    rows: dict[int, int]
    """By branch. A branch that starts where its parent ends continues on the parent's row, if it is the next branch."""
    stubs: list[Stub]
    count: int


@dataclass(frozen=True)
class Layout:
    """The whole tree of a book's trials, laid out."""

    book: Book
    branches: list[LaidBranch]
    leaves: dict[TrialId, int]
    """The index of the branch on which each trial ends."""

    @cached_property
    def place(self) -> dict[NodeId, int]:
        return {laid.branch.node.id: i for i, laid in enumerate(self.branches)}

    @cached_property
    def best(self) -> set[int]:
        """The branches on the path of the best trial."""
        id = self.book.best
        if id is None:
            return set()
        trial = self.book.trials[id]
        return {self.place[node.id] for node, _, _ in trial.path_to(trial.requested)}

    @cached_property
    def scale(self) -> dict[float, float]:
        """The metric's value of each rank."""
        measured = self.book.measured
        found = ((laid.rank, measured[laid.branch.node.id].value) for laid in self.branches)
        return {rank: value for rank, value in found if rank is not None and value is not None}

    def ticks(self) -> dict[float, float]:
        """Return up to five evenly spaced ranks with their values, for the colour bar."""
        ranks = sorted(self.scale)
        places = {round(i * (len(ranks) - 1) / 4) for i in range(5)} if ranks else ()
        return {ranks[place]: self.scale[ranks[place]] for place in sorted(places)}

    def path(self, shown: Placed) -> list[tuple[int, int]]:
        """Return the best trial's path, as steps and rows."""
        if self.book.best is None:
            return []
        trial = self.book.trials[self.book.best]
        path = trial.path_to(trial.requested)
        pieces = [(shown.rows[self.place[node.id]], start, stop) for node, start, stop in path]
        return [(step, row) for row, start, stop in pieces for step in (start, stop)]

    def joins(self, shown: Placed) -> list[tuple[int, int, int, float | None]]:
        """Return the connectors of branches to their parents, the best last: step, row above, row below, rank."""
        found: list[tuple[int, int, int, float | None]] = []
        for i, row in shown.rows.items():
            laid = self.branches[i]
            if laid.parent != ROOT and shown.rows[laid.parent] != row:
                found.append((laid.branch.node.start, shown.rows[laid.parent], row, laid.rank))
        found.sort(key=lambda join: join[3] or 0.0)
        stubs = [stub for stub in shown.stubs if stub.branch != ROOT]
        starts = [self.branches[stub.branch].branch.node.start for stub in stubs]
        return [
            *((at, shown.rows[stub.branch], stub.row, None) for at, stub in zip(starts, stubs, strict=True)),
            *found,
        ]

    def failed(self, shown: Placed) -> list[tuple[int, int]]:
        """Return step and row of the first failure on each branch that is shown."""
        found: dict[int, int] = {}
        for failure in self.book.account.failures():
            i = self.place.get(failure.node)
            if i is not None and i in shown.rows:
                found[i] = min(found.get(i, self.branches[i].branch.reach), failure.step)
        return [(step, shown.rows[i]) for i, step in found.items()]

    def unfolded(self, most: int = ROWS) -> set[int]:
        """Return the branches that fit into ``most`` rows: the most trials first, the best among equals. The best
        trial's path and the parents of all these branches are always included."""
        book = self.book
        always = [self.branches[i].branch.node.id for i in self.best]
        return {self.place[branch.node.id] for branch in foremost(book.branches, book.ranking, most, always=always)}

    def fitted(self, most: int = ROWS) -> Placed:
        """Unfold as many branches as fit into ``most`` rows, counting rows of stubs, and return their rows."""
        fits, beyond = 1, most + 1
        while beyond - fits > 1:
            rows = (fits + beyond) // 2
            fits, beyond = (rows, beyond) if self.placed(self.unfolded(rows)).count <= most else (fits, rows)
        return self.placed(self.unfolded(fits))

    def folded(self, shown: Iterable[int]) -> dict[int, Folded]:
        """Return the folded branches beneath each branch of ``shown`` and beneath ``ROOT``, if there are any.

        The parent of every branch shown must be shown.
        """
        there = set(shown)
        found: dict[int, Folded] = {}
        i = 0
        while i < len(self.branches):
            laid = self.branches[i]
            if i in there:
                i += 1
                continue
            before = found.get(laid.parent, Folded(0, 0))
            found[laid.parent] = Folded(before.nodes + laid.stop - i, before.trials + laid.branch.trials)
            i = laid.stop
        return found

    def placed(self, shown: Iterable[int]) -> Placed:
        """Return the rows of the branches ``shown``. The parent of every branch shown must be shown."""
        there = set(shown)
        folded = self.folded(there)
        parents = {self.branches[i].parent for i in there}
        found: dict[int, int] = {}
        stubs: list[Stub] = []
        waiting: list[int] = []  # ancestors of the next branch: they may still get a stub
        count, last = 0, ROOT

        def close(i: int) -> None:
            nonlocal count, last
            last = ROOT
            if i in folded and i in parents:
                stubs.append(Stub(i, count, folded[i]))
                count += 1

        for i in sorted(there):
            laid = self.branches[i]
            while waiting and self.branches[waiting[-1]].stop <= i:
                close(waiting.pop())
            continues = (
                last != ROOT and laid.parent == last and laid.branch.node.start == self.branches[last].branch.reach
            )
            count += not continues
            found[i] = count - 1
            waiting.append(i)
            last = i
        for i in (*reversed(waiting), ROOT):
            close(i)
        return Placed(found, stubs, count)


def lay_out(book: Book) -> Layout:
    """Lay out the tree of a book's trials. O(n log n)."""
    branches = book.branches
    found = list(rows(branches.values()))  # in depth-first order
    place = {id: i for i, id in enumerate(found)}
    stops = list(range(1, len(place) + 1))
    parents = [ROOT if (node := branches[id].node).parent is None else place[node.parent.id] for id in found]
    for i in reversed(range(len(parents))):
        if parents[i] != ROOT:
            stops[parents[i]] = max(stops[parents[i]], stops[i])
    progress, ranks = states(book.account, branches, book.study), _ranks(book)
    laid = [
        LaidBranch(branches[id], parents[i], stops[i], changes(branches[id].node), progress[id], ranks.get(id))
        for i, id in enumerate(found)
    ]
    leaves = {id: place[trial.node_at(trial.requested).id] for id, trial in book.trials.items() if trial.requested}
    return Layout(book, laid, leaves)


def _ranks(book: Book) -> dict[NodeId, float]:
    """Rank the branches by the best value on or below them. Equal values have the same rank."""
    values = {
        id: merit(its.value, maximize=book.maximize) for id, its in book.measured.items() if its.value is not None
    }
    order = {value: i for i, value in enumerate(sorted(set(values.values())))}
    last = len(order) - 1
    return {id: order[value] / last if last else 1.0 for id, value in values.items()}
